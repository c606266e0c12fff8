"""torch.nn modules as ``(params, apply)``, through ``torch.func.functional_call``.

A module's parameters become a flat tree, key path to tensor, and its forward a function of that
tree. What a module hides becomes an argument: buffers (a batch norm's running statistics) go in and
come out, and dropout draws from a key. The module itself is never written to.

While a module runs, ``pure_layers.py`` computes its dropout and batch norms.
"""

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from .collectives import AxisName, agreed, pmean
from .module_calls import call_module, stands_for_tensor, turn_of
from .pure_layers import PureMode
from .tree import PyTree, Tensor

Params = dict[str, Tensor]
Buffers = dict[str, Tensor]

_RESERVED = ("buffers", "dropout_key")


class ModuleFunction(NamedTuple):
    """What :func:`from_module` gives.

    Attributes:
        params: key path to parameter, each tensor once.
        apply: the forward as a function of them.
    """

    params: Params
    apply: "Apply"


@dataclass(frozen=True)
class Apply:
    """A module's forward, ``apply(params, *args, buffers=..., dropout_key=..., **kwargs)``.

    Attributes:
        module: the module without its values.
        buffers: key path to buffer as they were; what ``apply`` uses unless it is given others.
        frozen: the key paths of parameters that have ``requires_grad=False``, for
            ``zf.train_step(..., frozen=apply.frozen)``.
        ties: for each further name of a parameter or buffer, the name it has in the trees.
        average_over: see :func:`from_module`.
        normalize_over: see :func:`from_module`.
        training: whether the module trains; None: as each of its parts was set.
    """

    module: torch.nn.Module = field(repr=False)
    buffers: Buffers = field(repr=False)
    frozen: tuple[str, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    average_over: AxisName | None = None
    normalize_over: AxisName | None = None
    training: bool | None = None

    def train(self) -> "Apply":
        """The same function in training mode."""
        return replace(self, training=True)

    def eval(self) -> "Apply":
        """The same function in evaluation mode: no dropout, batch norm by running statistics."""
        return replace(self, training=False)

    def __call__(
        self,
        params: PyTree,
        *args: Any,
        buffers: Buffers | None = None,
        dropout_key: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """What the module returns for these parameters.

        Args:
            params: as :func:`from_module` gave them, with other values, quantised ones too
                (:func:`zero_fn.quantize`).
            args: the forward's own.
            buffers: the module's buffers; then the result is a pair, (output, new buffers). None:
                those it was made with, and what becomes of them is dropped.
            dropout_key: what dropout draws from (:func:`zero_fn.random.key`). The same key gives
                the same masks. Ranks with different rows fold in their place.
            kwargs: the forward's own.

        Raises:
            ValueError: for a missing or unknown key path, a tensor of another shape, or dropout
                without a key.
            NotImplementedError: if the module draws random numbers in another way.
        """
        state = self.buffers if buffers is None else buffers
        _check_names(state, _shapes(self.buffers.items()), "buffers")
        # Modules add to buffers in place; these are copies, of this call alone.
        own = {name: x.clone() for name, x in state.items()}
        mode = PureMode(type(self.module).__name__, dropout_key, self.normalize_over)
        with turn_of(self.module):
            _check_names(params, _shapes(self.module.named_parameters()), "params")
            given = {**params, **own}
            given |= {name: given[first] for name, first in self.ties.items()}
            with _mode_of(self.module, self.training), mode, _explained(self.module):
                out = call_module(self.module, given, args, kwargs)
        if buffers is None:
            return out
        return out, {name: self._averaged(mode.written.get(id(x), x)) for name, x in own.items()}

    def _averaged(self, x: Tensor) -> Tensor:
        axis = self.average_over
        if axis is None:
            return x
        return pmean(x, axis) if x.is_floating_point() else agreed(x, axis)


def from_module(
    module: torch.nn.Module,
    *,
    average_over: AxisName | None = None,
    normalize_over: AxisName | None = None,
) -> ModuleFunction:
    """A module as parameters and a function of them.

    >>> import torch
    >>> import zero_fn as zf
    >>> params, apply = zf.from_module(torch.nn.Linear(3, 2))
    >>> sorted(params)
    ['bias', 'weight']
    >>> apply(params, torch.ones(4, 3)).shape
    torch.Size([4, 2])

    Args:
        module: any module; parameters that it has under several names are one leaf.
        average_over: the mesh axis, or axes, over which new buffers are averaged (floating-point
            ones), so that the ranks' running statistics stay the same.
        normalize_over: the mesh axis, or axes, whose ranks' rows a batch norm takes together, as
            ``torch.nn.SyncBatchNorm``; the result is that of one rank with the whole batch.

    Returns:
        The parameters, copied and detached, and the function; see :class:`Apply`.

    Raises:
        TypeError: for what is no module.
        ValueError: if its forward has arguments that ``apply`` has itself, or if it has parameters
            that are not yet made (lazy modules).
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"from_module takes a torch.nn.Module, and got {module!r}")
    taken = [n for n in _RESERVED if n in inspect.signature(module.forward).parameters]
    if taken:
        raise ValueError(
            f"{type(module).__name__}.forward has an argument {taken[0]!r}, which apply has too; "
            "wrap the module in one whose forward names it otherwise"
        )
    params, buffers = {}, {}
    ties: dict[str, str] = {}
    frozen: list[str] = []
    first: dict[int, str] = {}
    empty: dict[int, Any] = {}
    for name, p in _slots(module, module.named_parameters(remove_duplicate=False)):
        if isinstance(p, torch.nn.parameter.UninitializedParameter):
            raise ValueError(f"{name!r} has no shape yet; run the module once on a batch")
        if first.setdefault(id(p), name) != name:
            ties[name] = first[id(p)]
            continue
        params[name] = p.detach().clone()
        frozen += [] if p.requires_grad else [name]
        empty[id(p)] = torch.nn.Parameter(p.detach().to("meta"), requires_grad=False)
    for name, b in _slots(module, module.named_buffers(remove_duplicate=False)):
        if first.setdefault(id(b), name) != name:
            ties[name] = first[id(b)]
            continue
        buffers[name] = b.detach().clone()
        empty[id(b)] = b.detach().to("meta")
    body = copy.deepcopy(module, empty)  # without a value
    apply = Apply(body, buffers, tuple(frozen), ties, average_over, normalize_over)
    return ModuleFunction(params, apply)


def _slots(
    module: torch.nn.Module, named: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module, each place once, where a part of it may stand at several."""
    seen = set()
    for name, x in named:
        part, _, attribute = name.rpartition(".")
        slot = id(module.get_submodule(part)), attribute
        if slot not in seen:
            seen.add(slot)
            yield name, x


def to_module(
    module: torch.nn.Module, params: PyTree, buffers: Buffers | None = None
) -> torch.nn.Module:
    """Write parameters, and buffers if given, into a module; the module itself is returned.

    Args:
        module: the one that :func:`from_module` was given, or another of its shape.
        params: whole tensors by key path; of a state's pieces ``zf.gather_tree(params, mesh)``.
        buffers: the buffers by key path; None: they stay as they are.

    Raises:
        ValueError: for a missing or unknown key path, or a tensor of another shape; nothing is
            written then.
    """
    _check_names(params, _shapes(module.named_parameters()), "params")
    if buffers is not None:
        _check_names(buffers, _shapes(module.named_buffers()), "buffers")
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(params[name])
        for name, b in module.named_buffers() if buffers is not None else ():
            b.copy_(buffers[name])  # type: ignore[index]
    return module


def _shapes(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in tensors}


def _check_names(given: Any, wanted: Mapping[str, tuple[int, ...]], what: str) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(f"{what} is {type(given).__name__}; it is a dict, key path to tensor")
    for name, shape in wanted.items():
        if name not in given:
            raise ValueError(f"{what} lacks {name!r}; it has {sorted(given)[:8]}")
        x = given[name]
        if not stands_for_tensor(x):
            raise ValueError(
                f"{what} at {name!r} is {x!r}, no whole tensor; zf.unshard(params) inside spmd "
                "gives whole ones, and zf.gather_tree(params, mesh) outside"
            )
        if tuple(x.shape) != shape:
            raise ValueError(
                f"{what} at {name!r} has shape {tuple(x.shape)}; the module's is {shape}"
            )
    unknown = sorted(set(given) - set(wanted))
    if unknown:
        raise ValueError(f"{what} has {unknown[0]!r}, which the module has not")


@contextmanager
def _mode_of(module: torch.nn.Module, training: bool | None) -> Iterator[None]:
    """The module in training or evaluation mode meanwhile."""
    if training is None:
        yield
        return
    before = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, was in before:
            part.training = was


@contextmanager
def _explained(module: torch.nn.Module) -> Iterator[None]:
    """Say what to do where a module looks at the values of a traced or simulated tensor."""
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in ("data-dependent", ".item()")):
            raise
        raise RuntimeError(
            f"{type(module).__name__} branches on the values of a tensor, which a traced step and "
            "simulated ranks cannot. transformers looks for padding and packed sequences so, "
            "unless it is given a mask of 4 dimensions, (batch or 1, 1, queries, keys), true "
            "where a query sees a key: attention_mask=torch.ones(n, n).bool().tril()[None, None] "
            f"for a causal model. ({error})"
        ) from error
