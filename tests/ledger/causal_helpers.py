"""Small models of the library transformers, and their shape on paper."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from ledger_helpers import add_peft, agree, agree_on_bytes, offloading

from membudget.ledger import from_config, predict
from membudget.measuring import trace_step
from tests.four_bits import in_four_bits

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 72,
}
FAMILIES = {
    "Gemma2": {},
    "Gemma3Text": {"sliding_window_pattern": 2},
    "Gemma3Text, local": {"sliding_window": 8, "num_key_value_heads": 1},
    "GPT2": {},
    "GPT2, no more positions than tokens": {"n_positions": 12},
    "GPT2, no dropout": {
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": False,
    },
    "GPTNeoX": {"rotary_pct": 0.5},
    "GPTNeoX, turned": {"rotary_pct": 1.0, "attention_bias": False},
    "Llama": {},
    "Llama, biases": {"attention_bias": True, "mlp_bias": True},
    "Llama, tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "Mistral": {"sliding_window": 13, "head_dim": 16},
    "Mistral, local": {"sliding_window": 8},
    "Mixtral": {"num_local_experts": 8},
    "Mixtral, one": {"num_local_experts": 4, "num_experts_per_tok": 1},
    "Olmo2": {"head_dim": 16, "attention_bias": True},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "Phi3": {"pad_token_id": 0, "num_key_value_heads": 1},
    "Phi3, grouped": {"pad_token_id": 0},
    "Phi3, partial": {
        "pad_token_id": 0,
        "original_max_position_embeddings": 8,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "long_factor": [1.0] * 2,
            "short_factor": [1.0] * 2,
        },
    },
    "Qwen2": {"num_key_value_heads": 1},
    "Qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "Qwen3, local": {
        "sliding_window": 8,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
    "Qwen3Moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "head_dim": 16,
    },
    "StableLm": {"partial_rotary_factor": 0.5, "use_qkv_bias": True},
}
"""Options by case; the first word is the library's class."""

STEPS = {
    "no optimizer": {"optimizer": None},
    "one by one": {},
    "all at once": {"foreach": True},
    "one kernel": {"fused": True},
}


def config_of(family, **options):
    kind = family.split(",")[0]
    options = SMALL | FAMILIES.get(family, {}) | options
    if kind == "GPT2":
        options |= {"n_inner": options.pop("intermediate_size")}
    return getattr(transformers, f"{kind}Config")(**options)


def build(config, recipe="fp32", checkpointed=False, adapter=None):
    """The library's model, in training."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16 if recipe == "bf16" else torch.float32
    ).train()
    if adapter and adapter.four_bits:
        in_four_bits(model, blocks_of(model))
    if adapter:
        add_peft(model, adapter)
    if checkpointed:
        how = {"use_reentrant": False, "preserve_rng_state": False}
        model.activation_checkpointing_enable(how)
    for number, layer in enumerate(blocks_of(model)):
        among = checkpointed is True or number in (checkpointed or ())
        layer.gradient_checkpointing = among
    return model


def blocks_of(model):
    base = model.base_model
    return base.h if hasattr(base, "h") else base.layers


def loss(model, x, y):
    """As ``transformers.Trainer`` calls a model, whose cache is off."""
    return model(input_ids=x, labels=y, use_cache=False).loss


def in_autocast(model, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        return loss(model, x, y)


def batch_of(samples, tokens):
    x = torch.arange(samples * tokens).view(samples, tokens) % 5
    return x, x.clone()


def stepper(model, optimizer="adam", foreach=False, fused=False, **_):
    trained = [p for p in model.parameters() if p.requires_grad]
    if optimizer is None:
        return None
    return torch.optim.AdamW(trained, lr=0, foreach=foreach, fused=fused)


def same(config, samples, tokens, *, optimizer="adam", **options):
    """Predicted from the config and traced are the same; the prediction."""
    recipe = options.get("recipe", "fp32")
    built = {k: options.get(k) for k in ("checkpointed", "adapter")}
    model = build(config, recipe, **built)
    step = {k: options[k] for k in ("foreach", "fused") if k in options}
    micro, moved = options.get("micro_batch"), []
    batch = batch_of(samples, tokens)
    run = in_autocast if recipe == "autocast" else loss
    if options.get("offloaded"):
        run = offloading(run, moved, *batch)
    tracker = trace_step(
        model,
        run,
        *batch,
        optimizer=stepper(model, optimizer, **step),
        micro_batch=micro,
    )
    shape = from_config(config)
    found = predict(shape, samples, tokens, optimizer=optimizer, **options)
    agree(found, tracker, bool(micro) and micro < samples)
    agree_on_bytes(found, moved)
    return found
