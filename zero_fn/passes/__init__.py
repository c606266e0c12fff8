"""Passes: functions from a program to a program.

A pass changes how a step runs, never what it computes. ``zf.jit(step, passes=[...])`` runs a user's
own after the built-in ones.
"""

from collections.abc import Callable

from ..program import Program
from .bucketing import bucket
from .casting import cast_directly, cross_narrow
from .donation import own_results, update_in_place
from .following import write_to_disk
from .lowering import exchange_on_gloo, gather_on_gloo, reduce_in_place
from .overlapping import overlap
from .placement import gather_late, reduce_early
from .reading import read_ahead
from .rounds import exchange_early
from .skipping import skip_in_update
from .summing import sum_in_place

Pass = Callable[[Program], Program]

# In this order. Reductions move first, so that gathers know which gradients are gone; what writes
# into memory comes after what moves reads of it.
BUILT_IN: tuple[Pass, ...] = (
    own_results,
    cast_directly,
    reduce_early,
    exchange_early,
    cross_narrow,
    gather_late,
    bucket,
    overlap,
    skip_in_update,
    write_to_disk,
    read_ahead,
    update_in_place,
    reduce_in_place,
    sum_in_place,
    exchange_on_gloo,
    gather_on_gloo,
)

__all__ = [
    "BUILT_IN",
    "Pass",
    "bucket",
    "cast_directly",
    "cross_narrow",
    "exchange_early",
    "exchange_on_gloo",
    "gather_late",
    "gather_on_gloo",
    "overlap",
    "own_results",
    "read_ahead",
    "reduce_early",
    "reduce_in_place",
    "skip_in_update",
    "sum_in_place",
    "update_in_place",
    "write_to_disk",
]
