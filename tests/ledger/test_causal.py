"""Models of the library transformers: predicted from their config, and the
step that really runs, to the byte."""

import random
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import product

import pytest
import torch
import zoo
import zoo_models
from causal_helpers import (
    FAMILIES,
    STEPS,
    batch_of,
    build,
    config_of,
    in_autocast,
    loss,
    same,
    stepper,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_helpers import agree

from membudget.ledger import Adapter, CausalLM, from_config, predict
from membudget.measuring import trace_step, witness
from tests.soak import examples, part_of

PRECISIONS = "fp32", "bf16", "autocast"
CHECKPOINTED = False, True, (1,)
CASES = list(product(FAMILIES, PRECISIONS, CHECKPOINTED, STEPS))


def test_there_are_two_hundred_of_them():
    assert len(CASES) >= 200


@pytest.mark.few(14)
@pytest.mark.parametrize(
    ("family", "recipe", "checkpointed", "step"),
    part_of(CASES, random.Random(0), len(CASES)),
)
def test_a_step_to_the_byte(family, recipe, checkpointed, step):
    options = {"recipe": recipe, "checkpointed": checkpointed}
    same(config_of(family), 3, 12, **options, **STEPS[step])


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("family", "recipe", "checkpointed", "micro"),
    product(FAMILIES, PRECISIONS, [False, True], [1, 2]),
)
def test_micro_batches(family, recipe, checkpointed, micro):
    how = {"recipe": recipe, "checkpointed": checkpointed}
    same(config_of(family), 5, 7, micro_batch=micro, **how)


TARGETS = {"two": slice(0, 3, 2), "all": slice(None)}
"""Of a block's linear layers; two are query's and value's."""


def adapter_of(config, targets, **options):
    names = [*from_config(config).linears][TARGETS[targets]]
    return Adapter(names, rank=4, **options)


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("family", "recipe", "checkpointed", "targets", "dora"),
    product(FAMILIES, PRECISIONS, CHECKPOINTED, TARGETS, [False, True]),
)
def test_an_adapter(family, recipe, checkpointed, targets, dora):
    config = config_of(family)
    adapter = adapter_of(config, targets, dora=dora)
    how = {"recipe": recipe, "checkpointed": checkpointed}
    same(config, 3, 12, adapter=adapter, **how)


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("family", "recipe", "checkpointed"),
    product(FAMILIES, PRECISIONS, [False, True]),
)
def test_the_allocators_own_account(family, recipe, checkpointed):
    """In fp32 to the byte, but for numbers of Python that AdamW's step takes
    as tensors, or that autograd keeps of Gemma 2's caps and of GPT-2's GELU,
    8 bytes each; in 16 bits a CPU's matrix products have a workspace, and
    without it, too."""
    config = config_of(family)
    model, batch = build(config, recipe, checkpointed), batch_of(3, 12)
    run = in_autocast if recipe == "autocast" else loss
    case = zoo_models.Case(model, run, batch_of)
    step = batch, stepper(model)
    tracker = trace_step(model, run, *batch, optimizer=step[1])
    row = zoo.Row(family)
    zoo.beside_profiler(row, case, *step, tracker)
    assert not row.wrong, (row.cells, row.notes)
    how = {"recipe": recipe, "checkpointed": checkpointed}
    found = predict(from_config(config), 3, 12, **how)
    assert (found.start, found.peak) == (tracker.start, tracker.peak)
    if recipe == "fp32":
        optimizer = step[1]

        def whole():
            run(model, *batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        numbers = 12 if found.at_peak.phase == "optimizer" else 0
        if family == "Gemma2":  # three of a block, two of the logits
            numbers = 8 * (3 if checkpointed else 2 * 3 + 2)
        elif "no more positions" in family:  # three factors of a GELU
            numbers = 8 * (3 if checkpointed else 2 * 3)
        assert witness(whole) == found.peak - found.start + numbers


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("family", "recipe", "checkpointed", "targets"),
    product(
        ["Llama", "Qwen2", "Qwen3"], PRECISIONS[:2], [False, True], TARGETS
    ),
)
def test_an_adapter_over_four_bits(family, recipe, checkpointed, targets):
    """What is left has a name: the number that scales a branch, which
    autograd keeps, 8 bytes, and while one is made some more.

    Without oneDNN, whose products of 16-bit numbers have a workspace.
    """
    wide = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    config = config_of(family, vocab_size=512, **wide)
    adapter = adapter_of(config, targets, four_bits=True)
    model, batch = (
        build(config, recipe, checkpointed, adapter),
        batch_of(2, 64),
    )
    optimizer = stepper(model)

    def whole():
        loss(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    with torch.backends.mkldnn.flags(enabled=False):
        found = witness(whole)
    how = {"recipe": recipe, "checkpointed": checkpointed, "adapter": adapter}
    expected = predict(from_config(config), 2, 64, **how)
    left = found - (expected.peak - expected.start)
    branches = config.num_hidden_layers * len(adapter.targets)
    assert 0 <= left <= 16 * branches, left


@pytest.mark.parametrize("trained", [["model.layers.1.mlp.*"], ["*norm*"]])
def test_frozen_embeddings_under_checkpoints(trained):
    """The library asks for their gradient, as reentrant checkpoints need it,
    so that the first block goes backward to its input."""
    config = config_of("Llama")
    model = build(config, "fp32", True)
    for name, weight in model.named_parameters():
        weight.requires_grad_(any(fnmatchcase(name, p) for p in trained))
    step = trace_step(model, loss, *batch_of(3, 12))
    how = {"checkpointed": True, "trained": trained, "optimizer": None}
    agree(predict(from_config(config), 3, 12, **how), step)


def test_a_checkpoint_keeps_the_generators_state():
    """The one residual: with the library's defaults, on a CPU, once for each
    block that is checkpointed. No mode sees it."""
    config = config_of("Llama")
    model, (x, y) = build(config), batch_of(3, 12)
    model.activation_checkpointing_enable()
    found = predict(
        from_config(config), 3, 12, checkpointed=True, optimizer=None
    )
    more = witness(lambda: run(model, x, y)) - (found.peak - found.start)
    # at the peak one of two blocks has run again already
    assert more == torch.get_rng_state().nbytes


def run(model, x, y):
    loss(model, x, y).backward()
    model.zero_grad()


@pytest.mark.parametrize("recipe", PRECISIONS)
def test_a_cache_counts_where_its_copies_are_wider(recipe):
    """It is the library's default, and its Trainer switches it off. Under
    autocast it has keys and values in fp32 until the loss is there."""
    config = config_of("Llama")
    model, batch = build(config, recipe), batch_of(3, 12)
    active = recipe == "autocast"

    def cached(model, x, y):
        with torch.autocast("cpu", torch.bfloat16, enabled=active):
            return model(x, labels=y).loss

    step = trace_step(model, cached, *batch)
    how = {"recipe": recipe, "optimizer": None}
    found = predict(from_config(config), 3, 12, **how)
    backward = next(i for i, label in step.marks if label == "backward")
    before, after = step.timeline[:backward], step.timeline[backward:]
    assert max(after) == found.peak_in("backward")
    wide = 2 * 4 * (3 * 12 * 2 * 8)  # of a block
    assert max(before) - found.peak_in("forward") == 2 * wide * active


ANY = (
    "Gemma2",
    "Gemma3Text",
    "GPT2",
    "Llama",
    "Llama, biases",
    "Olmo2",
    "Phi3",
    "Qwen2",
    "Qwen3",
)


@st.composite
def configs(draw):
    """Any shape, of one block or more."""
    shared = draw(st.sampled_from([1, 2, 4]))
    heads = shared * draw(st.sampled_from([1, 2, 3]))
    return config_of(
        draw(st.sampled_from(ANY)),
        num_attention_heads=heads,
        num_key_value_heads=shared,
        head_dim=draw(st.sampled_from([2, 4, 16])),
        hidden_size=heads * draw(st.sampled_from([1, 2, 8])),
        intermediate_size=draw(st.sampled_from([4, 24, 72])),
        vocab_size=draw(st.sampled_from([5, 40, 200])),
        num_hidden_layers=draw(st.integers(1, 3)),
        sliding_window=draw(st.sampled_from([2, 9, 99])),
        tie_word_embeddings=draw(st.booleans()),
    )


@settings(max_examples=examples(10))
@given(
    configs(),
    st.integers(1, 4),
    st.sampled_from([1, 2, 3, 12, 30]),
    st.sampled_from(PRECISIONS),
    st.booleans(),
    st.sampled_from([*STEPS.values()]),
)
def test_any_shape(config, samples, tokens, recipe, checkpointed, step):
    how = {"recipe": recipe, "checkpointed": checkpointed}
    same(config, samples, tokens, **how, **step)


@st.composite
def wide_heads(draw):
    """Shapes whose heads make the width: numbers of 16 bytes in a row, as
    products of experts need them."""
    shared = draw(st.sampled_from([1, 2, 4]))
    heads = shared * draw(st.sampled_from([1, 2]))
    size = draw(st.sampled_from([8, 16]))
    families = "GPTNeoX", "Mixtral", "Olmoe", "Qwen3Moe", "StableLm"
    return config_of(
        draw(st.sampled_from(families)),
        num_attention_heads=heads,
        num_key_value_heads=shared,
        head_dim=size,
        hidden_size=heads * size,
        intermediate_size=draw(st.sampled_from([8, 24, 72])),
        num_hidden_layers=draw(st.integers(1, 3)),
    )


@settings(max_examples=examples(5))
@given(
    wide_heads(),
    st.integers(1, 4),
    st.sampled_from([1, 2, 3, 12, 30]),
    st.sampled_from(PRECISIONS),
    st.booleans(),
)
def test_any_shape_of_wide_heads(
    config, samples, tokens, recipe, checkpointed
):
    how = {"recipe": recipe, "checkpointed": checkpointed}
    same(config, samples, tokens, **how)


@pytest.mark.parametrize(
    ("family", "last"),
    [
        ("Qwen3, biases", "model.layers.1.mlp.*"),
        ("GPT2", "transformer.h.1.mlp.*"),
        ("GPTNeoX", "gpt_neox.layers.1.mlp.*"),
        ("Mixtral", "model.layers.1.mlp.experts.*"),
    ],
)
def test_weights_by_the_librarys_own_names(family, last):
    config = config_of(family, attention_bias=True)
    names = {name for name, _ in build(config).named_parameters()}
    shape = from_config(config)
    for name in names - {"lm_head.weight"}:
        predict(shape, 1, 4, trained=[name])
    found = predict(shape, 1, 4, trained=[last], optimizer=None)
    everything = predict(shape, 1, 4, optimizer=None)
    assert found.peak < everything.peak and found.start == everything.start


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_heads": 3}, "4 heads do not share 3 heads of keys: use a"),
        ({"head_size": 5}, "turn 5 numbers of a head: use a head_size and a"),
        ({"turned": 0.1}, "turn 0 numbers of a head: use a head_size and a"),
        ({"turned": 2}, "turned is 2: use a finite number from 0 to 1"),
        ({"biases": ["query"]}, "no linear layer of a block 'query': use one"),
        ({"depth": 1001}, "depth is 1001: use a whole number from 1 to 1000"),
        ({"block": "gptj"}, "no block 'gptj': use one of gemma2,"),
        ({"block": "phi3", "biases": ["q_proj"]}, "'q_proj': use one of qkv_"),
        (
            {"dropouts": ["mlp"]},
            "no place of dropout 'mlp': use one of embed",
        ),
        ({"active": 2}, "active is 2: use a whole number from 1 to 1"),
        ({"experts": 0}, "experts is 0: use a whole number of at least 1"),
        ({"context": 0}, "context is 0: use a whole number of at least 1"),
        ({"window": 1}, "window is 1: use a whole number of at least 2"),
    ],
)
def test_shapes_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        CausalLM(**(SHAPE | options))


SHAPE = {
    "vocabulary": 96,
    "width": 32,
    "depth": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_size": 8,
    "hidden": 72,
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_chunks": 2}, "no loss in chunks"),
        ({"kept_attention": True}, "leave loss_chunks and kept_attention out"),
        ({"trained": ["*.query"]}, "use names such as model.embed_tokens.wei"),
        ({"adapter": Adapter(["query"])}, "no linear layer 'query': use q_pr"),
    ],
)
def test_steps_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        predict(CausalLM(**SHAPE), 2, 12, **options)


def test_more_tokens_than_learned_positions():
    shape = from_config(config_of("GPT2", n_positions=12))
    predict(shape, 2, 12)
    with pytest.raises(ValueError, match="than the 12 learned positions: use"):
        predict(shape, 2, 13)


def test_dropout_of_attention_keeps_less_on_a_gpu():
    """There it is in the kernel; a CPU has none, and keeps the scores."""
    config = config_of("GPT2", embd_pdrop=0.0, resid_pdrop=0.0)
    shape = from_config(config)
    bare = replace(shape, dropouts=())
    cpu, gpu, none = (
        predict(of, 3, 12, kernels=kernels).saved
        for of, kernels in ((shape, "cpu"), (shape, "cuda"), (bare, "cuda"))
    )
    assert cpu > gpu == none


def test_an_adapters_targets_as_peft_finds_them():
    """By the end of a layer's name: ``c_proj`` is two of GPT-2's."""
    config = config_of("GPT2")
    short = Adapter(["c_proj"], rank=4)
    long = Adapter(["attn.c_proj", "mlp.c_proj"], rank=4)
    found = same(config, 3, 12, adapter=short)
    assert found == predict(from_config(config), 3, 12, adapter=long)


@pytest.mark.parametrize("family", ["Mixtral", "Olmoe", "Qwen3Moe"])
@pytest.mark.parametrize("tokens", ["same", "two kinds", "spread"])
def test_experts_take_the_same_memory_however_they_are_chosen(family, tokens):
    """Each token has a row in as many groups as it goes through."""
    config = config_of(family, num_hidden_layers=1)
    model, batch = build(config), batch_of(3, 12)
    gate = model.model.layers[0].mlp.gate
    with torch.no_grad():
        gate.weight.normal_(std={"spread": 1}.get(tokens, 0))
        if tokens == "two kinds":
            gate.weight[:4] += 1
    groups = chosen_by(gate, model, batch)
    assert (groups > config.num_experts_per_tok) == (tokens != "same")
    step = trace_step(model, loss, *batch)
    agree(predict(from_config(config), 3, 12, optimizer=None), step)


def chosen_by(gate, model, batch):
    """How many experts a router chooses for a batch."""
    found = []

    def note(_, given, made):
        found.append(made[2].unique().numel())

    hook = gate.register_forward_hook(note)
    loss(model, *batch)
    hook.remove()
    return found[0]


def test_a_sequence_as_long_as_local_attention():
    """Then there is a mask, which each local block makes wider and keeps."""
    shape, rest = CausalLM(**SHAPE), {"window": 12, "local": [True, False]}
    short, long = (
        predict(replace(shape, **rest), 2, tokens).saved
        - predict(shape, 2, tokens).saved
        for tokens in (11, 12)
    )
    repeated = 2 * 4 * (2 * 12 * (4 - 2) * 8)  # keys and values
    assert (short, long) == (0, repeated + 4 * 2 * 12**2)
