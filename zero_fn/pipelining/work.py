"""The computing of a pipeline: what each F, I, W and B of a schedule does.

``Work`` holds one step of the stages that live in this process: what waits for its action (a carry,
gradients, what a backward reads), and the gradients so far. It knows nothing of other ranks: an
executor calls ``compute`` in the order of a schedule, and moves what crosses ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .. import tree
from ..autodiff import Static, join_tensors, split_tensors
from ..captures import name_of
from ..mesh import bound_axes
from ..tree import PyTree, Tensor
from .parameters import OWN, Dtypes, StageParams
from .schedule import Action
from .split import StageProgram, Tensors, differentiable, pulled_program, traced_program

StageFn = Callable[[PyTree, PyTree, PyTree], PyTree]
Place = tuple[int, int]  # a stage and a micro-batch

_WORDS = {
    "F": "the forward",
    "B": "the backward",
    "I": "the input's gradient",
    "W": "the weights' gradient",
    "SEND_F": "sending the carry",
    "RECV_F": "receiving the carry",
    "SEND_B": "sending the carry's gradient",
    "RECV_B": "receiving the carry's gradient",
}


class PipelineError(RuntimeError):
    """What went wrong in a pipeline, with the stage, the micro-batch and the action.

    Attributes:
        action: the action of the schedule that failed; None on ranks that only heard of it.
    """

    def __init__(self, message: str, action: Action | None = None) -> None:
        super().__init__(message)
        self.action = action


class Carry(NamedTuple):
    """What one stage hands to the next: contiguous tensors, and the tree besides them."""

    tensors: Tensors
    static: Static


class _Known(NamedTuple):
    """A stage's program, and what its results are: for each a gradient or not, and their tree."""

    program: StageProgram
    moves: list[bool]
    static: list[Static]


Programs = dict[Any, _Known]


class Work:
    """One step of the stages that live here.

    Args:
        stages: all stage functions.
        trees: the parameters of the stages that live here, by stage.
        parts: the micro-batches.
        shares: what each micro-batch's loss counts in the mean.
        programs: the programs that are known; new ones are added.
        eager: whether tensors have values and memory now, and are not traced or transformed.
        dtypes: those that the stages see, and in which gradients are summed over ranks.
        scale: what gradients are multiplied by from the loss on, 0-dim; None: 1.
    """

    def __init__(
        self,
        stages: Sequence[StageFn],
        trees: Mapping[int, PyTree],
        parts: Sequence[PyTree],
        shares: Sequence[float],
        programs: Programs,
        eager: bool,
        dtypes: Dtypes = OWN,
        scale: Tensor | None = None,
    ) -> None:
        self.stages, self.shares, self.scale = stages, shares, scale
        self.programs, self.eager = programs, eager
        self.params = StageParams.of_stages(trees, dtypes)
        self.parts = [split_tensors(part) for part in parts]
        nothing = split_tensors(None)
        self.carries = {(0, microbatch): Carry(*nothing) for microbatch in range(len(parts))}
        self.gradients: dict[Place, Tensors] = {}  # of a stage's results
        self.saved: dict[Place, tuple[StageProgram, Any]] = {}
        self.due: dict[Place, tuple[StageProgram, Any]] = {}
        self.losses: list[Tensor] = []
        self.weights: list[Tensor] = []

    def compute(self, action: Action) -> None:
        """Run one action.

        Raises:
            PipelineError: for whatever it raises, naming the stage, the micro-batch and the action.
        """
        place = action.stage, action.microbatch
        try:
            if action.kind == "F":
                self._forward(place)
            elif action.kind == "I":
                self._input_grad(place)
            elif action.kind == "W":
                self._weight_grad(place)
            else:
                self._backward(place)
        except Exception as error:
            raise failure(self.stages, action, error) from error

    def _forward(self, place: Place) -> None:
        stage, microbatch = place
        carry, part = self.carries.pop(place), self.parts[microbatch]
        params = self.params[stage]
        known = self._known(stage, params, carry, part)
        outs, aux, saved = known.program.forward(params.tensors, carry.tensors, part[0])
        self.saved[place] = known.program, saved
        if stage < len(self.stages) - 1:
            moving, others = iter(outs), iter(aux)
            tensors = [next(moving if moves else others) for moves in known.moves]
            self.carries[stage + 1, microbatch] = Carry(
                [x.contiguous() for x in tensors], known.static[0]
            )
            return
        (loss,) = outs
        if aux:
            (weight,) = aux
            self.weights.append(weight)
            self.losses.append(loss * weight)
            gradient = torch.ones_like(loss) * weight
        else:
            self.losses.append(loss * self.shares[microbatch])
            gradient = torch.full_like(loss, self.shares[microbatch])
        self.gradients[place] = [
            gradient if self.scale is None else gradient * self.scale.to(gradient.dtype)
        ]

    def _input_grad(self, place: Place) -> None:
        program, saved, grads = self._reached(place)
        params = self.params[place[0]]
        dcarry, due = program.input_grad(params.tensors, saved, grads)
        self._hand_back(place, dcarry)
        self.due[place] = program, due

    def _weight_grad(self, place: Place) -> None:
        program, due = self.due.pop(place)
        params = self.params[place[0]]
        grads = program.weight_grad(params.tensors, due, params.sums())
        params.add(grads, program.owned, in_place=self.eager)

    def _backward(self, place: Place) -> None:
        program, saved, grads = self._reached(place)
        params = self.params[place[0]]
        dcarry, dparams = program.backward(params.tensors, saved, grads, params.sums())
        self._hand_back(place, dcarry)
        params.add(dparams, program.owned, in_place=self.eager)

    def _reached(self, place: Place) -> tuple[StageProgram, Any, Tensors]:
        """A backward's program, what was saved for it, and the gradients of the results."""
        program, saved = self.saved.pop(place)
        return program, saved, [x.contiguous() for x in self.gradients.pop(place)]

    def _hand_back(self, place: Place, dcarry: Tensors) -> None:
        stage, microbatch = place
        if stage:
            self.gradients[stage - 1, microbatch] = dcarry

    def sums(self) -> tuple[Tensor | None, Tensor | None]:
        """The sum of the losses, each times its weight or share, and of the weights.

        None where the last stage lives elsewhere; no weights where the loss has none.
        """
        total = torch.stack(self.losses).sum() if self.losses else None
        return total, torch.stack(self.weights).sum() if self.weights else None

    def _known(
        self, stage: int, params: StageParams, carry: Carry, part: tuple[Tensors, Static]
    ) -> _Known:
        moves: list[bool] = []
        static: list[Static] = []
        body = self._body(stage, params, carry.static, part[1], moves, static)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return _Known(pulled_program(body), moves, static)
        tensors = [*params.tensors, *carry.tensors, *part[0]]
        statics = [(x.treedef, tuple(x.others)) for x in (carry.static, part[1])]
        axes = tuple((x.name, x.size, x.place, x.group) for x in bound_axes().values())
        key = (stage, params.key, *statics, axes, tuple(map(_looks, tensors)))
        if key not in self.programs:
            program = traced_program(body, params.tensors, carry.tensors, part[0])
            self.programs[key] = _Known(program, moves, static)
        return self.programs[key]

    def _body(
        self,
        stage: int,
        params: StageParams,
        carry_static: Static,
        part_static: Static,
        moves: list[bool],
        static: list[Static],
    ) -> Any:
        """A stage as a function of tensors, which notes what its results are."""
        f, last = self.stages[stage], stage == len(self.stages) - 1

        def body(tensors: Tensors, carry: Tensors, microbatch: Tensors) -> tuple[Tensors, Tensors]:
            out = f(
                params.whole(tensors),
                join_tensors(carry, carry_static),
                join_tensors(microbatch, part_static),
            )
            if last:
                return loss_and_weight(out)
            results, rest = split_tensors(out)
            static[:], moves[:] = [rest], map(differentiable, results)
            return (
                [x for x, moving in zip(results, moves, strict=True) if moving],
                [x for x, moving in zip(results, moves, strict=True) if not moving],
            )

        return body


def is_eager(params: PyTree, batch: PyTree) -> bool:
    """Whether a step runs now: not inside a trace or a transform, whose tensors end with it."""
    fake = any(isinstance(x, FakeTensor) for x in tree.leaves((params, batch)))
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return not fake and not transformed and get_proxy_mode() is None


def described(stages: Sequence[StageFn], action: Action) -> str:
    """What an action does, in an error."""
    stage, kind, microbatch = action
    return (
        f"{_WORDS[kind]} of stage {stage} ({name_of(stages[stage])!r}) failed on micro-batch "
        f"{microbatch} (action {action})"
    )


def failure(stages: Sequence[StageFn], action: Action, error: Exception) -> PipelineError:
    """The error that names what failed."""
    if isinstance(error, PipelineError):
        return error
    text = f"{type(error).__name__}: {error}"
    if "DataDependent" in text:
        text = (
            f"{text.splitlines()[0].strip()}. A stage is traced once and its graph is run, so it "
            "cannot branch on a value: write torch.where"
        )
    return PipelineError(f"{described(stages, action)}: {text}", action)


def loss_and_weight(out: Any) -> tuple[Tensors, Tensors]:
    """The last stage's loss, and its weight if it has one."""
    pair = isinstance(out, tuple | list)
    loss, *weight = out if pair else (out,)
    if not isinstance(loss, Tensor) or loss.ndim or not differentiable(loss):
        raise TypeError(
            "the last stage returns the loss, a 0-dim floating-point tensor, or a pair of the "
            f"mean loss and its weight (the number of tokens, say); it returned {_described(out)}"
        )
    if len(weight) > 1 or any(not isinstance(x, Tensor) or x.ndim for x in weight):
        raise TypeError(
            f"the last stage returned {_described(out)}; beside the loss there is one 0-dim "
            "tensor, its weight"
        )
    return [loss], [x.detach() for x in weight]


def _described(value: Any) -> str:
    """A tree in a message: each tensor as its dtype and shape."""
    shown = tree.map(lambda x: _typed(x) if isinstance(x, Tensor) else repr(x), value)
    return str(shown).replace("'", "")


def _typed(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def _looks(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device
