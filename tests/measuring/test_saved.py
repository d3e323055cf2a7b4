"""Bytes saved for backward, against hand counts."""

import sys
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from measuring_helpers import WIDTH, chain, hooked
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from membudget.measuring import SavedBytes
from membudget.models import GPT, Block
from tests.soak import examples

BATCH = 32
UNIT = 4 * BATCH * WIDTH


def counted(function, *exclude):
    """Run it; the account, and what it returned."""
    with SavedBytes(*exclude) as saved:
        out = function()
    assert sum(saved.by_module.values()) == saved.total
    assert all(saved.by_module.values())
    return saved, out


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.Sigmoid])
def test_activations_known_by_their_output_save_one_unit_a_layer(activation):
    """The input, and each layer's output: L + 1 units.

    The activation saves its output first; the next Linear finds it saved.
    """
    model, x = chain(4, activation), torch.randn(BATCH, WIDTH)
    saved, _ = counted(lambda: model(x), model)
    assert saved.by_module == {name: UNIT for name in "01357"}
    saved, _ = counted(lambda: model(x), model, x)
    assert saved.by_module == {name: UNIT for name in "1357"}


@pytest.mark.parametrize("activation", [nn.GELU, nn.SiLU])
def test_activations_known_by_their_input_save_two(activation):
    """Each layer's input, and the input of its activation: 2L units."""
    model, x = chain(4, activation), torch.randn(BATCH, WIDTH)
    saved, _ = counted(lambda: model(x), model)
    assert saved.by_module == {str(i): UNIT for i in range(8)}


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x * 2)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def test_a_storage_counts_once():
    x = torch.randn(10, requires_grad=True)
    with SavedBytes() as saved:
        y = x * x  # saves x twice
        z = y.view(2, 5)[0] * y[:5]  # two views of y: all of it
        w = Twice.apply(z)  # saves a tensor of its own
    assert saved.total == 40 + 40 + 20
    w.sum().backward()


def test_excluded_tensors_and_their_views_are_left_out():
    x, weight = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    with SavedBytes(x, weight.t()) as saved:
        y = x @ weight
        z = x[0] * y
    assert saved.total == 0  # the gradients of both need x and weight only
    z.sum().backward()
    with SavedBytes(weight) as saved:
        y = x @ weight
    assert saved.total == x.nbytes
    y.sum().backward()


# By module ---------------------------------------------------------------


def test_who_saved_what_in_a_transformer_block():
    """The sixteen units of the block, by hand."""
    batch, tokens, width, heads = 3, 5, 16, 2
    x = torch.randn(batch, tokens, width, requires_grad=True)
    unit, row = 4 * x.numel(), 4 * batch * tokens
    block = Block(width, heads)
    saved, _ = counted(lambda: block(x), block)
    assert saved.by_module == {
        "norm1": unit + 2 * row,
        "qkv": unit,
        "Block": 8 * unit + heads * row,  # attention and GELU
        "norm2": unit + 2 * row,
        "up": unit,
        "down": 4 * unit,
    }


def test_paths_begin_below_the_outermost_module():
    model = GPT(vocabulary=5, context=4, width=8, depth=2, heads=2)
    x = torch.zeros(2, 4, dtype=torch.int64)
    parts = {"norm1", "qkv", "norm2", "up", "down"}
    below = [
        {f"blocks.{i}", *(f"blocks.{i}.{p}" for p in parts)} for i in (0, 1)
    ]

    def loss():
        return F.cross_entropy(model(x).flatten(0, 1), x.flatten())

    saved, _ = counted(loss, model, x)
    names = {"position", "norm", "head", ""}
    assert set(saved.by_module) == names.union(*below)
    # Log-probabilities, and the sum of the weights.
    assert saved.by_module[""] == 5 * 2 * 4 * 4 + 4

    def part():
        return model.blocks[1](torch.ones(2, 4, 8, requires_grad=True))

    below_the_part, _ = counted(part, *model.parameters())
    assert set(below_the_part.by_module) == {*parts, "Block"}
    below_the_model, _ = counted(part, model)
    assert set(below_the_model.by_module) == below[1]


@pytest.mark.parametrize(
    ("function", "inputs", "outputs"),
    [
        (lambda x: F.avg_pool2d(x, 2), 1, 0),
        (lambda x: F.relu(x, inplace=True), 0, 1),
        (lambda x: x.flatten(1), 0, 0),
    ],
)
def test_what_chapter_2_says_of_operators_without_a_row(
    function, inputs, outputs
):
    x = torch.randn(2, 3, 4, 4, requires_grad=True) * 2
    size = x.nbytes
    saved, y = counted(lambda: function(x))
    assert saved.total == inputs * size + outputs * y.nbytes


def test_the_first_who_saves_a_storage_answers_for_it():
    x, model = torch.randn(10, requires_grad=True), nn.Softplus()
    first, _ = counted(lambda: [model(x), x * x])
    assert first.by_module == {"Softplus": 40}
    second, _ = counted(lambda: [x * x, model(x)])
    assert second.by_module == {"": 40}


@settings(max_examples=examples(20))
@given(
    st.lists(
        st.sampled_from([nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Softplus]),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 5),
)
def test_the_accounts_add_up_and_are_what_was_saved(kinds, rows):
    """Against plain hooks that know nothing of modules and operators."""
    layers = [layer for k in kinds for layer in (nn.Linear(3, 3), k())]
    model, x = nn.Sequential(*layers), torch.randn(rows, 3)
    saved, _ = counted(lambda: model(x), model)
    storages = {}

    def pack(tensor):
        storages[tensor.data_ptr()] = tensor
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    for parameter in model.parameters():
        storages.pop(parameter.data_ptr(), None)
    assert saved.total == sum(t.nbytes for t in storages.values())
    y.sum().backward()


# What is excluded --------------------------------------------------------


def test_a_module_stands_for_its_parameters_and_buffers():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    x = torch.randn(3, 4)
    listed, _ = counted(
        lambda: model(x), *model.parameters(), *model.buffers(), x
    )
    whole, _ = counted(lambda: model(x), model, x)
    assert whole.by_module == listed.by_module
    with_buffers, _ = counted(lambda: model(x), *model.parameters(), x)
    assert with_buffers.total - whole.total == 2 * 4 * 4


def test_a_freed_storage_does_not_hide_the_next():
    """Neither one that was saved nor one that was excluded."""
    x = torch.randn(100, requires_grad=True)
    with SavedBytes(*(torch.empty(100) for _ in range(20))) as saved:
        for _ in range(20):
            x.exp()
        kept = [x.exp() for _ in range(20)]
    assert saved.total == (20 + len(kept)) * 400


def test_sparse_and_nested_tensors_count_with_their_parts():
    coo, x = torch.eye(4).to_sparse(), torch.randn(4, 2, requires_grad=True)
    with warnings.catch_warnings(action="ignore"):
        csr = torch.sparse_csr_tensor(range(5), range(4), torch.ones(4))
    for matrix, size in ((coo, 2 * 4 * 8 + 16), (csr, 5 * 8 + 4 * 8 + 16)):
        saved, y = counted(lambda matrix=matrix: torch.sparse.mm(matrix, x))
        assert saved.total == size
        y.sum().backward()
        saved, _ = counted(lambda m=matrix: torch.sparse.mm(m, x), matrix)
        assert saved.total == 0
    nested = torch.nested.nested_tensor(
        [torch.ones(2, 3), torch.ones(4, 3)],
        layout=torch.jagged,
        requires_grad=True,
    )
    saved, _ = counted(lambda: nested.sin())
    assert saved.total == 6 * 3 * 4 + 3 * 8  # and offsets


# It stands in nobody's way ----------------------------------------------


def test_a_tensor_changed_in_place_is_still_an_error():
    """PyTorch does not check versions where there are hooks."""
    x = torch.randn(4, requires_grad=True)
    with SavedBytes():
        y = x.exp()
        z = x.sin().relu_().exp_()  # these change nothing that was saved
    y.mul_(2)
    message = (
        r"modified by an inplace operation: a torch.float32 tensor of shape "
        r"\(4,\) is at version 1; expected version 0 instead"
    )
    with pytest.raises(RuntimeError, match=message):
        y.sum().backward()
    assert z.grad_fn is not None


@pytest.mark.parametrize(
    "in_place",
    [
        lambda x: (x * x).mul_(2).add_(1).sigmoid_(),
        lambda x: (x + 1).view(2, 2)[0].exp_(),
        lambda x: F.silu(x + 1, inplace=True),
        lambda x: (x + 2).addcmul_(x, x),
    ],
)
def test_in_place_operators_are_no_error(in_place):
    x = torch.rand(4, requires_grad=True)
    (expected,) = torch.autograd.grad(in_place(x).sum(), x)
    with SavedBytes() as saved:
        y = in_place(x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
    assert saved.total > 0


def test_where_hooks_are_forbidden_nothing_is_left_behind():
    before = hooked()
    saved = SavedBytes()
    with (
        disable_saved_tensors_hooks("no hooks here"),
        pytest.raises(RuntimeError, match="no hooks here"),
        saved,
    ):
        pass
    assert hooked() == before
    with saved:  # it can still be used
        torch.ones(2, requires_grad=True).exp()
    assert saved.total == 8


def test_it_counts_on_when_it_is_entered_again():
    x = torch.randn(10, requires_grad=True)
    saved = SavedBytes()
    with saved:
        y = x.exp()
    x.sin()
    with saved:
        z = x.exp()
    assert saved.total == 80
    (y + z).sum().backward()


# Checkpoints -------------------------------------------------------------

both = pytest.mark.parametrize("reentrant", [False, True])
REFUSAL = (
    "^SavedBytes was entered inside a function that runs under "
    r"torch\.utils\.checkpoint: there its hooks would switch the "
    r"checkpointing off, or see nothing\. Enter it around the "
    "checkpointed call$"
)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.reentrant = chain(2, nn.GELU), reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@both
def test_the_module_that_checkpoints_answers_for_the_inputs(reentrant):
    model = nn.Sequential(Checkpointed(reentrant), nn.Tanh())
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    saved, y = counted(lambda: model(x), model)
    assert saved.by_module == {"0": UNIT, "1": UNIT}
    y.sum().backward()
    assert saved.total == 2 * UNIT


def test_backward_in_the_block_counts_what_a_reentrant_one_saves_again():
    model, x = chain(2, nn.GELU), torch.randn(BATCH, WIDTH)
    x.requires_grad_()
    totals = []
    for reentrant in (False, True):
        with SavedBytes(model) as saved:
            y = checkpoint(model, x, use_reentrant=reentrant)
            y.sum().backward()
        totals.append(saved.total)
    assert totals == [UNIT, UNIT + 3 * UNIT]  # the input is shared


@both
@pytest.mark.parametrize("refused", [1, 2])
def test_it_refuses_inside_a_checkpoint(reentrant, refused):
    """In the first run, or when the function runs again."""
    before = hooked()
    runs = []

    def function(x):
        runs.append(None)
        with SavedBytes() if len(runs) == refused else nullcontext():
            return x.exp()

    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    with pytest.raises(RuntimeError, match=REFUSAL):
        checkpoint(function, x, use_reentrant=reentrant).sum().backward()
    assert len(runs) == refused
    assert hooked() == before


def test_it_refuses_where_no_frame_tells_of_the_checkpoint():
    """FSDP's companion checkpoints a module from its forward hooks."""
    name = "torch.distributed._composable"
    composable = pytest.importorskip(name, reason=f"no {name} here")
    found = []

    class Counting(nn.Module):
        def forward(self, x):
            frame = sys._getframe()
            while frame is not None:
                found.append(frame.f_globals.get("__name__"))
                frame = frame.f_back
            with SavedBytes():
                return x.exp()

    model = Counting()
    composable.checkpoint(model)
    with pytest.raises(RuntimeError, match=REFUSAL):
        model(torch.randn(4, requires_grad=True))
    assert "torch.utils.checkpoint" not in found


@both
def test_after_a_checkpoint_it_may_be_entered(reentrant):
    x = torch.randn(10, requires_grad=True)
    y = checkpoint(torch.exp, x, use_reentrant=reentrant)
    saved, _ = counted(lambda: x.exp())
    assert saved.total == 40
    y.sum().backward()
    assert counted(lambda: x.exp())[0].total == 40
