"""Quantised weights: leaves of a pytree as small integers, or 8-bit floats, with their scales.

    method   a value is                      a scale covers         bytes a weight
    int8     an int8, -127 to 127            a row, or a group      1 + 4 / row or group
    int4     4 bits, -8 to 7, two a byte     a group of 32          0.5 + 4 / 32
    fp8      e4m3 (arXiv 2209.05433)         a row, or a group      1 + 4 / row or group

A row is what one output of a linear layer is made of, the last dimension of the weight. No data is
needed: the scale of a row or group comes from its largest value.

A :class:`Quantized` is a node whose children are plain tensors, or the pieces of one: it is
sharded, sliced, saved and traced as any tree is. Tensor functions see it as a tensor:
``F.linear`` and ``F.embedding`` on one compute from the small values (``products.py``), every other
function gets the whole weight. So a model need not know which of its weights are quantised.
"""

import math
from typing import Any, Literal, NamedTuple

import torch

from .. import tree
from ..collectives import all_gather_invariant
from ..placed import is_placed
from ..sharding import Tied
from ..slicing import Sliced, SliceRule
from ..tree import PyTree, Tensor, Where

Method = Literal["int8", "int4", "fp8"]

METHODS: tuple[Method, ...] = ("int8", "int4", "fp8")
LARGEST = {"int8": 127.0, "int4": -8.0, "fp8": 448.0}  # the value that the largest weight becomes
GROUP = {"int8": 0, "int4": 32, "fp8": 0}
_E4M3 = torch.float8_e4m3fn


class Format(NamedTuple):
    """The static fields of a quantised weight.

    Attributes:
        method: what a value is.
        group: how many neighbours of the last dimension share a scale; 0: the whole row.
        dtype: the dtype of the weight before, and of what is computed from it.
        activations: whether linear layers round their inputs, each row to int8 with a scale of its
            own, or compute with them as they are (None).
        padding: how many values of the last dimension are filled up.
    """

    method: Method
    group: int
    dtype: torch.dtype
    activations: Literal["int8"] | None
    padding: int


class Quantized:
    """A pytree node: one quantised weight.

    Attributes:
        values: (..., inputs) int8; for int4 (..., inputs / 2) uint8, the even places in the low
            four bits, each plus 8; for fp8 (..., inputs) uint8, the bits of the e4m3 numbers, so
            that every transport and file format takes them.
        scales: (..., groups of a row), float32. A weight is its value times its scale.
        format: the rest.
    """

    __slots__ = ("__weakref__", "format", "scales", "values")  # RNNs keep weak references
    __zero_fn_frozen__ = True  # zf.shard takes its integers

    def __init__(self, values: Any, scales: Any, format: Format) -> None:
        self.values, self.scales, self.format = values, scales, format

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight."""
        *rows, stored = self.values.shape
        columns = stored * (2 if self.format.method == "int4" else 1) - self.format.padding
        return torch.Size([*rows, columns])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight that it stands for."""
        return self.format.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return math.prod(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def is_floating_point(self) -> bool:
        return True

    def __getitem__(self, rows: int | slice | Tensor) -> Tensor:
        """Some of the first dimension, as plain weights."""
        if not isinstance(rows, int | slice | Tensor):
            raise TypeError(
                f"a Quantized is indexed along its first dimension, not by {rows!r}; "
                "zf.dequantize(w)[...] indexes the whole weight"
            )
        return dequantize(Quantized(self.values[rows], self.scales[rows], self.format))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        from .products import FUNCTIONS

        kwargs = kwargs or {}
        if func in FUNCTIONS:
            return FUNCTIONS[func](*args, **kwargs)
        return func(*dequantize(args), **dequantize(kwargs))

    def __repr__(self) -> str:
        if not hasattr(self.values, "shape"):
            return f"Quantized({self.values!r}, {self.scales!r})"
        each = f"{self.format.group} values" if self.format.group else "row"
        inputs = ", inputs int8" if self.format.activations else ""
        sizes = ",".join(map(str, self.shape))
        return f"{self.format.method}[{sizes}] with a scale a {each}{inputs}"


tree.register_node(
    Quantized,
    lambda node: ((node.values, node.scales), node.format),
    lambda format, parts: Quantized(parts[0], parts[1], format),
    ("values", "scales"),
)


def is_quantized(node: Any) -> bool:
    """Whether a node is a quantised weight."""
    return isinstance(node, Quantized)


def quantize(
    params: PyTree,
    method: Method = "int8",
    where: Where | None = None,
    *,
    group: int | None = None,
    activations: Literal["int8"] | None = None,
) -> PyTree:
    """The same tree, with quantised weights at the places that ``where`` names.

    >>> import torch, zero_fn as zf
    >>> zf.quantize({"weight": torch.ones(6, 4), "bias": torch.ones(6)})["weight"]
    int8[6,4] with a scale a row

    Args:
        params: a tree of tensors; slices over an axis too (:func:`zero_fn.slice_params`), inside
            ``spmd``. A tensor that stands at two places is quantised once.
        method: ``"int8"``, ``"int4"`` or ``"fp8"``.
        where: patterns of key paths (``"blocks.*.weight"``), or a function of key path and shape.
            None: every floating-point leaf of two or more dimensions.
        group: how many neighbours along the last dimension share a scale; 0: the whole row. None:
            32 for int4, 0 for the others.
        activations: ``"int8"``: linear layers round their inputs too, for int8 with a scale a row.

    Returns:
        The tree with a :class:`Quantized` at each place.

    Raises:
        ValueError: for an unknown method, a group below 0, a pattern that names no leaf, sharded
            leaves, slices of rows that groups don't divide, or activations of another method.
        TypeError: naming the place that is no floating-point tensor of two or more dimensions.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; there are {', '.join(METHODS)}")
    size = GROUP[method] if group is None else group
    if size < 0:
        raise ValueError(f"group is {group}; it takes a number of values, or 0 for the whole row")
    if activations not in (None, "int8"):
        raise ValueError(f"activations is {activations!r}; it is None or 'int8'")
    if activations and (method != "int8" or size):
        raise ValueError(
            f"activations='int8' computes in int8 with a scale a row, and the weights are {method} "
            f"with group={size}; take method='int8', group=0"
        )
    chosen = _chosen(params, where)
    made: dict[int, Quantized] = {}
    formats: dict[str, Format] = {}

    def at(path: str, leaf: Any) -> Any:
        if isinstance(leaf, Tied) or path not in chosen:
            return leaf
        if id(leaf) not in made:
            _check(path, leaf)
            made[id(leaf)] = _quantized(path, leaf, method, size, activations)
        formats[path] = made[id(leaf)].format
        return made[id(leaf)]

    def tied(node: Any) -> Any:
        if not isinstance(node, Tied) or node.to not in formats:
            return node
        values, scales = (Tied(tree.join_path(node.to, name)) for name in ("values", "scales"))
        return Quantized(values, scales, formats[node.to])

    return tree.map(tied, tree.map_with_path(at, params, is_leaf=_is_leaf), is_leaf=_is_leaf)


def dequantize(params: PyTree) -> PyTree:
    """The same tree with plain weights, in the dtype that each had before."""

    def whole(node: Any) -> Any:
        if not isinstance(node, Quantized):
            return node
        return weights(node.values, node.scales, node.format, node.dtype)

    return tree.map(whole, params, is_leaf=is_quantized)


def weights(values: Tensor, scales: Tensor, format: Format, dtype: torch.dtype) -> Tensor:
    """The weights that some rows of values and scales stand for."""
    plain = numbers(values, format, dtype)
    scales = scales.to(dtype)
    if format.group:
        plain = plain.unflatten(-1, (-1, format.group)) * scales.unsqueeze(-1)
        plain = plain.flatten(-2)
    else:
        plain = plain * scales
    return plain[..., : plain.shape[-1] - format.padding] if format.padding else plain


def numbers(values: Tensor, format: Format, dtype: torch.dtype) -> Tensor:
    """What the values are before their scales, padding included."""
    if format.method == "int4":
        pairs = torch.stack([values & 15, values >> 4], -1).flatten(-2)
        return pairs.to(dtype) - 8
    if format.method == "fp8":
        # The bits of an e4m3 number in those of a float16, whose exponent starts 8 lower. Exact,
        # and some times as fast as torch's conversion on a CPU.
        wide = values.to(torch.int16)
        half = ((wide & 0x80) << 8 | (wide & 0x7F) << 7).view(torch.float16)
        return half.to(torch.promote_types(dtype, torch.float32)).mul(256).to(dtype)
    return values.to(dtype)


def _is_leaf(node: Any) -> bool:
    return is_placed(node) or isinstance(node, Tied | Quantized)


def _chosen(params: PyTree, where: Where | None) -> set[str]:
    """The key paths to quantise."""
    paths, leaves = tree.paths(params, _is_leaf), tree.leaves(params, _is_leaf)
    if where is None:
        return {
            path
            for path, x in zip(paths, leaves, strict=True)
            if len(getattr(x, "shape", ())) > 1
            and not isinstance(x, Quantized)
            and x.dtype.is_floating_point
        }
    meant = tree.chosen(where, paths, leaves, "where")
    return {path for path, on in zip(paths, meant, strict=True) if on}


def _check(path: str, leaf: Any) -> None:
    if isinstance(leaf, Quantized):
        raise ValueError(f"params at {path!r} is quantised already: {leaf!r}")
    if is_placed(leaf) and not (isinstance(leaf, Sliced) and isinstance(leaf.local, Tensor)):
        raise ValueError(
            f"params at {path!r} is {leaf!r}; quantise whole leaves or slices first and shard what "
            "comes out: zf.shard(zf.quantize(params), stage)"
        )
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None or not dtype.is_floating_point or len(shape) < 2:
        what = repr(leaf) if shape is None else f"{dtype} of shape {tuple(shape)}"
        raise TypeError(
            f"params at {path!r} is {what}; a floating-point tensor of two or more dimensions can "
            "be quantised, so narrow `where`"
        )


def _quantized(path: str, leaf: Any, method: Method, group: int, activations: Any) -> Quantized:
    if not isinstance(leaf, Sliced):
        return _of_tensor(leaf, method, group, activations)
    # A row that is cut keeps one scale, so that the mesh is not seen in what comes out.
    in_rows = leaf.rule is not None and leaf.rule.dim == leaf.local.ndim - 1
    shared = leaf.axis if in_rows and not group else None
    part = _of_tensor(leaf.local, method, group, activations, shared)

    def slices(x: Tensor, rule: SliceRule | None) -> Sliced:
        # Along the cut dimension the whole is as many times its slice as there are ranks, but for
        # padding, which stands at the end of dimension 0.
        shape = list(x.shape)
        if rule is not None and in_rows:
            columns, stored = leaf.local.shape[-1], shape[-1]
            if part.format.padding or any(
                n * stored % (columns * leaf.parts) for n in rule.sections
            ):
                raise ValueError(
                    f"params at {path!r} is {leaf!r}, and groups of {part.format.group} values "
                    f"don't divide its slices, of {columns} columns; give a group that does"
                )
            rule = rule._replace(sections=tuple(n * stored // columns for n in rule.sections))
            shape[-1] *= leaf.parts
        elif rule is not None:
            shape[rule.dim] = min(shape[rule.dim] * leaf.parts, leaf.shape[rule.dim])
        return Sliced(x, tuple(shape), leaf.axis, rule, leaf.parts)

    scales = slices(part.scales, None if shared else leaf.rule)
    return Quantized(slices(part.values, leaf.rule), scales, part.format)


def _of_tensor(
    w: Tensor, method: Method, group: int, activations: Any, shared: str | None = None
) -> Quantized:
    """One tensor; with an axis, the rows of all its ranks' tensors have common scales."""
    columns = w.shape[-1]
    size = min(group, columns + columns % 2) if group else 0
    padding = -columns % (size or (2 if method == "int4" else 1))
    if size and method == "int4" and size % 2:
        padding += (columns + padding) % 2 * size  # two values a byte
    wide = w.detach().to(torch.promote_types(w.dtype, torch.float32))
    wide = torch.nn.functional.pad(wide, (0, padding)) if padding else wide
    grouped = wide.unflatten(-1, (-1, size)) if size else wide.unsqueeze(-2)
    largest = _largest(grouped)
    if shared is not None:
        largest = _largest(all_gather_invariant(largest, shared, dim=-1).unsqueeze(-2))
    # For int4 the largest becomes -8, whichever its sign, so that all 16 values are used.
    largest = largest if method == "int4" else largest.abs()
    scales = (largest / LARGEST[method]).float()
    divisor = torch.where(scales == 0, 1, scales).to(wide.dtype)
    scaled = (grouped / divisor.unsqueeze(-1)).flatten(-2)
    if method == "fp8":
        values = scaled.clamp(-448, 448).float().to(_E4M3).view(torch.uint8)
    elif method == "int8":
        values = scaled.round().clamp(-127, 127).to(torch.int8)
    else:
        places = (scaled.round().clamp(-8, 7) + 8).to(torch.uint8)
        values = places[..., ::2] | places[..., 1::2] << 4
    return Quantized(values, scales, Format(method, size, w.dtype, activations, padding))


def _largest(groups: Tensor) -> Tensor:
    """The value of each group that lies farthest from 0; (..., groups, values) to (..., groups)."""
    if groups.shape[-1] == 0:
        return groups.new_zeros(groups.shape[:-1])
    return groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
