"""The training script's functions, for ranks to call."""

import sys
from contextlib import contextmanager

from membudget.sharding import training_script

if str(training_script().parent) not in sys.path:
    sys.path.insert(0, str(training_script().parent))

import parallel_train


def main(*options):
    parallel_train.train(parallel_train.options(options))
