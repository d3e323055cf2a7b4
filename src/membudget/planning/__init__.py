"""Planning: which combination fits, at the least slowdown."""

from membudget.planning.counter import WorkCounter
from membudget.planning.largest import largest_micro_batch
from membudget.planning.layout import Layout
from membudget.planning.layouts import ASSUMED, layouts
from membudget.planning.machine import Machine, calibrate, seconds
from membudget.planning.memory import at_peak, memory, static
from membudget.planning.own import OwnJob, step
from membudget.planning.plan import STAGES, Job, Plan
from membudget.planning.ranks import need
from membudget.planning.search import AXES, CAUSES, Answer, Choice, search
from membudget.planning.work import Work, work

__all__ = [
    "ASSUMED",
    "AXES",
    "CAUSES",
    "STAGES",
    "Answer",
    "Choice",
    "Job",
    "Layout",
    "Machine",
    "OwnJob",
    "Plan",
    "Work",
    "WorkCounter",
    "at_peak",
    "calibrate",
    "largest_micro_batch",
    "layouts",
    "memory",
    "need",
    "search",
    "seconds",
    "static",
    "step",
    "work",
]
