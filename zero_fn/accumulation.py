"""Gradient accumulation: micro-batches, with each leaf gathered and reduced as its scheme says.

This is where a stage's policy acts. A leaf whose scheme gathers once a step is whole before the
first micro-batch; one that gathers at each use is gathered again in every one. A gradient is added
up whole and reduced once, or reduced in every micro-batch and added up as a piece.
"""

from collections.abc import Callable
from typing import Any

import torch

from . import tree
from .autodiff import grad_and_value
from .collectives import AxisName, axis_size, psum
from .sharding import Scheme, Sharded, is_piece, tie_whole
from .tree import PyTree, Tensor

LossFn = Callable[..., Any]  # (whole params, micro-batch) to the mean loss


def accumulate(
    loss_fn: LossFn,
    microbatches: int = 1,
    axis: AxisName = "dp",
    *,
    reduce: bool = True,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    has_state: bool = False,
) -> Callable[..., Any]:
    """The gradient and value of the mean loss over all ranks and micro-batches.

    Args:
        loss_fn: (whole params, micro-batch) to the mean loss over the micro-batch's rows, 0-dim;
            or to a pair of that and its weight, the number of tokens that it is the mean over,
            say. Losses with weights are averaged by them, over micro-batches and ranks, which
            then equal one big batch however ragged they are. A micro-batch without tokens needs a
            finite loss: divide a sum by ``weight.clamp(min=1)``.
        microbatches: how many equal parts a rank's batch is cut into, along dimension 0.
        axis: the axis, or axes, whose ranks have different batches.
        reduce: False: the gradients are this rank's own, by the whole parameters, and nobody has
            reduced them, as :func:`zero_fn.compress` and the 1-bit optimizers take them.
        dtype: the dtype of the whole params that ``loss_fn`` sees, and in which they travel; None:
            the pieces' own. Gradients add up in the pieces' dtype.
        reduce_dtype: the dtype in which gradients travel and are summed over ranks; None: the
            pieces' own.
        has_state: whether ``loss_fn`` takes a state (running statistics, a key) as its third
            argument, and returns a pair of the loss, with or without a weight, and the new state.
            It goes from one micro-batch to the next.

    Returns:
        A function (params as :func:`zero_fn.shard` cut them, this rank's batch) to
        ``(grads, value)``, for use inside ``spmd``; equal to one big batch. With ``has_state`` a
        function (params, batch, state) to ``(grads, value, state)``.

    Raises:
        ValueError: if ``microbatches`` is not positive, or does not divide a rank's batch; with
            ``reduce=False``, for a leaf of a stage that reduces in every micro-batch.
        TypeError: if ``loss_fn`` returns neither a loss nor a pair of one and its weight.
    """
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(f"microbatches is {microbatches!r}; it must be an int of 1 or more")

    def accumulated(params: PyTree, batch: PyTree, *given: PyTree) -> tuple[Any, ...]:
        if not reduce:
            params = tree.map(_own, params, is_leaf=is_piece)
        nodes, treedef = tree.flatten(params, is_piece)
        leaves = [AccumulatedLeaf(node, dtype, reduce_dtype) for node in nodes]
        ranks = axis_size(axis)
        share = 1 / (microbatches * (ranks if reduce else 1))

        def loss(values: list[Any], microbatch: PyTree, *state: PyTree) -> tuple[Tensor, Any]:
            whole = [leaf.use(value) for leaf, value in zip(leaves, values, strict=True)]
            out = loss_fn(tie_whole(tree.unflatten(treedef, whole)), microbatch, *state)
            out, *state_ = out if has_state else (out,)
            value, weight = split_loss(out)
            value = at_least_float32(value) * share
            weighted = value if weight is None else value * weight.to(value.dtype)
            return weighted, (weight, state_)

        values, weights, state = [], [], list(given)
        for part in cut_batch(batch, microbatches):
            differentiated = grad_and_value(loss, has_aux=True)
            grads, (value, aux) = differentiated([leaf.value for leaf in leaves], part, *state)
            weight, state = aux
            values.append(value)
            weights += [] if weight is None else [weight]
            for leaf, g in zip(leaves, grads, strict=True):
                leaf.add(g)
        total = psum(torch.stack(values).sum() / (1 if reduce else ranks), axis)
        gradient = tree.unflatten(treedef, [leaf.gradient() for leaf in leaves])
        if weights:
            whole = psum(torch.stack(weights).sum(), axis)
            factor = torch.where(whole > 0, microbatches * ranks / whole, 0)
            gradient = tree.map(lambda g: g * factor.to(g.dtype), gradient)
            total = total * factor.to(total.dtype)
        return gradient, total, *state

    return accumulated


def split_loss(out: Any) -> tuple[Any, Tensor | None]:
    """A loss, and the weight that it comes with or None.

    Raises:
        TypeError: for a weight that is no 0-dim tensor.
    """
    if not isinstance(out, tuple):
        return out, None
    if len(out) != 2 or not isinstance(out[1], Tensor) or out[1].ndim:
        raise TypeError(
            f"the loss returned {out!r}; it returns the mean loss, or a pair of that and its "
            "weight (the number of tokens, say), both 0-dim tensors"
        )
    return out[0], out[1].detach().to(torch.float64)


def at_least_float32(x: Tensor) -> Tensor:
    """The same value, in float32 if it had fewer bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_unreduced(scheme: Scheme) -> None:
    """Refuse a scheme whose gradients exist only reduced."""
    if scheme.gather_at != "step" or scheme.reduce_at != "step":
        raise ValueError(
            f"{scheme!r} gathers parameters or reduces gradients in every micro-batch, so that a "
            "rank's own gradients are never whole, and there is nothing to compress; use stage 0 "
            "or 1"
        )


def _own(node: Any) -> Any:
    if not isinstance(node, Sharded):
        return node
    check_unreduced(node.scheme)
    return node.whole(node.local)


class AccumulatedLeaf:
    """One leaf on its way through the micro-batches: what it is for them, and its gradient so far.

    A piece that is gathered once stands here whole, with the pullback that reduces its gradient.
    """

    def __init__(
        self,
        node: Any,
        dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.node, self.sum = node, None  # type: Any, Any
        self.dtypes = dtype, reduce_dtype
        self.own = False  # whether the sum's memory is nobody else's
        self.early = isinstance(node, Sharded) and node.scheme.gather_at == "step"
        self.each = not self.early or node.scheme.reduce_at == "microbatch"
        self.value: Any = node
        if self.early:
            whole, self.pullback, *_ = torch.func.vjp(self._whole, node.local)
            self.value = self._cast(whole)

    def use(self, value: Any) -> Any:
        """The whole leaf, inside the loss."""
        if isinstance(value, Sharded):
            return self._cast(self._whole(value.local))
        return value if self.early else self._cast(value)

    def add(self, g: Any, *, own: bool = False, in_place: bool = False) -> None:
        """Add one micro-batch's gradient.

        Args:
            g: the gradient.
            own: whether its memory is nobody else's.
            in_place: whether to write into memory, where that is the sum's own.
        """
        if self.early:
            g = g.to(self.node.dtype)
            if self.each:
                g, own = self._reduced(g), False
        if self.sum is None:
            self.sum, self.own = g, own and in_place
        elif self.own:
            tree.map(torch.Tensor.add_, self.sum, g)
        else:
            self.sum, self.own = tree.map(torch.add, self.sum, g), in_place

    def gradient(self) -> Any:
        if self.sum is None:  # nothing used it
            return tree.map(torch.zeros_like, self.node)
        return self.sum if self.each else self._reduced(self.sum)

    def _whole(self, local: Tensor) -> Tensor:
        whole: Tensor = self.node.whole(local, *self.dtypes)
        return whole

    def _cast(self, whole: Any) -> Any:
        dtype = self.dtypes[0]
        if dtype is None or not isinstance(whole, Tensor) or not whole.is_floating_point():
            return whole
        return whole.to(dtype)

    def _reduced(self, g: Tensor) -> Sharded:
        return self.node.like(self.pullback(g)[0])


def cut_batch(batch: PyTree, count: int, *, uneven: bool = False) -> list[PyTree]:
    """The batch, cut along dimension 0 into equal parts, or ones that differ by a row at most.

    Raises:
        ValueError: for a tensor that cannot be cut so, with its key path.
    """
    if count == 1:
        return [batch]

    def cut(path: str, x: Any) -> list[Any]:
        if not isinstance(x, Tensor):
            return [x] * count
        if x.ndim == 0 or (x.shape[0] < count if uneven else x.shape[0] % count):
            where = f"the batch at {path!r}" if path else "the batch"
            wrong = "has fewer rows than" if uneven and x.ndim else "is not divisible by"
            raise ValueError(
                f"{where}: a rank has a tensor of shape {tuple(x.shape)}, and dimension 0 {wrong} "
                f"microbatches={count}"
            )
        return list(x.tensor_split(count))

    leaves, treedef = tree.flatten(batch)
    columns = [cut(path, x) for path, x in zip(tree.paths(batch), leaves, strict=True)]
    return [tree.unflatten(treedef, [column[i] for column in columns]) for i in range(count)]
