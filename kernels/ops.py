"""How a kernel becomes an op that every transform of torch sees through.

torch's own ways to give a custom op a derivative raise under ``torch.func.grad`` or have a silent
zero tangent under ``jvp``, and ``torch.compile`` over ``torch.func`` drops an
``autograd.Function``'s backward. What survives all of them is a ``torch.library.custom_op`` without
autograd, called by an ``autograd.Function`` with a ``vmap`` rule, whose ``apply`` stands in a
function that Dynamo is told to leave alone. ``differentiable`` builds that.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

Static = tuple[Any, ...]  # constants of a call: hashable, of Python's own types
Run = Callable[..., tuple[Tensor, ...]]  # (static, *tensors) to tensors
InDims = Sequence[int | None]
Batch = Callable[..., tuple[tuple[Tensor, ...], tuple[int | None, ...]]]
Gradients = Sequence[Tensor | None]
# (static, inputs, results, their gradients) to the inputs' gradients, None where there is none
Backward = Callable[[Static, Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], Gradients]


def differentiable(
    run: Run,
    reference: Run | None,
    batch: Callable[[Run], Batch],
    backward: Backward | None = None,
    keep: Callable[[Static], Any] | None = None,
) -> Run:
    """A function like ``run`` that torch.func and torch.compile differentiate and batch.

    Args:
        run: (static, *tensors) to tensors; calls a custom op that has a fake implementation.
        reference: the same in plain torch: without ``backward``, its vjp is the derivative,
            computed again from the inputs, and its own derivatives are the further ones.
        batch: given the function itself, the batching rule: (static, in_dims, size, *tensors) to
            (results, their mapped dimensions).
        backward: a derivative of its own: (static, inputs, results, the results' gradients, which
            are contiguous) to the gradients of the inputs, None for one that has none. It is
            differentiated again, and so calls plain torch, or functions that ``differentiable``
            made. None, and no reference: there is no derivative, and asking for one raises.
        keep: what has to live until the backward, besides the tensors.

    Forward-mode derivatives raise; they are not silently zero.
    """

    own = backward

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(static: Static, *tensors: Tensor) -> tuple[Tensor, ...]:
            return run(static, *tensors)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.static, *tensors = inputs
            ctx.kept = keep(ctx.static) if keep else None
            ctx.count = len(tensors)
            ctx.save_for_backward(*tensors, *(output if own else ()))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            # After vjp has returned, saved tensors are wrappers of a level that is gone.
            kept = [torch._C._functorch.unwrap_if_dead(x) for x in ctx.saved_tensors]
            saved, results = kept[: ctx.count], kept[ctx.count :]
            if own is not None:
                dense = [g.contiguous() for g in grads]  # a sum's have stride 0
                given = own(ctx.static, saved, results, dense)
                for i, grad in enumerate(given):
                    if grad is None and ctx.needs_input_grad[i + 1]:
                        raise NotImplementedError(
                            f"a gradient of input {i} of {run.__module__}, of shape "
                            f"{tuple(saved[i].shape)}, which has none: detach() it"
                        )
                return None, *given
            if reference is None:
                raise NotImplementedError(
                    f"a further derivative of {run.__module__}, which has none"
                )
            places = [i for i, x in enumerate(saved) if x.is_floating_point()]

            def of_floating(*values: Tensor) -> tuple[Tensor, ...]:
                given = list(saved)
                for place, value in zip(places, values, strict=True):
                    given[place] = value
                return reference(ctx.static, *given)

            pullback: Any = torch.func.vjp(of_floating, *[saved[i] for i in places])[1]
            found = dict(zip(places, pullback(grads), strict=True))
            return None, *[found.get(i) for i in range(len(saved))]

        @staticmethod
        def vmap(info: Any, in_dims: InDims, static: Static, *tensors: Tensor) -> Any:
            return batch(call)(static, in_dims[1:], info.batch_size, *tensors)

    @torch.compiler.allow_in_graph
    def call(static: Static, *tensors: Tensor) -> tuple[Tensor, ...]:
        return Kernel.apply(static, *tensors)

    return call


def leading(x: Tensor, dim: int | None, size: int) -> Tensor:
    """``x`` with the mapped dimension first, expanded where it is not mapped."""
    if dim is None:
        return x.expand(size, *x.shape)
    return x if dim == 0 else x.movedim(dim, 0)


@contextmanager
def plainly() -> Iterator[None]:
    """Inside, torch computes numbers: nothing is traced, fake, batched or differentiated outside.

    For what an op computes when it runs, and for constants that outlive the call.
    """
    with (
        temporarily_clear_interpreter_stack(),
        _disable_current_modes(),
        torch.inference_mode(False),
    ):
        yield
