"""What the widget *Your model* sends to the page: peaks as polynomials.

The ledger writes a step down once for many models at the same time: their
sizes are vectors (:class:`Many`). At each moment the bytes are a polynomial in
the sizes, which a least-squares fit over those models finds to the last digit;
that it gives every one of them to the byte is asserted. Of the moments those
stay that are the worst for one of many other models. ``python -m
membudget.widgets.yours_rows`` writes ``yours.json``.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from membudget.cards import CARDS
from membudget.ledger import RECIPES, Adapter, CausalLM, configs, from_config
from membudget.ledger import operators as op
from membudget.ledger.adapters import checked_trained, stepped_recipe
from membudget.ledger.recipes import optimizer_bytes
from membudget.ledger.walk import _Held, _Walk
from membudget.widgets.base import later

FILE = Path(__file__).with_name("yours.json")

TRAIN = {
    "full": (later("all weights, mixed precision"), "autocast"),
    "half": (later("all weights, in bf16"), "bf16"),
    "lora": ("LoRA", "bf16"),
    "qlora": ("QLoRA", "bf16"),
}
"""What is trained: words, and the recipe of precision."""

CASES = ("whole", "one", "split")
"""How the sequences of a step run: two or more at once, the only one, or one
after the other."""

LEAST = 5
"""Blocks of a model, at least: the first two and the last three are written
down, the others stand in between."""

RANKS = 16, 48
"""Between which a line through the bytes is drawn."""

KINDS = ("llama", "mistral", "phi3", "qwen2", "qwen3")
"""The ``model_type`` of the models that the page knows."""

GRAIN = 4096
"""Coefficients are multiples of one part in so many, the fraction of a byte
that a weight in 4 bits has of its scales."""


class Many:
    """A whole number for each of many models.

    Comparisons have to come out alike for all.
    """

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def _with(self, other: object, do: Callable) -> "Many":
        other = other.values if isinstance(other, Many) else other
        return Many(do(self.values, other))

    def _alike(self, other: object, do: Callable) -> bool:
        found = np.asarray(self._with(other, do).values)
        if found.any() != found.all():
            raise ArithmeticError("the models are not alike in this")
        return bool(found.all())

    def __add__(self, other: object) -> "Many":
        return self._with(other, lambda a, b: a + b)

    def __sub__(self, other: object) -> "Many":
        return self._with(other, lambda a, b: a - b)

    def __mul__(self, other: object) -> "Many":
        return self._with(other, lambda a, b: a * b)

    def __floordiv__(self, other: object) -> "Many":
        return self._with(other, lambda a, b: a // b)

    def __neg__(self) -> "Many":
        return self * -1

    __radd__, __rmul__ = __add__, __mul__

    def __lt__(self, other: object) -> bool:
        return self._alike(other, lambda a, b: a < b)

    def __gt__(self, other: object) -> bool:
        return self._alike(other, lambda a, b: a > b)

    def __ge__(self, other: object) -> bool:
        return self._alike(other, lambda a, b: a >= b)

    def __eq__(self, other: object) -> bool:
        return self._alike(other, lambda a, b: a == b)

    def __bool__(self) -> bool:
        return self != 0

    __hash__ = None  # type: ignore[assignment]


class _Log(_Walk):
    """Notes what is alive after every allocation."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh: list[tuple] = []
        self.events: list[tuple[str, str, tuple]] = []

    def make(self, size: Any, category: str) -> _Held:
        self.live[category] += size
        self.fresh.append(tuple(self.live.values()))
        return _Held(size, category)

    def release(self, held: _Held | None) -> None:
        if held is not None:
            held.holders -= 1
            if not held.holders:
                self.live[held.category] -= held.bytes

    def moment(self, name: str, phase: str) -> None:
        for parts in self.fresh or [tuple(self.live.values())]:
            self.events.append((name, phase, parts))
        self.fresh = []


class Sizes(NamedTuple):
    """Of models and their steps; arrays, or numbers.

    Attributes:
        V, d, f: vocabulary, width, and the MLP's.
        q, k: width of all queries, and of all keys.
        h, g, s: heads, those of keys, and numbers of one.
        n, m: tokens of a sequence, and sequences at once.
    """

    V: Any
    d: Any
    f: Any
    q: Any
    k: Any
    h: Any
    g: Any
    s: Any
    n: Any
    m: Any


MONOMIALS = (
    *("", "n", "ns", "m", "s", "d", "q", "k", "f", "V", "mn"),
    *("mnd", "mnq", "mnk", "mnf", "mnV", "mnh", "mng"),
    *("dd", "dq", "dk", "df", "dV"),
)
"""Products of sizes by their letters; each also times the blocks beyond
:data:`LEAST`, the rank, and both."""


def monomials(sizes: Sizes) -> np.ndarray:
    """Their values: a row for each model."""
    one = np.ones(len(sizes.d))
    columns = [one for _ in MONOMIALS]
    for place, letters in enumerate(MONOMIALS):
        for letter in letters:
            columns[place] = columns[place] * getattr(sizes, letter)
    return np.stack(columns, 1)


def drawn(count: int, single: bool) -> Sizes:
    """Models in whose sizes a step is a polynomial: every product of two
    widths fills the blocks of 4 bits."""
    rng = np.random.default_rng(0)
    s = rng.choice([64, 128], count)
    kv = 2 * rng.integers(1, 3, count)
    h = kv * rng.integers(5, 9, count)
    k, q = kv * s, h * s
    d = 128 * rng.integers(5, 10, count)
    d = np.where(d > k, d, k + 128)
    d = np.where(d < q, d, q - 128)
    f = q + 128 * rng.integers(1, 9, count)
    V = f + 128 * rng.integers(20, 90, count)
    n = 64 * rng.integers(2, 9, count)
    m = np.ones_like(n) if single else rng.integers(2, 7, count)
    return Sizes(V, d, f, q, k, h, kv, s, n, m)


def realistic(count: int, single: bool) -> tuple[Sizes, np.ndarray]:
    """Other models, and blocks beyond :data:`LEAST` and ranks of each."""
    rng = np.random.default_rng(1)

    def spread(low: float, high: float) -> np.ndarray:
        return np.exp(rng.uniform(np.log(low), np.log(high), count)).round()

    s = rng.choice([32, 64, 80, 96, 128, 256], count)
    kv = rng.choice([1, 2, 4, 8, 16, 32], count)
    h = kv * rng.integers(1, 9, count)
    d = (h * s * rng.choice([0.5, 0.75, 1, 1, 1, 2], count)).round()
    f = (d * rng.uniform(0.5, 8, count)).round()
    m = np.ones(count) if single else spread(2, 64)
    sizes = Sizes(
        spread(2_000, 300_000),
        d,
        f,
        h * s,
        kv * s,
        h,
        kv,
        s,
        spread(64, 150_000),
        m,
    )
    beyond = rng.integers(0, 130, count)
    return sizes, np.stack([beyond, spread(1, 256)], 1)


@dataclass(frozen=True)
class Variant:
    """One way to train one kind of model.

    Attributes:
        kind: one of :data:`KINDS`.
        tied: whether its head shares the embedding's weight.
        train: one of :data:`TRAIN`.
        checkpointed: whether every block is.
        case: one of :data:`CASES`.
    """

    kind: str
    tied: bool
    train: str
    checkpointed: bool
    case: str

    @property
    def key(self) -> str:
        """Of its rows."""
        marks = "tied" * self.tied, "checkpointed" * self.checkpointed
        return " ".join([self.kind, self.train, *filter(None, marks)])

    def base(self) -> CausalLM:
        """A shape of the kind."""
        return from_config(
            {
                "model_type": self.kind,
                "vocab_size": 9,
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": LEAST,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 2,
                "tie_word_embeddings": self.tied,
            }
        )

    def shape(self, sizes: Sizes, depth: int) -> CausalLM:
        """Many shapes of the kind in one."""
        base, shape = self.base(), object.__new__(CausalLM)
        given = {f.name: getattr(base, f.name) for f in fields(CausalLM)}
        given |= {
            "vocabulary": Many(sizes.V),
            "width": Many(sizes.d),
            "hidden": Many(sizes.f),
            "heads": Many(sizes.h),
            "kv_heads": Many(sizes.g),
            "head_size": Many(sizes.s),
            "depth": depth,
        }
        for name, value in given.items():
            object.__setattr__(shape, name, value)
        return shape

    def walked(self, sizes: Sizes, depth: int, rank: int) -> _Log:
        """The events of a micro-batch."""
        _, name = TRAIN[self.train]
        recipe, adapter = RECIPES[name], None
        shape = self.shape(sizes, depth)
        if "lora" in self.train:
            packed = self.train == "qlora"
            adapter = Adapter(list(shape.linears), rank, four_bits=packed)
        split = self.case == "split"
        paper = shape.write(
            Many(sizes.m) if self.case == "whole" else 1,
            Many(sizes.n),
            itemsize=recipe.parameters,
            autocast=recipe.autocast,
            lists="cuda",
            kernels="cuda",
            checkpointed=self.checkpointed,
            trained=checked_trained(None, adapter),
            adapter=adapter,
        )
        if split:
            op.scale(paper, paper.rows[-1].makes[0])
        log, weights = _Log(), paper.parameters
        stepped = stepped_recipe(name, adapter)
        numbers = [w.elements for w in weights]
        whole = RECIPES[stepped].gradients * sum(numbers)
        held = shape.buffers_beside(recipe.parameters)
        log.live["parameters"] = held + sum(
            w.bytes for w in weights + paper.frozen
        )
        log.live["optimizer"] = _states(numbers, stepped)
        log.live["gradients"] = whole if split else 0
        log.begun = set(range(len(weights))) if split else set()
        log.micro_batch(paper)
        log.live |= dict.fromkeys(("activations", "temporaries"), 0)
        log.live["gradients"] = whole
        log.moment("optimizer", "update")
        return log


def _states(numbers: list[Many], recipe: str) -> Many:
    """Bytes of Adam's states, affine in the numbers of each weight."""
    one, two = (optimizer_bytes([n], recipe, "adam") for n in (1, 2))
    return (two - one) * sum(numbers) + (2 * one - two) * len(numbers)


def variants() -> Iterator[Variant]:
    """All that the page knows."""
    for kind, tied in product(KINDS, (False, True)):
        if kind == "mistral":  # a Llama
            continue
        yield from (
            Variant(kind, tied, *how)
            for how in product(TRAIN, (False, True), CASES)
        )


def polynomials(variant: Variant) -> list[tuple[str, str, np.ndarray]]:
    """The moments that can be the worst: name, phase, and coefficients by
    category, of the monomials alone, times blocks, times rank, times both."""
    single = variant.case != "whole"
    sizes = drawn(160, single)
    values = monomials(sizes)
    scale = values.max(0)
    solve = np.linalg.pinv(values / scale) / scale[:, None]
    ranks = RANKS if "lora" in variant.train else RANKS[:1]
    names: list[tuple[str, str]] = []
    grid = {}
    for depth, rank in product((LEAST, LEAST + 1), ranks):
        log = variant.walked(sizes, depth, rank)
        events = [e for e in log.events if depth == LEAST or not _third(e[0])]
        names = [e[:2] for e in events]
        found = np.stack(
            [_columns(parts, len(scale), sizes) for *_, parts in events]
        )
        fitted = np.einsum("mk,ekc->emc", solve, found)
        fitted = np.round(fitted * GRAIN) / GRAIN
        if not (np.einsum("km,emc->ekc", values, fitted) == found).all():
            raise ArithmeticError(f"{variant} is no polynomial in its sizes")
        grid[depth, rank] = fitted
    return _worst(variant, names, _lines(grid, ranks))


def _third(name: str) -> bool:
    """Whether a row belongs to the block that a deeper model has more."""
    return re.match(r"model\.layers\.2\b", name) is not None


def _columns(parts: tuple, count: int, sizes: Sizes) -> np.ndarray:
    """Bytes of each model by category."""
    rows = [p.values if isinstance(p, Many) else p for p in parts]
    return np.stack([np.broadcast_to(r, sizes.d.shape) for r in rows], 1)


def _lines(grid: dict, ranks: tuple[int, ...]) -> np.ndarray:
    """Through the corners: alone, times blocks, times rank, times both."""
    low = ranks[0]
    at = {rank: grid[LEAST, rank] for rank in ranks}
    more = {rank: grid[LEAST + 1, rank] - at[rank] for rank in ranks}
    if len(ranks) == 1:
        zero = np.zeros_like(at[low])
        return np.stack([at[low], more[low], zero, zero], 1)
    gap = ranks[1] - low
    slopes = [(one[ranks[1]] - one[low]) / gap for one in (at, more)]
    alone = [
        one[low] - low * slope
        for one, slope in zip((at, more), slopes, strict=True)
    ]
    return np.stack([*alone, *slopes], 1)


def _worst(
    variant: Variant, names: list[tuple[str, str]], found: np.ndarray
) -> list[tuple[str, str, np.ndarray]]:
    """Of all moments those that are the most for a realistic model."""
    sizes, others = realistic(20_000, variant.case != "whole")
    beyond, rank = others.T
    factors = np.stack([np.ones_like(rank), beyond, rank, beyond * rank], 1)
    values = monomials(sizes)
    grid = (factors[:, :, None] * values[:, None, :]).reshape(len(rank), -1)
    totals = found.sum(-1).reshape(len(found), -1)
    _, first = np.unique(totals, axis=0, return_index=True)
    most = np.sort(first)[(grid @ totals[np.sort(first)].T).argmax(1)]
    return [(*names[i], found[i]) for i in np.unique(most)]


def tables() -> dict[str, Any]:
    """What stands in the file."""
    moments: dict[tuple, int] = {}
    pool: dict[tuple, int] = {}
    rows: dict[str, dict[str, list]] = {}
    for variant in variants():
        found = rows.setdefault(variant.key, {})[variant.case] = []
        for name, phase, parts in polynomials(variant):
            moment = _short(name), phase
            columns = parts.reshape(-1, parts.shape[-1]).T
            numbers = [_pooled(pool, part) for part in columns]
            found.append([moments.setdefault(moment, len(moments)), *numbers])
    return {
        "moments": list(map(list, moments)),
        "polynomials": list(map(list, pool)),
        "rows": rows,
    }


def _pooled(pool: dict[tuple, int], part: np.ndarray) -> int:
    """The number of a polynomial: place and coefficient of each term."""
    terms = [
        term
        for place in np.flatnonzero(part)
        for term in (int(place), _plain(float(part[place])))
    ]
    return pool.setdefault(tuple(terms), len(pool))


def _plain(value: float) -> float | int:
    return int(value) if value.is_integer() else value


def _short(name: str) -> str:
    """A row's name without the number of its block."""
    return re.sub(r"^model\.layers\.\d+\.?", "a block's ", name)


SIZES = {
    "vocab_size": "vocabulary",
    "hidden_size": "width",
    "intermediate_size": "hidden",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_size",
}
"""What a config calls the sizes of a :class:`CausalLM`."""

INPUTS = 16
"""Bytes of a token and its label, int64."""

MOST = 10**6
"""Of a size: numbers of bytes stay whole in the browser."""

SPANS = {"queries": (0.5, 2), "MLP": (0.5, 8)}
"""Widths of all queries and of the MLP as multiples of the model's: among
such models the worst moments were looked for (:func:`realistic`)."""

PACKED = (2, 1), (64, 1), (16384, 4)
"""Of :func:`membudget.ledger.adapters.packed_bytes`: bytes for so many
weights, begun ones as whole ones."""

TABLE = """
SmolLM2 360M|HuggingFaceTB/SmolLM2-360M|llama 49152 960 2560 32 15 5 64 yes
TinyLlama 1.1B|TinyLlama/TinyLlama_v1.1|llama 32000 2048 5632 22 32 4 64 no
Llama 3.2 1B|meta-llama/Llama-3.2-1B|llama 128256 2048 8192 16 32 8 64 yes
Qwen2.5 1.5B|Qwen/Qwen2.5-1.5B|qwen2 151936 1536 8960 28 12 2 128 yes
Llama 3.2 3B|meta-llama/Llama-3.2-3B|llama 128256 3072 8192 28 24 8 128 yes
Qwen3 4B|Qwen/Qwen3-4B|qwen3 151936 2560 9728 36 32 8 128 yes
Mistral 7B|mistralai/Mistral-7B-v0.3|mistral 32768 4096 14336 32 32 8 128 no
Qwen2.5 7B|Qwen/Qwen2.5-7B|qwen2 152064 3584 18944 28 28 4 128 no
Llama 3.1 8B|meta-llama/Llama-3.1-8B|llama 128256 4096 14336 32 32 8 128 no
Qwen3 8B|Qwen/Qwen3-8B|qwen3 151936 4096 12288 36 32 8 128 no
Phi-4|microsoft/phi-4|phi3 100352 5120 17920 40 40 10 128 no
Llama 3.1 70B|meta-llama/Llama-3.1-70B|llama 128256 8192 28672 80 64 8 128 no
"""
"""Public models: their names on the hub, where their config.json says so
(``https://huggingface.co/NAME/blob/main/config.json``)."""


def _choice(line: str) -> tuple[str, str, dict[str, Any]]:
    name, source, entries = line.split("|")
    kind, *sizes, tied = entries.split()
    named = zip(SIZES, map(int, sizes), strict=True)
    tie = {"tie_word_embeddings": tied == "yes"}
    return name, source, {"model_type": kind, **dict(named), **tie}


_CHOICES = [_choice(line) for line in TABLE.strip().splitlines()]
CHOICES = {choice[0]: choice[2] for choice in _CHOICES}
"""Configs of public models, the smallest first."""
SOURCES = {choice[0]: choice[1] for choice in _CHOICES}
"""Their names on the hub."""


def own_biases(kind: str) -> tuple[str, ...]:
    """Linear layers of a kind that have a bias, whatever its config says."""
    return tuple(Variant(kind, False, "full", False, "whole").base().biases)


def rules(kind: str) -> dict[str, Any]:
    """How the page reads a kind's config: entries that it needs, what an
    option may be, which switch makes attention local, and whose rows its are.
    """
    family, off = configs._FAMILIES[kind], [False, None]
    fine = {k: [*v, None] for k, v in configs._FINE.items()}
    fine |= {"hidden_act": [*family.activations, None]}
    if kind in ("llama", "qwen3"):
        fine["attention_bias"] = off
    if kind == "llama":
        fine["mlp_bias"] = off
    windows = {"mistral": "", "phi3": ""} | dict.fromkeys(
        ("qwen2", "qwen3"), "use_sliding_window"
    )
    return {
        "needed": [*configs._NEEDED, *family.needed],
        "fine": fine,
        "window": windows.get(kind),
        "rows": "llama" if kind == "mistral" else kind,
        "linears": _widths(kind),
    }


def _widths(kind: str) -> list[list[list[int]]]:
    """Inputs and outputs of a block's linear layers: how many times the
    widths d, k, q and f, which here are powers of 100."""
    sizes = 9, 1, 100**3, LEAST, 100, 1, 100
    config = {"model_type": kind, **dict(zip(SIZES, sizes, strict=True))}
    pairs = from_config(config).linears.values()
    return [
        [[width // 100**i % 100 for i in range(4)] for width in pair]
        for pair in pairs
    ]


def page_tables(
    choices: Mapping[str, str], ways: Mapping[str, tuple[str, bool, bool]]
) -> dict[str, Any]:
    """All that the page has to know; the file as it is, which is shorter, and
    lists where the order counts."""
    return {
        "file": FILE.read_text(),
        "monomials": list(MONOMIALS),
        "least": LEAST,
        "most": MOST,
        "spans": {name: list(span) for name, span in SPANS.items()},
        "packed": list(map(list, PACKED)),
        "inputs": INPUTS,
        "sizes": list(SIZES),
        "choices": list(map(list, choices.items())),
        "kinds": {kind: rules(kind) for kind in KINDS},
        "train": [[key, words] for key, (words, _) in TRAIN.items()],
        "ways": [[way, *how] for way, how in ways.items()],
        "cards": {name: card.usable for name, card in CARDS.items()},
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(tables(), separators=(",", ":")) + "\n")
