"""The peak of a whole step, from the rows alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from membudget.checks import flag, instance, one_of, whole
from membudget.ledger import operators as op
from membudget.ledger.adapters import (
    Adapter,
    checked_adapter,
    checked_trained,
    stepped_recipe,
)
from membudget.ledger.causal import CausalLM
from membudget.ledger.host import check_host
from membudget.ledger.networks import Chain, Transformer
from membudget.ledger.paper import LISTS
from membudget.ledger.recipes import (
    RECIPES,
    optimizer_bytes,
    update_workspace,
)
from membudget.ledger.walk import Prediction, moved, walk


def predict(
    network: Transformer | CausalLM | Chain,
    batch: int,
    *sizes: int,
    recipe: str = "fp32",
    lists: str = "cpu",
    optimizer: str | None = "adam",
    micro_batch: int | None = None,
    checkpointed: bool | int | Sequence[int] = False,
    loss_chunks: int | None = None,
    kept_attention: bool = False,
    kernels: str = "cpu",
    foreach: bool = False,
    fused: bool = False,
    buffers: int | None = None,
    keep_gradients: bool = False,
    trained: Sequence[str] | None = None,
    adapter: Adapter | None = None,
    offloaded: bool = False,
    optimizer_on_host: bool = False,
) -> Prediction:
    """Predict a training step: nothing runs, nothing is allocated.

    It is the step of :func:`membudget.measuring.trace_step`: the optimizer's
    states exist, gradients do not (but where a recipe sums them in fp32),
    the batch is alive throughout, every micro-batch goes forward and
    backward, then the optimizer steps.

    Args:
        network: what is trained; a :class:`CausalLM` is a transformer, too.
        batch: samples, or sequences.
        *sizes: for a transformer, the tokens of a sequence.
        recipe: one of :data:`RECIPES`.
        lists: whose operator lists autocast follows, ``"cpu"`` or
            ``"cuda"``.
        optimizer: one of :data:`OPTIMIZERS` for whose step
            :func:`update_workspace` has a rule; None for a step without.
        micro_batch: samples that run at once; the last may be fewer. Of the
            full ones the first two are walked through.
        checkpointed: which blocks of a transformer, or segments of a chain,
            are checkpointed, each by itself: all or none, the first *n*
            (``membudget.schedules.every_first``), or those of these numbers.
        loss_chunks: into which a transformer's tokens are cut for the head
            and the loss (:func:`membudget.models.chunked_loss`); None for
            the plain loss.
        kept_attention: whether a transformer's checkpointed blocks keep
            attention's results (:data:`membudget.checkpointing.ATTENTION`).
        kernels: whose kernels run, ``"cpu"`` or ``"cuda"``. A GPU's keep
            one byte of each number that dropout may drop, have a norm's
            statistics in fp32, and run RMSNorm as one operator.
        foreach: whether the optimizer works on all parameters at once, which
            is PyTorch's way on a GPU, too.
        fused: whether one kernel does the optimizer's whole step, without
            temporaries (``torch.optim.AdamW(…, fused=True)``).
        buffers: bytes of buffers, counted as parameters; by default those
            of the network.
        keep_gradients: the gradients stay from step to step, as after
            ``zero_grad(set_to_none=False)`` or in the buckets of DDP.
        trained: of a transformer, which weights are trained: names, or
            patterns such as ``"blocks.[45].*"`` or ``"*.bias"``. By default
            all are, and beside an adapter none.
        adapter: of a transformer, the LoRA in its blocks.
        offloaded: whether the forward pass and the loss of each micro-batch
            run under :class:`membudget.offloading.Offload`, around its
            checkpoints. On a GPU the storages that are on their way
            (``ahead``) come on top.
        optimizer_on_host: whether the optimizer steps there
            (:func:`membudget.offloading.optimizer_on_host`): on the device
            are no states, and the step allocates nothing.
            :func:`host_step` tells the host's bytes.

    Raises:
        ValueError: an optimizer without a rule for its step,
            more tokens than learned positions, blocks that do not
            exist or are named twice, attention to be kept that is not fused,
            an optimizer both ``foreach`` and ``fused``, a chain with an
            option that is a transformer's, an adapter's target that does not
            exist, a rank above a layer's width, an adapter beside master
            copies or beside trained weights of another dtype, 4 bits under
            autocast or trained, DoRA offloaded, nothing that is trained, or
            an optimizer on the host without a rule or with gradients that
            stay.
    """
    _checked(network)
    flag(foreach, "foreach"), flag(fused, "fused")
    flag(keep_gradients, "keep_gradients")
    flag(kept_attention, "kept_attention"), flag(offloaded, "offloaded")
    one_of(lists, LISTS, "list of operators for")
    one_of(kernels, LISTS, "kernels of")
    chosen = RECIPES[one_of(recipe, RECIPES, "recipe")]
    if buffers is None:
        buffers = _buffers(network, chosen.parameters)
    buffers = whole(buffers, "buffers", 0)
    if loss_chunks is not None:
        loss_chunks = whole(loss_chunks, "loss_chunks")
    sizes = tuple(whole(size, "tokens") for size in sizes)
    size = batch = whole(batch, "batch")
    if micro_batch is not None:
        size = min(batch, whole(micro_batch, "micro_batch"))
    wanted = int(not isinstance(network, Chain))
    if len(sizes) != wanted:
        raise TypeError(
            f"{len(sizes)} sizes besides the batch: use the tokens of a "
            "sequence for a Transformer, and none for a Chain"
        )
    how: dict[str, Any] = {}
    if not isinstance(network, Chain):
        how = {
            "loss_chunks": loss_chunks,
            "kept_attention": kept_attention,
            "trained": checked_trained(trained, adapter),
            "adapter": checked_adapter(adapter, recipe, trained),
        }
    elif loss_chunks is not None or kept_attention or trained or adapter:
        raise ValueError(
            "only a Transformer's loss is cut into chunks, its attention "
            "kept, its weights frozen or adapted: leave loss_chunks, "
            "kept_attention, trained and adapter out for a Chain"
        )
    if offloaded and adapter and adapter.dora:
        raise ValueError(
            "there is no rule for DoRA that is offloaded: of its norms' graph "
            "what leaves never comes back. Use dora=False, or offloaded=False"
        )
    full, rest = divmod(batch, size)
    # every full micro-batch but the first is like the second
    papers = []
    for samples in [size] * min(full, 2) + [rest] * bool(rest):
        paper = network.write(
            samples,
            *sizes,
            itemsize=chosen.parameters,
            autocast=chosen.autocast,
            lists=lists,
            kernels=kernels,
            checkpointed=checkpointed,
            **how,
        )
        if size < batch:  # its share of the batch
            op.scale(paper, paper.rows[-1].makes[0])
        papers.append(paper)
    if not papers[0].parameters:
        raise ValueError(
            "no parameter is trained: use a network with a layer that has "
            "weights, and patterns that some of their names match"
        )
    sample = sum(t.bytes for t in papers[0].inputs) // min(size, batch)
    weights = [w.elements for w in papers[0].parameters]
    recipe = stepped_recipe(recipe, adapter)
    there = keep_gradients or chosen.gradients > chosen.parameters
    workspace, kept = [], 0
    if flag(optimizer_on_host, "optimizer_on_host"):
        _check_host(recipe, optimizer, keep_gradients)
        workspace = [0]
    elif optimizer is not None:
        workspace = update_workspace(
            weights, recipe, optimizer, foreach, fused
        )
        kept = optimizer_bytes(weights, recipe, optimizer)
    found = walk(
        papers,
        states=kept,
        inputs=sample * batch,
        gradients=RECIPES[recipe].gradients * sum(weights) if there else 0,
        buffers=buffers,
        workspace=workspace,
        offloaded=offloaded,
    )
    if not offloaded:
        return found
    left = full * moved(papers[0]) + bool(rest) * moved(papers[-1])
    return replace(found, moved=left)


def rules(
    network: Transformer | CausalLM | Chain, device: str
) -> dict[str, Any]:
    """The options of :func:`predict` that a device decides.

    On a GPU autocast follows CUDA's lists, PyTorch's optimizers work on all
    parameters at once, and kernels keep other things.

    Args:
        network: what is trained.
        device: ``"cpu"`` or ``"cuda"``.
    """
    _checked(network)
    gpu = one_of(device, LISTS, "device") == "cuda"
    return {"lists": device, "kernels": device, "foreach": gpu}


def _checked(network: Transformer | CausalLM | Chain) -> None:
    instance(
        network,
        Transformer | CausalLM | Chain,
        "the network",
        "a Transformer, a CausalLM or a Chain",
    )


def _check_host(recipe: str, optimizer: str | None, keeps: bool) -> None:
    if optimizer is None or keeps:
        raise ValueError(
            "the optimizer on the host takes the gradients with it: name an "
            "optimizer, and leave keep_gradients out"
        )
    check_host(recipe, optimizer)


def _buffers(network: Transformer | CausalLM | Chain, itemsize: int) -> int:
    """Bytes of the buffers; numbers with a fraction take ``itemsize``."""
    if not isinstance(network, Chain):
        return network.buffers_beside(itemsize)
    return sum(
        b.numel() * itemsize if b.is_floating_point() else b.nbytes
        for b in network.model.buffers()
    )
