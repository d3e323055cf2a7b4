"""Checked exercises: ``check_NAME(fn)`` prints how a solution fares.

It prints one of three states, "Not attempted yet.", "Not right yet:" with a
hint, or "Correct.", and raises nothing. ``check_NAME.judge(fn)`` returns the
same as an :class:`Outcome`.
"""

from membudget.exercises.accumulation import (
    check_accumulate,
    check_amp_step,
    check_clipped_step,
    check_largest_micro_batch,
    check_mean_of_means_error,
    check_noise_scale,
    check_padded_gradient,
    check_token_weights,
    check_train_epoch,
    check_weights,
)
from membudget.exercises.amp_loops import (
    check_backward_outside,
    check_best_epoch,
    check_clipped_amp_step,
    check_train_step,
    check_two_losses,
)
from membudget.exercises.checkpointing import (
    check_best_count,
    check_cheapest_count,
    check_expensive,
    check_forget,
    check_remember,
    check_same_network,
    check_segment_step,
    check_sequential_peak,
    check_shrinking,
    check_square_root,
    check_survive,
    check_two_sweeps,
    check_uneven,
)
from membudget.exercises.core import Exercise, Outcome
from membudget.exercises.ledger import (
    check_estimate,
    check_extrapolate,
    check_gated_block,
    check_largest_batch,
    check_llama_parameters,
    check_model_states,
    check_saved_bytes,
)
from membudget.exercises.measuring import (
    check_alive_at_peak,
    check_allocated,
    check_collect_above,
    check_predict_peak,
    check_statuses,
    check_train,
)
from membudget.exercises.own_ledger import OwnLedger, check_own_ledger
from membudget.exercises.precision import (
    check_autocast_saved,
    check_loss_scale,
    check_round_to,
    check_scale_history,
    check_stochastic_round,
    check_survives,
)

__all__ = [
    "Exercise",
    "Outcome",
    "OwnLedger",
    "check_accumulate",
    "check_accumulate_sharded",
    "check_alive_at_peak",
    "check_allocated",
    "check_amp_step",
    "check_autocast_saved",
    "check_average_gradients",
    "check_backward_outside",
    "check_best_count",
    "check_best_epoch",
    "check_cheapest_count",
    "check_clipped_amp_step",
    "check_clipped_step",
    "check_collect_above",
    "check_estimate",
    "check_expensive",
    "check_extrapolate",
    "check_fewest_ranks",
    "check_forget",
    "check_gated_block",
    "check_in_step",
    "check_largest_batch",
    "check_largest_micro_batch",
    "check_llama_parameters",
    "check_loss_scale",
    "check_mean_of_means_error",
    "check_model_states",
    "check_noise_scale",
    "check_own_ledger",
    "check_padded_gradient",
    "check_predict_peak",
    "check_rank_bytes",
    "check_remember",
    "check_round_to",
    "check_same_network",
    "check_saved_bytes",
    "check_scale_history",
    "check_segment_step",
    "check_sequential_peak",
    "check_shard_bytes",
    "check_shrinking",
    "check_square_root",
    "check_statuses",
    "check_stochastic_round",
    "check_stored_rows",
    "check_survive",
    "check_survives",
    "check_token_weights",
    "check_train",
    "check_train_epoch",
    "check_train_step",
    "check_two_losses",
    "check_two_sweeps",
    "check_uneven",
    "check_weighted_average",
    "check_weights",
]


def __getattr__(name: str) -> object:
    """The checkers on sharding: what they import takes a second."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from membudget.exercises import sharding

    return getattr(sharding, name)
