"""Groups of parameters with optimizers of their own, by key path."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial

from ..freezing import freeze, merge
from ..placed import placed_leaves
from ..tree import PyTree
from .protocol import Optimizer


def by_path(rules: Mapping[str, Optimizer], default: Optimizer) -> Optimizer:
    """Each leaf by the optimizer of its key path: other learning rates, decays, betas.

    Each group has a state, and so a count of steps, of its own.

    >>> import zero_fn as zf
    >>> optimizer = zf.by_path({"embed.*": zf.adamw(1e-4)}, default=zf.adamw(1e-3))

    Args:
        rules: key-path pattern, as in ``fnmatch``, to the optimizer of the leaves that it matches.
        default: of the leaves that no pattern matches.

    Raises:
        TypeError: for an optimizer that exchanges gradients itself.
        ValueError: for a leaf that more than one pattern matches, or a pattern that matches none.
    """
    optimizers = (*rules.values(), default)
    for optimizer in optimizers:
        if hasattr(optimizer, "advance"):
            raise TypeError(
                "by_path takes (init, update) pairs, and got an optimizer that exchanges "
                "gradients itself (onebit_adam, say), which has one rate for all leaves"
            )

    def groups_of(params: PyTree) -> dict[str, int]:
        found: dict[str, int] = {}
        for leaf in placed_leaves(params):
            matching = [i for i, p in enumerate(rules) if fnmatchcase(leaf.path, p)]
            if len(matching) > 1:
                raise ValueError(
                    f"params at {leaf.path!r} matches {[list(rules)[i] for i in matching]}, and a "
                    "leaf has one optimizer: narrow the patterns"
                )
            found[leaf.path] = matching[0] if matching else len(rules)
        for i, pattern in enumerate(rules):
            if i not in found.values():
                raise ValueError(f"{pattern!r} matches none of the key paths {list(found)}")
        return found

    def cut(value: PyTree, groups: dict[str, int]) -> list[PyTree]:
        """The tree of each group that has leaves, in order; the others have None there."""
        parts, rest = [], value
        for group in sorted(set(groups.values()))[:-1]:
            own = {path for path, g in groups.items() if g == group}
            rest, part = freeze(rest, partial(_among, own))
            parts.append(part)
        return [*parts, rest]

    def used(groups: dict[str, int]) -> list[Optimizer]:
        return [optimizers[i] for i in sorted(set(groups.values()))]

    def init(params: PyTree) -> tuple[PyTree, ...]:
        groups = groups_of(params)
        parts = zip(used(groups), cut(params, groups), strict=True)
        return tuple(optimizer.init(part) for optimizer, part in parts)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        groups = groups_of(params)
        done = [
            optimizer.update(g, s, p)
            for optimizer, g, s, p in zip(
                used(groups), cut(grads, groups), state, cut(params, groups), strict=True
            )
        ]
        updates = merge(*(u for u, _ in done))
        return updates, tuple(s for _, s in done)

    return Optimizer(init, update)


def _among(paths: set[str], path: str, shape: tuple[int, ...]) -> bool:
    return path in paths
