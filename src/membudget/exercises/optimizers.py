"""The exercises on lean optimizers: their states, and which of them fits."""

from math import prod

from membudget.exercises.core import Case, Exercise, given
from membudget.exercises.observe import answer, calls

# Adafactor's states


def adafactor_bytes(shapes):
    numbers = 0
    for shape in shapes:
        if len(shape) == 1:
            numbers += shape[0]
        else:
            *more, rows, columns = shape
            numbers += prod(more) * (rows + columns)
    return 4 * numbers + 4 * len(shapes)


def _shapes(told: str, *lists: list[tuple[int, ...]]) -> Case:
    return Case(told, lambda: tuple((shapes,) for shapes in lists))


check_adafactor_bytes = Exercise(
    adafactor_bytes,
    cases=[
        _shapes("a matrix, or two", [(30, 50)], [(30, 50), (7, 9)]),
        _shapes("with a vector", [(30, 50), (30,)], [(11,), (13,)]),
        _shapes("with a convolution's filters", [(5, 4, 3, 2)]),
    ],
    observe=calls(lambda shapes: f"bytes for {shapes}"),
    mistakes="""
        rows + columns => rows * columns
            a matrix keeps one number for each row and one for each column,
            not one for each of its elements.
        + 4 * len(shapes) =>
            each tensor's count of steps is missing: 4 bytes.
        4 * len(shapes) => 4
            each tensor counts its steps by itself.
        4 * numbers => numbers
            these are numbers, not bytes: in fp32 each takes 4.
        if len(shape) == 1 => if False and len(shape) == 1
        *more, rows, columns = shape => \
        *more, rows, columns = (1, *shape)
            a vector has neither rows nor columns: all of it is kept.
        numbers += shape[0] => pass
            vectors keep states, too: one number for each element.
        prod(more) * (rows + columns) => rows + columns
            every matrix of the last two dimensions has its own rows and
            columns: multiply with the dimensions before them.
        """,
    shown=(
        '`ledger.states(model, optimizer="adafactor")` counts the same for '
        "a whole model."
    ),
)

# Which optimizer fits


def most_per_parameter(parameters, itemsize, beside, capacity):
    weights_and_gradients = 2 * itemsize * parameters
    left = capacity - beside - weights_and_gradients
    return left / parameters


check_most_per_parameter = Exercise(
    most_per_parameter,
    cases=[
        given(parameters=100, itemsize=2, beside=0, capacity=1000),
        given(parameters=100, itemsize=2, beside=150, capacity=1000),
        given(parameters=250, itemsize=4, beside=300, capacity=2000),
    ],
    observe=answer,
    mistakes="""
        2 * itemsize => itemsize
            the gradients are missing: as many bytes as the weights.
        2 * itemsize => 3 * itemsize
        or 2 * itemsize => 4 * itemsize
            count weights and gradients alone: the states are what you look
            for.
        - beside =>
            what is there beside the model states is missing.
        - beside => + beside
            what is there beside the model states leaves less room, not more.
        left / parameters => left
            these are the bytes that are left: divide by the parameters.
        - weights_and_gradients =>
            weights and gradients are missing.
        """,
    shown=(
        "A negative number says that no optimizer helps: weights and "
        "gradients alone do not fit."
    ),
)
