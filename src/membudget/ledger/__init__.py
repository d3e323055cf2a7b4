"""The ledger: every byte predicted before it is measured.

Three ways to the same account: :func:`predict` writes a network's operators
down as rows and walks through them (what :class:`Transformer`,
:class:`CausalLM` and :class:`Chain` can express); the closed forms of
:mod:`membudget.ledger.formulas` are what the rows add up to; and
:func:`account` runs any model without data.
"""

from membudget.ledger.account import Account, account
from membudget.ledger.adapters import TARGETS, Adapter
from membudget.ledger.causal import CausalLM
from membudget.ledger.configs import from_config
from membudget.ledger.formulas import (
    activations,
    block_activations,
    korthikanti,
)
from membudget.ledger.host import HostStep, host_step
from membudget.ledger.largest import largest_batch
from membudget.ledger.lines import PeakLine, peak_at, peak_lines
from membudget.ledger.networks import (
    GPT2,
    LLAMA3_8B,
    PRESETS,
    Chain,
    Transformer,
)
from membudget.ledger.optimizers import OPTIMIZERS, PLANNED, Optimizer
from membudget.ledger.predict import predict, rules
from membudget.ledger.recipes import (
    RECIPES,
    Recipe,
    States,
    bytes_per_parameter,
    optimizer_bytes,
    states,
    update_workspace,
)
from membudget.ledger.walk import PaperMoment, Prediction

__all__ = [
    "GPT2",
    "LLAMA3_8B",
    "OPTIMIZERS",
    "PLANNED",
    "PRESETS",
    "RECIPES",
    "TARGETS",
    "Account",
    "Adapter",
    "CausalLM",
    "Chain",
    "HostStep",
    "Optimizer",
    "PaperMoment",
    "PeakLine",
    "Prediction",
    "Recipe",
    "States",
    "Transformer",
    "account",
    "activations",
    "block_activations",
    "bytes_per_parameter",
    "from_config",
    "host_step",
    "korthikanti",
    "largest_batch",
    "optimizer_bytes",
    "peak_at",
    "peak_lines",
    "predict",
    "rules",
    "states",
    "update_workspace",
]
