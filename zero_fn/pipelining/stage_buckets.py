"""Compressed gradients of a pipeline: each stage's leaves travel in a bucket of their own.

An optimizer that exchanges gradients packs leaves into one flat bucket, and ranks of the pipeline's
axis have different leaves. So each stage has a state of its own, of its own leaves, wherever it
lives: numbers do not depend on which rank holds which stages. A leaf that stands in several stages
has a bucket for itself. Each rank that holds a copy sends the same, and gets the same back.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .. import tree
from ..collectives import psum, pvary
from ..optim import LocalOptimizer
from ..precision import all_finite
from ..sharding import Tied
from ..tree import PyTree, Tensor
from .staging import Copy, Staged, is_one_leaf

Name = int | str  # a stage, for its own leaves; the key path of a leaf that several stages use


class StageState(NamedTuple):
    """The optimizer's states of one stage.

    Attributes:
        own: that of the leaves which only this stage uses; empty without such leaves.
        tied: by key path, those of leaves that other stages use as well.
    """

    own: PyTree
    tied: dict[str, PyTree]


class StagesState(NamedTuple):
    """The state of an optimizer over the stages.

    Attributes:
        stages: a :class:`StageState` each, where the stage lives.
        finite: whether the last gradients of all ranks and stages were finite, 0-dim bool.
    """

    stages: tuple[PyTree, ...]
    finite: Tensor


def by_stage(optimizer: LocalOptimizer, axis: str) -> LocalOptimizer:
    """The same optimizer for a tuple of stages' trees, as a :class:`Pipeline` takes and gives them.

    A step at which a gradient is not finite, in whatever stage, changes nothing in all of them.

    Args:
        optimizer: what exchanges the gradients of one stage.
        axis: the mesh axis over which it does.
    """

    def init(params: PyTree) -> StagesState:
        parts = _Parts(params)
        states = {name: optimizer.init(part) for name, part in parts.cut(params).items()}
        return StagesState(parts.of_stages(states), torch.ones((), dtype=torch.bool))

    def update(
        grads: PyTree, state: StagesState, params: PyTree
    ) -> tuple[tuple[PyTree, ...], StagesState]:
        finite = psum((~all_finite(grads)).to(torch.float32), axis) == 0
        here = pvary(finite, axis)
        grads = tree.map(lambda g: torch.where(here, g, math.nan), grads)  # no bucket takes part
        parts = _Parts(params)
        states, updates = by_name(state.stages), {}
        of = parts.cut(grads)
        for name, part in parts.cut(params).items():
            updates[name], states[name] = optimizer.update(of[name], states[name], part)
        return parts.join(updates, params), StagesState(parts.of_stages(states), finite)

    def advance(state: StagesState) -> StagesState:
        return state._replace(stages=_mapped(optimizer.advance, state.stages))

    def view(params: PyTree, state: StagesState) -> tuple[PyTree, ...]:
        parts, states = _Parts(params), by_name(state.stages)
        seen = {name: optimizer.view(x, states[name]) for name, x in parts.cut(params).items()}
        return parts.join(seen, params)

    return LocalOptimizer(init, update, advance, view, lambda state: state.finite)


def by_name(stages: Sequence[PyTree]) -> dict[Name, PyTree]:
    """The states that live here."""
    found: dict[Name, PyTree] = {}
    for number, stage in enumerate(_bare(stages)):
        if isinstance(stage, StageState):
            found[number] = stage.own
            found.update(stage.tied)
    return found


def _mapped(f: Callable[[PyTree], PyTree], stages: Sequence[PyTree]) -> tuple[PyTree, ...]:
    """The function of each state that lives here."""

    def each(stage: StageState) -> StageState:
        own = f(stage.own) if tree.leaves(stage.own) else stage.own
        return StageState(own, {name: f(x) for name, x in stage.tied.items()})

    return tuple(
        (Staged(each(node.local), node.home) if node.here else node)
        if isinstance(node, Staged)
        else each(node)
        for node in stages
    )


class _Parts:
    """The leaves of the stages that live here, and the bucket that each travels in."""

    def __init__(self, params: Sequence[PyTree]) -> None:
        trees = _bare(params)
        nodes, self.treedef = tree.flatten(trees, is_one_leaf)
        paths = tree.paths(trees, is_one_leaf)
        self.homes = [node.home if isinstance(node, Staged) else None for node in params]
        self.stages = [int(path.split(".")[0]) for path in paths]
        names = {
            path: node.of if isinstance(node, Copy) else path
            for path, node in zip(paths, nodes, strict=True)
        }
        shared = set(_copies(params))
        for path, node in zip(paths, nodes, strict=True):
            if isinstance(node, Tied):
                # within all stages' tree, or within the stage's own
                stage = path.split(".")[0]
                to = node.to if node.to in names else tree.join_path(stage, node.to)
                if to.split(".")[0] != stage:
                    shared.add(names[to])
        self.names: list[Name | None] = [
            None
            if isinstance(node, Tied)
            else names[path]
            if names[path] in shared
            else int(path.split(".")[0])
            for path, node in zip(paths, nodes, strict=True)
        ]

    def cut(self, values: Sequence[PyTree]) -> dict[Name, PyTree]:
        """For each bucket the trees, without the leaves of others."""
        nodes = tree.leaves(_bare(values), is_one_leaf)
        found = {}
        for name in self._order():
            own = [
                (node.local if isinstance(node, Copy) else node) if name == other else None
                for node, other in zip(nodes, self.names, strict=True)
            ]
            found[name] = tree.unflatten(self.treedef, own)
        return found

    def join(self, parts: dict[Name, PyTree], like: Sequence[PyTree]) -> tuple[PyTree, ...]:
        """The trees again, from those of the buckets; tied leaves are those of ``like``."""
        rest = {name: iter(tree.leaves(part, is_one_leaf)) for name, part in parts.items()}

        def filled(node: Any, name: Name | None) -> Any:
            if name is None:
                return node
            new = next(rest[name])
            return Copy(new, node.of) if isinstance(node, Copy) else new

        nodes = tree.leaves(_bare(like), is_one_leaf)
        whole = tree.unflatten(self.treedef, map(filled, nodes, self.names))
        return self._homed(whole)

    def of_stages(self, states: dict[Name, PyTree]) -> tuple[PyTree, ...]:
        """The states by stage: that of a shared leaf stands in the first stage here that has it."""
        stages = [StageState(states.get(number, ()), {}) for number in range(len(self.homes))]
        for name in self._order():
            if isinstance(name, str):
                stages[self.stages[self.names.index(name)]].tied[name] = states[name]
        return self._homed(stages)

    def _homed(self, stages: Sequence[PyTree]) -> tuple[PyTree, ...]:
        """What lives here is marked so, as the parameters are."""
        return tuple(
            stage if home is None else Staged(stage if home.elsewhere is None else None, home)
            for stage, home in zip(stages, self.homes, strict=True)
        )

    def _order(self) -> list[Name]:
        return [name for name in dict.fromkeys(self.names) if name is not None]


def _bare(stages: Sequence[PyTree]) -> tuple[PyTree, ...]:
    """The trees that live here, and nothing for the others."""
    return tuple(
        (node.local if node.here else ()) if isinstance(node, Staged) else node for node in stages
    )


def _copies(params: Sequence[PyTree]) -> list[str]:
    """The key paths of leaves that stand on several ranks."""
    staged = [node for node in params if isinstance(node, Staged)]
    nodes = [x for stage in staged for x in tree.leaves(stage.looks(), is_one_leaf)]
    return [node.of for node in nodes if isinstance(node, Copy)]
