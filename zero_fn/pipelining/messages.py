"""Messages between two ranks of an axis, as operations that a trace keeps in their order.

A send returns at once, and its tensor is kept until ``finish_sends`` has waited for it. A receive
is posted with ``receive``, which makes the tensor, and its values are there after ``received``: in
between the data travels while the rank computes. On Gloo a message is matched by its tag, so
receives may be posted long before; other backends match messages by their order alone.

Nothing here is differentiated: a pipeline's backward has messages of its own.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.fx.node import has_side_effect

from ..mesh import is_gloo
from ..tree import Tensor

_LIBRARY = torch.library.Library("zero_fn", "FRAGMENT")
_LIBRARY.define("send(Tensor x, int peer, int tag, str what, str group) -> ()")
_LIBRARY.define("finish_sends(int left) -> ()")
_LIBRARY.define(
    "receive(int[] shape, ScalarType dtype, Device device, int peer, int tag, str what, str group) "
    "-> Tensor"
)
_LIBRARY.define("received(Tensor(a) x) -> Tensor(a)")


class Message(NamedTuple):
    """A message under way: its tensor, the work to wait for, and what it is, for an error."""

    x: Tensor
    work: Any
    what: str

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise MessageError(f"{self.what}: {error}") from error


class MessageError(RuntimeError):
    """A message that did not come to its end; the text says which."""


_sending: deque[Message] = deque()
_receiving: dict[int, Message] = {}  # by the memory of the tensor


def send(x: Tensor, peer: int, tag: int, what: str, group: str) -> None:
    """Send a contiguous tensor to the rank at place ``peer`` of a group."""
    torch.ops.zero_fn.send(x, peer, tag, what, group)


def finish_sends(left: int = 0) -> None:
    """Wait until at most ``left`` sends are under way."""
    torch.ops.zero_fn.finish_sends(left)


def receive(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    peer: int,
    tag: int,
    what: str,
    group: str,
) -> Tensor:
    """Post a receive; the tensor has no values until :func:`received`."""
    return torch.ops.zero_fn.receive(list(shape), dtype, device, peer, tag, what, group)


def received(x: Tensor) -> Tensor:
    """A posted receive's tensor, with the values that arrived."""
    return torch.ops.zero_fn.received(x)


def forget() -> None:
    """Let go of what is under way, after an error."""
    _sending.clear()
    _receiving.clear()


def may_post_ahead(group: str, device: torch.device) -> bool:
    """Whether receives may be posted before their turn."""
    return is_gloo(group, device)


def _group(name: str) -> Any:
    return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def _send(x: Tensor, peer: int, tag: int, what: str, group: str) -> None:
    work = dist.isend(x, group=_group(group), group_dst=peer, tag=tag)
    _sending.append(Message(x, work, what))


def _finish_sends(left: int) -> None:
    while len(_sending) > left:
        _sending.popleft().wait()


def _receive(
    shape: list[int],
    dtype: torch.dtype,
    device: torch.device,
    peer: int,
    tag: int,
    what: str,
    group: str,
) -> Tensor:
    x = torch.empty(shape, dtype=dtype, device=device)
    work = dist.irecv(x, group=_group(group), group_src=peer, tag=tag)
    _receiving[x.data_ptr()] = Message(x, work, what)
    return x


def _received(x: Tensor) -> Tensor:
    _receiving.pop(x.data_ptr()).wait()
    return x


_LIBRARY.impl("send", _send, "CompositeExplicitAutograd")
_LIBRARY.impl("finish_sends", _finish_sends, "CompositeExplicitAutograd")
_LIBRARY.impl("receive", _receive, "CompositeExplicitAutograd")
_LIBRARY.impl("received", _received, "CompositeExplicitAutograd")

# What a trace knows of them; and those that give nothing are not left out of a graph.
_FAKES: dict[str, Callable[..., Any]] = {
    "send": lambda x, peer, tag, what, group: None,
    "finish_sends": lambda left: None,
    "receive": lambda shape, dtype, device, peer, tag, what, group: torch.empty(
        shape, dtype=dtype, device=device
    ),
    "received": lambda x: x,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"zero_fn::{_name}", _fake, lib=_LIBRARY)
has_side_effect(torch.ops.zero_fn.send.default)
has_side_effect(torch.ops.zero_fn.finish_sends.default)
