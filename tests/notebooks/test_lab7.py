"""What lab 7 gives to copy, and how it reads a ``config.json``."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from membudget import ledger

LAB = Path(__file__).parents[2] / "labs/lab7_adapters.ipynb"
CELLS = json.loads(LAB.read_text("utf-8"))["cells"]
PROSE = "\n".join(
    "".join(c["source"]) for c in CELLS if c["cell_type"] == "markdown"
)
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


def cell(start):
    """What a code cell that begins so defines."""
    [source] = [
        text for c in CELLS if (text := "".join(c["source"])).startswith(start)
    ]
    names = {"ledger": ledger}
    exec(source, names)
    return names


def config(kind, **sizes):
    """A configuration as its file has it."""
    return AutoConfig.for_model(kind, **SMALL | sizes).to_dict()


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_shape_has_the_parameters_of_its_model(kind, tied):
    given = config(kind, tie_word_embeddings=tied)
    shape = cell("def shape_of")["shape_of"](given)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **SMALL, tie_word_embeddings=tied)
        )
    found = sum(
        p.numel()
        for name, p in model.named_parameters()
        if not name.endswith(".bias")  # of a Qwen2, left out
    )
    assert shape.parameters == found


@pytest.mark.parametrize(
    "given", [config("gpt_neox"), config("llama", head_dim=32)]
)
def test_what_the_ledger_has_no_rows_for_gets_a_sentence(given):
    with pytest.raises(ValueError, match="use a llama, mistral or qwen2"):
        cell("def shape_of")["shape_of"](given)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A small Llama on disk, as one that was downloaded."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    made = AutoConfig.for_model("llama", **SMALL)
    AutoModelForCausalLM.from_config(made).save_pretrained(folder)
    return str(folder)


def test_the_lines_train_the_adapters_beside_4_bits(
    saved, tmp_path, monkeypatch
):
    bnb = pytest.importorskip("bitsandbytes")
    monkeypatch.chdir(tmp_path)
    [lines] = re.findall("```python\n(import torch.*?)```", PROSE, re.DOTALL)
    tokens = torch.arange(96).view(1, 96) % 256
    space = {"name": saved, "batches": [tokens]}
    exec(lines.replace('"cuda"', '"cpu"'), space)
    model = space["model"]
    linear = [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert len(linear) == 7 * SMALL["num_hidden_layers"]
    layers = space["llama"].model.layers
    assert all(m.gradient_checkpointing and m.training for m in layers)
    assert all(p.dtype == torch.float32 for p in space["trained"])
    named = model.named_parameters()
    moved = [p for name, p in named if "lora_B" in name]
    assert len(moved) == 7 * SMALL["num_hidden_layers"]
    assert all(p.any() for p in moved)
    assert (tmp_path / "adapter/adapter_model.safetensors").exists()


def test_the_lines_compute_the_loss_of_the_model(saved, tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes")
    monkeypatch.chdir(tmp_path)
    [lines] = re.findall("```python\n(import torch.*?)```", PROSE, re.DOTALL)
    tokens = torch.arange(96).view(1, 96) % 256
    space = {"name": saved, "batches": [tokens]}
    lines = lines.replace('"cuda"', '"cpu"').replace("lr=2e-4", "lr=0")
    exec(lines, space)
    whole = space["model"](tokens, labels=tokens, use_cache=False).loss
    torch.testing.assert_close(
        space["loss"].detach(), whole.detach().float(), rtol=0.02, atol=0
    )
