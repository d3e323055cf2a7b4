"""The allocator as a witness, and the tracker and the dry run beside it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import profiler

from membudget.measuring import PeakTracker, dry_run, trace_step, witness
from membudget.measuring.step import Step

MIB = 2**20


def peaks(model, loss, *batch, inference=False):
    """Above the start: of the witness, the tracker and the dry run."""
    step = Step(model, loss, batch, inference=inference)
    found = [witness(step)]
    for run in trace_step, dry_run:
        tracker = run(model, loss, *batch, inference=inference)
        found.append(tracker.peak - tracker.start)
    return found


# The witness itself --------------------------------------------------------


def test_it_counts_every_request():
    held = []

    def step():
        held.append(torch.empty(MIB, dtype=torch.uint8))
        torch.empty(3 * MIB, dtype=torch.uint8)
        torch.empty(2 * MIB, dtype=torch.uint8)

    assert witness(step) == 4 * MIB
    assert len(held) == 2


def test_what_was_there_before_is_the_start():
    held = [torch.empty(0, dtype=torch.uint8)]

    def step():  # the first block goes when the second is there
        held[0] = torch.empty(MIB, dtype=torch.uint8)

    assert witness(step) == MIB


def test_it_watches_the_second_step():
    """The first makes Adam's states, of twice the weights."""
    weights = nn.Parameter(torch.zeros(MIB // 4))
    adam = torch.optim.Adam([weights], foreach=False)

    def step():
        weights.grad = torch.zeros_like(weights)
        adam.step()
        weights.grad = None

    second = witness(step)
    adam.state.clear()
    with PeakTracker(weights, adam) as first:
        step()
    assert first.peak - first.start > second + MIB


def test_it_is_no_second_profiler():
    with (
        profiler.profile(),
        pytest.raises(RuntimeError, match="has but one: leave its block"),
    ):
        witness(lambda: None)


# What a mode changes, and the tracker makes up for -------------------------


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.each, self.all = nn.Linear(3, 128), nn.Linear(128, 10)

    def forward(self, points):
        return self.all(F.relu(self.each(points)).max(1).values)


def transducer(model, x, y):
    """Negative log-likelihood of y, by the forward algorithm."""
    acoustic, text = model["ear"](x)[0], model["mouth"](y)[0]
    joint = (acoustic[:, :, None] + text[:, None]).log_softmax(-1)
    words = y[:, None, 1:, None].expand(-1, x.size(1), -1, -1)
    emit = joint[:, :, :-1].gather(-1, words).squeeze(-1)
    stay = joint[..., 0]
    row = stay[:, 0].cumsum(1)
    for t in range(1, x.size(1)):
        up = row[:, :-1] + emit[:, t]
        row = torch.logaddexp(row + stay[:, t], F.pad(up, (1, 0)))
    return -row[:, -1].mean()


def segmentation():
    target = torch.randint(2, (2, 64, 64, 8)).float()
    weight = torch.full((8,), 2.0)

    def loss(model, x, y, weight):
        return F.binary_cross_entropy_with_logits(
            model(x), y, pos_weight=weight
        )

    return nn.Linear(3, 8), loss, torch.rand(2, 64, 64, 3), target, weight


def points():
    def loss(model, x, y):
        return F.cross_entropy(model(x), y)

    return PointNet(), loss, torch.rand(4, 256, 3), torch.randint(10, (4,))


def speech():
    ear = nn.GRU(8, 12, batch_first=True)
    model = nn.ModuleDict({"ear": ear, "mouth": Mouth()})
    return model, transducer, torch.rand(3, 20, 8), torch.randint(12, (3, 9))


class Mouth(nn.Module):
    def __init__(self):
        super().__init__()
        self.word = nn.Embedding(12, 12)
        self.speech = nn.GRU(12, 12, batch_first=True)

    def forward(self, words):
        return self.speech(self.word(words))


@pytest.mark.parametrize("step", [segmentation, points, speech])
def test_a_step_that_pytorch_runs_in_place(step):
    torch.manual_seed(0)
    seen, tracked, dry = peaks(*step())
    assert tracked == dry == seen


def test_a_bias_is_added_in_place_where_tokens_are_transposed():
    model, x = nn.Linear(64, 256), torch.rand(100, 8, 64)

    def call(model, x):
        return model(x.transpose(0, 1))

    seen, tracked, dry = peaks(model, call, x, inference=True)
    assert tracked == dry == seen < 1.5 * 100 * 8 * 256 * 4


def test_a_bias_that_the_reader_adds_is_not():
    model, x = nn.Linear(64, 256), torch.rand(8, 100, 64)

    def call(model, x):
        return x @ model.weight.T + model.bias

    seen, tracked, dry = peaks(model, call, x, inference=True)
    assert tracked == dry == seen >= 2 * 8 * 100 * 256 * 4


W = 60  # rows and columns
ROWS = torch.arange(W) * 7 % W
MASK = (torch.arange(W * W) % 3 == 0).view(W, W)
IN_PLACE = {
    "gather": lambda w: w.gather(1, ROWS[:, None]),
    "take": lambda w: w.take(ROWS),
    "take_along_dim": lambda w: w.take_along_dim(ROWS[:, None], 1),
    "w[rows, columns]": lambda w: w[ROWS, ROWS],
    "w[rows]": lambda w: w[ROWS],
    "index_select": lambda w: w.index_select(0, ROWS),
    "max": lambda w: w.max(1).values,
    "min": lambda w: w.min(1).values,
    "topk": lambda w: w.topk(3).values,
    "sort": lambda w: w.sort().values,
    "cummax": lambda w: w.cummax(0).values,
    "trace": lambda w: w.trace()[None],
    "sgn": lambda w: w.sgn(),
    "binary cross-entropy": lambda w: F.binary_cross_entropy(
        w.sigmoid(), w.sigmoid(), reduction="none"
    ),
    "its logits": lambda w: F.binary_cross_entropy_with_logits(
        w, MASK.float(), pos_weight=ROWS.float(), reduction="none"
    ),
    "its target": lambda w: F.binary_cross_entropy_with_logits(
        w, w, reduction="none"
    ),
    "no gradient": lambda w: w.norm(0)[None] + w[0],
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_an_operator_that_pytorch_runs_in_place(name):
    """But for the numbers that become tensors of 8 and 4 bytes."""
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(W, W)])

    def loss(model):
        return (IN_PLACE[name](model[0]) * 1.5).sum()

    seen, tracked, dry = peaks(model, loss)
    assert tracked == dry
    assert 0 <= seen - tracked <= 16


WORK_SPACE = {
    "amax": (lambda w: w.amax(1), 8 * W * W),  # booleans summed as integers
    "kthvalue": (lambda w: w.kthvalue(9).values, 12 * W * W),
    "median": (lambda w: w.median(1).values, 12 * W * W),
    "w[mask]": (lambda w: w[MASK], 24 * W * W),
    "masked_select": (lambda w: w.masked_select(MASK), 8 * W * W),
}


@pytest.mark.parametrize("name", WORK_SPACE)
def test_work_space_within_an_operator_is_the_witnesss_alone(name):
    torch.manual_seed(0)
    model, (operator, most) = (
        nn.ParameterList([torch.randn(W, W)]),
        (WORK_SPACE[name]),
    )

    def loss(model):
        return (operator(model[0]) * 1.5).sum()

    seen, tracked, dry = peaks(model, loss)
    assert tracked == dry <= seen <= tracked + most


def test_a_chain_of_products_is_not_taken_for_a_layer():
    """Each product and each sum stand where the reader wrote them."""
    ws = nn.ParameterList([torch.randn(W, W) for _ in range(4)])

    def loss(ws, x):
        for w in ws:
            x = x @ w
            x = x + w
        return x.sum()

    seen, tracked, dry = peaks(ws, loss, torch.randn(W, W))
    assert tracked == dry == seen


def test_the_tracker_alone_counts_the_same():
    w = nn.Parameter(torch.randn(256, 512))
    column = torch.randint(0, 512, (256, 1))
    with PeakTracker(w, column) as tracker:
        (w.gather(1, column) * 1.5).sum().backward()
    assert tracker.peak - tracker.start == 525320


def test_products_that_are_not_counted_are_none_to_add_to():
    """On a device that is not asked about; the sum is another tensor."""
    model, x = nn.Linear(64, 256), torch.rand(100, 8, 64)
    with PeakTracker(device="meta") as tracker, torch.no_grad():
        model(x.transpose(0, 1))
        torch.empty(5, device="meta") + torch.empty(5, device="meta")
    assert tracker.peak == 3 * 5 * 4
