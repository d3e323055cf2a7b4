"""The exercises on adapters: bytes of states, and of inputs that stay."""

from membudget.exercises.core import Case, Exercise, given
from membudget.exercises.observe import answer, calls

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
