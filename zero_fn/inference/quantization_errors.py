"""What quantising did: the error and the bytes of each leaf, from the weights alone."""

from typing import NamedTuple

from .. import tree
from ..tree import PyTree, Tensor
from .quantization import Quantized, dequantize, is_quantized


class LeafError(NamedTuple):
    """What quantising did to one leaf.

    Attributes:
        relative: the norm of the difference over the norm of the weight.
        worst: the largest difference of one value.
        bytes: what the leaf takes now, scales included.
        share: that over its bytes before.
    """

    relative: float
    worst: float
    bytes: int
    share: float


def quantization_error(params: PyTree, quantized: PyTree) -> dict[str, LeafError]:
    """What quantising did to each leaf, by key path; no data is needed.

    Args:
        params: the tree before.
        quantized: what :func:`quantize` made of it.

    Raises:
        ValueError: for trees that don't fit, naming the key path.
    """
    before = dict(zip(tree.paths(params), tree.leaves(params), strict=True))
    nodes = tree.leaves(quantized, is_quantized)
    report = {}
    for path, node in zip(tree.paths(quantized, is_quantized), nodes, strict=True):
        if not isinstance(node, Quantized):
            continue
        weight = before.get(path)
        if weight is None or tuple(weight.shape) != tuple(node.shape):
            shape = None if weight is None else tuple(weight.shape)
            raise ValueError(
                f"{path!r} is {node!r}, and in params {shape or 'nothing'}; give the tree that was "
                "quantised"
            )
        difference = dequantize(node).double() - weight.double()
        bytes_now, norm = tree_bytes(node), weight.double().norm()
        report[path] = LeafError(
            (difference.norm() / norm).item() if norm else 0.0,
            difference.abs().max().item() if weight.numel() else 0.0,
            bytes_now,
            bytes_now / max(tree_bytes(weight), 1),
        )
    return report


def tree_bytes(params: PyTree) -> int:
    """The bytes of a tree's tensors, those at two places counted once."""
    unique = {id(x): x for x in tree.leaves(params) if isinstance(x, Tensor)}
    return sum(x.numel() * x.element_size() for x in unique.values())
