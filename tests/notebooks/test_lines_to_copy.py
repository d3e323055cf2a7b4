"""Lines that a page gives to copy, run over a network of several blocks."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from membudget import accumulation, ledger, models, planning, schedules
from membudget import checkpointing as ck
from membudget.planning import largest_micro_batch

CHAPTERS = Path(__file__).parents[2] / "chapters"

ELSEWHERE = {
    "01a_caching_allocator.ipynb": "records the history of a CUDA device",
    "07a_four_bits.ipynb": "loads a model, which has to be downloaded",
    "09_sharding.ipynb": "needs ranks: lab 4's program has the same lines",
    "09b_a_rank_dies.ipynb": "needs ranks: sharding.save and load are these",
    "10_parallelism.ipynb": "needs ranks: test_tensor cuts such a Llama",
    "10a_zero_bubble.ipynb": "needs ranks: run_pipeline has these lines",
    "10b_long_sequences.ipynb": "needs several GPUs, as the page says",
}
"""Pages whose lines this test does not run, and why."""


def snippets():
    """``(page, number, lines)`` of each block that is no folded solution."""
    for path in sorted(CHAPTERS.glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        text = "\n".join(
            "".join(cell["source"])
            for cell in cells
            if cell["cell_type"] == "markdown"
        )
        text = re.sub("<details>.*?</details>", "", text, flags=re.DOTALL)
        found = re.findall("```python\n(.*?)```", text, re.DOTALL)
        for number, lines in enumerate(found):
            yield path.name, number, lines


LINES = {(page, number): lines for page, number, lines in snippets()}


def world():
    """What the lines of any page take for granted."""
    torch.manual_seed(0)
    model = models.GPT(context=8, width=16, depth=4)
    x, y = torch.randint(256, (2, 4, 8))

    def loss_fn(logits, y):
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def step(x, y):
        raise torch.OutOfMemoryError

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "F": SimpleNamespace(cross_entropy=tokens_loss),
        "accumulation": accumulation,
        "accumulator": accumulation.Accumulator(model, optimizer),
        "adamw": torch.optim.AdamW(model.parameters()),
        "batches": [(x, y)] * 2,
        "budget": 2**30,
        "checkpoint": checkpoint,
        "ck": ck,
        "clip_grad_norm_": clip_grad_norm_,
        "largest_micro_batch": largest_micro_batch,
        "ledger": ledger,
        "loader": [(x[i : i + 1], y[i : i + 1]) for i in range(4)],
        "loss": lambda model, x, y: loss_fn(model(x), y),
        "loss_fn": loss_fn,
        "loss_of": loss_fn,
        "max_norm": float("inf"),
        "model": model,
        "my_operator": torch.square,
        "net": model,
        "optimizer": optimizer,
        "planning": planning,
        "schedules": schedules,
        "step": step,
        "steps": 4,
        "torch": torch,
        "x": x,
        "y": y,
        "K": 4,
    }


def tokens_loss(logits, y, reduction="mean"):
    """Cross-entropy of a language model, as its pages call it."""
    return F.cross_entropy(
        logits.flatten(0, -2), y.flatten(), reduction=reduction
    )


def labels_model(space):
    """A model that returns its own loss, as those of transformers do."""

    class Labels(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = space["model"]

        def forward(self, x, labels, use_cache):
            return SimpleNamespace(loss=tokens_loss(self.inner(x), labels))

    space["model"] = Labels().to("meta")
    space["x"] = torch.randint(256, (4, 8), device="meta")


def a_small_llama(space):
    """And an optimizer's parameters are the adapters'."""
    space |= {"LoraConfig": LoraConfig, "get_peft_model": get_peft_model}
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=32,
        num_attention_heads=2, num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    space["model"] = LlamaForCausalLM(config).bfloat16()


def a_batch_of_a_llama(space):
    a_small_llama(space)
    space["tokens"] = torch.arange(8).view(2, 4)
    space["model"].train()


def adapters_in_fp32(space):
    """None but adapters is trained, beside a base in 16 bits."""
    named = space["model"].named_parameters()
    trained = {name: p.dtype for name, p in named if p.requires_grad}
    return all(
        "lora_" in name and dtype == torch.float32
        for name, dtype in trained.items()
    ) and len(trained) == len(space["optimizer"].param_groups[0]["params"])


def hidden_rows(space):
    """Layers, and what the first is called with."""
    space |= {"layers": space["model"].blocks, "x": torch.rand(4, 8, 16)}


def sequential(space):
    space["net"] = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)))
    space["optimizer"] = torch.optim.SGD(space["net"].parameters(), lr=0.1)
    space["checkpoint_sequential"] = checkpoint_sequential
    space["batches"] = [tuple(torch.rand(2, 4, 16))]


def one_parameter(space):
    space["param"] = space["model"].head.weight
    space["step_and_free"] = lambda p: None


def next_tokens(space):
    """What a language model reads, and what it should say."""
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("from torch 2.13 on")
    space |= {"tokens": space["x"], "targets": space["y"]}


def rows_of_experts(space):
    space["rows_of_each_expert"] = torch.tensor([1, 2, 3, 4])
    space["ranks"] = 2


PREPARE = {
    ("02b_five_calculators.ipynb", 0): labels_model,
    ("03d_under_pressure.ipynb", 1): one_parameter,
    ("04c_my_loop.ipynb", 0): sequential,
    ("05_schedules.ipynb", 1): hidden_rows,
    ("06c_by_hand.ipynb", 0): hidden_rows,
    ("07_adapters.ipynb", 0): a_small_llama,
    ("08_offloading.ipynb", 0): a_batch_of_a_llama,
    ("08a_the_loss.ipynb", 0): next_tokens,
    ("10c_experts.ipynb", 0): rows_of_experts,
}
ON_A_CPU = {'"cuda"': '"cpu"', "pin_memory=True": "pin_memory=False"}

SAYS = {
    ("01_measuring.ipynb", 0): lambda s: s["step"].peak > 0,
    ("01b_when_it_runs_out.ipynb", 0): lambda s: s["guard"].report is None,
    ("01b_when_it_runs_out.ipynb", 1): lambda s: s["failed"],
    ("02a_which_moment.ipynb", 0): lambda s: s["most"] > 4,
    ("02b_five_calculators.ipynb", 0): lambda s: s["account"].peak > 0,
    ("03c_who_chooses.ipynb", 0): lambda s: s["size"] == 4,
    ("03d_under_pressure.ipynb", 0): lambda s: s["size"] == 4,
    ("03d_under_pressure.ipynb", 1): lambda s: s["loss"] > 0,
    ("04c_my_loop.ipynb", 0): lambda s: s["loss"] > 0,
    ("05_schedules.ipynb", 1): lambda s: s["net"](s["x"]).shape == (4, 8, 16),
    ("06a_every_bit.ipynb", 0): lambda s: True,
    ("06c_by_hand.ipynb", 0): lambda s: s["y"].dtype == torch.float32,
    ("07b_which_optimizer.ipynb", 0): lambda s: s["optimizer"].defaults[
        "fused"
    ],
    ("07_adapters.ipynb", 0): adapters_in_fp32,
    ("08_offloading.ipynb", 0): lambda s: (
        0 < s["moved"].out == s["moved"].back
    ),
    ("08a_the_loss.ipynb", 0): lambda s: s["model"].head.weight.grad.any(),
    ("10c_experts.ipynb", 0): lambda s: s["load"].tolist() == [3, 7],
    ("08b_elsewhere.ipynb", 0): lambda s: s["optimizer"].host.defaults[
        "fused"
    ],
    ("11_planning.ipynb", 0): lambda s: s["answer"].best,
    ("12_claims.ipynb", 0): lambda s: s["account"].peak > 0,
}
"""What holds after the lines have run once."""


def on_a_cpu(lines):
    for there, here in ON_A_CPU.items():
        lines = lines.replace(there, here)
    return lines


@pytest.mark.parametrize(("page", "number"), SAYS)
def test_the_lines_run(page, number, capsys):
    space = world()
    PREPARE.get((page, number), lambda space: None)(space)
    precision = torch.get_float32_matmul_precision()
    try:
        exec(on_a_cpu(LINES[page, number]), space)
    finally:
        torch.set_float32_matmul_precision(precision)
    assert SAYS[page, number](space)


def gradients(forward, model, x, y):
    """Of the weights of all blocks, when the hidden rows go through them."""
    model.zero_grad()
    rows = model.token(x) + model.position.weight
    loss = tokens_loss(model.head(model.norm(forward(rows))), y)
    return torch.autograd.grad(loss, list(model.blocks.parameters()))


def chapter_4(space):
    """The whole forward pass, with what comes before and after."""
    exec(LINES["04_checkpointing.ipynb", 0], space)
    parts = SimpleNamespace(
        embed=nn.Identity(), head=nn.Identity(), blocks=space["model"].blocks
    )
    return lambda x: space["forward"](parts, x)


def chapter_4b(space):
    *head, call = LINES["04b_what_to_keep.ipynb", 0].strip().splitlines()
    exec("\n".join(head), space)

    def through(x):
        for block in space["model"].blocks:
            names = space | {"x": x, "block": block}
            exec(call, names)
            x = names["x"]
        return x

    return through


def chapter_5(space):
    lines = LINES["05_schedules.ipynb", 0]

    def through(x):
        names = space | {"x": x, "self": space["model"], "j": 2}
        exec(lines, names)
        return names["x"]

    return through


LOOPS = {
    "04_checkpointing.ipynb": chapter_4,
    "04b_what_to_keep.ipynb": chapter_4b,
    "05_schedules.ipynb": chapter_5,
}


@pytest.mark.parametrize("page", LOOPS)
def test_each_block_gets_its_own_gradient(page):
    space = world()
    model, x, y = space["model"], space["x"], space["y"]
    copied = gradients(LOOPS[page](space), model, x, y)
    plain = gradients(model.blocks, model, x, y)
    for mine, right in zip(copied, plain, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=0)


def test_the_switch_of_5a_recomputes_every_second_layer():
    config = GPT2Config(
        n_layer=4, n_embd=16, n_head=2, vocab_size=64, n_positions=8,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model, runs = GPT2LMHeadModel(config), []
    exec(LINES["05a_planners.ipynb", 0], {"model": model})
    for layer in model.transformer.h:
        layer.mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    model.train()
    tokens = torch.randint(64, (2, 8))
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    assert len(runs) == 4 + 2


def test_the_mlps_of_chapter_5():
    """A lambda would run the last block's layers again, without a word."""
    cells = json.loads((CHAPTERS / "05_schedules.ipynb").read_text())["cells"]
    page = "\n".join("".join(cell["source"]) for cell in cells)
    [line] = re.findall(r"`(x = x \+ checkpoint\([^`]*\))`", page)
    [half] = re.findall(r"`(def half[^`]*)`", page)
    space = world()
    exec(half, space)
    model, x, y = space["model"], space["x"], space["y"]

    def mlps(step):
        def through(x):
            for block in model.blocks:
                mlp = nn.Sequential(block.up, nn.GELU(), block.down)
                x = step(x, block.norm2, mlp)
            return x

        used = ("norm2", "up", "down")
        model.blocks.requires_grad_(False)
        for block in model.blocks:
            for name in used:
                getattr(block, name).requires_grad_(True)
        rows = (model.token(x) + model.position.weight).detach()
        rows.requires_grad_(True)
        trained = [p for p in model.blocks.parameters() if p.requires_grad]
        loss = tokens_loss(model.head(through(rows)), y)
        return torch.autograd.grad(loss, trained)

    def copied(x, norm, mlp):
        names = space | {"x": x, "norm": norm, "mlp": mlp}
        exec(line, names)
        return names["x"]

    plain = mlps(lambda x, norm, mlp: x + mlp(norm(x)))
    for mine, right in zip(mlps(copied), plain, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=0)


TRAINING = {
    ("03_accumulation.ipynb", 0),
    ("03_accumulation.ipynb", 1),
    ("06_precision.ipynb", 0),
    ("06b_updates_that_vanish.ipynb", 0),
}


def whole_batch(space):
    """The weights after one step of the whole batch."""
    model, optimizer = space["model"], space["optimizer"]
    tokens_loss(model(space["x"]), space["y"]).backward()
    optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("number", [0, 1])
def test_chapter_3_takes_the_step_of_the_whole_batch(number):
    right = whole_batch(world())
    space = world()
    lines = LINES["03_accumulation.ipynb", number]
    if number == 0:  # tokens, as the comment beside it says
        lines = lines.replace("len(y) for", "y.numel() for")
    exec(lines, space)
    for mine, theirs in zip(space["model"].parameters(), right, strict=True):
        torch.testing.assert_close(mine.detach(), theirs)


def test_chapter_6_takes_a_step_for_each_batch():
    space = world()
    start = [p.detach().clone() for p in space["model"].parameters()]
    exec(on_a_cpu(LINES["06_precision.ipynb", 0]), space)
    weights = list(space["model"].parameters())
    assert all(p.dtype == torch.float32 for p in weights)
    assert not all(map(torch.equal, weights, start))


def test_the_copies_of_6b_stay_in_fp32_and_move():
    space = world()
    before, after = LINES["06b_updates_that_vanish.ipynb", 0].split("# in")
    exec(before, space)
    start = [copy.clone() for copy in space["copies"]]
    tokens_loss(space["model"](space["x"]), space["y"]).backward()
    exec("#" + after, space)
    for copy, p, old in zip(
        space["copies"], space["model"].parameters(), start, strict=True
    ):
        assert copy.dtype == torch.float32
        assert torch.equal(copy.bfloat16(), p)
        assert not torch.equal(copy, old)


def test_no_line_is_forgotten():
    run = {
        *SAYS,
        *TRAINING,
        *((page, 0) for page in LOOPS),
        *((page, 0) for page in ELSEWHERE),
        ("05a_planners.ipynb", 0),
    }
    assert run == set(LINES)
