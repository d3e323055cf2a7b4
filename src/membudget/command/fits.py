"""Say whether a model's training step fits a card, and how it would."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from operator import itemgetter
from typing import Any

from membudget.cards import CARDS
from membudget.command import asked
from membudget.command.asked import TRAIN, Asked, program, saved
from membudget.command.refused import Code, Refused

WIDTH = 40
"""Of the longest bar."""

TIGHT = 0.05
"""Share of the memory below which what is left is mentioned."""

STEP = 64
"""Tokens by which a shorter sequence is looked for."""


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``membudget fits``."""
    asked.add(parser)
    parser.add_argument(
        "--json", action="store_true", help="as JSON, memory in bytes"
    )


def run(args: argparse.Namespace) -> int:
    """Print the answer; whether a plan fits is the exit code."""
    with asked.quiet():
        question = Asked(args)
        if not args.json:  # what follows takes seconds
            print("\n".join(question.told()), flush=True)
        try:
            answer = question.answer()
            best = [c for c in answer.best if c.peak <= question.budget]
            if args.json:
                print(json.dumps(_json(question, answer, best), indent=2))
            else:
                print("\n".join(_text(question, answer, best)))
        except (ImportError, TypeError, ValueError) as error:
            raise Refused(str(error)) from None
    return Code.OK if best else Code.NO


def _plain(question: Asked) -> Any:
    """The worst moment of the plan without savings."""
    from membudget.planning import at_peak

    job = question.job
    plan = replace(question.plan, micro_batch=job.batch, checkpointed=0)
    return at_peak(job, plan)


def _text(question: Asked, answer: Any, best: list[Any]) -> Iterator[str]:
    from membudget.measuring import format_bytes
    from membudget.planning import at_peak

    whole = _plain(question).live
    yield ""
    yield f"All at once, without savings: {format_bytes(whole)}"
    yield ""
    if best:
        yield "It fits:" if whole <= question.budget else "It fits so:"
        for number, choice in enumerate(best, 1):
            yield from _choice(question, number, choice)
    else:
        yield from _instead(question, answer.smallest)
    yield ""
    shown = best[0] if best else answer.smallest
    yield from _bars(at_peak(question.job, shown.plan))
    yield ""
    yield "Bytes are those of PyTorch's tensors."
    yield f"Times are estimates from the data sheet of the {question.timed}."
    if question.card and not question.card.bf16:
        yield (
            "This card has no bf16: use torch.float16 and a GradScaler, "
            "which takes as much."
        )
        if question.network.kv_heads < question.network.heads:
            yield (
                "Nor has it a fused kernel for attention with grouped heads: "
                "its scores come on top, one block at a time."
            )


def _bars(worst: Any) -> Iterator[str]:
    """Bytes by category at the worst moment."""
    from membudget.measuring import format_bytes

    yield f"At its worst moment, {worst.row} ({worst.phase}):"
    most = max(worst.split.values())
    for part, size in worst.split.items():
        bar = "█" * round(WIDTH * size / most)
        yield f"  {part:12}{format_bytes(size):>11}  {bar}".rstrip()


def _choice(question: Asked, number: int, choice: Any) -> Iterator[str]:
    from membudget.measuring import format_bytes

    yield (
        f"{number}. {saved(question, choice.plan)}: "
        f"{format_bytes(choice.peak)}, {_time(choice.seconds)} a step"
    )
    left = 1 - choice.peak / question.budget
    if left < TIGHT:
        yield f"   {left:.1%} of the memory is left: it may fail"
    causes = [
        f"{cause} {share:+.0%}"
        for cause, share in choice.causes.items()
        if abs(share) >= 0.005
    ]
    if causes:
        yield f"   {choice.slowdown:.2f} times as long as with enough memory:"
        yield f"   {', '.join(causes)}"
    if question.args.form:
        yield from program(question, choice.plan).splitlines()


def _time(seconds: float) -> str:
    """With two digits: it is an estimate."""
    digits = float(f"{seconds:.2g}")
    return f"{1000 * digits:g} ms" if digits < 1 else f"{digits:g} s"


def _instead(question: Asked, smallest: Any) -> Iterator[str]:
    """What would fit, where nothing does."""
    from membudget.measuring import format_bytes
    from membudget.planning import memory

    budget, job, args = question.budget, question.job, question.args
    yield f"It does not fit. The least is {format_bytes(smallest.peak)},"
    yield f"with {saved(question, smallest.plan)}. Instead:"
    options = {"": question.plan}
    if args.train == "full" and question.plan.recipe != "bf16":
        options["--precision bf16 "] = question.family("full", recipe="bf16")
    if args.optimizer == "adam":
        options["--optimizer adam-8bit "] = question.family(
            args.train, optimizer="adam-8bit"
        )
    for train in list(TRAIN)[list(TRAIN).index(args.train) + 1 :]:
        options[f"--train {train} "] = question.family(train)
    found = []  # whether it fits, and in words
    for name, plan in options.items():
        most = memory(job, plan)
        if most <= budget:
            found.append((0, f"{name}fits, {format_bytes(most)}"))
        elif tokens := _shorter(question, plan):
            found.append((1, f"{name}--sequence {tokens} fits"))
        elif name:
            found.append((3, f"{name}does not fit, {format_bytes(most)}"))
    cards = sorted(
        (card.usable, name)
        for name, card in CARDS.items()
        if card.usable >= smallest.peak
    )
    if cards:
        found.append((2, f'--card "{cards[0][1]}" fits'))
    yield from (f"  {told}" for _, told in sorted(found, key=itemgetter(0)))


def _shorter(question: Asked, plan: Any) -> int:
    """The most tokens, in steps, that fit by a plan; 0 if none do."""
    from membudget.planning import memory

    low, high = 0, -(-question.job.tokens // STEP)
    while high - low > 1:
        middle = (low + high) // 2
        job = replace(question.job, tokens=STEP * middle)
        fits = memory(job, plan) <= question.budget
        low, high = (middle, high) if fits else (low, middle)
    return STEP * low


def _json(question: Asked, answer: Any, best: list[Any]) -> dict[str, Any]:
    worst = _plain(question)
    return {
        "model": question.args.config,
        "parameters": question.network.parameters,
        "budget": question.budget,
        "fits": bool(best),
        "all_at_once": {
            "peak": worst.live,
            "operator": worst.row,
            "phase": worst.phase,
            "split": worst.split,
        },
        "plans": [_planned(question, choice) for choice in best],
        "smallest": _planned(question, answer.smallest),
    }


def _planned(question: Asked, choice: Any) -> dict[str, Any]:
    plan = choice.plan
    kept = "micro_batch", "checkpointed", "recipe", "optimizer"
    row = {
        "peak": choice.peak,
        "seconds": choice.seconds,
        "slowdown": choice.slowdown,
        "causes": choice.causes,
        **{name: getattr(plan, name) for name in kept},
        "adapter": asdict(plan.adapter) if plan.adapter else None,
    }
    if question.args.form:
        row["program"] = program(question, plan)
    return row
