"""The training script of the lab: what it prints, and what it survives.

The lab itself runs it under ``torchrun``: a rank that is killed in a step and
starts again. Here it runs on ranks that wait.
"""

import io
import json
import runpy
import sys
import time
from contextlib import redirect_stdout
from functools import partial

import pytest
import torch
from fsdp_train_workers import (
    built,
    fsdp_train,
    gathered,
    main,
    one_step,
)

from membudget.models import GPT
from membudget.sharding import (
    RankError,
    Ranks,
    fsdp_traffic,
    rank_states,
    script,
    training_script,
    units_of,
)

ROUNDING = 2.0**-20
"""How far losses may be apart whose sums were added in another order."""

STEPS = 4
CPU = ("--cpu", "--steps", str(STEPS))


class Printed:
    """The lines of a run: losses, last lines of the ranks, and the rest."""

    def __init__(self, lines):
        found = [json.loads(line) for line in lines if line.startswith("{")]
        self.steps = [f["step"] for f in found if "step" in f]
        self.losses = [f["loss"] for f in found if "step" in f]
        self.scales = [f["scale"] for f in found if "scale" in f]
        last = [f for f in found if "rank" in f]
        self.ranks = sorted(last, key=lambda f: f["rank"])
        self.digests = {f["digest"] for f in last}
        self.other = [line for line in lines if not line.startswith("{")]


def alone(*options):
    """The script's functions in this process, without any ranks."""
    with redirect_stdout(io.StringIO()) as printed:
        fsdp_train.train(fsdp_train.options([*CPU, *map(str, options)]))
    return Printed(printed.getvalue().splitlines())


def on(pool, *options):
    """The same on ranks that wait."""
    lines = []
    pool.show = lambda rank, line: lines.append(line)
    pool.run(main, *CPU, *map(str, options))
    return Printed(lines)


def stand_in(patch, **numbers):
    """As if `torchrun` had started this process."""
    for name, number in numbers.items():
        patch.setenv(name, str(number))


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


@pytest.fixture(scope="module")
def pair(pools):
    """The undisturbed run on two ranks."""
    return on(pools[2])


def units():
    model = GPT(**fsdp_train.SIZES["tiny"][0])
    return units_of(model, model.blocks)


def close(ours, theirs):
    pairs = zip(ours, theirs, strict=True)
    return all(abs(a - b) <= ROUNDING * b for a, b in pairs)


def sizes(line):
    names = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    return [line[name] for name in names]


def paper(ranks, rank):
    held = rank_states(units(), ranks, rank)
    return [held.parameters, held.gradients, held.optimizer]


def test_the_interface_in_one_process(single):
    assert single.steps == list(range(STEPS))
    assert single.losses[-1] < single.losses[0] - 0.3
    (line,) = single.ranks
    assert set(line) == {
        "rank",
        "parameter_bytes",
        "gradient_bytes",
        "optimizer_bytes",
        "digest",
    }
    assert line["rank"] == 0
    assert sizes(line) == paper(1, 0)
    assert single.other == []


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, ()), (4, ("--stage", 2)), (2, ("--accumulate", 3))],
)
def test_ranks_learn_what_one_process_does(pools, single, ranks, options):
    run = on(pools[ranks], *options)
    assert run.steps == single.steps
    assert close(run.losses, single.losses)
    assert [line["rank"] for line in run.ranks] == list(range(ranks))
    for rank, line in enumerate(run.ranks):
        assert sizes(line) == paper(ranks, rank)
    assert len(run.digests) == 1
    assert run.other == []


def test_only_rank_0_ever_has_the_whole_model(pools):
    digest, whole = built(*CPU)
    (first, most), (second, least) = pools[2].run(built, *CPU)
    assert digest == first == second
    assert least < whole < most


@pytest.mark.parametrize(("stage", "synchronise"), [(2, "each"), (3, "last")])
def test_the_gradient_and_the_traffic(pools, stage, synchronise):
    """AdamW does not see the size of a gradient, so the losses do not."""
    one, _ = one_step(*CPU)
    options = ("--accumulate", "3", "--synchronise", synchronise)
    many, traffic = pools[2].run(
        one_step, *CPU, *options, "--stage", str(stage)
    )[1]
    assert (many - one).norm() <= 1e-5 * one.norm()
    expected = fsdp_traffic(
        units(),
        2,
        f"zero-{stage}",
        accumulation_steps=3,
        synchronise_last=synchronise == "last",
    )
    for kind in ("all-gather", "reduce-scatter"):
        assert traffic[kind] == expected[kind]


def test_the_ranks_share_the_batch_of_a_step(monkeypatch):
    def drawn(step, rank, ranks, *options):
        with monkeypatch.context() as patch:
            stand_in(patch, RANK=rank, WORLD_SIZE=ranks)
            args = fsdp_train.options([*CPU, *options])
        parts = fsdp_train.micro_batches(fsdp_train.text(), step, args)
        return torch.cat([torch.cat([x, y[:, -1:]], 1) for x, y in parts])

    whole = drawn(0, 0, 1)
    assert whole.shape == (24, 65)
    assert torch.equal(whole, torch.cat([drawn(0, r, 4) for r in range(4)]))
    assert torch.equal(drawn(0, 1, 2), drawn(0, 1, 2, "--accumulate", "3"))
    assert not torch.equal(whole, drawn(1, 0, 1))


@pytest.mark.few(0)
def test_the_stage_and_recomputation_change_no_bit(pools, pair):
    assert on(pools[2], "--stage", 2).digests == pair.digests
    assert on(pools[2], "--recompute").digests == pair.digests


@pytest.mark.few(0)
def test_uneven_shards(single):
    with Ranks(3, backend="gloo") as pool:
        run = on(pool, "--steps", 2)
    assert close(run.losses, single.losses[:2])
    assert [sizes(line) for line in run.ranks] == [
        paper(3, rank) for rank in range(3)
    ]
    assert len({tuple(sizes(line)) for line in run.ranks}) == 2


@pytest.mark.few(0)
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_mixed_precision_learns_nearly_the_same(pools, single, kind):
    run = on(pools[2], "--mixed", kind)
    assert not close(run.losses, single.losses)
    pairs = zip(run.losses, single.losses, strict=True)
    assert all(abs(a - b) < 0.01 for a, b in pairs)
    assert [sizes(line) for line in run.ranks] == [paper(2, 0), paper(2, 1)]
    assert run.scales == ([2.0**16] * STEPS if kind == "fp16" else [])


def test_bf16_without_units_is_said(monkeypatch, capsys):
    stand_in(monkeypatch, RANK=0, WORLD_SIZE=1)
    monkeypatch.setattr(fsdp_train.torch.cuda, "device_count", lambda: 1)
    for native in (True, False):
        monkeypatch.setattr(fsdp_train, "native_bf16", partial(bool, native))
        for kind in ("bf16", "fp16"):
            fsdp_train.options(["--mixed", kind])
            said = "use --mixed fp16" in capsys.readouterr().err
            assert said == (kind == "bf16" and not native)


def test_the_digest_is_of_all_weights(pools, pair):
    """Equal on all ranks, and different after another step."""
    first, second = pools[2].run(gathered, *CPU)
    assert first == second
    assert {first[0]} != pair.digests


def test_saved_on_four_loaded_on_two_and_on_one(pools, tmp_path):
    saved = on(pools[4], "--checkpoint-dir", tmp_path)
    resume = ("--checkpoint-dir", tmp_path, "--resume")
    loaded = on(pools[2], *resume)
    assert loaded.steps == []
    assert loaded.other == [
        f"nothing to do: the checkpoint has {STEPS} steps, --steps is {STEPS}"
    ]
    assert loaded.digests == saved.digests
    assert alone(*resume).digests == saved.digests

    newest = max(tmp_path.glob("step-*"))
    shards = newest / "__2_0.distcp"
    shards.write_bytes(shards.read_bytes()[:100])
    again = on(pools[2], *resume)
    assert again.other[0].startswith(f"skipped {newest.name}: __2_0.distcp")
    assert again.other[1:] == ["begin at step 2"]
    assert again.steps == [2, 3]
    assert close(again.losses, saved.losses[2:])


def test_resume_without_a_checkpoint_begins_at_0(tmp_path, single):
    run = alone("--checkpoint-dir", tmp_path / "new", "--resume")
    assert run.digests == single.digests


def test_a_checkpoint_is_written_every_so_often_and_at_the_end(tmp_path):
    alone("--checkpoint-dir", tmp_path, "--save-every", 3)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-00000003", "step-00000004"]


@pytest.mark.few(0)
def test_a_rank_dies_and_all_start_again(pools, pair, tmp_path):
    folder = ("--checkpoint-dir", tmp_path, "--save-every", 1)
    with pytest.raises(RankError, match=r"rank 1 died of .*SIGKILL"):
        on(pools[2], *folder, "--die", "1:2")
    run = on(pools[2], *folder, "--resume")
    assert run.other == ["begin at step 2"]
    assert run.steps == [2, 3]
    assert run.digests == pair.digests


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--resume"], "--resume needs --checkpoint-dir"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--save-every", "-1"], "--save-every must be at least 1"),
        (["--accumulate", "5"], "24 sequences cannot be split evenly among 1"),
        (["--die", "a:b"], "write RANK:STEP, as 1:3"),
        (["--die", "1:3"], "never happens: this run has ranks 0 to 0 and"),
        (["--die", "0:10"], "and steps 0 to 9"),
        (["--die", "-1:3"], "expected one argument"),
        (["--die=-1:3"], "--die -1:3 never happens"),
        (["--die=0:-1"], "--die 0:-1 never happens"),
        (["--checkpoint-dir", __file__], "is a file: name a folder"),
        (["--mixed", "bf16"], "are FSDP2's: start with torchrun"),
        (["--stage", "1"], "invalid choice: 1"),
        (["--step", "3"], "unrecognized arguments: --step 3"),
    ],
)
def test_wrong_options(given, said, capsys):
    with pytest.raises(SystemExit) as ended:
        fsdp_train.options(given)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_used_folder_is_not_mixed_with_another_run(tmp_path, capsys):
    used = ["--checkpoint-dir", str(tmp_path)]
    fsdp_train.options(used)  # an empty one is fine
    (tmp_path / "step-00000002").mkdir()
    said = f"{tmp_path} has checkpoints: use --resume or another folder"
    test_wrong_options(used, said, capsys)
    assert fsdp_train.options([*used, "--resume"]).resume


def test_options_without_effect_are_named(monkeypatch, tmp_path, capsys):
    args = fsdp_train.options([])
    assert (args.stage, args.synchronise, args.save_every) == (3, "last", 2)
    both = "--synchronise has no effect without torchrun and --accumulate\n"
    alone = "--stage has no effect without torchrun\n" + both
    folder = ["--checkpoint-dir", str(tmp_path)]
    saving = "--save-every has no effect without --checkpoint-dir\n"
    for given, ranks, said in (
        (["--stage", "2", "--synchronise", "each"], 1, alone),
        (["--stage", "2", "--die", "1:9"], 2, ""),
        (["--synchronise", "last"], 2, both),
        (["--synchronise", "last", "--accumulate", "3"], 2, ""),
        (["--save-every", "3"], 2, saving),
        (["--save-every", "3", *folder], 2, ""),
    ):
        if ranks > 1:
            stand_in(monkeypatch, RANK=0, WORLD_SIZE=ranks)
        args = vars(fsdp_train.options(given))
        for name, value in zip(given[::2], given[1::2], strict=True):
            kept = str(args[name[2:].replace("-", "_")])
            assert kept in (value, str((1, 9)))
        assert capsys.readouterr().err == said


def test_restarts_need_resume(monkeypatch, tmp_path, capsys):
    used = ["--checkpoint-dir", str(tmp_path)]
    for restarts, resume, said in [
        ("0", [], ""),
        ("1", ["--resume"], ""),
        ("1", [], "restarts need --resume: they will find checkpoints\n"),
    ]:
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        fsdp_train.options([*used, *resume])
        assert capsys.readouterr().err == said


@pytest.mark.parametrize(("rank", "local"), [(0, 0), (1, 1), (2, 0)])
def test_the_first_rank_of_a_node_names_a_mistake(
    monkeypatch, capsys, rank, local
):
    """The others wait for the end, and name it if that does not come."""
    stand_in(monkeypatch, RANK=rank, WORLD_SIZE=4)
    stand_in(monkeypatch, LOCAL_RANK=local, LOCAL_WORLD_SIZE=2)

    def wait(seconds):
        assert seconds == 60
        assert capsys.readouterr().err == ""
        print("waited")

    monkeypatch.setattr(time, "sleep", wait)
    for given in ["--steps", "0"], ["--accumulate", "5"], ["--stage", "1"]:
        with pytest.raises(SystemExit) as ended:
            fsdp_train.options(given)
        assert ended.value.code == 2
        said = capsys.readouterr()
        assert said.out == ("waited\n" if local else "")
        assert "fsdp_train.py: error: " in said.err


def test_fewer_gpus_than_ranks(monkeypatch, capsys):
    """Rank 0 alone says so."""
    stand_in(monkeypatch, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2)
    few = "1 GPU(s) for 2 ranks: all ranks use the CPU\n"
    for gpus, options, device, said in (
        (0, [], "cpu", ""),
        (1, [], "cpu", few),
        (1, ["--cpu"], "cpu", ""),
        (2, [], "cuda", ""),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda n=gpus: n)
        for rank in 0, 1:
            stand_in(monkeypatch, RANK=rank, LOCAL_RANK=rank)
            assert fsdp_train.options(options).device.type == device
            assert capsys.readouterr().err == ("" if rank else said)


def test_options_that_depend_on_the_ranks(monkeypatch, capsys):
    stand_in(monkeypatch, RANK=0, WORLD_SIZE=5)
    with pytest.raises(SystemExit):
        fsdp_train.options([])
    assert "evenly among 5 ranks x 1 micro-batches" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit):
        fsdp_train.options(["--offload", "--cpu"])
    assert "--offload needs a GPU for each rank" in capsys.readouterr().err


def test_the_checkpoint_of_another_size(tmp_path, monkeypatch, capsys):
    """Other ranks than a node's first wait with it for the agent's signal."""
    shape, sequences = fsdp_train.SIZES["tiny"]
    narrow = ({**shape, "width": 32}, sequences)
    with monkeypatch.context() as patch:
        patch.setitem(fsdp_train.SIZES, "tiny", narrow)
        alone("--checkpoint-dir", tmp_path)
    options = (*CPU, "--checkpoint-dir", str(tmp_path), "--resume")
    monkeypatch.setattr(sys, "argv", [str(training_script()), *options])
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    for local, waited in (None, []), (0, []), (1, [60]):
        if local is not None:
            monkeypatch.setenv("LOCAL_RANK", str(local))
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(sys.argv[0], run_name="__main__")
        assert ended.value.code == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("fsdp_train.py: error: ")
        assert "is the checkpoint of another model" in said.err
        assert "Traceback" not in said.err
        assert waits == waited


def test_a_script_that_did_not_come_along(tmp_path, monkeypatch):
    """Where it did, is tested in an environment without a clone."""
    home = tmp_path / "lib/membudget/sharding/script.py"
    monkeypatch.setattr(script, "__file__", str(home))
    monkeypatch.setattr(script.metadata, "files", lambda name: None)
    with pytest.raises(FileNotFoundError, match="install the package again"):
        training_script()
