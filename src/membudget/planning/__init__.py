"""Planning: which combination fits, at the least slowdown."""

from membudget.planning.machine import Machine, seconds
from membudget.planning.memory import at_peak, memory, static
from membudget.planning.plan import STAGES, Job, Plan
from membudget.planning.search import AXES, CAUSES, Answer, Choice, search
from membudget.planning.work import Work, work

__all__ = [
    "AXES",
    "CAUSES",
    "STAGES",
    "Answer",
    "Choice",
    "Job",
    "Machine",
    "Plan",
    "Work",
    "at_peak",
    "memory",
    "search",
    "seconds",
    "static",
    "work",
]
