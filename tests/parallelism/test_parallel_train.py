"""The training script of the lab: in each layout it trains one model.

The lab itself runs it under ``torchrun``. Here it runs on ranks that wait.
"""

import io
import json
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from parallel_train_workers import (
    first_gradient,
    first_values,
    main,
    parallel_train,
)

from membudget.models import Llama
from membudget.sharding import RankError, Ranks, training_script
from tests.soak import SOAK

STEPS = 3
CPU = ("--cpu", "--steps", str(STEPS))
TIMES = (
    (2, "ddp", ()),
    (2, "fsdp2", ()),
    (2, "tp", ()),
    (2, "sp", ()),
    (2, "pp", ()),
    (2, "pp", ("--schedule", "GPipe", "--micro-batches", "8")),
    (4, "fsdp+tp", ()),
    (4, "pp", ()),
    (4, "sp", ()),
    (4, "tp", ()),
    (4, "fsdp2", ()),
    (4, "ddp", ()),
)
SOME = TIMES[:5] + TIMES[6:7]


class Printed:
    """The lines of a run: losses, last lines of the ranks, and the rest."""

    def __init__(self, lines):
        found = [json.loads(line) for line in lines if line.startswith("{")]
        self.steps = [f["step"] for f in found if "step" in f]
        self.losses = [f["loss"] for f in found if "step" in f]
        last = [f for f in found if "rank" in f]
        self.ranks = sorted(last, key=lambda f: f["rank"])
        self.digests = [f["digest"] for f in self.ranks]
        self.other = [line for line in lines if not line.startswith("{")]


def alone(*options):
    """The script's functions in this process, without any ranks."""
    both = io.StringIO()
    with redirect_stdout(both), redirect_stderr(both):
        parallel_train.train(parallel_train.options([*CPU, *options]))
    return Printed(both.getvalue().splitlines())


def on(pool, layout, *options):
    """The same on ranks that wait."""
    lines = []
    pool.show = lambda rank, line: lines.append(line)
    pool.run(main, *CPU, "--layout", layout, *map(str, options))
    return Printed(lines)


@pytest.fixture(scope="module")
def single():
    return alone()


@pytest.fixture(scope="module")
def pools():
    """Two ranks and four, for the whole module."""
    found = {n: Ranks(n, backend="gloo") for n in (2, 4)}
    yield found
    for pool in found.values():
        pool.kill()


def close(ours, theirs):
    pairs = zip(ours, theirs, strict=True)
    return all(abs(a - b) <= 1e-6 * b for a, b in pairs)


def test_the_interface_in_one_process(single):
    assert single.steps == list(range(STEPS))
    assert single.losses[-1] < single.losses[0] - 0.3
    (line,) = single.ranks
    sizes = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    assert set(line) == {"rank", *sizes, "peak_bytes", "digest"}
    model = Llama(**parallel_train.SIZES["tiny"][0])
    size = sum(4 * p.numel() for p in model.parameters())
    tensors = len(list(model.parameters()))
    assert [line[s] for s in sizes] == [size, size, 2 * size + 4 * tensors]
    assert line["peak_bytes"] > 4 * size
    assert single.other == []


def test_all_layouts_learn_what_one_process_does(pools, single):
    times = TIMES if SOAK else SOME
    for ranks, layout, options in times:
        run = on(pools[ranks], layout, *options)
        assert run.steps == single.steps
        assert close(run.losses, single.losses), layout
        assert [line["rank"] for line in run.ranks] == list(range(ranks))
        whole = single.ranks[0]
        for line in run.ranks:
            assert line["peak_bytes"] < whole["peak_bytes"]
            fewer = line["parameter_bytes"] < whole["parameter_bytes"]
            assert fewer == (layout != "ddp")
        check_predictions(run, ranks, layout, *options)
        assert run.other == []


def check_predictions(run, ranks, layout, *options):
    """States to the byte; peaks, too, but for what waits for a message."""
    given = dict(zip(options[::2], options[1::2], strict=True))
    plan = {
        "schedule": given.get("--schedule", "1F1B"),
        "micro_batches": int(given.get("--micro-batches", 4)),
    }
    for rank in {0, ranks - 1} if layout == "pp" else {0}:
        line = run.ranks[rank]
        states, peak = parallel_train.predicted(ranks, layout, rank, **plan)
        assert [states.parameters, states.gradients, states.optimizer] == [
            line[f"{kind}_bytes"]
            for kind in ("parameter", "gradient", "optimizer")
        ]
        assert peak <= line["peak_bytes"] <= 1.05 * peak, layout


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "tp", "sp", "pp"])
def test_the_gradient_is_that_of_one_process(pools, layout):
    """AdamW does not see the size of a gradient, so the losses do not."""
    one = first_gradient(*CPU)
    found = {}
    for part in pools[2].run(first_gradient, *CPU, "--layout", layout):
        found |= part
    assert found.keys() == one.keys()
    for name, gradient in one.items():
        far = (found[name] - gradient).norm()
        assert far <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize(
    ("ranks", "layout"), [(4, "fsdp+tp"), (2, "sp"), (2, "pp")]
)
def test_the_first_values_come_from_the_names(pools, ranks, layout):
    one, found = first_values(*CPU), {}
    for part in pools[ranks].run(first_values, *CPU, "--layout", layout):
        for name, value in part.items():
            assert torch.equal(found.setdefault(name, value), value)
    assert found.keys() == one.keys()
    assert all(torch.equal(found[name], one[name]) for name in one)


def test_saved_in_one_layout_resumed_in_another(pools, tmp_path):
    whole = alone("--steps", "5")
    saves = ("--checkpoint-dir", tmp_path, "--save-every", 1, "--resume")
    for done, (ranks, layout) in enumerate(
        [(4, "fsdp2"), (2, "tp"), (2, "pp"), (4, "fsdp+tp"), (2, "sp")]
    ):
        run = on(pools[ranks], layout, *saves, "--steps", done + 1)
        assert run.other == [f"begin at step {done}"]
        assert run.steps == [done]
        assert close(run.losses, whole.losses[done : done + 1]), layout
    again = [*CPU, *map(str, saves), "--steps", "5"]
    last = alone(*again)
    assert last.other[0].startswith("nothing to do")
    assert "peak_bytes" not in last.ranks[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", ["pp", "tp", "sp", "ddp"])
def test_a_rank_dies_and_all_start_again(pools, tmp_path, layout):
    unharmed = on(pools[2], layout)
    folder = ("--checkpoint-dir", tmp_path, "--save-every", 1)
    with pytest.raises(RankError, match=r"rank 1 died of .*SIGKILL"):
        on(pools[2], layout, *folder, "--die", "1:1")
    run = on(pools[2], layout, *folder, "--resume")
    assert run.other == ["begin at step 1"]
    assert run.steps == [1, 2]
    assert close(run.losses, unharmed.losses[1:])
    assert run.digests == unharmed.digests


def stand_in(patch, **numbers):
    """As if `torchrun` had started this process."""
    for name, number in numbers.items():
        patch.setenv(name, str(number))


@pytest.mark.parametrize(
    ("ranks", "given", "said"),
    [
        (1, "--layout tp", "tp is for 2 ranks or more: use torchrun"),
        (2, "", "2 ranks need another layout than one: ddp, fsdp2, tp"),
        (2, "--layout fsdp+tp", "2 ranks with --tp 2 make none: use 4 ranks"),
        (6, "--layout fsdp+tp --tp 4", "6 ranks with --tp 4 make none"),
        (4, "--layout fsdp+tp --tp 1", "4 ranks with --tp 1 make none"),
        (3, "--layout ddp", "8 sequences cannot be split evenly among 3"),
        (
            3,
            "--layout sp",
            "sequences of 64 tokens cannot be split evenly among 3 ranks",
        ),
        (2, "--layout pp --micro-batches 3", "into 3 equal micro-batches"),
        (4, "--layout pp --micro-batches 2", "use --micro-batches 4 or more"),
        (2, "--layout pp --micro-batches 0", "must be at least 1"),
        (1, "--layout dp", "invalid choice: 'dp'"),
        (1, "--resume", "--resume needs --checkpoint-dir"),
    ],
)
def test_what_does_not_fit_is_said_at_once(
    monkeypatch, capsys, ranks, given, said
):
    stand_in(monkeypatch, RANK=0, WORLD_SIZE=ranks)
    with pytest.raises(SystemExit) as ended:
        parallel_train.options(given.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_options_without_effect_are_named(monkeypatch, capsys):
    stand_in(monkeypatch, RANK=0, WORLD_SIZE=2)
    given = "--layout tp --micro-batches 8 --tp 2 --schedule GPipe"
    parallel_train.options(given.split())
    assert capsys.readouterr().err.splitlines() == [
        "--schedule has no effect without --layout pp",
        "--micro-batches has no effect without --layout pp",
        "--tp has no effect without --layout fsdp+tp",
    ]


@pytest.mark.parametrize(
    ("layout", "change", "said"),
    [
        ("pp", {"depth": 1}, "2 stages are more than the 1 blocks"),
        ("tp", {"kv_heads": 1}, "2 ranks do not divide 1, heads of keys"),
        ("sp", {"hidden": 351}, "2 ranks do not divide 351, the MLP's width"),
    ],
)
def test_a_model_that_cannot_be_cut_ends_with_a_sentence(
    pools, layout, change, said
):
    with pytest.raises(RankError, match=f"--layout {layout} on 2 ranks.*"):
        try:
            pools[2].run(with_model, change, *CPU, "--layout", layout)
        except RankError as error:
            assert said in str(error)
            raise


def with_model(change, *options):
    import parallel_train

    shape, batch = parallel_train.SIZES["tiny"]
    parallel_train.SIZES["tiny"] = ({**shape, **change}, batch)
    parallel_train.train(parallel_train.options(options))


def test_a_mistake_of_all_ranks_is_a_sentence(monkeypatch, capsys):
    """Other ranks than a node's first wait for the agent's signal."""

    def wrong(args):
        raise parallel_train.ScriptError("so it cannot be")

    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    args = parallel_train.options(["--cpu"])
    for local, waited in ((0, []), (1, [60])):
        stand_in(monkeypatch, LOCAL_RANK=local)
        with pytest.raises(SystemExit) as ended:
            parallel_train.run_script("parallel_train.py", args, wrong)
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert said == "parallel_train.py: error: so it cannot be\n"
        assert waits == waited


def test_the_script_is_found_by_its_name():
    path = training_script("parallel_train.py")
    assert path.read_text() == Path(parallel_train.__file__).read_text()
    with pytest.raises(ValueError, match="the script's name"):
        training_script("train.py")
