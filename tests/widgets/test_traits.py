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
        ("record", {}, "read-only|record"),
    ],
    "adapters": [("account", {}, "read-only|account")],
    "bits": [("number", NAN, WORDS), ("number", True, WORDS)],
    "fits": [("cut", "yes", "boolean"), ("tables", {}, "read-only|tables")],
    "ledger": [
        ("batch", 1025, "batch is 1025: use a whole number from 1 to 1024"),
        ("steps", 65, "from 1 to 64"),
        ("tokens", 2048, "GPT-2 124M use a power of two from 16 to 1024"),
        ("tokens", 100, "use a power of two from 16"),
    ],
    "lossscale": [
        ("scale", 3, r"power of two, from 2\*\*-12 to 2\*\*24"),
        ("scale", 2**25, "power of two"),
        ("scale", 2**-13, "power of two"),
        ("histogram", {}, "read-only|histogram"),
    ],
    "offloading": [
        ("width", 100, "width is 100: use a whole number from 256 to 16384"),
        ("width", 1000, "width is 1000: use a multiple of 256"),
        ("tokens", 512, "from 1024 to 131072"),
        ("tokens", 3000, "tokens is 3000: use a power of two"),
        ("busy", 9, "from 10 to 100"),
        ("full", 101, "from 10 to 100"),
        ("tables", {}, "read-only|tables"),
    ],
    "parallelism": [
        ("schedule", "2F2B", "no schedule '2F2B': use one of GPipe"),
        ("ranks", 3, r"ranks is 3: use one of \(2, 4, 8\)"),
        ("rounds", 5, "from 2 to 4"),
        ("order", "F0", "order has not the operations"),
        ("tables", {}, "read-only|tables"),
    ],
    "planning": [
        ("ranks", 3, "ranks is 3: use a power of two from 1 to 64"),
        ("ranks", 128, "from 1 to 64"),
        ("batch", 512, "from 1 to 256"),
        ("budget", -1, "from 0 to"),
        ("tokens", 100, "with small GPT use one of"),
        ("chunks", "3", "16"),
        ("micro", 3, "16"),
        ("trained", "dora", "'all', 'lora', 'qlora'"),
        ("pick", -1, "from 0 to"),
        ("tables", {}, "read-only|tables"),
    ],
    "recipes": [
        ("batch", 5, r"use one of \(1, 2, 4"),
        ("batch", True, "use a whole number"),
        ("account", {}, "read-only|account"),
    ],
    "schedules": [
        ("level", 10, "no level '10': use one of 9, 12, 16"),
        ("level", True, "no level"),
        ("level", "9", "level is '9': use a whole number"),
        ("segments", [], "there are no segments"),
        ("segments", [[0, 1], 3, 2], "each once, in order"),
        ("tables", {}, "read-only|tables"),
    ],
    "segments": [
        ("layers", 101, "from 1 to 100"),
        ("segments", 17, "from 0 to 16"),
        ("checkpoint", 0.07, "multiple of 0.05"),
        ("cuts", [3, 3], "ascending whole numbers"),
        ("cuts", [0, 3], "from 1 to 15"),
        ("cuts", [16], "from 1 to 15"),
        ("chain", CHAIN * 17, "from 1 to 200"),
        ("measured", {17: 4}, "from 0 to 16"),
        ("measured", {4: "8 MiB"}, "a finite number"),
        ("measured", {4: -1}, "at least 0"),
    ],
    "sharding": [
        ("model", "GPT-5", "use one of GPT-2 124M, 1.3 B, 7.5 B, Llama"),
        ("model", 2**40 + 1, "to 1099511627776"),
        ("ranks", 3, "use a power of two"),
        ("ranks", 2048, "from 1 to 1024"),
        ("accumulation_steps", 32, "from 1 to 16"),
        ("tables", {}, "read-only|tables"),
    ],
    "timeline": [
        ("moment", 275, "moment is 275: use a whole number from -1 to 274"),
        ("moment", -2, "from -1 to 274"),
        ("steps", {}, "read-only|steps"),
        ("label", "mine", "read-only|label"),
    ],
    "yours": [
        ("config", "no JSON", "the config is no JSON"),
        ("tokens", 63, "from 64 to 1048576"),
        ("batch", 0, "from 1 to 1024"),
        ("gib", 0.1, "from 0.5 to 1000"),
        ("rank", 2000, "from 1 to 1024"),
        ("tables", {}, "read-only|tables"),
    ],
}
"""What an argument is refused for beside its type and a name's list."""


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
