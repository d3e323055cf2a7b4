"""Which module is at work: forward, backward and in a recomputation."""

from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from measuring_helpers import KEPT, REENTRANT
from torch import nn
from torch.utils.checkpoint import checkpoint

from membudget.measuring import OUTSIDE, Operator, PeakTracker
from membudget.measuring.modules import ModuleStack
from membudget.models import GPT


class Note(nn.Module):
    """Notes the stack's names when it is called, then calls its parts."""

    def __init__(self, log, *parts):
        super().__init__()
        self.log = log
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        self.log()
        for part in self.parts:
            x = part(x)
        self.log()
        return x


# The stack alone ------------------------------------------------------------


def watched(build, known=()):
    """The stack, and what it held at each note."""
    seen = []
    model = build(lambda: seen.append((stack.name, list(stack.names))))
    stack = ModuleStack(*(model for _ in known))
    return stack, model, seen


def test_the_outermost_goes_by_its_class_and_the_others_by_their_path():
    stack, model, seen = watched(
        lambda log: Note(log, Note(log), nn.Sequential(nn.ReLU(), Note(log)))
    )
    assert (stack.name, stack.names) == (OUTSIDE, [])
    with stack:
        model(torch.ones(1))
        assert (stack.name, stack.names) == (OUTSIDE, [])
    inner = ["Note", "parts.1", "parts.1.1"]
    assert seen == [
        ("Note", ["Note"]),
        ("parts.0", ["Note", "parts.0"]),
        ("parts.0", ["Note", "parts.0"]),
        ("parts.1.1", inner),
        ("parts.1.1", inner),
        ("Note", ["Note"]),
    ]


def test_a_part_keeps_its_path_once_its_model_was_called_or_is_known():
    for known, names in (((), ["Note", "parts.0"]), ((1,), ["parts.0"] * 2)):
        stack, model, seen = watched(lambda log: Note(log, Note(log)), known)
        with stack:
            model.parts[0](torch.ones(1))
            model(torch.ones(1))
            model.parts[0](torch.ones(1))
        assert [seen[0][1], seen[-1][1]] == [[name] for name in names]


def test_a_module_that_is_no_part_goes_by_its_class():
    """Made in the forward pass, or hidden from ``named_modules``."""

    class Hides(nn.Module):
        def __init__(self, log):
            super().__init__()
            self.hidden = [Note(log)]

        def forward(self, x):
            return self.hidden[0](x)

    stack, model, seen = watched(Hides)
    with stack:
        model(torch.ones(1))
    assert seen == [("Note", ["Hides", "Note"])] * 2


def test_a_pre_hook_that_fails_ends_its_module():
    def fail(module, args):
        raise ValueError

    stack, model, _ = watched(lambda log: Note(log, nn.ReLU()))
    model.parts[0].register_forward_pre_hook(fail)
    with stack, suppress(ValueError):
        model(torch.ones(1))
    assert stack.names == []


def test_the_outermost_calls_are_reported_with_their_arguments():
    calls = []
    inner = nn.Sequential(nn.ReLU())
    model = nn.Sequential(inner, nn.ReLU())
    x, y = torch.ones(1), torch.ones(2)
    with ModuleStack(called=calls.append):
        model(x)
        nn.Bilinear(2, 2, 1)(y, y)
        inner(x)  # a part is no outermost module any more
    with ModuleStack(inner, called=calls.append):
        model(x)  # what is called inside it is none, though known as one
    assert calls.pop() == (x,)
    assert len(calls) == 2
    assert calls[0] == (x,)
    assert calls[1][0] is calls[1][1] is y


def test_a_block_that_begins_or_ends_inside_a_module():
    stack = ModuleStack()

    class Begins(nn.Module):
        def forward(self, x):
            stack.__enter__()
            return F.relu(x)

    class Ends(nn.Module):
        def forward(self, x):
            stack.__exit__()
            return F.relu(x)

    begins = Begins()
    # With a hook of its own, it looks for global ones at its end, too.
    begins.register_forward_hook(lambda *_: None)
    begins(torch.ones(1))
    assert stack.names == []
    nn.Sequential(Ends())(torch.ones(1))
    assert stack.names == []
    with stack:
        nn.ReLU()(torch.ones(1))
    assert stack.names == []


def test_two_stacks_at_once_are_independent():
    first, second = ModuleStack(), ModuleStack()
    seen = []
    model = Note(lambda: seen.append((first.name, second.name)))
    with first:
        with second:
            model(torch.ones(1))
        model(torch.ones(1))
    assert seen == [("Note", "Note")] * 2 + [("Note", OUTSIDE)] * 2


# Under the tracker ----------------------------------------------------------


def modules_of(tracker, name):
    """``(module, phase)`` of each operator with this name."""
    return [(o.module, o.phase) for o in tracker.operators if o.name == name]


NORMS = ("norm1", "norm2")
LINEARS = ("qkv", "out", "up", "down")


def test_every_part_of_a_gpt_by_its_path():
    model = GPT(vocabulary=13, context=8, width=8, depth=2, heads=2)
    x = torch.randint(13, (2, 8))
    with PeakTracker(model, x) as tracker:
        F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()

    def check(name, modules, backward=None):
        """In this order, and back again."""
        forward = [(module, "forward") for module in modules]
        assert modules_of(tracker, f"aten.{name}") == forward
        if backward:
            found = modules_of(tracker, f"aten.{backward}")
            assert found == [(m, "backward") for m in reversed(modules)]

    blocks = ["blocks.0", "blocks.1"]
    norms = [f"{block}.{norm}" for block in blocks for norm in NORMS]
    check("native_layer_norm", [*norms, "norm"], "native_layer_norm_backward")
    linears = [f"{block}.{part}" for block in blocks for part in LINEARS]
    check("addmm", linears)
    check("embedding", ["token", "position"])
    tables = modules_of(tracker, "aten.embedding_dense_backward")
    assert set(tables) == {("token", "backward"), ("position", "backward")}
    check("_log_softmax", [OUTSIDE], "_log_softmax_backward_data")
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    if modules_of(tracker, f"aten.{attention}"):
        check(attention, blocks, f"{attention}_backward")


@pytest.mark.parametrize("options", [KEPT, REENTRANT])
def test_a_recomputation_and_its_backward(options):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    x = torch.ones(2, 4, requires_grad=True)

    def run(x):
        return model(x).cos()

    with PeakTracker(model, x) as tracker:
        checkpoint(run, x, **options).sum().backward()
    parts = ["0", "1"]
    # A checkpoint that is not reentrant stops after the last saved tensor.
    assert modules_of(tracker, "aten.addmm") == [
        (part, phase)
        for phase in ("forward", "recomputation")
        for part in parts
    ]
    assert modules_of(tracker, "aten.sin") == [(OUTSIDE, "backward")]
    found = modules_of(tracker, "aten.mm")
    assert found == [(part, "backward") for part in ("1", "1", "0", "0")]


def test_a_graph_from_before_the_block_has_no_module():
    """Nor from the operators without a node that the block begins with."""

    class Draws(nn.Module):
        def forward(self):
            return torch.ones(3)

    x = torch.ones(3, requires_grad=True)
    loss = x.cos()
    draws = Draws()
    with PeakTracker(x) as tracker:
        draws()
        loss.backward(torch.ones(3))
    assert modules_of(tracker, "aten.ones")[0] == ("Draws", "forward")
    assert modules_of(tracker, "aten.sin") == [(OUTSIDE, "backward")]


def test_operators_without_a_graph_take_no_node_from_others():
    """Between two nodes, other modules run that make none."""

    class Draws(nn.Module):
        def forward(self, x):
            return torch.rand_like(x).round()

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.draws = Draws()

        def forward(self, x):
            y = x.cos()
            self.draws(y.detach())
            return y

    x = torch.ones(3, requires_grad=True)
    with PeakTracker(x) as tracker:
        Whole()(x).sum().backward()
    assert modules_of(tracker, "aten.round") == [("draws", "forward")]
    assert modules_of(tracker, "aten.sin") == [("Whole", "backward")]


def test_a_function_of_ones_own_that_calls_a_module_in_backward():
    layer = nn.Linear(3, 3)

    class Solves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.exp()

        @staticmethod
        def backward(ctx, gradient):
            return layer(gradient.exp2())

    class Uses(nn.Module):
        def forward(self, x):
            return Solves.apply(x)

    x = torch.ones(2, 3, requires_grad=True)
    with PeakTracker(layer, x) as tracker:
        nn.Sequential(nn.Tanh(), Uses())(x).sum().backward()
    for name, found in {
        "exp": ("1", "forward"),
        "exp2": ("1", "backward"),
        "addmm": ("Linear", "backward"),
        "tanh_backward": ("0", "backward"),
    }.items():
        assert modules_of(tracker, f"aten.{name}") == [found]


def test_backward_inside_a_module():
    """A slope that a module computes on the way."""

    class Slope(nn.Module):
        def forward(self, x):
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                return torch.autograd.grad(x.cos().sum(), x)[0]

    with PeakTracker() as tracker:
        Slope()(torch.ones(3))
    assert modules_of(tracker, "aten.cos") == [("Slope", "forward")]
    assert modules_of(tracker, "aten.sin") == [("Slope", "backward")]


def test_the_optimizer_is_outside():
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with PeakTracker(model, x) as tracker:
        model(x).sum().backward()
        optimizer.step()
        model(x)
    phases = [o.phase for o in tracker.operators]
    first, last = phases.index("optimizer"), phases[::-1].index("optimizer")
    steps = tracker.operators[first : len(phases) - last]
    assert {o[1:] for o in steps} == {(OUTSIDE, "optimizer")}
    after = tracker.operators[len(phases) - last :]
    assert Operator("aten.addmm", "Linear", "forward") in after


def test_the_module_at_work_is_left_when_its_forward_fails():
    class Fails(nn.Module):
        def forward(self, x):
            x.cos()
            raise ValueError

    with PeakTracker() as tracker:
        x = torch.ones(1)
        with suppress(ValueError):
            nn.Sequential(Fails())(x)
        x.sin()
    assert modules_of(tracker, "aten.cos") == [("0", "forward")]
    assert modules_of(tracker, "aten.sin") == [(OUTSIDE, "forward")]
