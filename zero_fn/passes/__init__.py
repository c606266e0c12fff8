"""Passes: functions from a program to a program.

A pass changes how a step runs, never what it computes. ``zf.jit(step, passes=[...])`` runs a user's
own after the built-in ones.
"""

from collections.abc import Callable

from ..program import Program
from .donation import own_results, update_in_place
from .placement import gather_late, reduce_early

Pass = Callable[[Program], Program]

# In this order. Reductions move first, so that gathers know which gradients are gone.
BUILT_IN: tuple[Pass, ...] = (own_results, reduce_early, gather_late, update_in_place)

__all__ = ["BUILT_IN", "Pass", "gather_late", "own_results", "reduce_early", "update_in_place"]
