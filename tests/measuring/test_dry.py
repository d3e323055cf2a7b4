"""The dry run on models that PyTorch's fake tensors do not know."""

import logging
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from measuring_helpers import check_both, mean_square
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.ao import quantization

from membudget.measuring import UNSURE, dry, dry_run, trace_step, unsure

# Values --------------------------------------------------------------------


class Masked(nn.Linear):
    """Makes a mask for each pair only where the given one hides something."""

    def __init__(self):
        super().__init__(8, 8)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("order", torch.arange(64))

    def forward(self, x, mask=None):
        self.steps += 1
        order = self.order[: x.shape[1]]
        if mask is None:
            mask = torch.ones(x.shape[:2])
        assert not isinstance(order, FakeTensor)
        hidden = mask != 1
        if mask.bool().all() and not torch.any(hidden):
            return super().forward(x)[:, : int(order[-1])]
        pairs = (order[:, None] >= order) & ~hidden[:, None]
        return torch.where(pairs[..., None], super().forward(x)[:, None], 0.0)


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float])
def test_masks_and_positions_are_known(dtype):
    model, x = Masked(), torch.randn(3, 6, 8)
    ones = torch.ones(3, 6, dtype=dtype)
    check_both(model, mean_square, x, ones)
    check_both(model, mean_square, x)
    if dtype is not torch.float:
        ones[1, 4:] = 0
        check_both(model, mean_square, x, ones)


def test_on_another_device_values_keep_their_strides():
    x = torch.ones(8, dtype=torch.long).expand(4, 8)
    for device in ("cpu", "meta"):
        moved = dry._moved(x, torch.device(device))
        assert (moved.device.type, moved.stride()) == (device, (0, 1))


def test_values_are_copies():
    def loss(model, ids):
        return model(ids.clamp_(max=2)).sum()

    ids = torch.tensor([[1, 5], [3, 0]])
    dry_run(nn.Embedding(6, 4), loss, ids)
    assert ids.tolist() == [[1, 5], [3, 0]]


def test_integers_that_nobody_knows_have_no_values():
    def written(model, x):
        best = torch.zeros(6, dtype=torch.long)
        best[1:5] = model(x)[1:5, :6].argmax(1)
        return best

    def used(model, x):
        return model(x)[written(model, x)].sum()

    def read(model, x):
        return model(x[: 1 + int(written(model, x).max())]).sum()

    model, x = nn.Linear(8, 8), torch.randn(6, 8)
    check_both(model, used, x)
    with pytest.raises(ValueError, match="needs the values"):
        dry_run(model, read, x)


def put(model, x, mask):
    values = model(x).clone()
    values[mask] = 0
    return values.sum()


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, x, mask: m(x)[mask].sum(),
        lambda m, x, mask: m(x)[mask.byte()].sum(),
        lambda m, x, mask: m(x).masked_select(mask[:, None]).square().sum(),
        lambda m, x, mask: m(x).repeat_interleave(mask.long(), 0).sum(),
        put,
    ],
)
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_what_a_known_mask_selects(loss):
    mask = torch.tensor([True, False, True, True, False, True])
    check_both(nn.Linear(8, 8), loss, torch.randn(6, 8), mask)


# A CPU's kernels -----------------------------------------------------------


def total(model, *batch):
    return model(*batch).square().sum()


def half(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x).float().square().mean()


def normed(norm):
    """A norm of 16 bits with weights of 32."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.Conv2d(8, 2, 3))
    return model, half, torch.randn(4, 3, 7, 7)


def compared(loss, transposed=False):
    """A loss that stays in a large storage, perhaps of what came across."""

    def call(model, x, y):
        predicted = model(x).mT if transposed else model(x)
        return loss(predicted, y), predicted

    shape = (2, 8, 6) if transposed else (2, 6, 8)
    return nn.Linear(8, 8), call, torch.randn(2, 6, 8), torch.randn(shape)


class Across(nn.LayerNorm):
    """Hands its result out the other way round."""

    def forward(self, x):
        return super().forward(x).transpose(1, 2)


def bags(mode, trained=True):
    bag = nn.EmbeddingBag(9, 4, mode=mode, include_last_offset=True)
    bag.weight.requires_grad_(trained)
    model = nn.ModuleList([bag, nn.Linear(4, 4)])
    ids, ends = torch.tensor([1, 2, 3, 8, 8]), torch.tensor([0, 2, 5])
    return model, lambda m, *b: total(m[1], m[0](*b)), ids, ends


def groups(model, x, ends):
    return torch._grouped_mm(x * 2, model.weight, offs=ends).square().sum()


def channels_last(model, x):
    return total(model, x.contiguous(memory_format=torch.channels_last))


def sequence(model, x):
    return mean_square(lambda x: model(x)[0], x)


def recurrent(kind):
    model = kind(8, 8, batch_first=True)
    return model, sequence, torch.randn(2, 4, 8)


ENDS = torch.tensor([2, 2, 7], dtype=torch.int32)
KERNELS = {
    "mse": lambda: compared(F.mse_loss),
    "smooth": lambda: compared(F.smooth_l1_loss),
    "margin": lambda: compared(F.soft_margin_loss),
    "bce": lambda: compared(
        lambda p, y: F.binary_cross_entropy(p.sigmoid(), y.sigmoid())
    ),
    "mse across": lambda: compared(F.mse_loss, transposed=True),
    "smooth across": lambda: compared(F.smooth_l1_loss, transposed=True),
    "huber across": lambda: compared(F.huber_loss, transposed=True),
    "batch norm": lambda: normed(nn.BatchNorm2d(8)),
    "without weights": lambda: normed(nn.BatchNorm2d(8, affine=False)),
    "group norm": lambda: normed(nn.GroupNorm(2, 8)),
    "layer norm": lambda: normed(nn.LayerNorm([8, 5, 5])),
    "a gradient that comes across": lambda: (
        nn.Sequential(nn.Linear(8, 8), Across(8), nn.Linear(6, 4)),
        mean_square,
        torch.randn(3, 6, 8),
    ),
    "an input without gradient": lambda: (
        nn.BatchNorm1d(8),
        total,
        torch.randn(4, 8),
    ),
    "a sum of patches": lambda: (
        nn.Sequential(nn.Conv1d(18, 18, 1), nn.Fold((8, 8), 3, padding=1)),
        total,
        torch.randn(2, 18, 64),
    ),
    "one number in another memory format": lambda: (
        nn.Conv2d(3, 4, 3),
        channels_last,
        torch.zeros(2, 3, 6, 6),
    ),
    "sum": lambda: bags("sum"),
    "mean": lambda: bags("mean"),
    "max": lambda: bags("max"),
    "frozen": lambda: bags("max", trained=False),
    "groups": lambda: (
        nn.Bilinear(8, 12, 3),
        groups,
        torch.randn(7, 8),
        ENDS,
    ),
    "GRU": lambda: recurrent(nn.GRU),
    "RNN": lambda: recurrent(nn.RNN),
}


@pytest.mark.parametrize("name", KERNELS)
def test_what_a_cpus_kernels_make(name):
    check_both(*KERNELS[name]())


def test_an_error_is_raised_and_not_logged_as_well():
    log, seen = logging.getLogger(FakeTensor.__module__), logging.Handler()
    seen.emit = lambda record: pytest.fail(record.getMessage())
    log.addHandler(seen)
    try:
        with pytest.raises(RuntimeError, match="same reduction dim"):
            dry_run(nn.Linear(8, 4), lambda m, x: m(x), torch.randn(3, 7))
    finally:
        log.removeHandler(seen)
    assert not log.disabled


def test_buffers_that_share_their_storage():
    def model():
        made = nn.Linear(4, 4)
        table = torch.zeros(100)
        made.register_buffer("table", table)
        made.register_buffer("part", table[10:60])
        return made

    with torch.device("meta"):
        empty, x = model(), torch.zeros(2, 4)
    start = dry_run(empty, total, x, on="cpu").start
    assert start == dry_run(model(), total, torch.zeros(2, 4)).start


def test_what_a_dry_run_would_answer_wrongly():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    mask = torch.ones(1, dtype=torch.long).expand(2**21 + 1).contiguous()
    with pytest.raises(ValueError, match=r"16\.0 MiB: leave the mask out"):
        dry_run(model, lambda model, x, mask: total(model, x), x, mask)
    model.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(
        ValueError, match="have hooks, which a dry run does no"
    ):
        dry_run(model, total, x)


def test_an_lstm_is_refused_or_an_estimate():
    model, x = nn.LSTM(8, 8, batch_first=True), torch.randn(2, 4, 8)
    with pytest.raises(ValueError, match=r"oneDNN .* with trace_step, or"):
        dry_run(model, sequence, x)
    run = dry_run(model, sequence, x, estimate=True)
    assert unsure(run).items() <= UNSURE.items()
    assert list(unsure(run)) == ["aten.mkldnn_rnn_layer"]
    assert run.peak < trace_step(model, sequence, x).peak


def test_a_device_that_this_pytorch_does_not_have():
    """Autograd's engine would end the process."""
    built = torch.accelerator.current_accelerator()
    other = "mps" if built and built.type == "cuda" else "cuda"
    with torch.device("meta"):
        model, x = nn.Linear(8, 8), torch.empty(4, 8)
    sentence = f'say on="cpu".* machine with {other}'
    with pytest.raises(ValueError, match=sentence):
        dry_run(model, total, x, on=other)


# What it says in its own words ----------------------------------------------


def matched(model, x):
    """As a matcher of scipy's looks at the outputs."""
    y = model(x)
    return y[y.detach().numpy().argmax(0)].sum()


def beside(model, x):
    y = model(x)
    return y[np.asarray(y.detach()).argmax(0)].sum()


class FourBits(nn.Parameter):
    """A weight as bitsandbytes has it."""

    def __new__(cls, data, requires_grad=False, quant_state=None):
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.quant_state = quant_state
        return self


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        codes = torch.arange(64, dtype=torch.uint8).view(8, 8)
        self.codes = FourBits(codes, quant_state={"scale": torch.ones(8)})
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        scale = self.codes.quant_state["scale"]
        return self.head(x @ (self.codes * scale))


def padded(model, x):
    return torch.nested.to_padded_tensor(model(x), 0.0).mean()


def ragged(model, x):
    ends = torch.tensor([0, 2, 5])
    parts = torch.nested.nested_tensor_from_jagged(model(x), ends)
    return parts.mean(1).sum()


def nested(x):
    return torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged)


def product(model, x):
    return (x.to_sparse() @ model.weight.T).sum()


def converted(model, x):
    return model.to(torch.float32)(x).sum()


def masked(model, x, mask, *ids):
    return mean_square(model, x, mask)


LINEAR, X = nn.Linear(8, 2), torch.ones(5, 8)
ROWS, IDS = torch.randn(3, 6, 8), torch.zeros(3, dtype=torch.long)
UNKNOWN = torch.ones(3, 6, dtype=torch.long, device="meta")
LOOKUP = nn.Embedding(4, 4, sparse=True)


@pytest.mark.parametrize(
    ("model", "loss", "batch", "says"),
    [
        (LINEAR, matched, [X], r"\.numpy\(\) needs the values"),
        (LINEAR, beside, [X], r"\.numpy\(\) needs the values"),
        (Masked(), masked, [ROWS, UNKNOWN], "with their data, not on meta"),
        (Masked(), masked, [ROWS, UNKNOWN, IDS], "their data, not on meta"),
        (Quantised(), total, [X], r"codes is a FourBits, .*quant_state"),
        (LINEAR, padded, [nested(X)], "few operators on nested tensors"),
        (LINEAR, ragged, [X], r"nested tensors.* \(PyTorch says"),
        (LINEAR, product, [X], "sparse tensor depend on its"),
        (LINEAR, total, [torch.eye(8).to_sparse()], "sparse tensor depend"),
        (LOOKUP, total, [IDS], "sparse=False in an embedding"),
        (LINEAR, converted, [X], r"Module\.to.*convert it before"),
        (LINEAR, total, [X.long()], "float32 and int64 and float32, which no"),
    ],
)
def test_what_it_refuses_in_its_own_words(model, loss, batch, says):
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=says):
        dry_run(model, loss, *batch)
    for ours, theirs in zip(model.parameters(), before, strict=True):
        assert torch.equal(ours, theirs) and ours.grad is None


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (torch.optim.LBFGS, "LBFGS evaluates the loss again"),
        (torch.optim.Adafactor, "such as AdamW"),
        (torch.optim.ASGD, "such as AdamW"),
    ],
)
def test_an_optimizer_that_looks_at_values(kind, says):
    optimizer = kind(LINEAR.parameters())
    with pytest.raises(ValueError, match=says):
        dry_run(LINEAR, mean_square, X, optimizer=optimizer)
    assert not optimizer.state


@pytest.mark.parametrize(
    "error",
    [
        ArithmeticError("the model's own"),
        AssertionError("mine"),
        RuntimeError("cannot swap these axes"),
    ],
)
def test_an_error_of_the_loss_is_its_own(error):
    def loss(model, x):
        raise error

    with pytest.raises(type(error), match=f"^{error}$"):
        dry_run(LINEAR, loss, X)


def test_a_weight_of_a_class_without_attributes_is_a_weight():
    class Marked(nn.Parameter):
        pass

    model = nn.Linear(8, 2)
    model.weight = Marked(torch.ones(2, 8))
    check_both(model, mean_square, X)


@pytest.mark.parametrize("by_row", [False, True])
def test_fake_quantisation_before_its_first_step(by_row):
    """Which gives its statistics their size."""
    config = "fbgemm" if by_row else "qnnpack"
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU()).train()
    model.qconfig = quantization.get_default_qat_qconfig(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = quantization.prepare_qat(model)
    dry = dry_run(model, mean_square, X)
    real = trace_step(model, mean_square, X)
    assert (dry.start, dry.peak) == (real.start, real.peak)


def test_an_optimizer_takes_all_at_once_where_the_real_one_does(monkeypatch):
    """As on a GPU: PyTorch looks at the types of the parameters."""
    module = sys.modules[torch.optim.Optimizer.__module__]
    devices = "_get_foreach_kernels_supported_devices"
    monkeypatch.setattr(module, devices, lambda: ["cpu"])
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 2))
    adam = torch.optim.AdamW(model.parameters())
    real = trace_step(model, mean_square, X, optimizer=adam)
    dry = dry_run(model, mean_square, X, optimizer=adam)
    assert any("_foreach_" in o.name for o in real.operators)
    assert (dry.start, dry.peak) == (real.start, real.peak)
    assert FakeTensor not in module._foreach_supported_types
