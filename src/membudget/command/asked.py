"""What is asked of ``fits`` and ``plan``, and its answer."""

import argparse
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from membudget.cards import CARDS
from membudget.command.refused import Refused

TRAIN = {
    "full": "all weights",
    "lora": "LoRA of rank {} in all linear layers",
    "qlora": "LoRA of rank {} in all linear layers, over weights in 4 bits",
}
PRECISION = {
    "fp32": "fp32",
    "autocast": "fp32 weights under bf16 autocast (bf16=True of the Trainer)",
    "bf16": "bf16 weights",
}
OPTIMIZERS = {
    "adam": "fused AdamW",
    "adam-8bit": "8-bit Adam",
    "lion-8bit": "8-bit Lion",
    "sgd": "SGD",
    "momentum": "SGD with momentum",
}
FORMS = "torch", "trainer"
NO_BF16 = "# This card has no bf16: take torch.float16 and a GradScaler."


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments that both have."""
    parser.add_argument(
        "config",
        metavar="CONFIG",
        help="a model's config.json, a folder with one, or the name of a "
        "model that was downloaded from the hub before",
    )
    card = parser.add_mutually_exclusive_group(required=True)
    card.add_argument(
        "--card", help='one of `membudget cards`, such as "RTX 3060"'
    )
    card.add_argument(
        "--memory",
        metavar="SIZE",
        help="instead of a card: what a step can have, as 11.2GiB",
    )
    for name, value, what in (
        ("--sequence", 2048, "tokens of a sequence"),
        ("--batch", 8, "sequences of an optimizer step"),
        ("--rank", 16, "of LoRA"),
    ):
        told = f"{what} ({value})"
        parser.add_argument(name, type=int, default=value, help=told)
    parser.add_argument(
        "--train", choices=TRAIN, default="full", help="what is trained (full)"
    )
    parser.add_argument(
        "--precision",
        choices=PRECISION,
        help="autocast for all weights, bf16 for LoRA, by default",
    )
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="adam", help="(adam)"
    )
    parser.add_argument(
        "--as",
        choices=FORMS,
        dest="form",
        help="each plan as a program: plain PyTorch, or the Trainer's",
    )


def config_of(name: str) -> str:
    """The path of a config; of the hub's models, where it was downloaded."""
    if Path(name).exists() or name.count("/") != 1:
        return name
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return name
    found = try_to_load_from_cache(name, "config.json")
    return found if isinstance(found, str) else name


@contextmanager
def quiet() -> Iterator[None]:
    """Without what libraries warn of while they build the model."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@dataclass
class Asked:
    """A job, a budget and what may differ between plans.

    Args:
        args: as :func:`add` has them.
    """

    args: argparse.Namespace

    def __post_init__(self) -> None:
        from membudget.checks import installed
        from membudget.ledger import from_config
        from membudget.measuring.units import parse_bytes
        from membudget.planning import Job, static

        args = self.args
        try:
            self.card = _card(args.card)
            self.budget = self.card.usable if self.card else 0
            if args.memory:
                self.budget = parse_bytes(args.memory)
            self.network = from_config(config_of(args.config))
            self.job = Job(self.network, args.sequence, args.batch)
            self.plan = self.family(args.train)
            self.states = static(self.job, self.plan).total
            installed("transformers", "a model of the hub")
            if self.plan.adapter:
                installed("peft", "a LoRA")
        except (ImportError, TypeError, ValueError) as error:
            raise Refused(str(error)) from None

    @property
    def depth(self) -> int:
        """Blocks of the model."""
        return self.job.depth

    def family(self, train: str, **other: Any) -> Any:
        """A plan by what is trained, with single sequences and every block
        checkpointed."""
        from membudget.ledger import Adapter
        from membudget.planning import Plan

        adapter = None
        if train != "full":
            names, packed = list(self.network.linears), train == "qlora"
            adapter = Adapter(names, self.args.rank, four_bits=packed)
        recipe = "bf16" if adapter else "autocast"
        if train == self.args.train and self.args.precision:
            recipe = self.args.precision
        given = {
            "recipe": recipe,
            "optimizer": self.args.optimizer,
            "adapter": adapter,
        }
        plan = Plan(1, self.depth, **(given | other))
        plan.share(self.job)
        return plan

    @property
    def locks(self) -> Mapping[str, object]:
        """Of a search: blocks are checkpointed all or none, as the Trainer
        has it."""
        plan = self.plan
        names = "recipe", "optimizer", "adapter"
        given = {name: [getattr(plan, name)] for name in names}
        return {**given, "checkpointed": [0, self.depth]}

    def answer(self) -> Any:
        """What the search finds, in a budget that holds the states."""
        from membudget.planning import Machine, search

        budget = max(self.budget, self.states)
        machine = Machine.of_card(self.timed)
        return search(self.job, budget, machine, locks=self.locks)

    @property
    def timed(self) -> str:
        """The card whose data sheet tells the time: of those that the course
        knows, the one with the most similar memory."""
        return min(
            CARDS, key=lambda name: abs(CARDS[name].usable - self.budget)
        )

    def told(self) -> list[str]:
        """The question, in lines."""
        from membudget.measuring.units import format_bytes

        args, plan = self.args, self.plan
        size = self.network.parameters / 1e6
        count = f"{size / 1000:.2f} b" if size >= 100 else f"{size:.1f} m"
        return [
            f"{args.config}: {count}illion parameters",
            TRAIN[args.train].format(args.rank),
            f"{PRECISION[plan.recipe]}; {OPTIMIZERS[plan.optimizer]}",
            f"{args.batch} sequences of {args.sequence} tokens in a step",
            f"{args.card or 'your card'}: {format_bytes(self.budget)} for "
            f"the step{'' if args.card else ', nothing set aside'}",
        ]


def _card(name: str | None) -> Any:
    if name is None:
        return None
    known = {card.lower(): card for card in CARDS}
    alike = [card for card in known if name.lower() in card.split()]
    if len(alike) == 1:  # "3060"
        name = alike[0]
    if name.lower() not in known:
        raise ValueError(
            f"there is no card {name!r}: use one of {', '.join(CARDS)}, or "
            "--memory with a size"
        )
    return CARDS[known[name.lower()]]


def saved(question: Asked, plan: Any) -> str:
    """What a plan does, in words."""
    job = question.job
    return plan.text(job).partition(f", {_recipe(plan)}")[0]


def _recipe(plan: Any) -> str:
    from membudget.planning.plan import WORDS

    return WORDS.get(plan.recipe, plan.recipe)


def program(question: Asked, plan: Any) -> str:
    """The program of a plan, in the form that was asked for.

    Raises:
        ValueError: a plan for which the Trainer has no arguments.
    """
    from membudget.planning import hub

    job, form = question.job, question.args.form
    text = plan.code(job)
    if form == "trainer":
        text = hub.trainer(job, plan, plan.trainer(job))
    if question.card and not question.card.bf16:
        text = f"{NO_BF16}\n{text}"
    return text
