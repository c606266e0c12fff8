"""Pytrees: nested dicts, tuples, NamedTuples and dataclasses of tensors, through optree.

All flattening in the library goes through this file, in one optree namespace, so that the nodes
defined here and above (``Sharded``, a user's dataclasses) are seen everywhere. Key paths are
strings such as ``blocks.0.attention.weight``; they name leaves in errors and in checkpoints.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

import optree
import torch
import torch.utils._pytree as torch_pytree

Tensor = torch.Tensor
PyTree = Any  # a nesting of containers; optree has no static type for one
TreeDef = optree.PyTreeSpec
IsLeaf = Callable[[Any], bool]

NAMESPACE = "zero_fn"
_T = TypeVar("_T", bound=type)


def flatten(tree: PyTree, is_leaf: IsLeaf | None = None) -> tuple[list[Any], TreeDef]:
    """The leaves of a tree, in a fixed order, and what is needed to build it again."""
    return optree.tree_flatten(tree, is_leaf, namespace=NAMESPACE)


def unflatten(treedef: TreeDef, leaves: Iterable[Any]) -> PyTree:
    """The tree with these leaves."""
    return optree.tree_unflatten(treedef, leaves)


def leaves(tree: PyTree, is_leaf: IsLeaf | None = None) -> list[Any]:
    """The leaves of a tree, in a fixed order."""
    return optree.tree_leaves(tree, is_leaf, namespace=NAMESPACE)


def map(
    f: Callable[..., Any], tree: PyTree, *rest: PyTree, is_leaf: IsLeaf | None = None
) -> PyTree:
    """The tree of ``f(leaf, *leaves of rest at the same place)``."""
    return optree.tree_map(f, tree, *rest, is_leaf=is_leaf, namespace=NAMESPACE)


def paths(tree: PyTree, is_leaf: IsLeaf | None = None) -> list[str]:
    """The key path of each leaf, as ``a.0.b``, in the order of :func:`leaves`.

    A node that is no step of the path names its child with an empty name.
    """
    accessors = optree.tree_accessors(tree, is_leaf, namespace=NAMESPACE)
    return [join_path(*(_key(entry) for entry in accessor)) for accessor in accessors]


def _key(entry: Any) -> str:
    return str(entry.field if isinstance(entry, optree.NamedTupleEntry) else entry.entry)


def map_with_path(
    f: Callable[..., Any], tree: PyTree, *rest: PyTree, is_leaf: IsLeaf | None = None
) -> PyTree:
    """Like :func:`map`, with the key path as the first argument of ``f``."""
    treedef = optree.tree_structure(tree, is_leaf, namespace=NAMESPACE)
    named = unflatten(treedef, paths(tree, is_leaf))
    return map(lambda leaf, path, *more: f(path, leaf, *more), tree, named, *rest, is_leaf=is_leaf)


def children(node: PyTree) -> tuple[Any, ...]:
    """The direct children of one node."""
    return tuple(optree.tree_flatten_one_level(node, namespace=NAMESPACE)[0])


def join_path(*parts: str) -> str:
    """Key paths put together, empty ones left out."""
    return ".".join(part for part in parts if part)


# Which leaves: patterns of key paths as for fnmatch, or a function of (key path, shape).
Where = str | Sequence[str] | Callable[[str, tuple[int, ...]], bool]


def chosen(where: Where, paths: Sequence[str], nodes: Sequence[Any], what: str) -> list[bool]:
    """For each node, whether it is meant.

    Args:
        where: a pattern of key paths, several, or a function of key path and shape.
        paths: the nodes' key paths.
        nodes: what has a shape, or not.
        what: the name of the argument, for errors.

    Raises:
        ValueError: for a pattern that matches no key path.
    """
    if callable(where):
        named = zip(paths, nodes, strict=True)
        return [bool(where(path, tuple(getattr(node, "shape", ())))) for path, node in named]
    patterns = [where] if isinstance(where, str) else where
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise ValueError(f"{what}: {pattern!r} matches none of the key paths {list(paths)}")
    return [any(fnmatchcase(path, pattern) for pattern in patterns) for path in paths]


def check_tensors(tree: PyTree, what: str, *, floating: bool = False) -> None:
    """Refuse leaves that cannot be trained.

    Raises:
        TypeError: naming the key path of the first leaf that is not a tensor, or, with
            ``floating``, of the first one that is not of a floating-point dtype.
    """
    for path, leaf in zip(paths(tree), leaves(tree), strict=True):
        where = f"{what} at {path!r}" if path else what
        if not isinstance(leaf, Tensor):
            hint = (
                f"; register its class: zf.register_dataclass({type(leaf).__name__})"
                if dataclasses.is_dataclass(leaf)
                else "; keep it out of the tree (close over it), or make it a tensor"
            )
            raise TypeError(f"{where}: expected a tensor, got {leaf!r}{hint}")
        if floating and not leaf.is_floating_point():
            raise TypeError(
                f"{where}: a tensor of dtype {leaf.dtype} cannot be differentiated; "
                "keep it out of the parameters, or convert it: x.float()"
            )


def register_node(
    cls: type,
    flatten_node: Callable[[Any], tuple[Sequence[Any], Any]],
    unflatten_node: Callable[[Any, Any], Any],
    names: Sequence[str] | Callable[[Any], Sequence[str]],
) -> None:
    """Register a node with optree (this namespace) and with torch, so torch.func sees through it.

    Args:
        cls: the class of the node.
        flatten_node: node to (children, static fields).
        unflatten_node: (static fields, children) to node.
        names: the name of each child, for key paths; or a function of the static fields to them.
    """

    def flatten_named(node: Any) -> tuple[Sequence[Any], Any, Sequence[str]]:
        parts, static = flatten_node(node)
        return parts, static, names(static) if callable(names) else names

    optree.register_pytree_node(cls, flatten_named, unflatten_node, namespace=NAMESPACE)
    torch_pytree.register_pytree_node(
        cls,
        lambda node: (list(flatten_node(node)[0]), flatten_node(node)[1]),
        lambda parts, static: unflatten_node(static, list(parts)),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=lambda node: (
            [
                (torch_pytree.GetAttrKey(name), part)
                for name, part in zip(flatten_named(node)[2], flatten_node(node)[0], strict=True)
            ],
            flatten_node(node)[1],
        ),
    )


class _StaticFields(NamedTuple):
    static: tuple[tuple[str, Any], ...]
    names: tuple[str, ...]


def register_dataclass(cls: _T, *, static: Sequence[str] = ()) -> _T:
    """Make a dataclass a pytree node; also usable as a decorator.

    Args:
        cls: a dataclass whose fields are all in its ``__init__``.
        static: names of the fields that are no leaves. Their values must be hashable; a change
            of one makes ``zf.jit`` trace again.

    Raises:
        TypeError: if ``cls`` is no dataclass, has a field that is not in its ``__init__``, or
            ``static`` names a field it does not have.
    """
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"register_dataclass takes a dataclass, got {cls!r}; use @dataclass on it")
    fields = [field.name for field in dataclasses.fields(cls)]
    unknown = [name for name in static if name not in fields]
    if unknown:
        raise TypeError(f"{cls.__name__} has no field {unknown[0]!r}; its fields are {fields}")
    apart = [field.name for field in dataclasses.fields(cls) if not field.init]
    if apart:
        raise TypeError(
            f"{cls.__name__}: the field {apart[0]!r} is not in __init__, so the node could not be "
            "built again from its fields; make it a property, or a field with init=True"
        )
    names = tuple(name for name in fields if name not in static)

    register_node(
        cls,
        lambda node: (
            [getattr(node, name) for name in names],
            _StaticFields(tuple((name, getattr(node, name)) for name in static), names),
        ),
        lambda fields, parts: cls(
            **dict(fields.static), **dict(zip(fields.names, parts, strict=True))
        ),
        lambda fields: fields.names,
    )
    return cls


def on_device_of(like: Tensor, x: Tensor) -> Tensor:
    """The same values on the device of another tensor; itself where it is there."""
    return x if x.device == like.device else x.to(like.device)
