"""An optimizer on the host, against the same one on the device."""

from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel

from membudget import models
from membudget.measuring import PeakTracker, optimizer_tensors, witness
from membudget.offloading import optimizer_on_host
from membudget.precision import MasterWeights
from tests.alike import same

ADAMW = partial(optim.AdamW, lr=1e-2)
OPTIMIZERS = {
    "sgd": partial(optim.SGD, lr=0.1),
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": ADAMW,
    "foreach": partial(ADAMW, foreach=True, amsgrad=True),
    "fused": partial(ADAMW, fused=True),
    "rmsprop": partial(optim.RMSprop, lr=1e-2),
    "adafactor": optim.Adafactor,
}


def gpt(dtype=torch.float32):
    torch.manual_seed(0)
    return models.GPT(16, 8, 16, 2).to(dtype)


def loss_of(model, seed):
    make = torch.Generator().manual_seed(seed)
    tokens = torch.randint(16, (4, 9), generator=make)
    logits = model(tokens[:, :-1]).flatten(0, 1).float()
    return F.cross_entropy(logits, tokens[:, 1:].flatten())


def groups(model):
    """Weights decay, and the others have another rate."""
    every = list(model.parameters())
    flat = [p for p in every if p.ndim < 2]
    wide = [p for p in every if p.ndim > 1]
    return [dict(params=wide, weight_decay=0.1), dict(params=flat, lr=0.03)]


def train(model, optimizer, steps, parts=1, first=0):
    for step in range(first, first + steps):
        for part in range(parts):
            (loss_of(model, 10 * step + part) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()


# The same update ------------------------------------------------------------


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("parts", [1, 3])
def test_fp32_weights_are_those_of_the_ordinary_step(make, parts):
    here = gpt()
    there = deepcopy(here)
    usual = make(groups(here))
    moved = optimizer_on_host(groups(there), make)
    for optimizer, model in ((usual, here), (moved, there)):
        schedule = LambdaLR(optimizer, lambda k: 0.5**k)
        for step in range(4):
            train(model, optimizer, 1, parts, first=step)
            schedule.step()
    assert same(here.state_dict(), there.state_dict())
    assert same(usual.state_dict()["state"], moved.state_dict()["state"])
    rates = [[g["lr"] for g in o.param_groups] for o in (usual, moved)]
    assert rates[0] == rates[1]


def test_bf16_weights_are_those_of_a_loop_by_hand():
    there = gpt(torch.bfloat16)
    here = deepcopy(there)
    weights = list(here.parameters())
    copies = [p.detach().float() for p in weights]
    usual = ADAMW(copies)
    moved = optimizer_on_host(there.parameters(), ADAMW)
    for step in range(5):
        train(there, moved, 1, parts=2, first=step)
        for part in range(2):
            (loss_of(here, 10 * step + part) / 2).backward()
        for p, copy in zip(weights, copies, strict=True):
            copy.grad = p.grad.float()
        usual.step()
        for p, copy in zip(weights, copies, strict=True):
            p.data = copy.bfloat16()
            p.grad = None
        assert same(here.state_dict(), there.state_dict())
    assert same(copies, list(moved.state_dict()["masters"].values()))


def test_bf16_weights_are_those_of_the_rooms_master_weights():
    """Those begin with fp32 copies, so ours are set to them first."""
    here = gpt()
    there = deepcopy(here).bfloat16()
    moved = optimizer_on_host(there.parameters(), ADAMW)
    masters = {i: p.detach().clone() for i, p in enumerate(here.parameters())}
    moved.load_state_dict({**moved.state_dict(), "masters": masters})
    master = MasterWeights(here, ADAMW)
    for step in range(4):
        loss_of(here, 10 * step).backward()
        master.step()
        train(there, moved, 1, first=step)
    assert same(here.state_dict(), there.state_dict())
    assert same(master.copies, list(moved.state_dict()["masters"].values()))


def test_a_closure_and_parameters_without_a_gradient():
    here = gpt()
    here.register_parameter("unused", nn.Parameter(torch.ones(3)))
    there = deepcopy(here)
    usual, moved = (
        ADAMW(here.parameters()),
        optimizer_on_host(there.parameters(), ADAMW),
    )
    for optimizer, model in ((usual, here), (moved, there)):

        def closure(optimizer=optimizer, model=model):
            optimizer.zero_grad()
            loss = loss_of(model, 1)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
    assert same(here.state_dict(), there.state_dict())
    assert torch.equal(there.unused, torch.ones(3))


def test_groups_that_are_added_later():
    here = gpt()
    there = deepcopy(here)
    made = []
    for model, make in ((here, ADAMW), (there, None)):
        wide, flat = groups(model)
        optimizer = make([wide]) if make else optimizer_on_host([wide], ADAMW)
        optimizer.add_param_group(flat)
        train(model, optimizer, 3)
        made.append(optimizer)
    assert same(here.state_dict(), there.state_dict())
    assert made[1].param_groups[1]["lr"] == 0.03
    assert made[1].param_groups[1]["betas"] == (0.9, 0.999)


def test_a_gradient_scaler_acts_on_the_devices_gradients():
    here = gpt()
    there = deepcopy(here)
    usual, moved = (
        ADAMW(here.parameters()),
        optimizer_on_host(there.parameters(), ADAMW),
    )
    for optimizer, model in ((usual, here), (moved, there)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for factor in (1.0, float("inf"), 1.0):
            scaler.scale(loss_of(model, 3) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert same(here.state_dict(), there.state_dict())


# Bytes ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parts", [1, 4])
def test_a_step_moves_each_gradient_out_and_each_weight_back_once(
    dtype, parts
):
    model = gpt(dtype)
    weights = sum(p.nbytes for p in model.parameters())
    optimizer = optimizer_on_host(model.parameters(), ADAMW)
    assert (optimizer.out, optimizer.back) == (0, 0)
    train(model, optimizer, 3, parts)
    assert (optimizer.out, optimizer.back) == (3 * weights, 3 * weights)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_device_holds_weights_and_gradients_alone_by_both_rulers(
    make, dtype
):
    model = gpt(dtype)
    weights = sum(p.nbytes for p in model.parameters())
    optimizer = optimizer_on_host(model.parameters(), make)
    assert optimizer_tensors(optimizer) == []

    def step():
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()

    step()
    with PeakTracker(model, optimizer) as tracker:
        step()
    assert tracker.start == weights
    assert tracker.peak == 2 * weights
    assert tracker.live == weights
    assert not any(tracker.timelines()["optimizer"])
    assert witness(step) == weights


def test_the_first_step_makes_its_states_on_the_host():
    model = gpt()
    with PeakTracker(model) as tracker:
        optimizer = optimizer_on_host(model.parameters(), ADAMW)
        train(model, optimizer, 1)
    assert tracker.live == tracker.start
    *_, last = [op for op in tracker.operators if op.name == "aten.copy_"]
    assert last.phase == "optimizer"


def test_gradients_leave_one_by_one():
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    optimizer = optimizer_on_host(model.parameters(), ADAMW)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with PeakTracker(model) as tracker:
        optimizer.step()
    alive = tracker.timelines()["gradients"]
    assert sorted(set(alive), reverse=True) == [192, 128, 64, 0]
    assert alive == sorted(alive, reverse=True)


# What is saved, and what is written meanwhile -------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_last", [False, True])
def test_a_run_that_is_resumed_goes_on_to_the_last_bit(dtype, model_last):
    one = gpt(dtype)
    optimizer = optimizer_on_host(groups(one), ADAMW)
    train(one, optimizer, 3)
    saved = deepcopy((one.state_dict(), optimizer.state_dict()))
    train(one, optimizer, 3, first=3)

    two = gpt(dtype)
    resumed = optimizer_on_host(groups(two), partial(optim.AdamW, lr=9.0))
    loads = [
        partial(two.load_state_dict, saved[0]),
        partial(resumed.load_state_dict, saved[1]),
    ]
    for load in reversed(loads) if model_last else loads:
        load()
    assert resumed.param_groups[0]["lr"] == 1e-2
    train(two, resumed, 3, first=3)
    assert same(one.state_dict(), two.state_dict())
    assert same(optimizer.state_dict(), resumed.state_dict())


def test_an_ordinary_optimizers_state_can_be_loaded_and_the_other_way():
    here = gpt()
    usual = ADAMW(here.parameters())
    train(here, usual, 2)
    there = deepcopy(here)
    moved = optimizer_on_host(there.parameters(), ADAMW)
    moved.load_state_dict(deepcopy(usual.state_dict()))
    train(here, usual, 2, first=2)
    train(there, moved, 2, first=2)
    assert same(here.state_dict(), there.state_dict())
    back = ADAMW(there.parameters())
    back.load_state_dict(moved.state_dict())
    train(here, usual, 1, first=4)
    train(there, back, 1, first=4)
    assert same(here.state_dict(), there.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_that_were_written_to_are_stepped_from_where_they_are(dtype):
    """As by clipping them, or loading others after the first step."""
    model = gpt(dtype)
    optimizer = optimizer_on_host(
        model.parameters(), partial(optim.SGD, lr=0.0)
    )
    train(model, optimizer, 1)
    masters = deepcopy(optimizer.state_dict()["masters"])
    weights = sum(p.nbytes for p in model.parameters())
    assert optimizer.out == weights
    with torch.no_grad():
        for p in model.parameters():
            p.view(-1)[0] = 5.0
    train(model, optimizer, 1)
    assert optimizer.out == 3 * weights
    for p in model.parameters():
        assert p.view(-1)[0] == 5.0
    for before, after in zip(
        masters.values(),
        optimizer.state_dict()["masters"].values(),
        strict=True,
    ):
        assert after.view(-1)[0] == 5.0
        assert torch.equal(after.view(-1)[1:], before.view(-1)[1:])


def test_an_average_of_the_weights_sees_the_new_ones():
    model = gpt()
    optimizer = optimizer_on_host(model.parameters(), ADAMW)
    averaged = AveragedModel(model)
    train(model, optimizer, 1)
    averaged.update_parameters(model)
    assert same(averaged.module.state_dict(), model.state_dict())


# What is refused ------------------------------------------------------------


def frozen():
    model = gpt()
    model.token.weight.requires_grad_(False)
    return model.parameters()


@pytest.mark.parametrize(
    ("parameters", "make", "error", "says"),
    [
        (frozen, ADAMW, ValueError, "a parameter is frozen"),
        (lambda: [], ADAMW, ValueError, "parameters is empty: use those of"),
        (lambda: [3], ADAMW, TypeError, "one of parameters is 3: use a list"),
        (lambda: 3, ADAMW, TypeError, "parameters is 3: use a list"),
        (lambda: gpt().parameters(), 3, TypeError, "make is 3: use a"),
        (
            lambda: gpt().to("meta").parameters(),
            ADAMW,
            ValueError,
            "a Parameter on meta: use plain ones on the CPU or on CUDA",
        ),
        (
            lambda: gpt().parameters(),
            lambda groups: groups,
            TypeError,
            "use a torch.optim.Optimizer",
        ),
        (
            lambda: [nn.Parameter(torch.ones(2))],
            optim.LBFGS,
            ValueError,
            "LBFGS evaluates the loss again",
        ),
        (
            lambda: gpt().parameters(),
            lambda groups: ADAMW(gpt().parameters()),
            ValueError,
            "has other parameters than it was given",
        ),
    ],
)
def test_what_is_refused(parameters, make, error, says):
    with pytest.raises(error, match=says):
        optimizer_on_host(parameters(), make)


def test_parameters_may_have_names():
    model = gpt()
    optimizer = optimizer_on_host(model.named_parameters(), ADAMW)
    train(model, optimizer, 1)
    assert optimizer.param_groups[0]["param_names"][0] == "token.weight"


def test_a_sparse_gradient_is_refused():
    table = nn.Embedding(8, 2, sparse=True)
    optimizer = optimizer_on_host(table.parameters(), optim.SGD)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="a gradient is sparse: use"):
        optimizer.step()


def test_a_state_of_other_parameters_is_refused():
    optimizer = optimizer_on_host(gpt().parameters(), ADAMW)
    other = ADAMW([nn.Parameter(torch.ones(2))]).state_dict()
    with pytest.raises(ValueError, match="size of optimizer's group"):
        optimizer.load_state_dict(other)


def test_an_error_on_the_host_is_the_readers():
    def broken(groups):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        optimizer_on_host(gpt().parameters(), broken)
