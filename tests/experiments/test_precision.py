"""The experiments on precision, small, on a CPU; and with a GPU's part played
by stand-ins."""

from contextlib import contextmanager
from math import log

import pytest
import torch
import torch.nn.functional as F
from experiments_helpers import ran

from membudget import models
from membudget.ledger import predict
from membudget.measuring import PeakTracker
from membudget_experiments import precision as subject
from membudget_experiments.precision import (
    SCENARIOS,
    Case,
    bf16_accumulation,
    equal_terms,
    mixed_precision,
    rounding_law,
    start,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
META = torch.device("meta")
NETWORKS = {
    "mlp": dict(model="mlp_blocks", width=16, depth=2, batch=64),
    "gpt": dict(
        model="gpt",
        vocabulary=40,
        width=16,
        depth=2,
        heads=2,
        context=12,
        batch=4,
    ),
}
PAIRS = [
    [scenario, format]
    for scenario in SCENARIOS
    for format in (
        ("bf16", "fp16")
        if scenario in ("autocast", "both")
        else ("fp32", "tf32")
    )
]
RUNS = [
    *(["mlp", *pair] for pair in PAIRS),
    *(["gpt", *pair] for pair in PAIRS[::2]),
]
GIVEN = dict(networks=NETWORKS, steps=3, rate=0.01, warm_up=0, repeats=2)
KEYS = ("network", "scenario", "format")
SCALED_LOSS = 4
EVERY = pytest.mark.parametrize("name", NETWORKS)


def case(name, scenario="plain", format="fp32"):
    return Case(name, NETWORKS[name], scenario, format)


def values(rows):
    return [[*row.values()] for row in rows]


# The four scenarios, on a CPU ----------------------------------------------


@pytest.fixture(scope="module")
def measured():
    """The prediction and the samples of every run."""
    return ran(mixed_precision, CPU, runs=RUNS, **GIVEN)


def both(measured, format):
    """Predictions and samples of the runs in a format."""
    pairs = zip(*measured, strict=True)
    return [pair for pair in pairs if pair[0]["format"] == format]


def test_the_scenarios_differ(measured):
    rows, samples = measured
    for sample in samples:
        assert sample["allocated"] is sample["live_before"] is None
    for found in (rows[:8:2], rows[8:]):  # the scenarios of a network
        for kind in ("dry_run", "saved"):
            assert len({row[kind] for row in found}) == 4
        assert {row["phase"] for row in found} <= {
            "forward",
            "backward",
            "optimizer",
        }


@pytest.mark.parametrize("format", ["fp32", "bf16", "fp16"])
def test_peak_and_saved_bytes_are_right_to_the_byte(measured, format):
    for row, sample in both(measured, format):
        more = SCALED_LOSS if format == "fp16" else 0
        assert row["ledger"] == row["dry_run"]
        assert row["dry_run"] == sample["requested"] - more
        assert row["ledger_saved"] == row["saved"] == sample["saved"]


def test_tf32_saves_no_byte_and_a_cpu_has_it_not(measured):
    plain = both(measured, "fp32")[:2]
    pairs = zip(both(measured, "tf32"), plain, strict=True)
    for (row, sample), (same, _) in pairs:
        assert {**row, "format": "fp32"} == same
        assert sample["support"] == "absent"
        rest = {*sample} - {*KEYS, "support"}
        assert {sample[name] for name in rest} == {None}


@pytest.mark.parametrize("format", ["fp32", "bf16", "fp16"])
def test_what_a_training_tells(measured, format):
    for _, sample in both(measured, format):
        supported = subject.support(format, CPU)
        assert sample["support"] == supported in ("native", "emulated")
        assert len(sample["seconds"]) == 2 and min(sample["seconds"]) > 0
        assert len(sample["losses"]) == 3
        assert sample["loss"] < sample["losses"][-1] < sample["losses"][0]
        scaled = [65536.0, 0] if format == "fp16" else [None, None]
        assert [sample["scale"], sample["skipped"]] == scaled


@EVERY
def test_losses_are_the_same_with_and_without_checkpoints(measured, name):
    found = {
        (s["scenario"], s["format"]): s["losses"] + [s["loss"]]
        for s in measured[1]
        if s["network"] == name and s["losses"]
    }
    assert found["plain", "fp32"] == found["checkpointed", "fp32"]
    assert found["autocast", "bf16"] == found["both", "bf16"]
    assert found["autocast", "bf16"] != found["plain", "fp32"]
    assert found["autocast", "bf16"] == pytest.approx(
        found["plain", "fp32"], rel=0.02
    )


@EVERY
def test_the_losses_are_those_of_adam(measured, name):
    work = case(name)
    with subject.seeded(CPU):
        network, (x, y) = work.build(CPU), work.data(CPU)
    optimizer = torch.optim.Adam(network.parameters(), lr=GIVEN["rate"])
    losses = []
    for _ in range(GIVEN["steps"] + 1):
        optimizer.zero_grad()
        value = F.cross_entropy(network(x).flatten(0, -2), y.flatten())
        value.backward()
        optimizer.step()
        losses.append(value.item())
    (sample, *_) = (s for s in measured[1] if s["network"] == name)
    assert sample["losses"] + [sample["loss"]] == pytest.approx(losses)


def test_flops_are_six_for_a_weight_and_more_for_a_recomputation():
    shape = NETWORKS["mlp"]
    rows, width, depth = shape["batch"], shape["width"], shape["depth"]
    block = 8 * width**2
    plain = 6 * rows * (depth * block + 10 * width)
    # nothing behind the first product of a block is needed again
    again = 2 * rows * depth * block // 2
    found = [subject._flops(case("mlp", *pair), CPU) for pair in PAIRS[::2]]
    assert found == [plain, plain, plain + again, plain + again]


def test_flops_of_a_gpu_need_none():
    plain, checkpointed = (
        subject._flops(case("gpt", scenario), CUDA)
        for scenario in ("plain", "checkpointed")
    )
    assert 0 < plain < checkpointed < 4 / 3 * plain


def test_random_numbers_go_on_as_before():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, other = (start(case("gpt"), CPU, 0.1) for _ in range(2))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(one.x, other.x)
    assert torch.equal(one.network.head.weight, other.network.head.weight)
    assert not torch.equal(one.x[0], one.x[1])


def test_overflows_are_counted():
    work = case("mlp", "autocast", "fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    training = start(work, CPU, 0.01)._replace(scaler=scaler)
    learned = subject._learn(work, training, 4)
    assert (learned["skipped"], learned["scale"]) == (4, 2.0**36)
    assert len(set(learned["losses"])) == 1  # nothing was learned


def test_losses_end_before_one_that_is_not_finite():
    work = case("mlp")
    training = start(work, CPU, float("inf"))
    learned = subject._learn(work, training, 3)
    assert len(learned["losses"]) == 1
    assert learned["loss"] is None
    with torch.no_grad():
        training.network[0].up.weight.fill_(float("nan"))
    assert subject._learn(work, training, 2)["losses"] is None


# What is trained -----------------------------------------------------------


@pytest.mark.parametrize(("scenario", "format"), PAIRS[:4])
def test_autocast_takes_the_format(scenario, format):
    work, seen = case("mlp", scenario, format), []
    network = work.build(CPU)
    network.register_forward_hook(lambda m, i, out: seen.append(out.dtype))
    assert work.loss(network, *work.data(CPU)).dtype == torch.float32
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    assert seen == [dtypes.get(format, torch.float32)]
    scaler = start(work, CPU, 0.1).scaler
    assert (scaler is not None) == (format == "fp16")


@pytest.mark.parametrize(
    ("scenario", "format", "words"),
    [
        ("amp", "fp32", "no scenario is 'amp': use one of plain, autocast"),
        ("autocast", "fp32", "autocast in fp32: use bf16 or fp16"),
        ("plain", "bf16", "plain in bf16: use fp32 or tf32"),
    ],
)
def test_cases_that_are_none(scenario, format, words):
    with pytest.raises(ValueError, match=words):
        case("mlp", scenario, format)


# On a GPU ------------------------------------------------------------------


@pytest.fixture
def gpu(play_gpu, monkeypatch):
    """A GPU played by the CPU; what was done, in order."""
    gpu = play_gpu(subject)

    def seconds(call, device, warm_up, repeats):
        assert (device, warm_up) == (CUDA, 1)
        call()
        gpu.done.append("time")
        return [2.0] * repeats

    @contextmanager
    def tf32(device):
        assert device == CUDA
        gpu.done.append("tf32 on")
        yield
        gpu.done.append("tf32 off")

    @contextmanager
    def seeded(device):
        assert device == CUDA
        yield

    for stand_in in (seconds, tf32, seeded):
        monkeypatch.setattr(subject, stand_in.__name__, stand_in)
    monkeypatch.setattr(subject, "support", lambda format, device: "native")
    return gpu


GPU_GIVEN = {**GIVEN, "warm_up": 1}


def test_a_gpu_is_asked_for_its_own_operators(gpu, monkeypatch):
    lists = []

    def noted(*args, **options):
        lists.append(options["lists"])
        return predict(*args, **options)

    monkeypatch.setattr(subject, "predict", noted)
    runs = [["gpt", "autocast", "bf16"]]
    (row,) = next(mixed_precision(CUDA, runs=runs, **GPU_GIVEN))["runs"]
    (asked,) = gpu.asked
    assert row["dry_run"] == 5
    assert asked["on"] == asked["device"] == CUDA
    (group,) = asked["optimizer"].param_groups
    assert group["foreach"] is True
    # the ledger's rules are a CPU's, but for the lists of autocast
    wanted = {"recipe": "autocast", "lists": "cuda", "foreach": True}
    assert lists == ["cuda"]
    paper = predict(case("gpt").paper, 4, 12, **wanted)
    assert row["ledger"] == paper.peak
    assert row["ledger_saved"] == paper.saved - 4
    assert gpu.done == []  # nothing is built there before it is on disk


def test_what_was_there_before_is_not_the_models(gpu):
    runs = [["gpt", "plain", "fp32"], ["mlp", "checkpointed", "tf32"]]
    _, *samples = mixed_precision(CUDA, runs=runs, **GPU_GIVEN)
    clear = ["wait", "empty"]
    run = [
        *[*clear, "build", "train"],
        *[*clear, "read", "build", *["train"] * GIVEN["steps"]],
        *["train", "peak", "train", "time"],
    ]
    assert gpu.done == [*run, "tf32 on", *run, "tf32 off"]
    for sample, (name, *rest) in zip(samples, runs, strict=True):
        work = case(name, *rest)
        training = start(work, CUDA, 0.01)
        subject.train(work, training)
        with PeakTracker() as fresh:
            subject.train(work, training)
        assert sample["live_before"] == gpu.workspace
        assert sample["requested"] == fresh.peak
        assert sample["allocated"] == fresh.peak + gpu.rounding
        assert sample["seconds"] == [2.0] * GIVEN["repeats"]
        assert sample["saved"] > 0


# The sizes -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "least", "most"),
    [
        ("tiny", 2 << 20, 32 << 20),
        ("t4", 15 << 28, 9 << 30),
        ("large", 5 << 30, 40 << 30),
    ],
)
def test_the_runs_of_a_size(size, least, most):
    given = mixed_precision.experiment.sizes[size]
    assert given["runs"] == [[n, *pair] for n in NETWORKS for pair in PAIRS]
    for name, shape in given["networks"].items():
        for pair in (PAIRS[0], PAIRS[6]):
            assert least <= ledger(Case(name, shape, *pair)).peak <= most


def ledger(work):
    return predict(
        work.paper,
        work.shape["batch"],
        *work.tokens,
        recipe="autocast" if work.autocast else "fp32",
        lists="cuda",
        checkpointed=work.checkpointed,
        foreach=True,
    )


# Accumulation in bf16 ------------------------------------------------------

U = 2.0**-8
COUNTS = (1, 2, 4, 16, 128)
ACCUMULATED = dict(
    shape=dict(width=16, depth=2),
    size=2,
    runs=[[kind, k] for kind in ("fresh", "same") for k in COUNTS],
    warm_up=0,
    repeats=1,
)


@pytest.fixture(scope="module")
def accumulated():
    return ran(bf16_accumulation, CPU, **ACCUMULATED)


def of(accumulated, kind):
    pairs = zip(*accumulated, strict=True)
    return [pair for pair in pairs if pair[0]["kind"] == kind]


def test_equal_micro_batches_are_at_the_law(accumulated):
    pairs = of(accumulated, "same")
    for law, sample in pairs[3:]:
        assert sample["summing"] == pytest.approx(law["equal"], rel=0.3)
    assert pairs[3][1]["summing"] < 0.02 < 0.05 < pairs[4][1]["summing"]


def test_a_sum_in_fp32_is_not_the_trouble(accumulated):
    for law, sample in zip(*accumulated, strict=True):
        assert sample["summing_fp32"] <= law["noise_fp32"]
        first = accumulated[1][0]
        for way in ("fp32_sum", "autocast"):
            assert sample[way] <= 1.3 * first[way]
    _, last = of(accumulated, "fresh")[-1]
    assert last["bf16"] > 3 * last["fp32_sum"] > 3 * last["autocast"]


@pytest.mark.parametrize("kind", ["fresh", "same"])
def test_accumulation_by_hand(accumulated, kind):
    """Every gradient alone, then added by hand."""
    with subject.seeded(CPU):
        half = models.mlp_blocks(16, 2).bfloat16()
        generator = torch.Generator().manual_seed(subject.SEED)
    exact = models.mlp_blocks(16, 2).double()
    exact.load_state_dict(half.state_dict())
    terms, reference = [], []
    for index in range(4):
        if index == 0 or kind == "fresh":
            x = torch.randn(2, 16, generator=generator)
            y = x[:, :10].argmax(1)
            x = x.bfloat16()
        value = F.cross_entropy(half(x).float(), y)
        terms.append(flat(torch.autograd.grad(value, half.parameters())))
        value = F.cross_entropy(exact(x.double()), y)
        reference.append(flat(torch.autograd.grad(value, exact.parameters())))
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    assert total.dtype == torch.bfloat16
    total, own = total.double(), sum(term.double() for term in terms)
    truth = sum(reference)
    _, sample = of(accumulated, kind)[2]
    assert sample["micro_batches"] == 4
    assert sample["summing"] == pytest.approx(relative(total, own))
    assert sample["bf16"] == pytest.approx(relative(total, truth))
    assert sample["fp32_sum"] == pytest.approx(relative(own, truth))


def flat(tensors):
    return torch.cat([t.flatten() for t in tensors])


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def test_the_law_in_closed_form():
    c = U / (8 * log(2)) ** 0.5
    assert rounding_law(1) == rounding_law(1, noise=False) == 0
    assert rounding_law(2) == pytest.approx(c)
    assert rounding_law(4) == pytest.approx(c * (9 / 4) ** 0.5)
    assert rounding_law(4, noise=False) == pytest.approx(c * 29**0.5 / 4)
    assert rounding_law(10**4) == pytest.approx(c * 5000**0.5, rel=1e-3)
    assert rounding_law(10**4, noise=False) == pytest.approx(
        c * (10**4 / 3) ** 0.5, rel=1e-3
    )
    assert rounding_law(9, "fp32") == pytest.approx(rounding_law(9) / 2**16)


@pytest.mark.parametrize(("noise", "count"), [(True, 64), (False, 16)])
def test_the_law_holds_for_random_sums(noise, count):
    """Of all scales; without noise they vary by a half."""
    generator = torch.Generator().manual_seed(0)
    shape = count, 20_000
    terms = torch.randn(shape, generator=generator)
    if not noise:
        terms = 1 + torch.rand(shape, generator=generator)
    terms = terms * 2 ** torch.rand(shape[1], generator=generator)
    terms = terms.bfloat16()
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    found = relative(total.double(), terms.double().sum(0))
    assert found == pytest.approx(rounding_law(count, noise=noise), rel=0.15)


@pytest.mark.parametrize(("count", "format"), [(2, "fp16"), (300, "bf16")])
def test_equal_terms_are_pytorchs(count, format):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[format]
    step = torch.finfo(dtype).eps
    terms = torch.arange(1, 2, step, dtype=torch.float64)
    total = terms.to(dtype)
    for _ in range(count - 1):
        total = total + terms.to(dtype)
    errors = total.double() / (count * terms) - 1
    mean = (errors**2 / terms).sum() / (1 / terms).sum()
    assert equal_terms(count, format) == pytest.approx(mean.sqrt().item())
