"""Tensor and sequence parallelism, by law, simulated and on real ranks."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from tensor_workers import apart, bytes_of, cut, loss_of
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from membudget.ledger import PRESETS, Transformer
from membudget.measuring import FlopCounter, PeakTracker, witness
from membudget.models import GPT, Llama, chain
from membudget.parallelism import (
    GATHERS,
    tensor_parallel,
    tensor_tape,
    tensor_traffic,
)
from membudget.sharding import Ranks, simulate_rank
from membudget.sharding._private import fake_group

GPT_SHAPE = Transformer(61, 64, 1, 8, 32)
LLAMA = Transformer(61, 64, 1, 8, 32, kv_heads=4, hidden=96, family="llama")
WIDE = {
    "gpt": Transformer(61, 256, 1, 64, 64),
    "llama": Transformer(
        61, 256, 1, 64, 64, kv_heads=64, hidden=704, family="llama"
    ),
}
"""With as many heads as ranks."""

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}

WAYS = [
    (shape, sequence, gathers)
    for shape in (GPT_SHAPE, LLAMA)
    for sequence in (False, True)
    for gathers in GATHERS
]
NAMES = [
    f"{shape.family}-{'sequence' if sequence else 'tensor'}-{gathers}"
    for shape, sequence, gathers in WAYS
]


@pytest.fixture(scope="module", params=(2, 4))
def ranks(request):
    with Ranks(request.param) as pool:
        yield pool


@pytest.mark.few(6)
@pytest.mark.parametrize("way", WAYS, ids=NAMES)
def test_loss_and_gradients_are_the_whole_models(ranks, way):
    shape, *rest = way
    worst = ranks.run(apart, replace(shape, depth=2), *rest)
    assert max(worst) < 1e-14


@pytest.mark.few(2)
@pytest.mark.parametrize("way", WAYS, ids=NAMES)
def test_a_simulated_rank_has_a_real_ones_bytes(ranks, way):
    """gloo's own thread may hold a collective's tensor somewhat longer, so
    of some runs the least is the step's."""
    runs = [ranks.run(bytes_of, *way) for _ in range(6)]
    with fake_group(ranks.ranks, 0):
        peak, kept, sent = bytes_of(*way)
    for found in zip(*runs, strict=True):  # of each rank
        peaks, tapes, traffic = zip(*found, strict=True)
        assert (min(peaks), min(tapes)) == (peak, kept)
        assert all(one == sent for one in traffic)


@pytest.mark.parametrize("gathers", GATHERS)
def test_a_simulated_rank_counts_a_gathered_tensor_once(gathers):
    """PyTorch's fake tensors make another one when they are waited for."""
    shape = replace(LLAMA, vocabulary=8)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    simulated = simulate_rank(
        partial(shape.build, "cpu"),
        lambda model, mesh: tensor_parallel(model, mesh, True, gathers),
        loss_of,
        tokens,
        ranks=4,
        optimizer=partial(torch.optim.SGD, foreach=False),
    )
    with fake_group(4, 0):
        model, _ = cut(shape, True, gathers)
        with PeakTracker(model, tokens) as tracker:
            loss_of(model, tokens).backward()
    assert simulated.peak == tracker.peak


def test_ranks_of_one_mesh_are_simulated_one_after_the_other():
    """Their groups have other names, and what is kept of the first rank's
    must not be found."""
    found = {
        simulate_rank(
            partial(GPT_SHAPE.build, "cpu"),
            lambda model, mesh: tensor_parallel(model, mesh["shard"], True),
            loss_of,
            torch.zeros(1, 32, dtype=torch.int64),
            ranks=16,
            rank=rank,
            mesh=(4, 4),
        ).peak
        for rank in (0, 5)
    }
    assert len(found) == 1


def a_block(of, way):
    """What the second block adds to a number of a simulated step."""
    shape, sequence, gathers, ranks = way
    with fake_group(ranks, 0):
        one, two = (
            of(*bytes_of(replace(shape, depth=n), sequence, gathers))
            for n in (1, 2)
        )
    return two - one


@pytest.mark.few(6)
@pytest.mark.parametrize("ranks", (1, 2, 4, 8, 64))
@pytest.mark.parametrize("way", WAYS, ids=NAMES)
def test_a_block_keeps_what_the_law_says_to_the_byte(way, ranks):
    shape, *rest = way
    shape = WIDE[shape.family]
    simulated = simulate_tape(shape, ranks, *rest)
    assert simulated == tensor_tape(shape, 1, 64, ranks, *rest)


def simulate_tape(shape, ranks, sequence, gathers):
    kept = []
    for depth in (1, 2):
        step = simulate_rank(
            partial(replace(shape, depth=depth).build, "cpu"),
            lambda model, mesh: tensor_parallel(
                model, mesh, sequence, gathers
            ),
            loss_of,
            torch.zeros(1, 64, dtype=torch.int64),
            ranks=ranks,
        )
        kept.append(step.after_forward - step.tracker.start)
    return kept[1] - kept[0]


@pytest.mark.few(4)
@pytest.mark.parametrize("way", WAYS, ids=NAMES)
def test_a_blocks_collectives_are_those_of_the_law(way):
    for name, law in tensor_traffic(way[0], 2, 32, *way[1:]).items():
        for field in ("calls", "bytes"):
            found = a_block(
                lambda peak, kept, sent, name=name, field=field: getattr(
                    sent[name], field
                ),
                (*way, 4),
            )
            assert found == getattr(law, field), name


def test_a_second_gather_multiplies_nothing_again():
    work = {}
    for gathers in GATHERS:
        with fake_group(4, 0), FlopCounter() as counter:
            model, _ = cut(LLAMA, True, gathers)
            loss_of(model, torch.zeros(1, 32, dtype=torch.int64)).backward()
        work[gathers] = counter.total
    assert len(set(work.values())) == 1


@pytest.mark.parametrize("gathers", ("once", "again"))
def test_the_allocator_says_the_same(gathers):
    way = LLAMA, True, gathers
    with fake_group(4, 0):
        model, _ = cut(*way)
        tokens = torch.zeros(2, 32, dtype=torch.int64)
        seen = witness(lambda: loss_of(model, tokens).backward())
        assert seen == bytes_of(*way)[0]


def test_gradients_of_one_gathered_tensor_are_added_out_of_place():
    """They are DTensors, whose sum is another tensor, as the allocator says.
    It watches a second step, before which there are gradients."""
    shape = replace(LLAMA, vocabulary=8, hidden=64, kv_heads=8)
    with fake_group(8, 0):
        model, _ = cut(shape, True, "once")
        tokens = torch.zeros(1, 16, dtype=torch.int64)

        def step():
            model.zero_grad()
            loss_of(model, tokens).backward()

        seen = witness(step)
        parts = [p.grad for p in model.parameters()]
        made = sum(getattr(p, "_local_tensor", p).nbytes for p in parts)
        del parts
        model.zero_grad()
        with PeakTracker(model, tokens) as tracker:
            step()
    assert tracker.peak - tracker.start == seen + made


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", (4, 1, 2, 8))
def test_another_librarys_llama_keeps_what_the_law_says(ranks):
    """Of transformers, cut by the styles that its own plan names."""
    transformers = pytest.importorskip("transformers")

    def build(depth):
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=61,
                hidden_size=256,
                intermediate_size=704,
                num_hidden_layers=depth,
                num_attention_heads=8,
                num_key_value_heads=8,
            )
        )

    def cut_layers(model, mesh):
        plan = {
            name.removeprefix("layers.*."): STYLES[style]()
            for name, style in model.config.base_model_tp_plan.items()
        }
        for layer in model.model.layers:
            parallelize_module(layer, mesh, plan)

    kept = []
    for depth in (1, 2):
        step = simulate_rank(
            partial(build, depth),
            cut_layers,
            lambda model, ids: model(input_ids=ids, labels=ids).loss,
            torch.zeros(1, 64, dtype=torch.int64),
            ranks=ranks,
        )
        kept.append(step.after_forward - step.tracker.start)
    shape = replace(WIDE["llama"], heads=8, kv_heads=8)
    assert kept[1] - kept[0] == tensor_tape(shape, 1, 64, ranks)


def units(ranks, **how):
    """A GPT block's tape in bf16, in units, wide enough for the rest."""
    shape = Transformer(256, 8192, 1, 64, 4096)
    tape = tensor_tape(shape, 1, 4096, ranks, itemsize=2, **how)
    return tape / (4096 * 8192 * 2)


@pytest.mark.parametrize("ranks", (2, 8, 64))
def test_a_gpt_blocks_units(ranks):
    assert units(ranks) == pytest.approx(4 + 12 / ranks, abs=0.02)
    once = units(ranks, sequence=True)
    assert once == pytest.approx(2 + 14 / ranks, abs=0.02)
    again = units(ranks, sequence=True, gathers="again")
    assert again == pytest.approx(16 / ranks, abs=0.02)


@pytest.mark.parametrize("ranks", (1, 2, 8))
def test_a_llama_blocks_units_on_a_gpu(ranks):
    """By hand: of Llama 3 70B the norms' inputs and outputs, 4; q and what
    attention gives, 2, and k and v, 2/8; four tensors of 3.5 in the MLP."""
    whole, cut = 4, 2 + 2 / 8 + 4 * 3.5
    shape = PRESETS["Llama 3 70B"]

    def found(**how):
        tape = tensor_tape(
            shape, 1, 8192, ranks, itemsize=2, kernels="cuda", **how
        )
        return tape / (8192 * 8192 * 2)

    assert found() == pytest.approx(whole + cut / ranks, abs=0.03)
    if ranks > 1:
        once = found(sequence=True)
        assert once == pytest.approx(2 + (2 + cut) / ranks, abs=0.03)
        each = found(sequence=True, gathers="each")
        assert each == pytest.approx(5 + (2 + cut) / ranks, abs=0.03)


def test_a_gather_for_each_layer_keeps_more_than_no_sequence_parallelism():
    each = tensor_tape(LLAMA, 2, 32, 2, True, "each")
    assert each > tensor_tape(LLAMA, 2, 32, 2)


@pytest.mark.parametrize(
    ("model", "ranks", "sentence"),
    [
        (GPT(8, 8, 24, 1, 6), 4, "4 ranks do not divide 6, heads: use a"),
        (Llama(8, 32, 1, 8, 2, 32), 4, "divide 2, heads of keys and values"),
        (Llama(8, 32, 1, 8, 8, 42), 4, "divide 42, the MLP's width"),
    ],
)
def test_a_layer_that_cannot_be_cut_says_so(model, ranks, sentence):
    with fake_group(ranks, 0):
        mesh = torch.distributed.init_device_mesh("cpu", (ranks,))
        with pytest.raises(ValueError, match=sentence):
            tensor_parallel(model, mesh)


def test_a_wrong_mesh_or_model_says_so():
    with fake_group(4, 0):
        mesh = torch.distributed.init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("data", "tensor")
        )
        with pytest.raises(ValueError, match="mesh has 2 dimensions: use one"):
            tensor_parallel(GPT(8, 8, 8, 1, 2), mesh)
        with pytest.raises(TypeError, match="a GPT or a Llama"):
            tensor_parallel(chain(), mesh["tensor"])


def test_a_model_with_dropout_says_so():
    with fake_group(2, 0):
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        with pytest.raises(
            ValueError, match="and ranks would draw zeros of their own"
        ):
            tensor_parallel(GPT(8, 8, 8, 1, 2, dropout=0.1), mesh)


def test_a_law_refuses_tokens_that_are_not_divided():
    with pytest.raises(ValueError, match="4 ranks do not divide 30, tokens"):
        tensor_tape(LLAMA, 1, 30, 4, sequence=True)
