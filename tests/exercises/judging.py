"""What a checker says of an answer."""

from membudget import exercises
from membudget.exercises.core import CORRECT, NOT_RIGHT
from membudget.exercises.mistakes import mistakes


def checker(name):
    return getattr(exercises, f"check_{name}")


def judged(name, answer):
    return checker(name).judge(answer)


def accepts(name, answer):
    outcome = judged(name, answer)
    assert outcome.state == CORRECT, outcome


def rejects(name, answer, words):
    outcome = judged(name, answer)
    assert outcome.state == NOT_RIGHT
    assert words in outcome.text


def mistaken(name, words):
    """The first known mistake whose hint holds these words."""
    check = checker(name)
    known = mistakes(check.solution, check.mistakes)
    return next(fn for hint, fn in known if words in hint)


def edits(texts):
    """Answers that are edits of solutions, as known mistakes are.

    Args:
        texts: of each exercise, edits and what is said of them.
    """
    return [
        (name, answer, words)
        for name, text in texts.items()
        for words, answer in mistakes(checker(name).solution, text)
    ]
