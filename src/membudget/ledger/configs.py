"""A model of Hugging Face's hub, from its ``config.json``."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from os.path import isdir, isfile
from pathlib import Path
from typing import Any, Protocol

from membudget.checks import flag, instance, listed, refused, shown, whole
from membudget.ledger.adapters import TARGETS
from membudget.ledger.causal import CausalLM

_SWITCHES = (
    "add_cross_attention",
    "use_bidirectional_attention",
    "qk_layernorm",
    "output_router_logits",
)
_CAPS = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
"""Gemma 2 caps scores and logits, by default at these."""

_DROPOUTS = {
    "embedding": "embd_pdrop",
    "attention": "attention_dropout",
    "residual": "resid_pdrop",
}
"""Where GPT-2 has dropout, and what says so."""


@dataclass(frozen=True)
class _Family:
    """What distinguishes the configs of a ``model_type``.

    Attributes:
        block: one of :data:`membudget.ledger.blocks.BLOCKS`.
        needed: entries without which there is no shape.
        activations: that ``hidden_act`` may be; the first is the usual one.
        names: what it calls an entry, if not as Llama does.
        architecture: the name of the class ends so.
        tied: whether the head is tied where nothing is said.
        free: options for which there are rules, whatever they are.
        turned: share of a head that is turned where nothing is said.
        parallel: whether the MLP is beside attention.
        normalized: whether the weights of a token's experts add up to 1;
            None where no entry says so.
    """

    block: str = "llama"
    needed: tuple[str, ...] = ("intermediate_size", "num_key_value_heads")
    activations: tuple[str, ...] = ("silu", "swish")
    names: Mapping[str, str] = field(default_factory=dict)
    architecture: str = "ForCausalLM"
    tied: bool = False
    free: tuple[str, ...] = ()
    turned: float = 1.0
    parallel: bool = False
    normalized: bool | None = False


_EXPERTS = "num_local_experts", "num_experts_per_tok"

_FAMILIES = {
    "gemma2": _Family(
        "gemma2",
        ("intermediate_size", "num_key_value_heads", "head_dim"),
        ("gelu_pytorch_tanh",),
        {"hidden_act": "hidden_activation"},
        tied=True,
        free=tuple(_CAPS),
    ),
    "gemma3_text": _Family(
        "gemma3",
        ("intermediate_size", "num_key_value_heads", "head_dim"),
        ("gelu_pytorch_tanh",),
        {"hidden_act": "hidden_activation"},
        tied=True,
    ),
    "gpt2": _Family(
        "gpt2",
        (),
        ("gelu_new",),
        {
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "num_key_value_heads": "n_head",
            "head_dim": "",  # it has none
            "max_position_embeddings": "n_positions",
            "hidden_act": "activation_function",
            "attention_dropout": "attn_pdrop",
        },
        "LMHeadModel",
        tied=True,
        free=tuple(_DROPOUTS.values()),
    ),
    "gpt_neox": _Family(
        "gpt_neox",
        ("intermediate_size",),
        ("gelu",),
        {
            "num_key_value_heads": "num_attention_heads",
            "head_dim": "",  # it has none
            "partial_rotary_factor": "rotary_pct",
        },
        free=("partial_rotary_factor",),
        turned=0.25,
        parallel=True,
    ),
    # whose first configs have no heads of keys
    "llama": _Family(needed=("intermediate_size",)),
    "mistral": _Family(),
    "mixtral": _Family(
        "mixtral",
        ("intermediate_size", "num_key_value_heads", *_EXPERTS),
        normalized=None,  # always
    ),
    "olmo2": _Family("olmo2", ("intermediate_size",)),
    "olmoe": _Family(
        "olmoe",
        ("intermediate_size", *_EXPERTS),
        names={"num_local_experts": "num_experts"},
    ),
    "phi3": _Family("phi3", free=("partial_rotary_factor",)),
    "qwen2": _Family(),
    "qwen3": _Family(
        "qwen3", ("intermediate_size", "num_key_value_heads", "head_dim")
    ),
    "qwen3_moe": _Family(
        "qwen3_moe",
        ("intermediate_size", "num_key_value_heads", "head_dim", *_EXPERTS),
        names={
            "intermediate_size": "moe_intermediate_size",
            "num_local_experts": "num_experts",
        },
        normalized=True,
    ),
    "stablelm": _Family(
        "stablelm",
        names={"head_dim": ""},  # it has none
        free=("partial_rotary_factor",),
        turned=0.25,
    ),
}

MODEL_TYPES = tuple(_FAMILIES)
"""The ``model_type`` of a config for which there are rules."""

_ATTENTION, _MLP = TARGETS["transformers"][:4], TARGETS["transformers"][4:]
_NEOX = (
    "attention.query_key_value",
    "attention.dense",
    "mlp.dense_h_to_4h",
    "mlp.dense_4h_to_h",
)
_NEEDED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_FINE: dict[str, tuple[object, ...]] = {
    "attention_dropout": (0,),
    "embd_pdrop": (0,),
    "resid_pdrop": (0,),
    "quantization_config": (None,),
    "rope_type": ("default", "linear", "llama3", "longrope", "yarn"),
    "partial_rotary_factor": (1,),
    "add_cross_attention": (False,),
    "use_bidirectional_attention": (False,),
    "qk_layernorm": (False,),
    "output_router_logits": (False,),
    "mlp_only_layers": ([],),
    "decoder_sparse_step": (1,),
    "clip_qkv": (None,),
    "router_jitter_noise": (0,),
    "hidden_dropout": (0,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}
"""What an option may be; the first is the usual one."""

_ACCOUNT = "hand the model itself to membudget.ledger.account"


class Config(Protocol):
    """A config of transformers."""

    def to_dict(self) -> dict[str, Any]:
        """Its entries."""
        ...


def from_config(
    config: Mapping[str, Any] | str | PathLike[str] | Config,
) -> CausalLM:
    """The shape of a language model, read from its config.

    Nothing is downloaded, and the library transformers is not needed.

    Args:
        config: the content of a ``config.json``, the path of one or of a
            folder with one, or a config of transformers. Its
            ``model_type`` is one of :data:`MODEL_TYPES`: Gemma 2 and 3
            (text), GPT-2, GPT-NeoX (Pythia), Llama 1 to 3 and SmolLM
            (``"llama"``), Mistral, Mixtral, OLMo 2, OLMoE, Phi-3 and 4,
            Qwen 2, 2.5 and 3 (its mixtures, too), StableLM. Experts run as
            ``"grouped_mm"``, the library's default, which takes the same
            memory whichever the router chooses; ``"eager"`` does not.

    Raises:
        ValueError: no file, a file that is no JSON, an entry that is missing
            or makes no sense, a model of another kind, or an option for which
            there is no rule (another activation function, dropout but
            GPT-2's, quantized weights, rotary positions that depend on the
            length).

    Example:
        >>> shape = from_config("Qwen2.5-7B/config.json")
        >>> predict(shape, 1, 4096, recipe="bf16", checkpointed=True).peak
    """
    read = _known(_read(config))
    heads, width = (
        read.whole(name) for name in ("num_attention_heads", "hidden_size")
    )
    return CausalLM(
        read.whole("vocab_size"),
        width,
        read.whole("num_hidden_layers"),
        heads,
        read.whole("num_key_value_heads", heads),
        read.whole("head_dim", width // heads),
        read.whole("intermediate_size", 4 * width),
        tied=read.flag("tie_word_embeddings", read.family.tied),
        biases=_biases(read),
        block=read.family.block,
        window=_window(read),
        local=_local(read),
        turned=_turned(read),
        context=_context(read),
        dropouts=_dropouts(read),
        experts=read.whole("num_local_experts", 1),
        active=read.whole("num_experts_per_tok", 1),
        config=dict(read.entries),
    )


@dataclass(frozen=True)
class _Entries:
    """The entries of a config, by Llama's names."""

    kind: str
    entries: Mapping[str, Any]

    @property
    def family(self) -> _Family:
        return _FAMILIES[self.kind]

    def named(self, name: str) -> str:
        """What the config calls it."""
        return self.family.names.get(name, name)

    def get(self, name: str) -> Any:
        """None where it says nothing."""
        return self.entries.get(self.named(name))

    def whole(self, name: str, otherwise: int | None = None) -> int:
        value = self.get(name)
        value = otherwise if value is None else value
        return whole(value, self.named(name))

    def flag(self, name: str, otherwise: bool = False) -> bool:
        value = self.get(name)
        return flag(otherwise if value is None else value, self.named(name))


def _read(config: object) -> Mapping[str, Any]:
    """The entries of a config, wherever they are."""
    if isinstance(config, str | PathLike):
        config = _from_file(config)
    elif hasattr(config, "to_dict") and not isinstance(config, type):
        config = config.to_dict()
    if isinstance(config, Mapping):
        return config
    use = "a dictionary, the path of a config.json or a transformers config"
    raise refused("the config", config, use)


def _from_file(path: str | PathLike[str]) -> object:
    if isdir(path):
        path = Path(path, "config.json")
    if not isfile(path):
        raise ValueError(
            f"there is no file {shown(str(path))}, and nothing is downloaded: "
            "use the path of a config.json, or of a folder with one"
        )
    path = Path(path)
    try:
        read = json.loads(path.read_text("utf-8"))
    except ValueError as error:  # no text, or no JSON
        raise ValueError(
            f"{path.name} is no JSON ({error}): use a model's config.json"
        ) from None
    if not isinstance(read, dict):
        raise ValueError(
            f"{path.name} holds a {type(read).__name__}, no entries: use a "
            "model's config.json"
        )
    return read


def _known(entries: Mapping[str, Any]) -> _Entries:
    """The entries, if there are rules for all that they say."""
    kind = entries.get("model_type")
    if kind is None:
        raise ValueError(
            "the config has no model_type: use a model's whole config.json, "
            f"whose model_type is one of {', '.join(MODEL_TYPES)}"
        )
    if kind not in MODEL_TYPES:
        raise ValueError(
            f"there is no rule for the model_type {shown(kind)}: use one of "
            f"{', '.join(MODEL_TYPES)}, or {_ACCOUNT}"
        )
    if entries.get("num_experts") is None:  # as the library writes them
        entries = {**entries, "num_experts": entries.get("num_local_experts")}
    read = _Entries(kind, entries)
    needed = *_NEEDED, *read.family.needed
    missing = [read.named(name) for name in needed if read.get(name) is None]
    if missing:
        raise ValueError(
            f"the config of a {kind} lacks {', '.join(missing)}: use a "
            "model's whole config.json"
        )
    _without_rule(read)
    return read


def _without_rule(read: _Entries) -> None:
    """Refuse an option that changes the step in a way that no rule has."""
    family = read.family
    fine = _FINE | {
        "hidden_act": family.activations,
        "the architecture": (family.architecture,),
        "use_parallel_residual": (family.parallel,),
        "norm_topk_prob": (family.normalized,),
    }
    if read.kind == "gemma2":
        fine |= {name: (value,) for name, value in _CAPS.items()}
    for name, value in _options(read).items():
        if name in family.free and value is not None:
            continue
        if value not in fine[name]:
            raise ValueError(
                f"{read.named(name)} is {shown(value)}, for which there is no "
                f"rule: use {fine[name][0]}, or {_ACCOUNT}"
            )


def _rope(read: _Entries) -> dict[str, Any]:
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        use = "the entries of one, or leave it out"
        rope |= instance(read.get(name) or {}, dict, name, use)
    for kind in rope.values():  # Gemma 3 has one for each kind of block
        if isinstance(kind, dict) and kind.get("rope_type") != "default":
            rope = rope | kind
    return rope


def _turned(read: _Entries) -> float:
    """The share of a head that is turned."""
    found = _rope(read).get("partial_rotary_factor")
    if found is None:
        found = read.get("partial_rotary_factor")
    return read.family.turned if found is None else found


def _options(read: _Entries) -> dict[str, object]:
    rope, end = _rope(read), read.family.architecture
    made = read.get("architectures") or [end]
    head = str(listed(made, "architectures", "names")[0])
    activation = read.get("hidden_act") or read.family.activations[0]
    options = {
        "the architecture": re.sub(rf"^\w+(?={end}$)", "", head),
        "hidden_act": activation,
        "quantization_config": read.get("quantization_config"),
        "rope_type": rope.get("rope_type") or rope.get("type") or "default",
        "partial_rotary_factor": _turned(read),
    }
    usual = _CAPS if read.kind == "gemma2" else dict.fromkeys(_CAPS)
    options |= {name: read.entries.get(name, usual[name]) for name in _CAPS}
    options |= {name: read.get(name) or False for name in _SWITCHES}
    options["norm_topk_prob"] = None
    if read.family.normalized is not None:
        options["norm_topk_prob"] = read.flag("norm_topk_prob")
    options["use_parallel_residual"] = read.flag(
        "use_parallel_residual", read.family.parallel
    )
    options |= {
        "mlp_only_layers": read.get("mlp_only_layers") or [],
        "decoder_sparse_step": read.get("decoder_sparse_step") or 1,
        "clip_qkv": read.get("clip_qkv"),
    }
    for name in ("hidden_dropout", "router_jitter_noise"):
        options[name] = read.get(name) or 0
    return options | {name: read.get(name) or 0 for name in _DROPOUTS.values()}


def _biases(read: _Entries) -> tuple[str, ...]:
    """Linear layers with a bias, as the library's classes have them."""
    if read.kind in ("gpt2", "mistral", "mixtral", "phi3"):
        return ()
    if read.kind == "gpt_neox":
        first = 0 if read.flag("attention_bias", True) else 2
        return _NEOX[first:]
    if read.kind == "stablelm":
        return _ATTENTION[:3] if read.flag("use_qkv_bias") else ()
    if read.kind == "qwen2":
        return _ATTENTION[:3]
    biases = _ATTENTION if read.flag("attention_bias") else ()
    if read.kind == "llama" and read.flag("mlp_bias"):
        biases += _MLP
    return biases


def _window(read: _Entries) -> int | None:
    """Tokens of local attention; a Qwen has it where it is switched on."""
    always = "gemma2", "gemma3_text", "mistral", "mixtral", "phi3"
    used = read.kind in always
    if read.kind in ("qwen2", "qwen3", "qwen3_moe"):
        used = read.flag("use_sliding_window")
    if not used or read.get("sliding_window") is None:
        return None
    return read.whole("sliding_window")


def _local(read: _Entries) -> tuple[bool, ...]:
    """Which blocks are local, as far as they do not repeat themselves."""
    depth, kinds = read.whole("num_hidden_layers"), read.get("layer_types")
    if kinds is None:
        local = _by_number(read, depth)
    else:
        kinds = listed(kinds, "layer_types", "names, one of each block")
        local = [kind == "sliding_attention" for kind in kinds]
    for period in range(1, depth):
        if all(a == b for a, b in zip(local, local[period:], strict=False)):
            return tuple(local[:period])
    return tuple(local)


def _by_number(read: _Entries, depth: int) -> list[bool]:
    """A Gemma's last block of several is not local, a Qwen's first are not."""
    if read.kind.startswith("gemma"):
        pattern = 2 if read.kind == "gemma2" else 6
        every = read.whole("sliding_window_pattern", pattern)
        return [index % every < every - 1 for index in range(depth)]
    first = 0
    if read.kind in ("qwen2", "qwen3"):
        first = read.whole("max_window_layers", 28)
    return [index >= first for index in range(depth)]


def _context(read: _Entries) -> int | None:
    if read.family.block != "gpt2":
        return None
    return read.whole("max_position_embeddings", 1024)


def _dropouts(read: _Entries) -> tuple[str, ...]:
    """Where GPT-2 drops numbers: by default everywhere, one in ten."""
    if read.family.block != "gpt2":
        return ()
    return tuple(
        where
        for where, name in _DROPOUTS.items()
        if read.get(name) is None or float(read.get(name)) > 0
    )
