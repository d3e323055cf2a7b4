"""Plans for models of transformers: their bytes, and their programs run."""

import os
from dataclasses import replace
from random import Random

import pytest
import torch
from planning_helpers import any_host

from membudget.cards import CARDS
from membudget.ledger import Adapter, from_config, predict, rules
from membudget.measuring import PeakTracker, witness
from membudget.planning import (
    Job,
    Machine,
    Plan,
    WorkCounter,
    hub,
    memory,
    search,
    static,
    work,
)
from membudget.planning.memory import input_bytes
from membudget.planning.plan import HOST
from tests.soak import examples

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

LLAMA = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 96,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 12,
}
SHAPES = (
    from_config(LLAMA | {"model_type": "qwen2"}),
    from_config(
        LLAMA
        | {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 16}
    ),
    from_config(LLAMA | {"model_type": "phi3", "pad_token_id": 0}),
    from_config(GPT2),
    from_config(
        LLAMA
        | {
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 9,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        }
    ),
)
PACKED = Adapter(list(SHAPES[0].linears), 3, four_bits=True)


def any_plan(rng: Random, depth: int = 3) -> tuple[Job, Plan]:
    """A tiny job and one of its plans."""
    network = replace(rng.choice(SHAPES), depth=depth)
    job = Job(network, rng.choice([8, 12]), rng.randint(1, 6), "cpu")
    recipe, adapter = rng.choice(["fp32", "bf16", "autocast"]), None
    if rng.random() < 0.5:
        targets = rng.sample(list(network.linears), 2)
        adapter = Adapter(targets, 3, 4, rng.random() < 0.3)
    plan = Plan(
        rng.randint(1, job.batch),
        rng.randint(0, depth),
        None,
        recipe,
        rng.choice(["sgd", "momentum", "adam"]),
        fused=rng.random() < 0.5,
        adapter=adapter,
    )
    return job, plan


def run(job: Job, plan: Plan, folder) -> dict:
    """The names of the plan's program, with a model in this folder."""
    job.network.build("cpu").save_pretrained(folder)
    names = {}
    torch.manual_seed(0)
    exec(plan.code(job).replace("your/model", str(folder)), names)
    return names


@pytest.mark.parametrize("number", range(examples(4)))
def test_the_program_peaks_where_the_plan_says(number, tmp_path):
    job, plan = any_plan(Random(number))
    plan = any_host(Random(number), plan)
    names = run(job, plan, tmp_path)
    tokens, model = names["tokens"], names["model"]
    labels = tokens.clone()  # the program has one tensor for both
    with PeakTracker(model, names["optimizer"], tokens, labels) as tracker:
        names["step"](tokens, labels)
    assert tracker.peak == memory(job, plan), (job, plan)


@pytest.mark.parametrize("number", range(examples(4)))
def test_the_work_is_that_of_the_program(number, tmp_path):
    """FLOPs, bytes and operators of its second step, which finds states.

    Where some blocks are local, bytes are taken from the first two.
    """
    job, plan = any_plan(Random(number))
    names = run(job, plan, tmp_path)
    tokens = names["tokens"]
    names["step"](tokens, tokens)
    with WorkCounter() as counter:
        names["step"](tokens, tokens)
    found, expected = work(job, plan)[:3], counter.counts
    if not job.network.alike(job.tokens):
        assert found[0] == expected[0], (job, plan)
        assert found[1:] == pytest.approx(expected[1:], rel=0.03)
        return
    assert found == expected, (job, plan)


def test_the_plan_needs_what_the_ledger_says():
    """At any depth, on a GPU, in parts or at once."""
    rng = Random(0)
    for _ in range(examples(40)):
        job, plan = any_plan(rng, rng.choice([1, 2, 5, 6, 9]))
        plan = any_host(rng, plan)
        job = replace(job, device="cuda")
        if plan.adapter and plan.recipe == "bf16":
            packed = replace(plan.adapter, four_bits=rng.random() < 0.5)
            plan = replace(plan, adapter=packed)
        names = "recipe", "optimizer", "micro_batch", "checkpointed"
        names += "fused", "adapter", *HOST
        expected = predict(
            job.network,
            job.batch,
            job.tokens,
            **rules(job.network, "cuda") | {"foreach": not plan.fused},
            **{name: getattr(plan, name) for name in names},
        )
        assert memory(job, plan) == expected.peak, (job, plan)


def test_the_program_over_4_bits(tmp_path):
    """By the allocator: what is left are the numbers that scale the branches
    and the generator's state that a checkpoint keeps."""
    pytest.importorskip("bitsandbytes")
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}
    shape = from_config(LLAMA | sizes | {"model_type": "llama"})
    adapter = Adapter(list(shape.linears), 3, 4, four_bits=True)
    job, plan = Job(shape, 16, 6, "cpu"), Plan(2, 1, recipe="bf16")
    plan = replace(plan, adapter=adapter)
    names = run(job, plan, tmp_path)
    tokens = names["tokens"]
    with torch.backends.mkldnn.flags(enabled=False):
        found = witness(lambda: names["step"](tokens, tokens))
    held = static(job, plan)
    states = held.parameters + held.optimizer + input_bytes(job, 6)
    kept = torch.get_rng_state().nbytes
    left = found - kept - (memory(job, plan) - states)
    assert 0 <= left <= 3 * len(adapter.targets) * 16, left


@pytest.mark.parametrize(
    "plan",
    [
        Plan(3, 3, recipe="autocast"),
        Plan(2, recipe="bf16", adapter=Adapter(("q_proj", "v_proj"), 3)),
        Plan(1, 3, recipe="bf16", optimizer="sgd"),
        Plan(6, 3, recipe="bf16", adapter=PACKED),
    ],
    ids=str,
)
def test_the_trainer_runs_the_plan(plan, tmp_path):
    if plan.adapter and plan.adapter.four_bits:
        pytest.importorskip("bitsandbytes")
    job = Job(SHAPES[0], 8, 6, "cpu")
    job.network.build("cpu").save_pretrained(tmp_path)
    given = plan.trainer(job) | {"use_cpu": True, "max_steps": 1}
    program = hub.trainer(job, plan, given)
    for old, new in (("your/model", tmp_path), ('"out"', f'"{tmp_path}"')):
        program = program.replace(old, str(new))
    row = dict.fromkeys(("input_ids", "labels"), [1] * job.tokens)
    names = {"data": [row] * 6}
    exec(program, names)
    assert names["trainer"].state.global_step == 1
    given = names["trainer"].args
    assert given.per_device_train_batch_size == plan.micro_batch
    assert given.gradient_accumulation_steps == 6 // plan.micro_batch
    assert given.bf16 == (plan.recipe == "autocast")


def test_what_has_no_rule_is_refused():
    job = Job(SHAPES[0], 8, 6)
    for plan in (Plan(1, loss_chunks=2), Plan(1, ranks=2)):
        with pytest.raises(ValueError, match="has its whole loss at once"):
            plan.share(job)
    with pytest.raises(ValueError, match="no linear layer 'query'"):
        Plan(1, adapter=Adapter(("query",))).share(job)


def test_a_search_ends_with_the_hub_s_own_linear_layers():
    job = Job(SHAPES[0], 8, 6)
    adapter = Adapter(list(job.network.linears), 2, four_bits=True)
    locks = {"recipe": ["bf16"], "adapter": [adapter], "micro_batch": [3, 6]}
    machine = Machine.of_card(next(iter(CARDS)))
    found = search(job, 2**30, machine, locks=locks)
    assert found.best[0].plan.micro_batch == 6
    assert found.smallest.peak < found.best[0].peak
