"""What is read from a config.json, and what is refused."""

import json
import re

import pytest
import transformers
from causal_helpers import FAMILIES, SMALL, build, config_of
from real_configs import BUFFERS, TWICE, models

from membudget.ledger import LLAMA3_8B, CausalLM, from_config

LLAMA = SMALL | {"model_type": "llama"}


def test_three_ways_to_hand_it_over(tmp_path):
    """A dictionary, a config of the library, and a file or its folder."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    shape = CausalLM(96, 32, 2, 4, 2, 8, 72)
    for config in (LLAMA, path, str(path), tmp_path, config_of("Llama")):
        assert from_config(config) == shape


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parameters_and_buffers_of_the_library(family):
    config = config_of(family)
    shape = from_config(config)
    for recipe, itemsize in (("fp32", 4), ("bf16", 2)):
        model = build(config, recipe)
        count = sum(p.numel() for p in model.parameters())
        assert shape.parameters == count
        size = sum(b.nbytes for b in model.buffers())
        assert shape.buffers_beside(itemsize) == size


def test_what_old_configs_leave_out():
    """As many heads of keys as of queries, and heads that make the width."""
    given = {k: v for k, v in LLAMA.items() if "head" not in k}
    shape = from_config(given | {"num_attention_heads": 8})
    assert (shape.kv_heads, shape.head_size, shape.tied) == (8, 4, False)
    old = LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert from_config(old) == from_config(LLAMA)


@pytest.mark.parametrize(
    ("kind", "options", "window"),
    [
        ("mistral", {"sliding_window": 4096}, 4096),
        ("mistral", {"sliding_window": None}, None),
        ("phi3", {"sliding_window": 2047}, 2047),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": False}, None),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": True}, 4096),
        ("qwen3", {"use_sliding_window": True}, None),
        ("llama", {"sliding_window": 4096}, None),
    ],
)
def test_local_attention(kind, options, window):
    shape = from_config(SMALL | {"model_type": kind} | options)
    assert shape.window == window


@pytest.mark.parametrize(
    ("kind", "options", "local"),
    [
        ("mistral", {}, "1"),
        ("qwen2", {"max_window_layers": 2}, "001111"),
        ("qwen2", {}, "0"),
        ("gemma2", {}, "10"),
        ("gemma3_text", {}, "111110"),
        ("gemma3_text", {"sliding_window_pattern": 2}, "10"),
        ("gemma3_text", {"layer_types": ["sliding_attention"] * 6}, "1"),
    ],
)
def test_which_blocks_are_local(kind, options, local):
    """As far as they do not repeat themselves."""
    config = SMALL | {"num_hidden_layers": 6, "model_type": kind} | options
    shape = from_config(config | {"sliding_window": 8})
    assert shape.local == tuple(map(bool, map(int, local)))


REFUSED = [
    ({"model_type": "vit"}, "no rule for the model_type 'vit': use one of"),
    ({"model_type": "falcon"}, "'falcon': use one of gemma2, gemma3_text"),
    ({"model_type": None}, "the config has no model_type: use a model's"),
    ({"model_type": 3}, "no rule for the model_type 3: use one of gemma"),
    ({"model_type": []}, "no rule for the model_type []: use one of gem"),
    (
        {"vocab_size": None, "hidden_size": None},
        "the config of a llama lacks vocab_size, hidden_size: use a model's",
    ),
    (
        {"model_type": "qwen3", "head_dim": None},
        "the config of a qwen3 lacks head_dim",
    ),
    (
        {"model_type": "mistral", "num_key_value_heads": None},
        "the config of a mistral lacks num_key_value_heads",
    ),
    ({"vocab_size": 0}, "vocab_size is 0: use a whole number of at least 1"),
    ({"num_key_value_heads": 3}, "4 heads do not share 3 heads of keys"),
    (
        {"architectures": ["LlamaForSequenceClassification"]},
        "the architecture is 'LlamaForSequenceClassification', for which "
        "there is no rule: use ForCausalLM, or hand the model itself to "
        "membudget.ledger.account",
    ),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu', for which there is no"),
    ({"attention_dropout": 0.1}, "attention_dropout is 0.1, for which there"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits'"),
    ({"resid_pdrop": 0.1}, "resid_pdrop is 0.1, for which there is no rule"),
    ({"embd_pdrop": 0.1}, "embd_pdrop is 0.1, for which there is no rule"),
    ({"rope_scaling": {"type": "dynamic"}}, "rope_type is 'dynamic', for whi"),
    (
        {"rope_parameters": {"rope_type": "proportional"}},
        "rope_type is 'proportional'",
    ),
    (
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor is 0.5, for which",
    ),
]


@pytest.mark.parametrize(("entries", "message"), REFUSED)
def test_what_is_refused_by_name(entries, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_config(LLAMA | entries)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu', for wh"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
            "rope_type is 'dynamic', for which",
        ),
    ],
)
def test_what_is_refused_of_gemmas(entries, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_config(SMALL | {"model_type": "gemma3_text"} | entries)


def test_a_share_of_a_head_is_turned():
    """As the file says, in one of two places; a Phi has rules for it."""
    phi, share = SMALL | {"model_type": "phi3"}, {"partial_rotary_factor": 0.5}
    for entries in (share, {"rope_scaling": share | {"type": "longrope"}}):
        assert from_config(phi | entries).turned_size == 4
    assert from_config(phi).turned_size == 8


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"use_parallel_residual": True}, "use_parallel_residual is True, fo"),
        ({"qk_layernorm": True}, "qk_layernorm is True, for which there is"),
        ({"hidden_dropout": 0.1}, "hidden_dropout is 0.1, for which there is"),
    ],
)
def test_what_is_refused_of_stablelm(entries, message):
    config = SMALL | {"model_type": "stablelm"}
    assert from_config(config).turned_size == 2
    with pytest.raises(ValueError, match=re.escape(message)):
        from_config(config | entries)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"use_parallel_residual": False}, "use_parallel_residual is False,"),
        ({"hidden_act": "gelu_fast"}, "is 'gelu_fast', for which there is no"),
        ({"hidden_dropout": 0.1}, "hidden_dropout is 0.1, for which there is"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1, for which t"),
        ({"rotary_pct": 0.1}, "turn 0 numbers of a head: use a head_size and"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_type is 'dynamic', for"),
    ],
)
def test_what_is_refused_of_gpt_neox(entries, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_config(NEOX | entries)


NEOX = {
    "model_type": "gpt_neox",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 72,
}


ALL = {"norm_topk_prob": True}
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("kind", "entries", "message"),
    [
        ("mixtral", {"num_experts": None}, "lacks num_local_experts: use"),
        ("mixtral", {"num_experts_per_tok": 9}, "active is 9: use a whole"),
        ("mixtral", {"router_jitter_noise": 0.1}, "jitter_noise is 0.1, for"),
        ("mixtral", {"output_router_logits": True}, "logits is True, for whi"),
        ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob is True, for wh"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0, for which there is"),
        ("qwen3_moe", {}, "norm_topk_prob is False, for which there is no"),
        ("qwen3_moe", {"moe_intermediate_size": None}, "lacks moe_intermedi"),
        ("qwen3_moe", ALL | {"mlp_only_layers": [0]}, "mlp_only_layers is"),
        ("qwen3_moe", ALL | {"decoder_sparse_step": 2}, "sparse_step is 2"),
    ],
)
def test_what_is_refused_of_mixtures(kind, entries, message):
    made = {"moe_intermediate_size": 24, "model_type": kind}
    if kind == "mixtral":
        made["num_local_experts"] = entries.get("num_experts", 8)
    with pytest.raises(ValueError, match=re.escape(message)):
        from_config(SMALL | MIXTURE | made | entries)


def test_what_gpt_neox_does_where_nothing_is_said():
    """A quarter of a head is turned, and every linear layer has a bias."""
    shape = from_config(NEOX)
    assert (shape.kv_heads, shape.head_size, shape.turned_size) == (4, 8, 2)
    assert shape.biases == tuple(shape.linears)
    bare = from_config(NEOX | {"attention_bias": False})
    assert bare.biases == ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")


def test_caps_of_scores_and_logits():
    """There are rules for Gemma 2 with both, whatever they are."""
    config = SMALL | {"model_type": "gemma2"}
    assert from_config(config | {"final_logit_softcapping": 20}).block
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        with pytest.raises(ValueError, match=f"{name} is None, for which th"):
            from_config(config | {name: None})


GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 96,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"activation_function": "relu"},
            "activation_function is 'relu', for which there is no rule: use "
            "gelu_new",
        ),
        ({"n_layer": None}, "the config of a gpt2 lacks n_layer: use a model"),
        ({"n_head": 0}, "n_head is 0: use a whole number of at least 1"),
        ({"add_cross_attention": True}, "add_cross_attention is True, for wh"),
        (
            {"architectures": ["GPT2DoubleHeadsModel"]},
            "the architecture is 'GPT2DoubleHeadsModel', for which there is "
            "no rule: use LMHeadModel, or hand the model itself",
        ),
    ],
)
def test_what_is_refused_of_gpt2(entries, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_config(GPT2 | entries)


def test_what_gpt2_does_where_nothing_is_said():
    """An MLP of 4 × width, 1 024 positions, a tied head, and dropout."""
    shape = from_config(GPT2 | {"architectures": ["GPT2LMHeadModel"]})
    assert (shape.hidden, shape.context, shape.tied) == (128, 1024, True)
    assert shape == from_config(transformers.GPT2Config(**GPT2))
    assert from_config(GPT2 | {"attn_pdrop": 0}).dropouts == (
        "embedding",
        "residual",
    )


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"hidden_size": "32"}, "hidden_size is '32': use a whole number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no': use Tr"),
        ({"rope_scaling": 2.0}, "rope_scaling is 2.0: use the entries of one"),
        ({"architectures": "Llama"}, "architectures is 'Llama': use a list"),
    ],
)
def test_entries_of_a_wrong_kind(entries, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        from_config(LLAMA | entries)


def test_files_that_are_none(tmp_path):
    path = tmp_path / "config.json"
    for missing in ("Qwen/Qwen2.5-7B", tmp_path, json.dumps(LLAMA), "\0"):
        with pytest.raises(ValueError, match="and nothing is downloaded: use"):
            from_config(missing)
    for text, message in (
        (b"{", "config.json is no JSON (Expecting property"),
        (b"\xff", "config.json is no JSON ('utf-8' codec"),
        (b"[1]", "config.json holds a list, no entries: use a model's"),
    ):
        path.write_bytes(text)
        with pytest.raises(ValueError, match=re.escape(message)):
            from_config(path)


@pytest.mark.parametrize(
    "config", [None, 3, [LLAMA], type(config_of("Llama"))]
)
def test_what_is_no_config(config):
    with pytest.raises(TypeError, match="use a dictionary, the path of a con"):
        from_config(config)


def test_the_courses_own_llama_has_as_many_parameters():
    """Its step is another, as its operators are."""
    shape = CausalLM(128256, 4096, 32, 32, 8, 128, 14336)
    assert shape.parameters == LLAMA3_8B.parameters == 8_030_261_248


@pytest.mark.parametrize("name", models())
def test_a_public_model_has_its_published_parameters(name):
    config, published = models()[name]
    shape = from_config(config)
    more = 0
    if name.startswith(BUFFERS):
        more = shape.depth * shape.head_size // 2
    if name in TWICE:
        more = shape.vocabulary * shape.width
    assert shape.parameters + more == published


def test_there_are_thirty_of_them():
    assert len(models()) >= 30
