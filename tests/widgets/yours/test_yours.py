"""A reader's own model: the page's bytes are Python's, and it reads the same
configs."""

import json
import random

import pytest
import widget_pages as pages
from kind_yours import SMALL, random_states
from traitlets import TraitError

from membudget.ledger.adapters import packed_bytes
from membudget.planning import Job
from membudget.planning.memory import input_bytes
from membudget.widgets import YourModel, bundle, yours_rows
from membudget.widgets.yours import read_config
from tests.ledger.real_configs import models
from tests.soak import SOAK


@pytest.fixture
def asked(show):
    """What a function of the module, in Chromium, says of each of many."""
    page = show(YourModel())
    page.evaluate(
        """async ([text, state]) => {
          const blob = new Blob([text], { type: "text/javascript" });
          window.yours = await import(URL.createObjectURL(blob));
          window.start = state;
        }""",
        [bundle.module_text("yours"), YourModel().state()],
    )
    return page.evaluate


COUNT = 600 if SOAK else 16


def test_random_models_have_pythons_bytes(asked):
    widgets = [YourModel(**state) for state in random_states(COUNT)]
    states = [
        {k: v for k, v in w.state().items() if k != "tables"} for w in widgets
    ]
    found = asked(
        """(states) => states.map((state) =>
             window.yours.peaks({ ...window.start, ...state }))""",
        states,
    )
    assert len(found) == COUNT
    for widget, peaks in zip(widgets, found, strict=True):
        assert peaks == widget.peaks, widget
    assert sum(map(bool, found)) > 0.9 * COUNT


def test_an_answer_comes_at_once(asked):
    """Within 100 ms: all numbers and the sentence of a new state."""
    took = asked(
        """() => [256, 512, 1024, 4096, 8192].map((tokens) => {
             const from = performance.now();
             const state = { ...window.start, tokens };
             window.yours.layout(state, 700);
             window.yours.sentence(state);
             return performance.now() - from;
           })"""
    )
    assert sorted(took)[2] < 100


REAL = [config for config, _ in models().values()]
CHANGES = [
    ("model_type", "vit"),
    ("model_type", "qwen2_vl"),
    ("model_type", None),
    ("model_type", 7),
    ("model_type", "constructor"),
    ("hidden_act", "gelu"),
    ("hidden_act", "silu"),
    ("hidden_act", None),
    ("hidden_act", 3),
    ("attention_dropout", 0.1),
    ("attention_dropout", 0.0),
    ("attention_dropout", None),
    ("attention_bias", True),
    ("attention_bias", False),
    ("mlp_bias", True),
    ("quantization_config", {"bits": 4}),
    ("quantization_config", None),
    ("rope_scaling", {"rope_type": "llama3", "factor": 8}),
    ("rope_scaling", {"type": "linear", "factor": 8}),
    ("rope_scaling", {"rope_type": "dynamic"}),
    ("rope_scaling", {"type": "su"}),
    ("rope_scaling", None),
    ("rope_scaling", 4),
    ("rope_parameters", {"rope_type": "default"}),
    ("partial_rotary_factor", 0.75),
    ("partial_rotary_factor", 1.0),
    ("num_hidden_layers", 4),
    ("num_hidden_layers", 5),
    ("num_hidden_layers", 1001),
    ("num_hidden_layers", "12"),
    ("num_hidden_layers", 0),
    ("hidden_size", None),
    ("hidden_size", -8),
    ("hidden_size", 10**7),
    ("hidden_size", 12.5),
    ("num_key_value_heads", 7),
    ("num_key_value_heads", None),
    ("num_attention_heads", True),
    ("head_dim", 63),
    ("head_dim", 512),
    ("intermediate_size", 200),
    ("head_dim", None),
    ("head_dim", 0),
    ("intermediate_size", None),
    ("vocab_size", [1]),
    ("tie_word_embeddings", None),
    ("tie_word_embeddings", "yes"),
    ("tie_word_embeddings", True),
    ("architectures", ["LlamaForCausalLM"]),
    ("architectures", ["LlamaForSequenceClassification"]),
    ("architectures", None),
    ("sliding_window", 4096),
    ("sliding_window", None),
    ("sliding_window", 1),
    ("use_sliding_window", True),
    ("use_sliding_window", False),
    ("attn_logit_softcapping", 50.0),
    ("add_cross_attention", True),
    ("unknown_entry", {"a": 1}),
]


def odd_configs(count):
    """Real configs with one or two entries changed, as texts."""
    draw = random.Random(0)
    for change in CHANGES:
        yield json.dumps({**draw.choice(REAL), **dict([change])})
    for _ in range(count - len(CHANGES)):
        changes = dict(draw.sample(CHANGES, 2))
        yield json.dumps({**draw.choice(REAL), **changes})


NO_CONFIGS = ["", "no JSON", "[1]", "7", "null", '"llama"', "{", "{}", "NaN"]


def python_reads(text):
    """None where it refuses."""
    try:
        return read_config(text)
    except (TypeError, ValueError):
        return None


def test_the_page_reads_the_configs_that_python_reads(asked):
    texts = [*map(json.dumps, REAL), *odd_configs(300), *NO_CONFIGS]
    found = asked(
        """(texts) => texts.map((text) =>
             window.yours.read(window.start.tables, text))""",
        texts,
    )
    wanted = list(map(python_reads, texts))
    for text, one, python in zip(texts, found, wanted, strict=True):
        assert one.get("config") == python, (text, one)
        assert python or one["wrong"].endswith("."), text
    assert 60 < sum(map(bool, wanted)) < len(wanted) - 200


def test_what_is_pasted_stays_and_what_is_refused_changes_nothing(show):
    page = show(YourModel())
    title = page.locator(".mb-title").first
    pages.control(page, "model").select_option("your own")
    box = pages.control(page, "config")
    box.fill("no JSON")
    assert "The text is no JSON" in page.locator(".mb-config").inner_text()
    assert title.inner_text() == "Will Qwen2.5 7B fit the RTX 3060?"
    assert box.input_value() == "no JSON"
    text = json.dumps({**SMALL, "torch_dtype": "bfloat16"})
    box.fill(text)
    assert box.input_value() == text
    assert title.inner_text() == "Will your model fit the RTX 3060?"
    assert page.locator(".mb-wrong").locator("visible=true").count() == 0
    pages.control(page, "model").select_option("Qwen3 4B")
    assert not box.is_visible()
    assert title.inner_text() == "Will Qwen3 4B fit the RTX 3060?"


def test_the_choices_are_public_models():
    real = models()
    for name, config in yours_rows.CHOICES.items():
        published, _ = real[yours_rows.SOURCES[name]]
        assert read_config(config) == read_config(published), name


def test_the_widget_says_what_it_knows_no_rows_for():
    widget = YourModel({**SMALL, "sliding_window": 100}, tokens=99)
    assert widget.problem == "" and widget.peaks
    local = {**SMALL, "sliding_window": 100, "use_sliding_window": True}
    widget = YourModel(local, tokens=99)
    assert widget.problem == ""
    widget.tokens = 100
    assert "local beyond 99 tokens" in widget.sentence()
    assert widget.peaks == {}
    widget = YourModel(SMALL, rank=65)
    assert "a linear layer is 64 wide" in widget.problem
    widget.train = "half"
    assert widget.problem == ""
    with pytest.raises(TraitError, match="lacks vocab_size"):
        YourModel({"model_type": "llama"})


def test_the_pages_rules_are_the_ledgers():
    for weights in (0, 1, 63, 64, 65, 16384, 16385, 12345677):
        begun = [b * -(-weights // n) for n, b in yours_rows.PACKED]
        assert packed_bytes(weights) == packed_bytes(0) + sum(begun)
    shape = YourModel(SMALL).shape
    assert input_bytes(Job(shape, 1, 1), 1) == yours_rows.INPUTS


@pytest.mark.few(1)
@pytest.mark.parametrize("train", yours_rows.TRAIN)
def test_the_file_is_what_the_ledger_says(train):
    """``python -m membudget.widgets.yours_rows`` writes it."""
    file = json.loads(yours_rows.FILE.read_text())
    variant = yours_rows.Variant("llama", False, train, False, "split")
    rows = file["rows"][variant.key][variant.case]
    found = yours_rows.polynomials(variant)
    assert len(rows) == len(found)
    for (moment, *numbers), (name, phase, parts) in zip(
        rows, found, strict=True
    ):
        words = yours_rows._short(name), phase
        assert tuple(file["moments"][moment]) == words
        for number, part in zip(numbers, parts.reshape(-1, 6).T, strict=True):
            terms = file["polynomials"][number]
            assert {p: part[p] for p in part.nonzero()[0]} == dict(
                zip(terms[::2], terms[1::2], strict=True)
            )
