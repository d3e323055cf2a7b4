"""Checkpoints: read on any number of ranks, whole or not at all."""

import json
import re
import shutil
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import sharding_workers as workers
import torch
import torch.distributed as dist
from sharding_workers import build, everything, resume, step, train
from torch import nn

from membudget.sharding import (
    CheckpointError,
    Loaded,
    RankError,
    Ranks,
    launching,
    load_checkpoint,
    save_checkpoint,
)

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(),
    reason="this PyTorch has no gloo",
)

LAST = 3  # the newest checkpoint of `run`
INTERRUPTIONS = [  # which step is saved, where it ends, on which rank, how
    (LAST + 1, "before", 1, "raise"),
    (LAST + 1, "writing", 1, "kill"),
    (LAST, "after", 0, "raise"),
    (LAST, "manifest", 0, "kill"),
    (LAST, "deleting", 0, "kill"),
]


@pytest.fixture(scope="module")
def pools():
    """One for each number of ranks, started when it is needed.

    Without ranks it runs in this process.
    """
    found = {0: SimpleNamespace(run=lambda worker, *args: [worker(*args)])}

    def pool(ranks):
        return found.get(ranks) or found.setdefault(ranks, Ranks(ranks))

    yield pool
    del found[0]
    for pool in found.values():
        pool.kill()


@pytest.fixture(scope="module")
def run(pools, tmp_path_factory):
    """Saved on 4 ranks: where, and everything after each step."""
    folder = tmp_path_factory.mktemp("run")
    return folder, pools(4).run(train, str(folder), LAST + 2)[0]


@pytest.fixture
def copy(run, tmp_path):
    """Of the checkpoints, to damage."""
    return shutil.copytree(run[0], tmp_path / "copy"), run[1]


def alike(found, expected):
    """Bit by bit."""
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], value)
        if torch.is_tensor(value)
        else found[name] == value
        for name, value in expected.items()
    )


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def checkpoint(folder, number=LAST):
    return folder / f"step-{number:08d}"


# Round trips -------------------------------------------------------------


@pytest.mark.parametrize("ranks", [0, 2, 3])
def test_saved_on_four_and_loaded_on_any_number(run, pools, ranks, recwarn):
    """The optimizer, too: the next step is the same."""
    folder, after = run
    for loaded, found, then in pools(ranks).run(resume, str(folder)):
        assert loaded == Loaded(LAST)
        assert alike(found, after[LAST])
        assert alike(then, after[LAST + 1])
    assert not alike(after[LAST], after[LAST - 1])
    assert not recwarn.list


@pytest.mark.parametrize("optimizer", ["momentum", "sgd"])
def test_saved_in_a_plain_process(tmp_path, pools, optimizer):
    after = train(tmp_path, 3, optimizer=optimizer)
    assert alike(resume(tmp_path, optimizer)[2], after[2])
    for _, found, then in pools(3).run(resume, str(tmp_path), optimizer):
        assert alike(found, after[1]) and alike(then, after[2])


def test_the_newest_ones_are_kept(run, tmp_path):
    assert names(run[0]) == ["step-00000002", "step-00000003"]
    train(tmp_path / "made" / "on demand", 6, keep=3)
    assert names(tmp_path / "made" / "on demand") == [
        f"step-{i:08d}" for i in (2, 3, 4)
    ]


def test_what_was_saved_just_now_is_kept(copy):
    """Also after a return to an earlier step."""
    folder, after = copy
    model, optimizer = build()
    path = save_checkpoint(folder, 1, model, optimizer, keep=1)
    assert path == checkpoint(folder, 1)
    assert names(folder) == [f"step-{i:08d}" for i in (1, 2, 3)]
    save_checkpoint(str(folder), 3, model, optimizer, keep=1)
    assert names(folder) == ["step-00000003"]
    assert alike(resume(folder)[1] | after[0], after[0] | resume(folder)[1])


def test_steps_are_ordered_as_numbers(tmp_path):
    model, optimizer = build()
    for number in (99_999_999, 100_000_000):
        save_checkpoint(tmp_path, number, model, optimizer)
    model, optimizer = build()
    assert load_checkpoint(tmp_path, model, optimizer) == Loaded(100_000_000)


def test_other_files_in_the_folder(copy):
    folder, _ = copy
    (folder / "step-notes.txt").write_text("mine")
    (folder / "step-best").mkdir()
    (folder / "step-00000009").write_text("a file")
    assert resume(folder)[0] == Loaded(LAST)
    save_checkpoint(folder, LAST + 1, *build(), keep=1)
    assert names(folder) == [
        *("step-00000004", "step-00000009", "step-best", "step-notes.txt"),
    ]


@pytest.mark.parametrize("optimizer", ["adamw", "dampened", "nadam", "sgd"])
def test_saving_before_the_first_step_changes_nothing(tmp_path, optimizer):
    """PyTorch makes the states by a step, and counts it."""
    expected = build(optimizer)
    saved = build(optimizer)
    for p in saved[0].parameters():
        p.grad = torch.ones_like(p)  # not saved, and not touched
    save_checkpoint(tmp_path, 0, *saved)
    assert alike(everything(*saved), everything(*expected))
    assert all(bool((p.grad == 1).all()) for p in saved[0].parameters())
    step(*expected)
    step(*saved)
    assert alike(everything(*saved), everything(*expected))
    assert alike(resume(tmp_path, optimizer)[2], everything(*expected))


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_layer_that_is_never_used(tmp_path, pools, ranks):
    """Its parameters have no states, neither before nor after."""
    run = pools(ranks).run
    for saved, loaded in run(workers.without_a_layer, str(tmp_path)):
        assert "0.weight, exp_avg" in saved and "2.weight" in saved
        assert "2.weight, exp_avg" not in saved
        assert alike(loaded, saved)


def test_gradients_that_are_there_when_a_checkpoint_is_loaded(run):
    folder, after = run
    model, optimizer = build(seed=1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    load_checkpoint(folder, model, optimizer)
    assert alike(everything(model, optimizer), after[LAST])


# Nothing there, or of another model --------------------------------------


@pytest.mark.parametrize("ranks", [0, 2])
def test_no_checkpoint_yet(tmp_path, pools, ranks):
    for folder in (tmp_path, tmp_path / "missing"):
        for loaded, same in pools(ranks).run(untouched, str(folder)):
            assert loaded == Loaded(None) and same


def untouched(folder):
    """Loaded, and whether the model and the optimizer stayed as they were."""
    model, optimizer = build()
    before = everything(model, optimizer)
    loaded = load_checkpoint(folder, model, optimizer)
    return loaded, alike(everything(model, optimizer), before)


def test_a_checkpoint_of_other_shapes(run, pools):
    folder, _ = run
    path = checkpoint(folder)
    for found in (
        workers.refused(str(folder), widths=(7, 6, 3)),
        *pools(2).run(workers.refused, str(folder), widths=(7, 6, 3)),
    ):
        message, before, after = found
        assert message == (
            f"{path} is the checkpoint of another model, 7 tensors differ: "
            "0.bias is (5,) float32 in the checkpoint and (6,) float32 in the "
            "model; 0.weight is (5, 7) float32 in the checkpoint and (6, 7) "
            "float32 in the model; 1.bias is (5,) float32 in the checkpoint "
            "and (6,) float32 in the model. Build the model with the sizes "
            "and dtypes it was saved with, or use another "
            "folder"
        )
        assert alike(after, before)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (
            lambda: nn.Sequential(nn.Linear(2, 2)),
            "another model, 4 tensors differ: 0.bias is (2,) float32 in the "
            "checkpoint and missing in the model; 0.weight is (2, 2) float32 "
            "in the checkpoint and missing in the model; bias is missing in "
            "the checkpoint and (2,) float32 in the model. ",
        ),
        (  # PyTorch would convert the numbers and say nothing
            lambda: nn.Linear(2, 2, dtype=torch.bfloat16),
            "another model, 2 tensors differ: bias is (2,) bfloat16 in the "
            "checkpoint and (2,) float32 in the model; ",
        ),
    ],
)
def test_a_checkpoint_of_other_names_or_dtypes(tmp_path, build, said):
    def sgd(model):
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    save_checkpoint(tmp_path, 1, *sgd(build()))
    refuses(tmp_path, sgd(nn.Linear(2, 2)), re.escape(said))


def refuses(folder, pair, said):
    """And the model and the optimizer stay as they were."""
    before = everything(*pair)
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(folder, *pair)
    assert alike(everything(*pair), before)


KINDS = [n for n in dir(torch.optim) if n[0].isupper() and n != "Optimizer"]
REFUSED = "LBFGS", "SparseAdam"


def small(kind, parts=1, **options):
    """A model of two weights, and an optimizer with some groups."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(2)))
    groups = [{"params": part.parameters()} for part in (model, *model)]
    groups = {1: groups[:1], 2: groups[1:], "first": groups[1:2]}[parts]
    return model, getattr(torch.optim, kind)(groups, **options)


def small_step(model, optimizer):
    for p in model.parameters():
        p.grad = 0.3 * p.detach() ** 2 + 0.2
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in KINDS if kind not in REFUSED),
        ("Adam", {"amsgrad": True, "lr": torch.tensor(0.1)}),
    ],
)
def test_each_optimizer_goes_on(tmp_path, kind, options):
    saved, loaded = small(kind, **options), small(kind, **options)
    small_step(*saved)
    save_checkpoint(tmp_path, 1, *saved)
    load_checkpoint(tmp_path, *loaded)
    for pair in saved, loaded:
        small_step(*pair)
    assert alike(everything(*loaded), everything(*saved))


@pytest.mark.parametrize(
    ("saved", "loaded", "said"),
    [
        (
            {"kind": "AdamW"},
            {"kind": "Adam"},
            "AdamW, not of Adam",
        ),
        (
            {"kind": "Adam", "amsgrad": True},
            {"kind": "Adam"},
            "an optimizer with other states: those of 0.weight are exp_avg, "
            "exp_avg_sq, max_exp_avg_sq, step in the checkpoint and exp_avg, "
            "exp_avg_sq, step here",
        ),
        (
            {"kind": "SGD", "momentum": 0.9},
            {"kind": "SGD"},
            "an optimizer with other states: those of 0.weight are "
            "momentum_buffer in the checkpoint and none here",
        ),
        (
            {"kind": "Adam", "parts": 2},
            {"kind": "Adam"},
            "an optimizer with other groups of parameters, 2 differ: "
            "0.weight, 1.weight",
        ),
        (
            {"kind": "SGD", "parts": "first"},
            {"kind": "SGD", "parts": 2},
            "an optimizer with other groups of parameters, 1 differ: 1.weight",
        ),
    ],
)
def test_a_checkpoint_of_another_optimizer(tmp_path, saved, loaded, said):
    """PyTorch would drop states, or mix two optimizers, and say nothing."""
    pair = small(**saved)
    small_step(*pair)
    path = save_checkpoint(tmp_path, 1, *pair)
    text = f"{path} is the checkpoint of {said}. Make the optimizer as it "
    refuses(tmp_path, small(**loaded), "^" + re.escape(text))


def test_optimizers_that_cannot_be_saved(tmp_path):
    model, _ = small("SGD")
    for kind, text in (
        ("LBFGS", "LBFGS evaluates the loss again"),
        ("SparseAdam", "dense gradients, which SparseAdam cannot"),
        ("Adam", "Adam has 2 parameters that the model has not"),
    ):
        own = model if kind in REFUSED else small("SGD")[0]
        optimizer = getattr(torch.optim, kind)(own.parameters())
        for call in (
            lambda *pair: save_checkpoint(tmp_path, 1, *pair),
            lambda *pair: load_checkpoint(tmp_path, *pair),
        ):
            with pytest.raises(ValueError, match=text):
                call(model, optimizer)
    assert names(tmp_path) == []


# Damage ------------------------------------------------------------------


def shards(folder):
    return sorted(checkpoint(folder).glob("*.distcp"))


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def unreadable(file):
    """As on a broken disk (Linux)."""
    file.unlink()
    file.symlink_to("/proc/self/mem")


def overwrite(file):
    file.write_bytes(b"x" * file.stat().st_size)


DAMAGE = [  # of which file, how, and what is said about it
    ("__1_0.distcp", cut, r"has \d+ of \d+ bytes"),
    ("__2_0.distcp", Path.unlink, "is missing"),
    (".metadata", Path.unlink, "is missing"),
    ("__0_0.distcp", overwrite, "is not what was written"),
    ("complete.json", Path.unlink, "is missing or cut short"),
    ("complete.json", cut, "is missing or cut short"),
    ("__1_0.distcp", unreadable, "cannot be read: Input/output error"),
]


@pytest.mark.parametrize(("name", "damage", "said"), DAMAGE)
def test_the_one_before_is_used(copy, name, damage, said):
    folder, after = copy
    damage(checkpoint(folder) / name)
    loaded, found, _ = resume(folder)
    assert loaded.step == LAST - 1
    reason = rf"step-00000003: {re.escape(name)} {said}"
    assert re.fullmatch(reason, *loaded.skipped)
    assert alike(found, after[LAST - 1])
    # The run goes on, and saves the same step again.
    save_checkpoint(folder, LAST, *build(seed=1))
    assert resume(folder)[0] == Loaded(LAST)


def test_the_one_before_is_used_on_ranks(copy, pools):
    folder, after = copy
    overwrite(shards(folder)[0])
    for loaded, found, _ in pools(2).run(resume, str(folder)):
        assert loaded.step == LAST - 1 and len(loaded.skipped) == 1
        assert alike(found, after[LAST - 1])


def test_a_single_bit(tmp_path):
    """In the middle of a parameter: PyTorch would read it."""
    saved = build()
    for number in (1, 2):
        path = save_checkpoint(tmp_path, number, *saved)
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    parameter = next(saved[0].parameters()).detach()
    first = content.find(parameter.numpy().tobytes())
    assert first > 0
    content[first + 2] ^= 1
    file.write_bytes(content)
    said = "step-00000002: __0_0.distcp is not what was written"
    assert resume(tmp_path)[0] == Loaded(1, (said,))


def test_what_pytorch_cannot_read(copy):
    """Whole by the manifest, but of another format, say."""
    folder, after = copy
    for file in (checkpoint(folder) / ".metadata", shards(folder)[0]):
        again = shutil.copytree(folder, folder.parent / f"with {file.name}")
        file = checkpoint(again) / file.name
        overwrite(file)
        manifest = checkpoint(again) / "complete.json"
        content = json.loads(manifest.read_text())
        size = file.stat().st_size
        content["files"][file.name] = [size, zlib.crc32(b"x" * size)]
        manifest.write_text(json.dumps(content))
        loaded, found, _ = resume(again)
        assert loaded.step == LAST - 1
        assert loaded.skipped[0].startswith("step-00000003: ")
        assert "Error" in loaded.skipped[0]
        assert "\n" not in loaded.skipped[0]
        assert alike(found, after[LAST - 1])


def test_none_that_can_be_read(copy, pools):
    folder, _ = copy
    cut(shards(folder)[0])
    (checkpoint(folder, LAST - 1) / "complete.json").unlink()
    pattern = (
        rf"no checkpoint in {re.escape(str(folder))} can be read: "
        r"step-00000003: __0_0\.distcp has \d+ of \d+ bytes; "
        r"step-00000002: complete\.json is missing or cut short\. Start "
        r"without --resume, or from another folder"
    )
    with pytest.raises(CheckpointError, match=f"^{pattern}$"):
        resume(folder)
    with pytest.raises(RankError, match=f"CheckpointError: {pattern}"):
        pools(2).run(resume, str(folder))


# A crash while a checkpoint is saved -------------------------------------


@pytest.mark.parametrize(("number", "where", "rank", "how"), INTERRUPTIONS)
def test_a_crash_leaves_the_ones_before(
    copy, pools, monkeypatch, number, where, rank, how
):
    """Also one while the same step is saved again."""
    monkeypatch.setattr(launching, "GRACE", 0.1)
    folder, after = copy
    with pytest.raises(RankError) as caught:
        pools(2).run(
            workers.interrupted, str(folder), number, where, rank, how
        )
    if how == "kill":
        assert caught.value.rank == rank
    sure = where not in ("before", "deleting")
    assert f"saving-{number:08d}" in names(folder) or not sure
    loaded, found, _ = resume(folder)
    assert loaded == Loaded(LAST)
    assert alike(found, after[LAST])
    pools(2).run(workers.interrupted, str(folder), LAST + 1, "", 0, "")
    assert names(folder) == ["step-00000003", "step-00000004"]
    loaded, found, _ = resume(folder)
    assert loaded == Loaded(LAST + 1)
    assert alike(found, after[LAST + 1])


# What cannot be ----------------------------------------------------------


def test_numbers_that_cannot_be(tmp_path):
    for number, keep, said in (
        (-1, 2, "step is -1: use a whole number of at least 0"),
        (1, 0, "keep is 0: use a whole number of at least 1"),
    ):
        with pytest.raises(ValueError, match=f"^{said}$"):
            save_checkpoint(tmp_path, number, *build(), keep=keep)
    assert names(tmp_path) == []
