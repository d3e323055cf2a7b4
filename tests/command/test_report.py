"""What the report says about the error, without a process of its own."""

import pytest
import torch
from torch import nn

from membudget.command import census, report
from membudget.command.watch import Call, Watch
from membudget.measuring import MemoryReading
from membudget.measuring.tracker import Operator

SHORT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate "


def short(size=4096):
    raise RuntimeError(f"{SHORT}{size} bytes. Error code 12")


def raised(function):
    with pytest.raises(BaseException) as caught:
        function()
    return caught.value


def from_none():
    try:
        short()
    except RuntimeError:
        raise ValueError("other") from None


def leaves(code):
    try:
        short()
    except RuntimeError:
        raise SystemExit(code) from None


@pytest.mark.parametrize(
    ("end", "about"),
    [
        (short, True),
        (from_none, True),
        (lambda: leaves(1), True),
        (lambda: leaves(0), False),
        (lambda: 1 / 0, False),
    ],
)
def test_what_ended_by_memory(end, about):
    found = report.ended_by(raised(end))
    assert (found is not None) == about
    assert not about or SHORT in str(found)


class Net(nn.Module):
    """Runs out of memory where it is told to."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.where = ""

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        if self.where == "forward":
            short()
        return x.sum()


class Stepping(torch.optim.SGD):
    def step(self):
        short()


class Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        short()


def step(where):
    """A step that runs out of memory; its report."""
    net, x = Net(), torch.ones(8, 4)
    net.where = where
    optimizer = Stepping(net.parameters())
    loss = net(x)
    if where == "backward":
        loss = Refused.apply(loss)
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("forward", " in Net (forward)"),
        ("backward", ": the backward pass (backward)"),
        ("optimizer", " (optimizer)"),
    ],
)
def test_a_report_has_its_parts(where, said, capsys):
    watch = Watch()
    try:
        error = raised(lambda: step(where))
        report.report_on(error, watch, limit=2**40)
    finally:
        watch.end()
    text = capsys.readouterr().err
    assert text.startswith("\nOut of memory: ")
    assert text.splitlines()[1].endswith(said)
    assert "asked for 4.00 KiB, with " in text
    assert "of 1.00 TiB in use:" in text
    assert error.__traceback__ is None


def test_the_call_of_the_innermost_line_is_named():
    def binary():
        return torch.ones(2) @ torch.ones(3)

    def called():
        return torch.ones(2).reshape(3, 5)

    for function, name in ((binary, "@"), (called, "torch.ones(2).reshape")):
        found = report._called(raised(function).__traceback__)
        assert name in found and "(3, 5)" not in found


def test_cudas_census_is_taken_when_the_allocator_gives_up(
    monkeypatch, capsys
):
    now = MemoryReading("cuda:0", free=50, total=10**6, requested=5000)
    snapshot = {
        "segments": [
            {
                "device": 0,
                "total_size": 3072,
                "blocks": [
                    {"state": "inactive", "size": 1024},
                    {"state": "active_allocated", "size": 1024},
                    {"state": "inactive", "size": 512},
                ],
            }
        ],
        "device_traces": [[]],
    }
    monkeypatch.setattr(census, "snapshot_of", lambda i: (snapshot, 3072))
    monkeypatch.setattr(census, "read_memory", lambda device: now)
    monkeypatch.setattr(census, "process_limit", lambda device: 8000)
    watch = Watch()
    watch._refused(0, 4096, 10**6, 50)
    watch.end()
    seen = watch.seen
    assert (seen.asked, seen.used, seen.budget) == (3072, 5000, 8000)
    assert (seen.free, seen.largest_free) == (1536, 1024)
    assert seen.node == Operator("", "", "")

    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
    report.report_on(raised(lambda: throw(error)), watch)
    text = capsys.readouterr().err
    assert "asked for 3.00 KiB, with 4.88 KiB of 7.81 KiB in use:" in text
    assert "Fragmentation: 1.50 KiB are reserved" in text
    assert "pieces\n  of at most 1.00 KiB" in text


def throw(error):
    raise error


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (None, "no module with something to train"),
        (Call.of(nn.ReLU(), (object(),), {}), "called with a object"),
    ],
)
def test_why_there_is_no_prediction(call, said):
    model = None if call is None else nn.ReLU()
    why = report._no_prediction(call, model)
    assert said in why
