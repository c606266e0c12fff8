"""One rank's part of a pipeline, where the ranks are processes: its own actions, and messages.

A rank walks its list of the schedule. Sends return at once; receives are posted ahead of their turn
where the backend can match them, and waited for by the action that needs them, so that data travels
while the rank computes.

A rank on which a stage raises computes no more, but goes on to send what others wait for, zeros.
So every rank comes to the end of the step, and there all of them raise what the one has to say:
nothing hangs, and the next step may run. A rank that has died shows in the messages, at once where
the backend notices, else when the mesh's timeout has passed; so does one that is stuck in a
collective of another axis.
"""

from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence

import torch

from ..collectives import all_gather, psum
from ..mesh import Axis
from ..tree import Tensor
from .messages import MessageError, finish_sends, forget, may_post_ahead, receive, received, send
from .outlines import Outline
from .schedule import COMPUTE, Action, Schedule, peer
from .staging import Look
from .work import Carry, PipelineError, Work, described, failure

AHEAD = 2  # computing actions before which the receives for them are posted
UNDER_WAY = 4  # sends that are not waited for yet
TEXT = 1024  # bytes of an error that other ranks hear of
TAGS = 1000  # tensors that a carry may have


class Exchange:
    """One step of one rank.

    Args:
        work: the stages that live here.
        schedule: with its sends and receives spelt out.
        axis: the pipeline's axis.
        outlines: for each micro-batch, what each stage hands to the next, and the loss.
        tracing: whether the step is traced, not run.
    """

    def __init__(
        self,
        work: Work,
        schedule: Schedule,
        axis: Axis,
        outlines: Sequence[Sequence[Outline]],
        tracing: bool,
    ) -> None:
        self.work, self.schedule, self.axis = work, schedule, axis
        self.outlines, self.tracing = outlines, tracing
        self.device = outlines[0][-1].looks[0].device
        self.failed: PipelineError | None = None
        self.posted: dict[Action, list[Tensor]] = {}

    def run(self) -> None:
        """Run the rank's list to its end.

        Raises:
            PipelineError: if a message fails; what a stage raises is kept for :meth:`agree`.
        """
        actions = self.schedule.actions[self.axis.place]
        receives = deque(place for place, action in enumerate(actions) if _receives(action))
        ahead = may_post_ahead(self.axis.group, self.device)
        computing = [place for place, action in enumerate(actions) if action.kind in COMPUTE]
        for place, action in enumerate(actions):
            horizon = place
            if ahead and computing:
                horizon = computing[min(bisect(computing, place) + AHEAD, len(computing)) - 1]
            while receives and receives[0] <= max(place, horizon):
                self._message(self._post, actions[receives.popleft()])
            if action.kind in COMPUTE:
                needed = action._replace(kind="RECV_F" if action.kind == "F" else "RECV_B")
                if action.kind != "W" and needed in self.posted:
                    self._message(self._take, needed)
                self._compute(action)
            elif not _receives(action):
                self._message(self._send, action)
        sends = [action for action in actions if action.kind.startswith("SEND")]
        if sends:
            self._message(lambda _: finish_sends(), sends[-1])

    def agree(self, sums: tuple[Tensor | None, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        """The sums of losses and weights, the same on all ranks.

        Raises:
            PipelineError: on every rank, if a stage has raised on one.
        """
        failed = torch.full((), float(self.failed is not None))
        numbers = [torch.zeros(()) if x is None else x for x in (*sums, failed)]
        shared = torch.stack([x.to(self.device, torch.float64) for x in numbers])
        value, weight, failures = psum(shared, self.axis.name).unbind()
        if not self.tracing and failures.item():
            self._raise()
        looks = self.outlines[0][-1].looks
        return value.to(looks[0].dtype), weight if len(looks) > 1 else None

    def _raise(self) -> None:
        text = "" if self.failed is None else str(self.failed)
        data = text.encode()[:TEXT].ljust(TEXT, b"\0")
        mine = torch.tensor(list(data), dtype=torch.uint8, device=self.device)
        everyone = all_gather(mine.unsqueeze(0), self.axis.name)
        if self.failed is not None:
            raise self.failed
        heard = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in everyone]
        name = self.axis.name
        raise PipelineError(
            "; ".join(f"rank {r} of {name!r}: {text}" for r, text in enumerate(heard) if text)
        )

    def _compute(self, action: Action) -> None:
        if self.failed is None:
            try:
                self.work.compute(action)
            except PipelineError as error:
                if self.tracing:
                    raise
                self.failed = error

    def _message(self, f: Callable[[Action], None], action: Action) -> None:
        try:
            f(action)
        except Exception as error:
            forget()
            if isinstance(error, MessageError):
                raise PipelineError(str(error), action) from error
            raise failure(self.work.stages, action, error) from error

    def _what(self, action: Action, other: int) -> str:
        """What a message is, if it fails."""
        return (
            f"{described(self.work.stages, action)}; rank {other} of axis {self.axis.name!r} may "
            "have ended, or be stuck"
        )

    def _post(self, action: Action) -> None:
        looks, other, tag = self._travels(action)
        rest = self._what(action, other), self.axis.group
        self.posted[action] = [
            look.make(torch.empty)
            if 0 in look.shape
            else receive(look.shape, look.dtype, look.device, other, tag + number, *rest)
            for number, look in enumerate(looks)
        ]

    def _take(self, action: Action) -> None:
        tensors = [received(x) if x.numel() else x for x in self.posted.pop(action)]
        place = action.stage, action.microbatch
        if action.kind == "RECV_B":
            self.work.gradients[place] = tensors
        else:
            static = self.outlines[action.microbatch][action.stage - 1].static
            self.work.carries[place] = Carry(tensors, static)

    def _send(self, action: Action) -> None:
        looks, other, tag = self._travels(action)
        stage, kind, microbatch = action
        if self.failed is not None:
            tensors = [look.make(torch.zeros) for look in looks]
        elif kind == "SEND_F":
            tensors = self.work.carries.pop((stage + 1, microbatch)).tensors
        else:
            tensors = self.work.gradients.pop((stage - 1, microbatch))
        for number, (x, look) in enumerate(zip(tensors, looks, strict=True)):
            if (tuple(x.shape), x.dtype) != (look.shape, look.dtype):
                raise ValueError(f"{Look.of(x)} was announced as {look}")
            if x.numel():
                what = self._what(action, other)
                send(x.contiguous(), other, tag + number, what, self.axis.group)
        finish_sends(UNDER_WAY)

    def _travels(self, action: Action) -> tuple[list[Look], int, int]:
        """What a message consists of, the other rank, and the first of the tensors' tags."""
        stage, kind, microbatch = action
        forward = kind in ("SEND_F", "RECV_F")
        # what is between two stages is named after the first of them
        first = stage if kind in ("SEND_F", "RECV_B") else stage - 1
        outline = self.outlines[microbatch][first]
        looks = [x for x, moves in zip(*outline[:2], strict=True) if forward or moves]
        boundary = first * self.schedule.microbatches + microbatch
        tag = (2 * boundary + int(forward)) * TAGS
        return looks, self.schedule.placement[peer(action).stage], tag


def _receives(action: Action) -> bool:
    return action.kind.startswith("RECV")
