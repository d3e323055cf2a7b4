"""Experiments as they are read from their source, and the hash of it."""

import textwrap

import pytest
from experiments_helpers import SIMPLE, plant

from membudget import experiments
from membudget.experiments import definition
from membudget.experiments import record as records

# The catalogue -----------------------------------------------------------


def test_the_catalogue_agrees_with_the_modules():
    import importlib

    found = records.catalogue()
    assert list(found) == [
        "allocator",
        "bf16_accumulation",
        "fsdp_one_gpu",
        "fsdp_ranks",
        "largest_batch",
        "matmul_rate",
        "micro_batch",
        "mixed_precision",
        "recoveries",
        "segments_gpt",
        "segments_mlp",
        "sharded_ranks",
        "step_peaks",
        "synchronisation",
    ]
    for name, experiment in found.items():
        module = importlib.import_module(
            f"membudget.experiments.{experiment.subject}"
        )
        function = getattr(module, name)
        assert function.sizes == experiment.sizes
        assert function.units == experiment.units
        assert function.over == experiment.over
        first, _, rest = function.__doc__.partition("\n")
        assert first == experiment.summary
        assert first.endswith(".")
        assert rest.startswith("\n"), "a blank line after the first"


def test_every_declared_experiment_is_in_the_catalogue():
    import membudget.experiments.accumulation
    import membudget.experiments.checkpointing
    import membudget.experiments.ledger
    import membudget.experiments.measuring
    import membudget.experiments.precision
    import membudget.experiments.sharding

    declared = {
        name
        for module in (
            membudget.experiments.accumulation,
            membudget.experiments.checkpointing,
            membudget.experiments.ledger,
            membudget.experiments.measuring,
            membudget.experiments.precision,
            membudget.experiments.sharding,
        )
        for name, value in vars(module).items()
        if hasattr(value, "sizes") and value.__module__ == module.__name__
    }
    assert declared == set(experiments.catalogue())


def test_two_experiments_of_one_name(tmp_path):
    folder = tmp_path / "experiments"
    path = plant(folder, one=SIMPLE)
    (folder / "again.py").write_text(path.read_text())
    with pytest.raises(
        ValueError, match=r"again.py and planted.py both .* one: rename one"
    ):
        records.catalogue(folder)


def test_a_decorator_that_cannot_be_read(tmp_path):
    folder = tmp_path / "experiments"
    path = plant(folder, one=SIMPLE)
    text = path.read_text().replace('"values": [1, 2, 3]', '"values": LIST')
    path.write_text(text)
    with pytest.raises(ValueError, match=r"planted.py: .* one as literals"):
        records.catalogue(folder)


# The hash ----------------------------------------------------------------

MODULE = '''
"""A module."""

from membudget.experiments.definition import experiment
from membudget.experiments.sibling import shared, unused as spare
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
        return records.source_hash(path, "one")

    return of


def changed(text, old, new):
    assert old in text
    return text.replace(old, new)


SAME = {
    "a docstring": ('"""Summary."""', '"""Another."""'),
    "no docstring": ('    """Help."""\n', ""),
    "a new docstring": (
        "def inner(n):\n",
        'def inner(n):\n    """Double."""\n',
    ),
    "a method's docstring": ('"""Do it."""', '"""Do that."""'),
    "a class' docstring": ('"""A thing."""', '"""Things."""'),
    "the module's docstring": ('"""A module."""\n', ""),
    "a comment": ("  # one after the other", ""),
    "another comment": ("LIMIT = 8", "# why\nLIMIT = 8"),
    "brackets": ("return n * 2", "return (\n        n\n        * 2\n    )"),
    "quotes": ('{"a": helper', "{'a': helper"),
    "an empty line": ("LIMIT = 8", "\n\nLIMIT = 8"),
    "the decorator": ('over="values"', 'over="others"'),
    "the decorator's sizes": ('{"tiny": {}}', '{"tiny": {"x": 1}}'),
    "what is not used": ("return OTHER", "return OTHER + 1"),
    "an unused constant": ("OTHER: int = 9", "OTHER: int = 10"),
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
    "its width": ("{value!r:>{4}}", "{value!r:>{5}}"),
    "a number's type": ("LIMIT = 8", "LIMIT = 8.0"),
    "a string's type": ('"value": f', 'b"value": f'),
    "what it imports": ("shared, unused as spare", "unused as shared"),
    "another decorator": ("def helper(n)", "@cache\ndef helper(n)"),
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


def test_what_counts_in_another_module_of_the_package(hashed):
    before = hashed()
    for old, new in {
        "n * FACTOR": "n + FACTOR",
        "FACTOR = 2": "FACTOR = 3",
    }.items():
        assert hashed(sibling=changed(SIBLING, old, new)) != before
    unused = changed(SIBLING, "    return n\n", "    return -n\n")
    assert hashed(sibling=unused) == before


def test_what_counts_under_another_name(hashed):
    renamed = changed(MODULE, "import shared, ", "import shared as common, ")
    renamed = changed(renamed, "shared(3)", "common(3)")
    factor = changed(SIBLING, "FACTOR = 2", "FACTOR = 3")
    assert hashed(renamed) != hashed(renamed, factor)


def test_the_hash_is_the_same_in_every_version_of_python(hashed):
    assert hashed()[:6] == GOLDEN


def test_recursion_ends(hashed):
    looped = changed(MODULE, "return n * 2", "return helper(n)")
    assert hashed(looped) != hashed()


def test_a_change_of_a_helper_makes_a_record_outdated(planted, tmp_path):
    from experiments_helpers import good

    planted(one=SIMPLE)
    path = tmp_path / "experiments/planted.py"
    found = records.catalogue(records.HERE)["one"]
    record = good(
        experiment="one",
        parameters=found.sizes["tiny"],
        units=found.units,
        source=found.source,
    )
    assert records.is_current(record)
    path.write_text(changed(path.read_text(), "sum(values)", "max(values)"))
    records.catalogue.cache_clear()
    assert not records.is_current(record)


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
    assert function.sizes == SIZES
    assert (function.units, function.over) == ({"value": "things"}, "values")


def test_not_a_generator():
    with pytest.raises(TypeError, match="<lambda> yields nothing: yield the"):
        declare(lambda device, *, values, warm_up, repeats: [])


@pytest.mark.parametrize(
    "names", [["tiny"], ["tiny", "large", "t4"], [*SIZES, "huge"], []]
)
def test_other_sizes(names):
    sizes = {name: PARAMETERS for name in names}
    with pytest.raises(ValueError, match="give tiny, t4, large, in this"):
        declare(sizes=sizes)


def test_parameters_that_the_function_does_not_take():
    sizes = {**SIZES, "t4": {**PARAMETERS, "extra": 1}}
    with pytest.raises(TypeError, match="extra"):
        declare(sizes=sizes)
    sizes = {**SIZES, "t4": {"values": [1], "warm_up": 0}}
    with pytest.raises(TypeError, match="repeats"):
        declare(sizes=sizes)


@pytest.mark.parametrize("value", [(1, 2), {1: 2}])
def test_parameters_that_json_would_change(value):
    sizes = {**SIZES, "large": {**PARAMETERS, "values": value}}
    with pytest.raises(TypeError, match="generator at size large: use num"):
        declare(sizes=sizes)


def test_missing_counts():
    def bare(device, *, values, **rest):
        yield {}

    sizes = {**SIZES, "tiny": {"values": [1], "warm_up": 0}}
    with pytest.raises(ValueError, match="size tiny lacks warm_up or rep"):
        declare(bare, sizes)


@pytest.mark.parametrize("over", ["repeats", "unknown"])
def test_over_is_a_list(over):
    with pytest.raises(ValueError, match=f"{over!r} must be a list"):
        declare(over=over)


def test_the_planted_module_is_what_it_seems(planted):
    module = planted(one=SIMPLE)
    steps = module.one("cpu", values=[4, 5], warm_up=0, repeats=1)
    assert list(steps) == [{"total": 9}, {"value": 4}, {"value": 5}]
    found = records.catalogue(records.HERE)
    assert list(found) == ["one"]
    assert found["one"].summary == "Planted: one."
    assert textwrap.dedent(SIMPLE) == SIMPLE
