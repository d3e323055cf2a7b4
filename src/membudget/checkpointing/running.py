"""Run segments on a real model with ``torch.utils.checkpoint``."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
)

from membudget.checkpointing.schedule import Segments, actions, flatten
from membudget.checks import flag, instance, listed
from membudget.internals import NormBase, OpOverload, tree_map
from membudget.measuring.storages import tensors

Ran = TypeVar("Ran")

aten = torch.ops.aten

MATMULS = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
)
"""Matrix products, as policies for selective checkpointing name them."""

ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
"""Fused attention, on a CPU and on CUDA."""


class Checkpointed(nn.Module):
    """Stages that run one after the other, some of them checkpointed.

    It computes what ``nn.Sequential(*stages)`` computes and leaves the same
    gradients, to the last bit where the operators are deterministic (under
    autocast with ``keep``, a weight of several segments is cast and rounded
    in each); its ``state_dict`` has the same keys. While gradients are
    recorded each segment runs under ``torch.utils.checkpoint`` with
    ``use_reentrant=False``, and again in the backward pass.

    Random numbers of PyTorch's default generators (dropout) are the same both
    times; others, and states that a stage counts by itself, are not.
    Batch norm updates its running statistics once.

    Args:
        *stages: modules that take one tensor and return one; or one
            ``nn.Sequential``, whose stages are taken.
        segments: as :data:`membudget.checkpointing.Segments`.
        keep: operators whose results are kept in spite of the checkpoint
            (selective checkpointing), such as :data:`MATMULS`.
        preserve_rng_state: as in ``torch.utils.checkpoint``. Without it
            stages that draw random numbers compute something else the second
            time.

    Attributes:
        segments: may be set anew between two steps.

    Raises:
        TypeError: when it runs: a stage that returns something else than a
            tensor.
        RuntimeError: when it runs: in a segment, a stage that changes a
            buffer (other than batch norm's), or the segment's input in place,
            and so would run on something else the second time.

    Example:
        >>> blocks = model.blocks
        >>> model.blocks = Checkpointed(
        ...     blocks, segments=equal_segments(len(blocks), 4)
        ... )
    """

    def __init__(
        self,
        *stages: nn.Module,
        segments: Segments,
        keep: Sequence[OpOverload] = (),
        preserve_rng_state: bool = True,
    ) -> None:
        super().__init__()
        for index, stage in enumerate(stages_of(*stages)):
            self.add_module(str(index), stage)
        self.segments = segments
        use = "an operator, such as torch.ops.aten.mm.default"
        self.keep = tuple(
            instance(operator, OpOverload, "one to keep", use)
            for operator in listed(keep, "keep", "operators", 0)
        )
        self.preserve_rng_state = flag(
            preserve_rng_state, "preserve_rng_state"
        )

    @property
    def segments(self) -> Segments:
        """Which stages are checkpointed together."""
        return self._segments

    @segments.setter
    def segments(self, segments: Segments) -> None:
        actions(segments, len(self._modules))  # checks them
        self._segments = segments

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the stages; ``x`` is the input of the first."""
        instance(x, torch.Tensor, "x", "a tensor")
        return self._run(self.segments, x)

    def _run(self, segments: Segments, x: torch.Tensor) -> torch.Tensor:
        for item in segments:
            if isinstance(item, int):
                x = run_stage(self._modules[str(item)], item, x)
            elif torch.is_grad_enabled():
                x = self._checkpoint(item, x)
            else:
                x = self._run(item, x)
        return x

    def _checkpoint(self, item: Segments, x: torch.Tensor) -> torch.Tensor:
        modules = {
            f"stage {index}": self._modules[str(index)]
            for index in flatten(item)
        }
        return checkpointed(
            lambda x: self._run(item, x),
            x,
            modules=modules,
            keep=self.keep,
            preserve_rng_state=self.preserve_rng_state,
        )


def checkpointed(
    run: Callable[..., Ran],
    *args: object,
    modules: dict[str, nn.Module],
    keep: Sequence[OpOverload] = (),
    preserve_rng_state: bool = True,
    named: dict[str, object] | None = None,
) -> Ran:
    """Call it under a checkpoint, as :class:`Checkpointed` does.

    An error of the call comes once the checkpoint is closed: torch 2.11 would
    leave it open for as long as a notebook keeps the traceback.

    Args:
        run: returns tensors, in lists, tuples and dictionaries or not.
        *args: what it is called with.
        modules: those that it calls, by the name for an error.
        named: what else it is called with, by keyword.
        keep, preserve_rng_state: as for :class:`Checkpointed`.
    """
    failed: list[BaseException] = []
    begun, named = False, named or {}

    def once(*args: object) -> Ran | None:
        nonlocal begun
        again, begun = begun, True  # perhaps before the first has ended
        try:
            return _run_to_the_end(run, args, named, modules)
        except BaseException as error:
            if again:
                raise
            failed.append(error)
            return None

    result = checkpoint(
        once,
        *args,
        use_reentrant=False,
        preserve_rng_state=preserve_rng_state,
        context_fn=_contexts(modules, keep),
    )
    if failed:
        raise failed.pop()
    return result


@contextmanager
def each_checkpointed(blocks: dict[str, nn.Module]) -> Iterator[None]:
    """Checkpoint each of these modules where it is called in the block.

    Args:
        blocks: by the name for an error.
    """
    with ExitStack() as after:
        for name, block in blocks.items():
            own = vars(block).get("forward")
            block.forward = _Calls(block.forward, {name: block})
            if own is None:
                after.callback(vars(block).pop, "forward")
            else:
                after.callback(setattr, block, "forward", own)
        yield


class _Calls(NamedTuple):
    """A block's ``forward``, under a checkpoint."""

    forward: Callable[..., object]
    modules: dict[str, nn.Module]

    def __call__(self, *args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpointed(
            self.forward, *args, modules=self.modules, named=kwargs
        )


def _run_to_the_end(
    run: Callable[..., Ran],
    args: tuple,
    named: dict[str, object],
    modules: dict[str, nn.Module],
) -> Ran:
    """Call it, and let a recomputation run as far as is needed."""
    given = tensors((args, named))
    versions = [x._version for x in given]
    result = run(*args, **named)
    if [x._version for x in given] != versions:
        raise RuntimeError(
            f"the segment that begins with {next(iter(modules))} changes its "
            "input in place, so there would be nothing to recompute it from: "
            "let its first stage make a new tensor (inplace=False)"
        )
    if not any(_fills_late(y, given) for y in tensors(result)):
        return result
    return tree_map(lambda y: _Last.apply(y) if _trained(y) else y, result)


def _trained(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _contexts(
    modules: dict[str, nn.Module], keep: Sequence[OpOverload]
) -> Callable[[], tuple]:
    """What surrounds a segment's first run, and its recomputation."""

    def contexts() -> tuple[AbstractContextManager, ...]:
        first: tuple = ()
        again: tuple = ()
        if keep:
            both = create_selective_checkpoint_contexts(list(keep))
            first, again = ((_casts_anew, each) for each in both)
        return (
            _Within(lambda: buffers_unchanged(modules), *first),
            # around the others, which let nothing run that did not
            # run in the first run
            _Within(lambda: statistics_kept(modules), *again),
        )

    return contexts


@contextmanager
def _casts_anew() -> Iterator[None]:
    """Let autocast forget the weights that it has cast before.

    A cast that the first run takes from the cache is none of its operators,
    and selective checkpointing would not know it when the segment runs again
    (pytorch#193338).
    """
    torch.clear_autocast_cache()
    yield


class _Last(torch.autograd.Function):
    """The identity, and the last to save something: a recomputation runs
    up to here."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.new_empty(0))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        ctx.saved_tensors  # noqa: B018  (asked for: it is recomputed)
        return gradient


def _fills_late(result: torch.Tensor, given: list[torch.Tensor]) -> bool:
    """Whether an operator fills what it saved only while it runs.

    A recomputation that stops early stops when the last tensor is saved. So
    RReLU's noise would not be there yet, nor an error.
    """
    seen, nodes = {None, *(x.grad_fn for x in given)}, [result.grad_fn]
    while nodes:
        node = nodes.pop()
        if node not in seen:
            if node.name() == "RreluWithNoiseBackward0":
                return True
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]
    return False


class _Within(AbstractContextManager):
    """Several context managers as one, that may be entered again."""

    def __init__(self, *inside: Any) -> None:
        self.inside = inside
        self.stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for item in self.inside:
                stack.enter_context(item() if callable(item) else item)
            self.stacks.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self.stacks.pop().__exit__(*error)


def stages_of(*stages: nn.Module) -> list[nn.Module]:
    """The stages of a chain; one ``nn.Sequential`` stands for its parts."""
    if len(stages) == 1 and isinstance(stages[0], nn.Sequential):
        stages = tuple(stages[0])
    if not stages:
        raise ValueError("the chain is empty: it needs at least one stage")
    for index, stage in enumerate(stages):
        if not isinstance(stage, nn.Module):
            raise TypeError(
                f"stage {index} is a {type(stage).__name__}: use modules "
                "(unpack a list with *)"
            )
    return list(stages)


def run_stage(stage: nn.Module, index: int, x: torch.Tensor) -> torch.Tensor:
    """Run a stage, and refuse what is no tensor."""
    result = stage(x)
    if not isinstance(result, torch.Tensor):
        raise TypeError(
            f"stage {index} ({type(stage).__name__}) returned a "
            f"{type(result).__name__}: a stage takes one tensor and returns "
            "one; wrap it in a module that does"
        )
    return result


@contextmanager
def buffers_unchanged(modules: dict[str, nn.Module]) -> Iterator[None]:
    """Refuse modules that change a buffer inside the block.

    The running statistics of normalisations may change.

    Args:
        modules: by the name for the error.
    """
    before = [
        (place, module, name, buffer, buffer._version)
        for place, outer in modules.items()
        for module in outer.modules()
        if not isinstance(module, NormBase)
        for name, buffer in module.named_buffers(recurse=False)
    ]
    yield
    for place, module, name, buffer, version in before:
        another = module._buffers.get(name) is not buffer
        if another or buffer._version != version:
            raise RuntimeError(
                f"{place}, {type(module).__name__}.{name} changes whenever "
                "the stage runs, and in a segment it runs twice for each "
                "step: leave this stage out of the segments, or change the "
                "buffer elsewhere"
            )


@contextmanager
def statistics_kept(modules: dict[str, nn.Module]) -> Iterator[None]:
    """Inside the block normalisations leave their statistics as they are.

    With a momentum of 0 the running mean and variance stay what they are, and
    batches that were counted are taken back.
    """
    norms = {
        norm
        for outer in modules.values()
        for norm in outer.modules()
        if isinstance(norm, NormBase) and norm.track_running_stats
    }
    before = [(norm, norm.momentum, _version(norm)) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum, version in before:
            norm.momentum = momentum
            counted = _version(norm) - version
            if counted:
                norm.num_batches_tracked.sub_(counted)


def _version(norm: NormBase) -> int:
    """One more for every batch that the norm counts."""
    count = norm.num_batches_tracked
    return 0 if count is None else count._version
