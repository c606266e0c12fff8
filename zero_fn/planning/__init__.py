"""Plans: what one step costs on one rank, before it runs.

``plans.py`` reads them off a traced program, ``estimating.py`` makes seconds of bytes, and says what
a device holds when parts live elsewhere, ``drawing.py`` shows them.
"""

from .estimating import Estimate
from .plans import Comparison, Plan, compare, eval_shape, plan, with_timeline

__all__ = ["Comparison", "Estimate", "Plan", "compare", "eval_shape", "plan", "with_timeline"]
