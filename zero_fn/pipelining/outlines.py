"""What passes between stages, known before it is made: stages run once on fake tensors.

So a rank knows the shapes that it receives, and nobody negotiates. It also finds a stage that
raises, or one whose carry the next cannot take, on all ranks alike and before anything is sent.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from .. import tree
from ..autodiff import Static, split_tensors
from ..sharding import Sharded, is_piece
from ..tree import PyTree, Tensor
from .parameters import OWN, Dtypes, StageParams
from .schedule import Action
from .split import differentiable
from .staging import Look
from .work import StageFn, failure


class Outline(NamedTuple):
    """A carry without its values.

    Attributes:
        looks: what its tensors look like.
        moves: for each tensor, whether it has a gradient.
        static: the tree besides the tensors.
    """

    looks: list[Look]
    moves: list[bool]
    static: Static


def outlines(
    stages: Sequence[StageFn],
    params: Sequence[PyTree],
    part: PyTree,
    microbatch: int,
    dtypes: Dtypes = OWN,
) -> list[Outline]:
    """What each stage but the last hands to the next; a :class:`Look` stands for its tensor.

    Raises:
        PipelineError: for what a stage raises.
    """
    leaves = tree.leaves((params, part))
    known = next((x.fake_mode for x in leaves if isinstance(x, FakeTensor)), None)
    mode = known or FakeTensorMode(allow_non_fake_inputs=True)

    def fake(x: Any) -> Any:
        if isinstance(x, Sharded):  # gathered, without a gather
            return torch.empty(x.shape, dtype=x.dtype, device=tree.leaves(x)[0].device)
        if isinstance(x, Look):
            return x.make(torch.empty)
        if not isinstance(x, Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

    found = []
    with disable_proxy_modes_tracing(), mode, torch.no_grad():
        faked = dict(enumerate(tree.map(fake, tuple(params), is_leaf=is_piece)))
        whole = StageParams.of_stages(faked, dtypes)
        given, carry = tree.map(fake, part), None
        for stage, f in enumerate(stages):
            try:
                carry = f(whole[stage].whole(whole[stage].tensors), carry, given)
            except Exception as error:
                raise failure(stages, Action(stage, "F", microbatch), error) from error
            tensors, static = split_tensors(carry)
            looks = [Look.of(x) for x in tensors]
            found.append(Outline(looks, [differentiable(x) for x in tensors], static))
    return found
