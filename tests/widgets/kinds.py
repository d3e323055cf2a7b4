"""All widgets, for the tests that are the same for all."""

import kind_accumulation
import kind_adapters
import kind_bits
import kind_fits
import kind_ledger
import kind_lossscale
import kind_offloading
import kind_parallelism
import kind_planning
import kind_recipes
import kind_schedules
import kind_segments
import kind_sharding
import kind_timeline
import kind_yours
import pytest

KINDS = tuple(
    module.KIND
    for module in (
        kind_accumulation,
        kind_adapters,
        kind_bits,
        kind_fits,
        kind_ledger,
        kind_lossscale,
        kind_offloading,
        kind_parallelism,
        kind_planning,
        kind_recipes,
        kind_schedules,
        kind_segments,
        kind_sharding,
        kind_timeline,
        kind_yours,
    )
)
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
