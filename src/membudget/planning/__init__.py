"""Planning: which combination fits, at the least slowdown."""

from membudget.planning.largest import largest_micro_batch
from membudget.planning.machine import Machine, calibrate, seconds
from membudget.planning.memory import at_peak, memory, static
from membudget.planning.plan import STAGES, Job, Plan
from membudget.planning.search import AXES, CAUSES, Answer, Choice, search
from membudget.planning.work import Work, WorkCounter, work

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
    "WorkCounter",
    "at_peak",
    "calibrate",
    "largest_micro_batch",
    "memory",
    "search",
    "seconds",
    "static",
    "work",
]
