"""The states of lean optimizers, against real ones and by hand."""

from math import prod

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from membudget.ledger import (
    OPTIMIZERS,
    PLANNED,
    RECIPES,
    Transformer,
    account,
    bytes_per_parameter,
    optimizer_bytes,
    predict,
    states,
    update_workspace,
)
from membudget.ledger.recipes import STEPS
from membudget.measuring import trace_step
from tests.soak import examples

SHAPES = [(64, 96), (96, 64), (96,), (64, 64), (128, 64), (1, 5), (8192,)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Parameters(nn.Module):
    """Parameters of these shapes; their loss has a gradient for each."""

    def __init__(self, shapes, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.ws = nn.ParameterList(torch.rand(s, dtype=dtype) for s in shapes)

    def forward(self, x):
        return sum((w * x).sum() for w in self.ws)


def loss(model, x):
    return model(x)


def tensors(value):
    """All tensors within a state; a projector's among them."""
    if torch.is_tensor(value):
        return [value]
    if hasattr(value, "__dict__"):
        value = vars(value)
    if isinstance(value, dict):
        return [t for one in value.values() for t in tensors(one)]
    return []


def kept(*steppers):
    """Bytes of the states, a tensor that is shared once."""
    found = {
        id(t): t.nbytes
        for stepper in steppers
        for state in stepper.state.values()
        for t in tensors(dict(state))
    }
    return sum(found.values())


def split(model):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return matrices, [p for p in model.parameters() if p.ndim != 2]


def library(name):
    return pytest.importorskip(name, reason=f"{name} is not installed")


def projected(name, kind, rank, **options):
    """A maker of GaLore or APOLLO, all matrices projected."""

    def make(model):
        matrices, rest = split(model)
        group = {
            "params": matrices,
            "rank": rank,
            "update_proj_gap": 200,
            "scale": 1.0,
            "proj_type": "std",
        }
        kinds = getattr(library(name), kind)
        return [kinds([group | options, {"params": rest}], lr=1e-3)]

    return make


def muon(model):
    matrices, rest = split(model)
    return [torch.optim.Muon(matrices), torch.optim.AdamW(rest)]


def bnb(kind):
    return lambda model: [
        getattr(library("bitsandbytes").optim, kind)(model.parameters())
    ]


APOLLO = "apollo_torch", "APOLLOAdamW"
RANDOM = {"proj": "random", "scale_type": "channel"}
MAKE = {
    ("amsgrad", None): lambda model: [
        torch.optim.AdamW(model.parameters(), amsgrad=True)
    ],
    ("adafactor", None): lambda model: [
        torch.optim.Adafactor(model.parameters())
    ],
    ("muon", None): muon,
    ("adam-8bit", None): bnb("AdamW8bit"),
    ("lion-8bit", None): bnb("Lion8bit"),
    ("lion", None): lambda model: [
        library("lion_pytorch").Lion(model.parameters())
    ],
    ("galore", 8): projected("galore_torch", "GaLoreAdamW", 8),
    ("galore", 70): projected("galore_torch", "GaLoreAdamW", 70),
    ("apollo", 8): projected(*APOLLO, 8, **RANDOM),
    ("apollo", 70): projected(*APOLLO, 70, **RANDOM),
    ("apollo", 1): projected(*APOLLO, 1, proj="random", scale_type="tensor"),
}
"""Real optimizers by the ledger's name and the rank."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", DTYPES)
@pytest.mark.parametrize(("optimizer", "rank"), MAKE)
def test_states_of_real_optimizers(optimizer, rank, recipe):
    model = Parameters(SHAPES, DTYPES[recipe])
    steppers = MAKE[optimizer, rank](model)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.rand_like(p)
        for stepper in steppers:
            stepper.step()
    found = states(model, recipe, optimizer, rank)
    assert found.optimizer == kept(*steppers)
    assert states(SHAPES, recipe, optimizer, rank) == found


def test_who_is_compared():
    others = {"sgd", "momentum", "adam"}  # in test_recipes.py
    assert {name for name, _ in MAKE} | others == set(OPTIMIZERS)
    assert set(PLANNED) <= set(STEPS) <= set(OPTIMIZERS)


def test_galore_holds_all_singular_vectors():
    """Its fp32 projector is a part of them, and they stay with it."""
    model = Parameters([(48, 96)])
    [stepper] = projected("galore_torch", "GaLoreAdamW", 4)(model)
    model.ws[0].grad = torch.rand(48, 96)
    stepper.step()
    [state] = stepper.state.values()
    projector = state["projector"].ortho_matrix
    assert projector.nbytes == 4 * 4 * 48
    assert projector.untyped_storage().nbytes() == 4 * 48 * 48


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trainer", [False, True])
def test_the_trainer_keeps_an_embeddings_states_in_32_bits(trainer, tmp_path):
    """And bitsandbytes itself in 8, as those of any large tensor."""
    model = nn.Embedding(128, 64)
    stepper = library("bitsandbytes").optim.AdamW8bit(model.parameters())
    if trainer:
        kinds = library("transformers")
        args = kinds.TrainingArguments(
            str(tmp_path), optim="adamw_bnb_8bit", use_cpu=True
        )
        stepper = kinds.Trainer(model, args).create_optimizer()
    model(torch.arange(8)).sum().backward()
    stepper.step()
    [state] = stepper.state.values()
    for name in ("state1", "state2"):
        assert state[name].dtype == (torch.float32 if trainer else torch.uint8)


# By hand -----------------------------------------------------------------

sides = st.integers(1, 200)


@settings(max_examples=examples(20))
@given(sides, sides, st.integers(1, 250))
@example(64, 64, 64)
@example(100, 200, 130)
def test_a_matrix_by_hand(m, n, rank):
    def found(optimizer, *rank):
        return optimizer_bytes([(m, n)], "fp32", optimizer, *rank)

    short, long = min(m, n), max(m, n)
    r = min(rank, short)  # no more singular vectors than that
    assert found("amsgrad") == 4 * 3 * m * n + 4
    assert found("lion") == found("muon") == 4 * m * n
    assert found("adafactor") == 4 * m + 4 * n + 4
    assert found("galore", rank) == 4 * r * short + 2 * 4 * r * long
    assert found("apollo", rank) == (
        4 * rank * short + 2 * 4 * rank * long + 4
    )


def test_other_shapes_by_hand():
    def found(shape, optimizer, *rank):
        return optimizer_bytes([shape], "bf16", optimizer, *rank)

    vector, filters = (10,), (5, 3, 2, 7)
    assert found(vector, "adafactor") == 2 * 10 + 4
    assert found(filters, "adafactor") == 2 * 15 * (2 + 7) + 4
    for shape in (vector, filters):
        n = prod(shape)
        assert found(shape, "muon") == 2 * 2 * n + 4  # AdamW's
        assert found(shape, "galore", 3) == 2 * 2 * n
        assert found(shape, "apollo", 3) == 2 * 2 * n
    assert found((), "adafactor") == 2 + 4


def test_eight_bit_lion_by_hand():
    def found(*sizes):
        return optimizer_bytes(sizes, "fp32", "lion-8bit")

    assert found(4095) == 4 * 4095
    assert found(4096) == 4096 + 4 * 16 + 1024
    assert found(4097, 10, 8192) == 4097 + 4 * 17 + 40 + 8192 + 4 * 32 + 1024


def test_a_master_copy_and_frozen_parameters():
    model = Parameters(SHAPES)
    model.ws[0].requires_grad_(False)
    count = sum(p.numel() for p in list(model.parameters())[1:])
    alone = optimizer_bytes(SHAPES[1:], "fp32", "adafactor")
    assert states(model, "master", "adafactor").optimizer == 4 * count + alone


# What the step allocates -------------------------------------------------


def test_the_workspace_by_hand():
    assert update_workspace([10, (2, 2)], optimizer="lion") == [0, 80, 32]
    assert update_workspace([10], "bf16", "lion", foreach=True) == [0, 40]
    for way in ({}, {"foreach": True}, {"fused": True}):
        adam = update_workspace([10, 4, 6], "fp32", "adam", **way)
        assert update_workspace([10, 4, 6], "fp32", "amsgrad", **way) == adam
        assert update_workspace([5000], "fp32", "lion-8bit", **way) == [0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", ["amsgrad", "lion", "lion-8bit"])
def test_the_workspace_of_real_optimizers(optimizer):
    model = Parameters(SHAPES)
    [stepper] = MAKE[optimizer, None](model)
    tracker = trace_step(model, loss, torch.ones(()), optimizer=stepper)
    [first] = [i for i, phase in tracker.marks if phase == "step"]
    before = tracker.timeline[first - 1] - 8  # the loss and its gradient
    most = max(tracker.timeline[first:]) - before
    assert 0 <= most - max(update_workspace(SHAPES, "fp32", optimizer)) <= 16


def test_a_whole_step_with_amsgrad():
    shape = Transformer(40, 16, 2, 4)
    model = shape.build("cpu")
    x = torch.zeros(2, 8, dtype=torch.long)
    way = {"amsgrad": True, "foreach": True}
    found = account(
        model,
        lambda model, x, y: nn.functional.cross_entropy(
            model(x).flatten(0, 1), y.flatten()
        ),
        x,
        x.clone(),
        optimizer=torch.optim.AdamW(model.parameters(), **way),
    )
    expected = predict(shape, 2, 8, optimizer="amsgrad", foreach=True)
    assert found.peak == expected.peak


# What is refused ---------------------------------------------------------


@pytest.mark.parametrize("optimizer", sorted({*OPTIMIZERS} - {*STEPS}))
def test_no_rule_for_its_step(optimizer):
    with pytest.raises(ValueError, match=r"no rule .* ledger\.account"):
        update_workspace([3], "fp32", optimizer)
    with pytest.raises(ValueError, match="states gives its states"):
        predict(Transformer(40, 16, 2, 4), 2, 8, optimizer=optimizer)
    with pytest.raises(ValueError, match="depends on the parameters' shapes"):
        bytes_per_parameter("fp32", optimizer)
    rank = 3 if OPTIMIZERS[optimizer].ranked else None
    for run in (states, optimizer_bytes):
        with pytest.raises(ValueError, match="and 12 is a size: use shapes"):
            run([(3, 4), 12], "fp32", optimizer, rank)


@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks(recipe):
    with pytest.raises(ValueError, match="name one, such as rank=128"):
        states([(3, 4)], recipe, "galore")
    with pytest.raises(ValueError, match="'muon' has no rank: leave it out"):
        states([(3, 4)], recipe, "muon", 3)
    with pytest.raises(ValueError, match="rank"):
        states([(3, 4)], recipe, "apollo", 0)
