"""The exercises on adapters: bytes, and a fine-tune without gradients."""

from collections.abc import Callable
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from membudget import models
from membudget.adapters import adapt
from membudget.exercises.compare import Seen
from membudget.exercises.core import Case, Exercise, given
from membudget.exercises.guard import Problem
from membudget.exercises.observe import answer, calls, doubles, found

# The states of an adapted model


def adapter_states(base, layers, rank):
    adapter = rank * sum(inputs + outputs for inputs, outputs in layers)
    return 2 * base + (4 + 4 + 8) * adapter


def _states(base: int, layers: list[tuple[int, int]], rank: int) -> Case:
    told = f"base = {base}, layers = {layers}, rank = {rank}"
    return Case(told, lambda: ((base, layers, rank),))


check_adapter_states = Exercise(
    adapter_states,
    cases=[
        _states(1000, [(16, 16), (16, 44)], 3),
        _states(10**9, [(4096, 1024)] * 7, 64),
        _states(50, [(5, 7)], 1),
    ],
    observe=calls(
        lambda base, layers, rank: f"bytes of states with rank {rank}"
    ),
    mistakes="""
        2 * base + => 16 * base +
            the base is frozen: it has neither gradients nor states.
        2 * base + => 4 * base +
            the base's weights are in 16 bits, two bytes each, and frozen
            ones have no gradient.
        2 * base + => 0 * base +
            the frozen weights are there, too: two bytes each.
        inputs + outputs for => inputs * outputs for
            this counts the layers' own weights: an adapter has rank · inputs
            numbers in one matrix and rank · outputs in the other.
        inputs + outputs for => inputs for
            the second matrix is missing: rank · outputs.
        inputs + outputs for => outputs for
            the first matrix is missing: rank · inputs.
        rank * sum => sum
            each of an adapter's matrices has `rank` rows or columns.
        (4 + 4 + 8) => (2 + 2 + 4)
            8 bytes are too few: the adapters are in fp32, 4 bytes each, and
            so are their gradients and both of Adam's moments.
        (4 + 4 + 8) => (4 + 8)
            4 bytes are missing: weights, gradients and both of Adam's
            moments count.
        (4 + 4 + 8) => 4
            this is the adapter itself: it has gradients, and Adam's states.
    """,
    shown="For Llama 3 8B with rank 16 in all layers it is 15.6 GiB.",
)

# What the linear layers of a block keep


def kept_inputs(tokens, layers):
    shared, copies = {}, 0
    for name, width, how in layers:
        if how == "trained":
            shared[name] = 2 * tokens * width
        if how == "adapted":
            copies += 4 * tokens * width
    return copies + sum(shared.values())


_ALL = ("x", 16, "adapted"), ("x", 16, "adapted"), ("y", 44, "adapted")
_MIXED = ("x", 16, "trained"), ("x", 16, "trained"), ("w", 5, "trained")

check_kept_inputs = Exercise(
    kept_inputs,
    cases=[
        given(tokens=10, layers=[*_ALL, ("z", 7, "frozen"), *_MIXED]),
        given(tokens=7, layers=[("x", 16, "frozen"), ("y", 44, "frozen")]),
        given(tokens=9, layers=[*_ALL]),
    ],
    observe=answer,
    mistakes="""
        if how == "trained": => if how in ("trained", "frozen"):
        or if how == "adapted": => if how in ("adapted", "frozen"):
            a frozen layer keeps nothing: its input is for the gradient of its
            weight alone.
        copies += 4 * => copies += 2 *
            beside 16-bit weights an adapter in fp32 reads a copy of its input
            in fp32, 4 bytes a number.
        copies += 4 * tokens * width => shared[name] = 4 * tokens * width
        or return copies + => copies = 4 * tokens * sum({name: width for name,\
 width, how in layers if how == "adapted"}.values()); return copies +
            each adapter casts its input itself: two that read one input keep
            two copies.
        copies += 4 * tokens * width => shared[name] = 2 * tokens * width
            an adapter in fp32 does not share the 16-bit input: it casts it,
            and keeps a copy of its own.
        shared[name] = 2 * tokens * width => copies += 2 * tokens * width
            trained layers that read the same tensor keep it once.
        shared[name] = 2 * => shared[name] = 4 *
            what is not cast is in 16 bits: 2 bytes a number.
        return copies + sum(shared.values()) => return copies
            a trained layer keeps its input, too.
        return copies + sum(shared.values()) => return sum(shared.values())
            an adapted layer keeps its input: the gradient of A needs it.
    """,
    shown="Measured on real layers it is the same, to the byte.",
)

# A fine-tune without gradients, for the lab


def fine_tunable(model):
    model.requires_grad_(False)
    trained = [p for name, p in model.named_parameters() if "lora_" in name]
    for p in trained:
        p.requires_grad_(True)
    again = partial(checkpoint, use_reentrant=False)
    for block in model.blocks:
        block.forward = partial(again, block.forward)
    return trained


def _llama(depth: int, *targets: str) -> Case:
    """A Llama with adapters, all of it trained."""

    def make() -> tuple:
        model = models.Llama(vocabulary=32, width=16, depth=depth, hidden=32)
        adapt(model, targets, 2)
        for name, p in model.named_parameters():
            torch.nn.init.constant_(p, 0.1) if ".lora_b" in name else None
        return (model.requires_grad_(True),)

    return Case(f"{depth} blocks, adapters beside {', '.join(targets)}", make)


def _tuned(fn: Callable, args: tuple) -> Seen:
    """What is trained, its gradients, and how often each block runs."""
    (model,) = args
    runs = [0] * len(model.blocks)

    def count(index: int, *_: object) -> None:
        runs[index] += 1

    for index, block in enumerate(model.blocks):
        block.norm1.register_forward_hook(partial(count, index))
    named = list(model.named_parameters())
    result = found(fn, fn(model), (list, tuple), "a list of parameters")
    known = {id(p) for _, p in named}
    if not all(id(p) in known for p in result):
        raise Problem("a list of parameters of the model is needed.")
    logits = model(torch.arange(24).view(2, 12))
    if logits.requires_grad:
        logits.square().sum().backward()
    adapters = [p for name, p in named if ".lora_" in name]
    grads = [
        torch.zeros_like(p) if p.grad is None else p.grad for p in adapters
    ]
    return Seen(
        {
            "number of parameters that are trained": doubles(
                sum(p.requires_grad for _, p in named)
            ),
            "gradient of the adapters": torch.cat(
                [g.double().flatten() for g in grads]
            ),
            "list of runs, block by block,": doubles(runs),
            "number of parameters for the optimizer": doubles(len(result)),
            "number of adapters for the optimizer": doubles(
                sum(any(p is a for a in adapters) for p in result)
            ),
        }
    )


AGAIN = "use_reentrant=False"

check_fine_tunable = Exercise(
    fine_tunable,
    cases=[_llama(3, "query", "value"), _llama(2, "down")],
    observe=_tuned,
    mistakes=f"""
        p.requires_grad_(True) => p.requires_grad_(False)
            nothing is trained: `model.requires_grad_(False)` freezes the
            adapters, too, and being in the optimizer's list changes nothing.
        {AGAIN} => use_reentrant=True
            the adapters are trained, and have no gradient. A reentrant
            checkpoint asks whether one of its inputs needs a gradient, and
            behind a frozen embedding none does.
        model.requires_grad_(False) =>
            the base is trained as well: each of its weights gets a gradient
            and states, as in full training.
        {AGAIN} => use_reentrant=True
        return trained => model.token.requires_grad_(True); return trained
            now the input of the first checkpoint needs a gradient, because
            the embedding is trained. It is part of the base: take
            checkpoints that do not ask, or wake what it returns, in a hook.
        partial(again, block.forward) => block.forward
            no block runs again in the backward pass: nothing is
            checkpointed.
        return trained => return list(model.parameters())
            the list holds frozen parameters, too: the adapters' alone are
            asked.
        "lora_" in name => "lora_a" in name
        or "lora_" in name => "lora_b" in name
            an adapter has two matrices, lora_a and lora_b, and both are
            trained.
        """,
    shown=(
        "Every adapter has its gradient, the base has none, and each block "
        "runs again in the backward pass."
    ),
)
