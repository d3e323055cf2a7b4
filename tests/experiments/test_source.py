"""Experiments as they are read from their source, and the hash of it."""

import json

import pytest

from membudget.records import record as records
from membudget_experiments import definition
from membudget_experiments.__main__ import catalogue_text
from membudget_experiments.source import source_hash

# The catalogue -----------------------------------------------------------


def test_the_catalogue_is_that_of_the_definitions():
    """After a change: ``python -m membudget_experiments catalogue``."""
    assert records.CATALOGUE.read_text("utf-8") == catalogue_text()


def test_a_summary_is_one_sentence():
    for function in definition.definitions().values():
        first, _, rest = function.__doc__.partition("\n")
        assert first == function.experiment.summary
        assert first.endswith(".")
        assert rest.startswith("\n"), "a blank line after the first"


def test_every_size_has_the_same_parameters_and_no_run_twice():
    for experiment in records.catalogue().values():
        assert len({tuple(size) for size in experiment.sizes.values()}) == 1
        for given in experiment.sizes.values():
            runs = [json.dumps(run) for run in given[experiment.over]]
            assert len(set(runs)) == len(runs) > 1


def test_committed_records_of_a_cpu_have_the_parameters_of_today():
    for name, experiment in records.catalogue().items():
        for record in records.load(name, device="cpu"):
            assert record["parameters"] == experiment.sizes[record["size"]]


# The hash ----------------------------------------------------------------

MODULE = '''
"""A module."""

from experiments.definition import experiment
from experiments.sibling import shared, unused as spare
from membudget.models import GPT

LIMIT = 8
OTHER: int = 9


def helper(n):
    """Help."""
    return inner(n) + LIMIT


def inner(n):
    return n * 2


def apart(n):
    return OTHER


class Thing:
    """A thing."""

    def method(self):
        """Do it."""
        return shared(3)


@experiment(sizes={"tiny": {}}, units={}, over="values")
def one(device, *, values):
    """Summary."""
    yield {"a": helper(len(values))}
    for value in values:  # one after the other
        yield {"value": f"{value!r:>{4}}", "thing": Thing().method()}
'''
SIBLING = """
FACTOR = 2


def shared(n):
    return n * FACTOR


def unused(n):
    return n
"""
GOLDEN = "053ab3"  # from Python 3.11


@pytest.fixture
def hashed(tmp_path):
    """A function from the two modules' text to the hash of ``one``."""

    def of(module=MODULE, sibling=SIBLING):
        folder = tmp_path / "experiments"
        folder.mkdir(exist_ok=True)
        (folder / "sibling.py").write_text(sibling, "utf-8")
        path = folder / "module.py"
        path.write_text(module, "utf-8")
        return source_hash(path, "one")

    return of


def changed(text, old, new):
    assert old in text
    return text.replace(old, new)


SAME = {
    "a docstring": ('"""Summary."""', '"""Another."""'),
    "no docstring": ('    """Help."""\n', ""),
    "a method's docstring": ('"""Do it."""', '"""Do that."""'),
    "the module's docstring": ('"""A module."""\n', ""),
    "a comment": ("  # one after the other", ""),
    "a prefix": ('yield {"a":', 'yield {u"a":'),
    "brackets": ("return n * 2", "return (\n        n\n        * 2\n    )"),
    "the decorator's over": ('over="values"', 'over="others"'),
    "a name that the decorator is given": ('{"tiny": {}}', "OTHER"),
    "another decorator's module": (
        "from experiments.definition import",
        "from experiments.other import",
    ),
    "what is not used": ("return OTHER", "return OTHER + 1"),
    "an import of another package": (
        "from membudget.models import GPT",
        "from membudget.models import mlp",
    ),
}
DIFFERENT = {
    "the function": ('yield {"a":', 'yield {"b":'),
    "its arguments": ("(device, *, values)", "(device, *, values, more=1)"),
    "a helper": ("return inner(n) +", "return inner(n) -"),
    "a helper's helper": ("n * 2", "n * 3"),
    "a constant": ("LIMIT = 8", "LIMIT = 9"),
    "a class that it uses": ("shared(3)", "shared(4)"),
    "a format": ("{value!r:>{4}}", "{value!s:>{4}}"),
    "a number's type": ("LIMIT = 8", "LIMIT = 8.0"),
    "what it imports": ("shared, unused as spare", "unused as shared"),
    "another decorator of its own": ("@experiment(", "@cache\n@experiment("),
    "the order": (
        '    """Help."""\n    return',
        '    """Help."""\n    LIMIT\n    return',
    ),
}


@pytest.mark.parametrize("change", SAME)
def test_what_does_not_count(hashed, change):
    assert hashed(changed(MODULE, *SAME[change])) == hashed()


@pytest.mark.parametrize("change", DIFFERENT)
def test_what_counts(hashed, change):
    assert hashed(changed(MODULE, *DIFFERENT[change])) != hashed()


SIBLINGS = {
    "return n * FACTOR": "return n + FACTOR",
    "FACTOR = 2": "FACTOR = 3",
}


@pytest.mark.parametrize("old", SIBLINGS)
@pytest.mark.parametrize("name", ["shared", "common"])
def test_what_counts_in_another_module_of_the_package(hashed, old, name):
    module = changed(MODULE, "import shared, ", f"import shared as {name}, ")
    module = changed(module, "shared(3)", f"{name}(3)")
    before = hashed(module)
    assert hashed(module, changed(SIBLING, old, SIBLINGS[old])) != before
    unused = changed(SIBLING, "    return n\n", "    return -n\n")
    assert hashed(module, unused) == before


def test_the_hash_is_the_same_in_every_version_of_python(hashed):
    assert hashed()[:6] == GOLDEN


def test_recursion_ends(hashed):
    looped = changed(MODULE, "return n * 2", "return helper(n)")
    assert hashed(looped) != hashed()


# The decorator -----------------------------------------------------------

PARAMETERS = {"values": [1], "warm_up": 0, "repeats": 1}
SIZES = {size: PARAMETERS for size in records.SIZES}


def generator(device, *, values, warm_up, repeats):
    yield {}


def declare(function=generator, sizes=SIZES, over="values"):
    return definition.experiment(
        sizes=sizes, units={"value": "things"}, over=over
    )(function)


def test_a_declaration():
    function = declare()
    assert function is generator
    known = function.experiment
    assert (known.sizes, known.over) == (SIZES, "values")
    assert known.units == {"value": "things"}


def bare(device, *, values, **rest):
    yield {}


def at(size, **changes):
    return {**SIZES, size: {**PARAMETERS, **changes}}


LACKS_REPEATS = {**SIZES, "tiny": {"values": [1], "warm_up": 0}}


@pytest.mark.parametrize(
    ("error", "words", "given"),
    [
        (
            TypeError,
            "<lambda> yields nothing: yield the",
            {"function": lambda device, *, values, warm_up, repeats: []},
        ),
        (
            ValueError,
            "generator has the sizes large, t4, tiny: give tiny, t4, large",
            {"sizes": dict(reversed(SIZES.items()))},
        ),
        (TypeError, "extra", {"sizes": at("t4", extra=1)}),
        (TypeError, "repeats", {"sizes": LACKS_REPEATS}),
        (
            ValueError,
            "size tiny lacks warm_up or repeats",
            {"function": bare, "sizes": LACKS_REPEATS},
        ),
        (
            TypeError,
            "generator at size large: use num",
            {"sizes": at("large", values=(1, 2))},
        ),
        (ValueError, "'repeats' must be a list", {"over": "repeats"}),
        (ValueError, "'unknown' must be a list", {"over": "unknown"}),
    ],
)
def test_what_is_no_declaration(error, words, given):
    with pytest.raises(error, match=words):
        declare(**given)
