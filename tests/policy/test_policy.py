"""The vision-language-action policy: what it reads, plans and needs."""

import pytest
import torch
import torch.nn.functional as F

from membudget import ledger, tabletop
from membudget.accumulation import Accumulator, partition
from membudget.measuring import trace_step
from membudget.planning import OwnJob, Plan, memory
from membudget.policy import Policy, errors, loss, planner

torch.set_num_threads(1)


@pytest.fixture
def batch():
    return tabletop.examples(12, torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Policy(width=16, depth=2, heads=2)


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_it_plans_a_chunk_of_actions(model, batch):
    plans = model(*batch[:3])
    assert plans.shape == (12, tabletop.CHUNK, 3)
    scenes = tabletop.scenes(5, torch.Generator().manual_seed(0))
    planned = planner(model)(scenes)
    assert planned.shape == (5, tabletop.CHUNK, 3)
    assert planned.dtype == torch.int64
    assert set(planned[..., 2].unique().tolist()) <= {0, 1}


@pytest.mark.parametrize("part", range(3))
def test_it_reads_the_picture_the_words_and_its_own_state(model, batch, part):
    other = list(batch[:3])
    other[part] = other[part].roll(1, 0)
    changed = (model(*other) != model(*batch[:3])).flatten(1).any(1)
    different = (other[part] != batch[part]).flatten(1).any(1)
    assert torch.equal(changed, different) and different.any()


def test_padding_is_not_read(model, batch):
    before = model(*batch[:3])
    with torch.no_grad():
        model.words.weight[0] += 100
    torch.testing.assert_close(model(*batch[:3]), before)


def test_a_patch_is_a_square_of_the_picture(model):
    """One pixel moves one token."""
    seen = []
    model.patches.register_forward_hook(lambda m, x, y: seen.append(x[0]))
    picture = torch.zeros(2, 3, 64, 64, dtype=torch.uint8)
    picture[1, :, 17, 42] = 255
    words = tabletop.tokens("move red to the left").repeat(2, 1)
    model(picture, words, torch.zeros(2, 4))
    moved = (seen[0][0] != seen[0][1]).any(1).nonzero().flatten()
    size = model.patch
    assert moved.tolist() == [17 // size * (64 // size) + 42 // size]


def test_the_loss_is_the_mean_over_real_actions(model, batch):
    plans, actions, real = model(*batch[:3]), *batch[3:]
    total = 0.0
    for n, k in real.nonzero().tolist():
        total += (plans[n, k, :2] - actions[n, k, :2]).abs().sum()
        total += F.binary_cross_entropy_with_logits(
            plans[n, k, 2], actions[n, k, 2]
        )
    torch.testing.assert_close(loss(model, *batch), total / real.sum())
    assert errors(plans, actions, real)[~real].eq(0).all() and (~real).any()


@pytest.mark.parametrize(
    ("micro_batch", "checkpointed"), [(12, 0), (12, 2), (5, 0), (5, 1)]
)
@pytest.mark.few(2)
def test_its_bytes_are_predicted(model, batch, micro_batch, checkpointed):
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model.checkpointed = checkpointed
    given = dict(optimizer=optimizer, micro_batch=micro_batch)
    predicted = ledger.account(model, loss, *batch, **given).peak
    assert trace_step(model, loss, *batch, **given).peak == predicted
    model.checkpointed = 0
    job = OwnJob(model, loss, *batch, optimizer=optimizer, blocks=model.blocks)
    assert memory(job, Plan(micro_batch, checkpointed)) == predicted


def test_accumulation_leaves_the_gradient_of_the_whole_batch(model, batch):
    """With the real actions as counts, whatever the micro-batch."""
    loss(model, *batch).backward()
    whole = gradient(model)
    model.checkpointed = 2
    for micro_batch in (1, 5):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.zero_grad()
        with Accumulator(model, optimizer).window() as window:
            for part in partition(12, micro_batch):
                here = [t[part] for t in batch]
                window.backward(loss(model, *here), count=here[4].sum())
            window.finish()
            torch.testing.assert_close(gradient(model), whole)
            window.step()


def test_it_learns(model, batch):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = loss(model, *batch).item()
    for _ in range(40):
        last = loss(model, *batch)
        last.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert last.item() < first / 2


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (dict(patch=7), "7 pixels do not divide"),
        (dict(width=6, heads=4), "width 6 is not a multiple"),
    ],
)
def test_wrong_shapes_are_refused(shape, words):
    with pytest.raises(ValueError, match=words):
        Policy(**shape)


def test_a_batch_without_its_parts_is_refused(model, batch):
    with pytest.raises(ValueError, match="use the five"):
        loss(model, *batch[:4])
    with pytest.raises(ValueError, match="words has 1 dimensions"):
        model(batch[0], batch[1][0], batch[2])
