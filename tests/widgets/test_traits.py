"""What every widget promises in Python: its traits and what is left behind."""

import json

import pytest
from kind_segments import CHAIN
from kinds import KINDS, every_kind
from traitlets import TraitError

NAN = float("nan")
WHOLE, WORDS = "use a whole number of at least 1", "use a number"
GIVEN = {kind.name: kind for kind in KINDS}

BAD = {
    "accumulation": [
        ("micro_batch", 0, WHOLE),
        ("steps", 2.5, WHOLE),
        ("global_batch", "all", WHOLE),
        ("samples", 0, WHOLE),
        ("budget", 0, WHOLE),
        ("normalisation", "mean", "no division"),
        ("footprint", {"parameters": 1}, "footprint"),
        ("record", {}, "read-only|record"),
    ],
    "bits": [
        ("number", "much", WORDS),
        ("number", NAN, WORDS),
        ("number", True, WORDS),
        ("number", 10**400, "many digits"),
        ("format", "fp64", "fp8-e4m3"),
    ],
    "fits": [
        ("model", "GPT-5", "Llama 3 8B"),
        ("card", "V100", "RTX 4090"),
        ("cut", "yes", "boolean"),
        ("tables", {}, "read-only|tables"),
    ],
    "ledger": [
        ("batch", 0, "batch is 0: use a whole number from 1 to 1024"),
        ("batch", 1025, "batch is 1025: use a whole number from 1 to 1024"),
        ("steps", 65, "from 1 to 64"),
        ("tokens", True, "tokens is True: use a whole number"),
        ("tokens", 2048, "GPT-2 124M use a power of two from 16 to 1024"),
        ("tokens", 100, "use a power of two from 16"),
        ("recipe", "fp8", "autocast"),
        ("optimizer", "lion", "adam-8bit"),
        ("model", "GPT-5", "GPT-2 124M"),
        ("card", "V100", "RTX 4090"),
        ("foreach", "yes", "boolean"),
    ],
    "lossscale": [
        ("format", "fp32", "fp8-e4m3"),
        ("scale", 3, r"power of two, from 2\*\*-12 to 2\*\*24"),
        ("scale", 2**25, "power of two"),
        ("scale", 2**-13, "power of two"),
        ("scale", True, "a finite number"),
        ("scale", "1", "a finite number"),
        ("label", 3, "label"),
        ("histogram", {}, "read-only|histogram"),
    ],
    "planning": [
        ("model", "GPT-5", "small GPT"),
        ("card", "V100", "RTX 4090"),
        ("ranks", 3, "ranks is 3: use a power of two from 1 to 64"),
        ("ranks", 128, "from 1 to 64"),
        ("batch", 512, "from 1 to 256"),
        ("batch", True, "use a whole number"),
        ("budget", -1, "from 0 to"),
        ("tokens", 100, "with small GPT use one of"),
        ("recipe", "fp8", "bf16"),
        ("optimizer", "lion", "adam-8bit"),
        ("checkpointed", "some", "all"),
        ("chunks", "3", "16"),
        ("micro", 3, "16"),
        ("stage", "zero-1", "zero-3"),
        ("pick", -1, "from 0 to"),
        ("tables", {}, "read-only|tables"),
    ],
    "recipes": [
        ("batch", 5, r"use one of \(1, 2, 4"),
        ("batch", True, "use a whole number"),
        ("card", "GTX", "T4"),
        ("checkpointed", "yes", "boolean"),
        ("account", {}, "read-only|account"),
    ],
    "schedules": [
        ("level", 10, "no level '10': use one of 9, 12, 16"),
        ("level", True, "no level"),
        ("level", "9", "level is '9': use a whole number"),
        ("level", None, "boss"),
        ("segments", [], "there are no segments"),
        ("segments", [[0, 1], 3, 2], "each once, in order"),
        ("segments", [[], *range(9)], "a segment is empty"),
        ("segments", [True, *range(1, 9)], "the segments hold True"),
        ("segments", 9, "use a list"),
        ("label", 3, "label"),
        ("tables", {}, "read-only|tables"),
    ],
    "segments": [
        ("layers", 101, "from 1 to 100"),
        ("segments", -1, "from 0 to 16"),
        ("segments", 17, "from 0 to 16"),
        ("segments", True, "whole"),
        ("checkpoint", 0.07, "multiple of 0.05"),
        ("checkpoint", 1.05, "up to 1"),
        ("checkpoint", True, "above 0"),
        ("split", "longest", "balanced"),
        ("cuts", [3, 3], "ascending whole numbers"),
        ("cuts", [0, 3], "from 1 to 15"),
        ("cuts", [16], "from 1 to 15"),
        ("cuts", [True], "whole"),
        ("chain", [], "use 1 stages"),
        ("chain", 16, "or None"),
        ("chain", [1, 2], "profile"),
        ("chain", CHAIN * 17, "from 1 to 200"),
        ("measured", {17: 4}, "from 0 to 16"),
        ("measured", {"4": 4}, "whole number"),
        ("measured", {4: "8 MiB"}, "a finite number"),
        ("measured", {4: NAN}, "a finite number"),
        ("measured", {4: -1}, "at least 0"),
    ],
    "sharding": [
        ("model", "GPT-5", "use one of GPT-2 124M, 1.3 B, 7.5 B, Llama"),
        ("model", 0, "use a whole number from 1"),
        ("model", 7.5e9, "use a whole number"),
        ("model", True, "use a whole number"),
        ("model", 2**40 + 1, "to 1099511627776"),
        ("ranks", 3, "use a power of two"),
        ("ranks", 2048, "from 1 to 1024"),
        ("ranks", True, "use a whole number"),
        ("stage", "zero-4", "zero-3"),
        ("recipe", "fp16", "autocast"),
        ("accumulation_steps", 32, "from 1 to 16"),
        ("card", "24 GB", "RTX 4090"),
        ("tables", {}, "read-only|tables"),
    ],
    "timeline": [
        ("step", "fast", "checkpointed"),
        ("moment", 275, "moment is 275: use a whole number from -1 to 274"),
        ("moment", -2, "from -1 to 274"),
        ("moment", 2.5, "moment is 2.5: use a whole number"),
        ("steps", {}, "read-only|steps"),
        ("label", "mine", "read-only|label"),
    ],
}


@pytest.mark.parametrize(
    "name, trait, value, why",
    [
        pytest.param(name, *bad, id=f"{name}-{bad[0]}-{i}")
        for name, rows in BAD.items()
        for i, bad in enumerate(rows)
    ],
)
def test_what_is_not_allowed_changes_nothing(name, trait, value, why):
    kind = GIVEN[name]
    with pytest.raises((TraitError, TypeError), match=why) as error:
        kind.make(**{trait: value})
    assert trait in str(error.value)
    widget = kind.make()
    before = widget.state()
    with pytest.raises(TraitError, match=why):
        setattr(widget, trait, value)
    assert widget.state() == before


@every_kind
def test_an_unknown_argument_is_refused(kind):
    with pytest.raises(TypeError, match="colour"):
        kind.make(colour="red")


@every_kind
def test_numpys_integers_are_whole_numbers(kind):
    numpy = pytest.importorskip("numpy")
    if kind.rest is None:
        return
    key, traits = kind.rest
    (value,) = traits.values()
    widget = kind.make(**{key: numpy.int64(value)})
    assert type(getattr(widget, key)) is int


@every_kind
def test_state_is_json(kind):
    """It is small, and the browser may send it back."""
    for arguments in [{}, *kind.given]:
        widget = kind.make(**arguments)
        state = widget.state()
        text = json.dumps(state, allow_nan=False)
        assert json.loads(text) == state
        assert len(text) < kind.state
        sent = {k: v for k, v in state.items() if k in kind.controls(widget)}
        widget.set_state(sent)
        assert widget.state() == state


@every_kind
def test_the_same_every_time(kind):
    for arguments in [{}, *kind.given]:
        one, two = kind.make(**arguments), kind.make(**arguments)
        assert one._html() == two._html() == one._html()
        assert repr(one) == repr(two)


@every_kind
def test_the_sentence_left_behind(kind):
    """It says what the widget shows, in one line and with a number."""
    for arguments in [{}, *kind.given]:
        sentence = kind.make(**arguments).sentence()
        assert "\n" not in sentence and sentence.endswith(".")
        assert any(letter.isdigit() for letter in sentence)
