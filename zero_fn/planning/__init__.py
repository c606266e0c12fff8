"""Plans: what one step costs on one rank, before it runs.

``plans.py`` reads them off a traced program, ``residing.py`` says what is on the device and what
lives elsewhere, ``estimating.py`` makes seconds of bytes and operations, ``drawing.py`` shows them.
"""

from .estimating import Estimate
from .plans import Comparison, Plan, compare, eval_shape, plan, with_timeline

__all__ = ["Comparison", "Estimate", "Plan", "compare", "eval_shape", "plan", "with_timeline"]
