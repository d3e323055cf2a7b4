"""What the tests have to know of the widget of a reader's own model."""

import random

from kind import Kind

from membudget.widgets import YourModel, format_bytes
from membudget.widgets.yours import WAYS
from membudget.widgets.yours_rows import CHOICES, KINDS, SIZES, TRAIN

SMALL = {"model_type": "qwen3", **dict.fromkeys(SIZES, 64)} | {
    "vocab_size": 5000,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
LOCAL = {**CHOICES["Mistral 7B"], "num_hidden_layers": 5} | {
    "sliding_window": 512
}
HEADS = 32, 64, 80, 96, 128
TRAITS = "train", "card", "gib", "tokens", "batch", "rank"


def controls(widget):
    traits = {key: getattr(widget, key) for key in TRAITS}
    return {"model": widget.model, "config": widget.config, **traits}


def printed(widget):
    peaks = {f"peaks.{way}": peak for way, peak in widget.peaks.items()}
    return {**peaks, "budget": widget.budget} if peaks else {}


def said(widget):
    if widget.problem:
        return [widget.problem]
    peaks = widget.peaks
    words = [f"{format_bytes(peaks['whole'])} all at once"]
    for way, peak in peaks.items():
        if peak <= widget.budget:
            how = [WAYS[way][0][1:], format_bytes(peak)]
            return words + (how if way != "whole" else ["which fits the"])
    return [*words, f"The least is {format_bytes(min(peaks.values()))}"]


KIND = Kind(
    "yours",
    YourModel,
    "Will Qwen2.5 7B fit the RTX 3060?",
    controls,
    printed,
    said,
    states=[
        {"train": "lora"},
        {"card": "H100 80 GB"},
        {"batch": 1},
        {"tokens": 64, "rank": 8},
        {"config": "SmolLM2 360M"},
        {"train": "full", "batch": 3},
        {"card": "another", "gib": 3.25},
        {"train": "half"},
        {"config": "Phi-4", "train": "qlora"},
        {"config": SMALL, "tokens": 100},
        {"rank": 200},
        {"rank": 4},
        {"config": LOCAL, "tokens": 511},
        {"tokens": 512},
        {"config": "Llama 3.1 70B", "card": "T4", "tokens": 8192},
    ],
    given=[
        {"config": "Qwen3 4B", "card": "RTX 4090", "train": "lora"},
        {"config": SMALL, "batch": 1, "tokens": 333, "train": "full"},
        {"card": "another", "gib": 1},
    ],
    tabs=("model", "train", "card"),
    rest=None,
    spoken={},
    columns=("at the peak", "all at once", "fits"),
    parts=5,
    moves=[({}, [{"tokens": 4096}, {"train": "full"}, {"card": "T4"}])],
    state=130_000,
)


def random_states(count, seed=0):
    """Arguments of widgets, of all kinds and sizes."""
    draw = random.Random(seed)
    for _ in range(count):
        kv_heads, size = draw.choice([1, 2, 4, 8]), draw.choice(HEADS)
        heads = kv_heads * draw.randint(1, 8)
        width = int(heads * size * draw.choice([0.5, 0.75, 1, 1, 1.5, 2]))
        config = {
            "model_type": draw.choice(KINDS),
            "vocab_size": draw.choice([32000, 50257, 128256, 151936]),
            "hidden_size": width,
            "intermediate_size": int(width * draw.uniform(0.6, 7.9)) // 8 * 8,
            "num_hidden_layers": draw.randint(5, 80),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": size,
            "tie_word_embeddings": draw.random() < 0.5,
        }
        yield {
            "config": config,
            "train": draw.choice(list(TRAIN)),
            "tokens": draw.choice([64 * draw.randint(1, 200), 1000, 2**16]),
            "batch": draw.choice([1, 2, 3, 8, 16]),
            "rank": draw.choice([4, 8, 16, 32]),
        }


def cases():
    """Random models, and what Python says of each."""
    for arguments in [*KIND.given, *random_states(8, seed=1)]:
        widget = YourModel(**arguments)
        yield {
            "state": widget.state(),
            "numbers": printed(widget),
            "said": said(widget),
        }
