"""A model of Hugging Face's hub, from its ``config.json``."""

import json
import re
from collections.abc import Mapping
from os import PathLike
from os.path import isdir, isfile
from pathlib import Path
from typing import Any, Protocol

from membudget.checks import flag, instance, listed, refused, shown, whole
from membudget.ledger.adapters import TARGETS
from membudget.ledger.causal import CausalLM

MODEL_TYPES = ("llama", "mistral", "phi3", "qwen2", "qwen3")
"""The ``model_type`` of a config for which there are rules."""

_BLOCKS = {"phi3": "phi3", "qwen3": "qwen3"}
_ATTENTION, _MLP = TARGETS["transformers"][:4], TARGETS["transformers"][4:]
_NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_FINE: dict[str, tuple[object, ...]] = {
    "the architecture": ("ForCausalLM",),
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0,),
    "embd_pdrop": (0,),
    "resid_pdrop": (0,),
    "quantization_config": (None,),
    "rope_type": ("default", "linear", "llama3", "yarn"),
    "partial_rotary_factor": (1,),
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
            ``model_type`` is one of :data:`MODEL_TYPES`, among them Llama 1
            to 3, SmolLM (``"llama"``), Mistral, Phi-3 and 4, Qwen 2, 2.5
            and 3.

    Raises:
        ValueError: no file, a file that is no JSON, an entry that is missing
            or makes no sense, a model of another kind, or an option for which
            there is no rule (another activation function, dropout, quantized
            weights, rotary positions that depend on the length).

    Example:
        >>> shape = from_config("Qwen2.5-7B/config.json")
        >>> predict(shape, 1, 4096, recipe="bf16", checkpointed=True).peak
    """
    read = _read(config)
    kind = _known(read)
    heads = _whole(read, "num_attention_heads")
    width = _whole(read, "hidden_size")
    return CausalLM(
        _whole(read, "vocab_size"),
        width,
        _whole(read, "num_hidden_layers"),
        heads,
        _whole(read, "num_key_value_heads", heads),
        _whole(read, "head_dim", width // heads),
        _whole(read, "intermediate_size"),
        tied=_flag(read, "tie_word_embeddings"),
        biases=_biases(read, kind),
        block=_BLOCKS.get(kind, "llama"),
        window=_window(read, kind),
    )


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


def _known(read: Mapping[str, Any]) -> str:
    """Its ``model_type``, if there are rules for all that it says."""
    kind = read.get("model_type")
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
    needed = list(_NEEDED)
    if kind != "llama":  # whose first configs were without
        needed.append("num_key_value_heads")
    if kind == "qwen3":  # its heads have a size of their own
        needed.append("head_dim")
    missing = [name for name in needed if read.get(name) is None]
    if missing:
        raise ValueError(
            f"the config of a {kind} lacks {', '.join(missing)}: use a "
            "model's whole config.json"
        )
    _without_rule(read)
    return str(kind)


def _without_rule(read: Mapping[str, Any]) -> None:
    """Refuse an option that changes the step in a way that no rule has."""
    for name, value in _options(read).items():
        if value not in _FINE[name]:
            raise ValueError(
                f"{name} is {shown(value)}, for which there is no rule: use "
                f"{_FINE[name][0]}, or {_ACCOUNT}"
            )


def _options(read: Mapping[str, Any]) -> dict[str, object]:
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        use = "the entries of one, or leave it out"
        rope |= instance(read.get(name) or {}, dict, name, use)
    made = read.get("architectures") or ["ForCausalLM"]
    head = str(listed(made, "architectures", "names")[0])
    turned = rope.get("partial_rotary_factor")
    if turned is None:
        turned = read.get("partial_rotary_factor")
    return {
        "the architecture": re.sub(r"^\w+(?=ForCausalLM$)", "", head),
        "hidden_act": read.get("hidden_act", "silu"),
        "attention_dropout": read.get("attention_dropout") or 0,
        "embd_pdrop": read.get("embd_pdrop") or 0,
        "resid_pdrop": read.get("resid_pdrop") or 0,
        "quantization_config": read.get("quantization_config"),
        "rope_type": rope.get("rope_type") or rope.get("type") or "default",
        "partial_rotary_factor": 1 if turned is None else turned,
    }


def _whole(
    read: Mapping[str, Any], name: str, otherwise: int | None = None
) -> int:
    value = read.get(name)
    return whole(otherwise if value is None else value, name)


def _flag(read: Mapping[str, Any], name: str) -> bool:
    return flag(read.get(name) or False, name)


def _biases(read: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    """Linear layers with a bias, as the library's classes have them."""
    if kind in ("mistral", "phi3"):
        return ()
    if kind == "qwen2":
        return _ATTENTION[:3]
    biases = _ATTENTION if _flag(read, "attention_bias") else ()
    if kind == "llama" and _flag(read, "mlp_bias"):
        biases += _MLP
    return biases


def _window(read: Mapping[str, Any], kind: str) -> int | None:
    """Tokens of local attention; a Qwen has it where it is switched on."""
    used = kind in ("mistral", "phi3") or _flag(read, "use_sliding_window")
    if not used or kind == "llama" or read.get("sliding_window") is None:
        return None
    return _whole(read, "sliding_window")
