"""Tensor and sequence parallelism: each layer over several ranks."""

from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from membudget.checks import flag, instance, one_of, whole
from membudget.ledger import Transformer, predict
from membudget.models import GPT, Block, Llama, LlamaBlock
from membudget.sharding import Traffic

GATHERS = ("once", "each", "again")

RECIPES = {2: "bf16", 4: "fp32"}

KV_HEADS = "heads of keys and values"


class _Chain(ParallelStyle):
    """One style after the other, on the same module."""

    def __init__(self, *styles: ParallelStyle) -> None:
        super().__init__()
        self.styles = styles

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for style in self.styles:
            module = style._apply(module, device_mesh)
        return module


class _ByHeads(ColwiseParallel):
    """The rows of q, k and v in one matrix: to each rank those of its heads.

    Attention splits a rank's rows into three parts, so they are sorted by
    ranks before they are cut.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        with torch.no_grad():
            for name, p in list(module.named_parameters()):
                by_rank = p.unflatten(0, (3, device_mesh.size(), -1))
                rows = by_rank.transpose(0, 1).reshape(p.shape)
                module.register_parameter(
                    name, nn.Parameter(rows, p.requires_grad)
                )
        return super()._apply(module, device_mesh)


class _Again(ParallelStyle):
    """A linear layer's input is made whole inside the layer.

    So a checkpoint can forget it: the backward pass gathers it again. It
    multiplies nothing again, as it stops once it has what was saved.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        forward = module.forward

        def gathered(x: DTensor) -> torch.Tensor:
            return forward(x.redistribute(placements=[Replicate()]))

        module.forward = partial(
            checkpoint, gathered, use_reentrant=False, preserve_rng_state=False
        )
        return module


def tensor_parallel(
    model: GPT | Llama,
    mesh: DeviceMesh,
    sequence: bool = False,
    gathers: str = "once",
) -> None:
    """Cut the blocks of a model over the ranks of a mesh, in place.

    Of attention and the MLP the first matrices are cut by their outputs and
    the last by its inputs (Shoeybi et al. 2019, arXiv 1909.08053), with
    PyTorch's ``parallelize_module``. Embeddings, the last norm and the head
    stay whole. Each rank calls the model with the whole batch, and has the
    whole logits.

    In a GPT, whose q, k and v are one matrix, the rows of that matrix are
    sorted by ranks: a whole ``state_dict`` has them in another order than
    before.

    Args:
        model: the same on each rank.
        mesh: of one dimension.
        sequence: whether norms and the sums around them have a part of the
            sequence on each rank (Korthikanti et al. 2022, arXiv 2205.05198).
        gathers: "once" makes one whole input for all layers that read it;
            "each" is PyTorch's default, a copy and a collective for each;
            "again" keeps no copy, and the backward pass gathers once more.
            Without sequence nothing is gathered, and "again" is "once".

    Raises:
        TypeError: an argument of a wrong kind.
        ValueError: a mesh of more dimensions, ranks that do not divide heads
            or the MLP's width, or a model with dropout.
    """
    instance(model, GPT | Llama, "model", "a GPT or a Llama of models")
    instance(mesh, DeviceMesh, "mesh", "a DeviceMesh")
    sequence = flag(sequence, "sequence")
    one_of(gathers, GATHERS, "gathers")
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions: use one of them, as in "
            'mesh["tensor"]'
        )
    blocks = list(model.blocks)
    if getattr(blocks[0], "dropout", 0):
        raise ValueError(
            f"the model's dropout is {blocks[0].dropout}, and ranks would "
            "draw zeros of their own, or the same ones for different heads: "
            "use dropout=0"
        )
    check_ranks(blocks[0], mesh.size())
    for block in blocks:
        parallelize_module(block, mesh, _plan(block, sequence, gathers))
    if sequence:
        ends = {
            "token": PrepareModuleOutput(
                output_layouts=Replicate(), desired_output_layouts=Shard(1)
            ),
            "norm": _Chain(SequenceParallel(), _whole(Shard(1), local=True)),
        }
        if isinstance(model, GPT):
            ends["position"] = PrepareModuleOutput(
                output_layouts=Replicate(), desired_output_layouts=Shard(0)
            )
        parallelize_module(model, mesh, ends)


def check_ranks(block: nn.Module, ranks: int) -> None:
    """Refuse ranks between which a block cannot be cut.

    Raises:
        ValueError: ranks do not divide the heads or the MLP's width.
    """
    _divides(ranks, block.heads, "heads")
    _divides(ranks, getattr(block, "kv_heads", block.heads), KV_HEADS)
    _divides(ranks, block.up.out_features, "the MLP's width")


def _divides(ranks: int, size: int, name: str) -> None:
    if size % ranks:
        raise ValueError(
            f"{ranks} ranks do not divide {size}, {name}: use a divisor"
        )


def _plan(
    block: Block | LlamaBlock, sequence: bool, gathers: str
) -> dict[str, ParallelStyle]:
    """The style of each of a block's layers."""
    given = Shard(1) if sequence else Replicate()
    if gathers == "again" and not sequence:
        gathers = "once"
    once = gathers == "once"

    def column(kind: type[ColwiseParallel] = ColwiseParallel) -> ParallelStyle:
        style = kind(input_layouts=Replicate() if once else given)
        if gathers != "again":
            return style
        style.desired_input_layouts = style.input_layouts
        return _Chain(style, _Again())

    plan: dict[str, ParallelStyle] = {
        name: RowwiseParallel(output_layouts=given) for name in ("out", "down")
    }
    for norm in ("norm1", "norm2"):
        styles: list[ParallelStyle] = [SequenceParallel()] if sequence else []
        plan[norm] = _Chain(*styles, *([_whole(given)] if once else []))
    if isinstance(block, Block):
        return plan | {"qkv": column(_ByHeads), "up": column()}
    names = ("query", "key", "value", "gate", "up")
    return plan | {name: column() for name in names}


def _whole(
    layout: Replicate | Shard, local: bool = False
) -> PrepareModuleOutput:
    """The output on each rank, whole."""
    return PrepareModuleOutput(
        output_layouts=layout,
        desired_output_layouts=Replicate(),
        use_local_output=local,
    )


def tensor_tape(
    shape: Transformer,
    batch: int,
    tokens: int,
    ranks: int,
    sequence: bool = False,
    gathers: str = "once",
    itemsize: int = 4,
    kernels: str = "cpu",
) -> int:
    """Bytes that a rank keeps of one block for the backward pass.

    Of a GPT block's 16 units (:func:`membudget.ledger.block_activations`)
    the inputs of its two norms and what the norms give to the layers are
    whole, 4 units, and 12 are cut: 4 + 12/P. With sequence parallelism what
    norms read is cut, too: 2 + 14/P if the layers' input is gathered once and
    kept, and 16/P if it is gathered again in the backward pass, as Megatron
    does (Korthikanti et al. 2022, arXiv 2205.05198, table 2). A copy for each
    layer that reads it makes 4 + 14/P of a block with separate q, k and v.

    Args:
        shape: of a GPT or Llama with fused attention.
        batch, tokens: sequences, and tokens of each.
        ranks: P; they divide heads, the MLP's width and, with sequence,
            tokens.
        sequence: whether norms have a part of the sequence on each rank.
        gathers: "once", "each" or "again"; without sequence all are one.
        itemsize: bytes of a number, 2 or 4.
        kernels: as for :func:`membudget.ledger.predict`; a Llama's norms keep
            more on a CPU.

    Raises:
        TypeError: an argument of a wrong kind.
        ValueError: ranks that do not divide what is cut, or another itemsize.
    """
    instance(shape, Transformer, "shape", "a Transformer of ledger")
    ranks = whole(ranks, "ranks")
    if whole(itemsize, "itemsize") not in RECIPES:
        raise ValueError(f"itemsize is {itemsize}: use 2 or 4 bytes")
    one_of(kernels, ("cpu", "cuda"), "kernels")
    sequence = flag(sequence, "sequence")
    one_of(gathers, GATHERS, "gathers")
    total = _kept(shape, batch, tokens, RECIPES[itemsize], kernels)
    _divides(ranks, shape.heads, "heads")
    _divides(ranks, shape.kv_heads or shape.heads, KV_HEADS)
    _divides(ranks, shape.hidden or 4 * shape.width, "the MLP's width")
    one = batch * tokens * shape.width * itemsize
    gpt, gpu = shape.family == "gpt", kernels == "cuda"
    numbers = 4 if gpt else 2  # of a token, those of two norms
    statistics = (
        batch * tokens * numbers * (itemsize if gpt and not gpu else 4)
    )
    norms = statistics + (2 * one if gpt or gpu else 16 * one // itemsize)
    given, cut = 2 * one, total - norms - 2 * one
    if not sequence:
        return norms + given + cut // ranks
    _divides(ranks, tokens, "tokens")
    if gathers == "again":
        return (norms + given + cut) // ranks
    copies = _copies(shape, gathers) if ranks > 1 else 2
    return norms // ranks + copies * one + cut // ranks


def _kept(
    shape: Transformer, batch: int, tokens: int, recipe: str, kernels: str
) -> int:
    """Bytes of a whole block's tape: what the second block adds."""
    one, two = (
        predict(
            replace(shape, depth=depth),
            batch,
            tokens,
            recipe=recipe,
            kernels=kernels,
            optimizer=None,
            keep_gradients=True,
        ).saved
        for depth in (1, 2)
    )
    return two - one


def _copies(shape: Transformer, gathers: str) -> int:
    """Whole inputs that a block's layers get, of its two norms."""
    return 2 if gathers == "once" or shape.family == "gpt" else 5


def tensor_traffic(
    shape: Transformer,
    batch: int,
    tokens: int,
    sequence: bool = False,
    gathers: str = "once",
    itemsize: int = 4,
) -> dict[str, Traffic]:
    """The collectives of a block's forward and backward pass, on each rank.

    Each of one unit: two all-reduces a pass (Shoeybi et al. 2019, arXiv
    1909.08053, section 3). With sequence parallelism an all-gather and a
    reduce-scatter stand for each. With ``gathers="each"`` the layers that
    read a norm's output each have their own, and with "again" a second
    all-gather in the backward pass. The gradients of the norms' weights, a
    few numbers, are not counted.

    Args:
        shape: of a GPT or Llama.
        batch, tokens, sequence, itemsize: as for :func:`tensor_tape`.
        gathers: "once", "each" or "again".

    Raises:
        TypeError: an argument of a wrong kind.
        ValueError: a number that cannot be.
    """
    instance(shape, Transformer, "shape", "a Transformer of ledger")
    one_of(gathers, GATHERS, "gathers")
    one = whole(batch, "batch") * whole(tokens, "tokens")
    one *= shape.width * whole(itemsize, "itemsize")
    copies = _copies(shape, gathers)
    calls = 2 + copies  # the sums forward, and those of the gradients
    if not flag(sequence, "sequence"):
        calls = 4 if gathers == "again" else calls
        return {"all-reduce": Traffic(calls, calls * one)}
    gathered = calls + (copies if gathers == "again" else 0)
    return {
        "all-gather": Traffic(gathered, gathered * one),
        "reduce-scatter": Traffic(calls, calls * one),
    }
