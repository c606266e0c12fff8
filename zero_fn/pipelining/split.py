"""A stage's forward, input gradient and weight gradient: three programs from one trace of its vjp.

The trace is one graph of forward and backward. What the results need is the forward (F); of the
rest, what the gradient of the carry needs is I, and what only the gradients of the weights need
is W. What one program makes and a later one reads is handed over in a list, and is freed at its
last use, so memory follows the schedule. What is made of the parameters alone at no cost in
arithmetic (views, casts, gathers of pieces) is made again instead of being held from F to B: that
is ZeRO-3's second gather. What ``remat`` computes again is in I or W by itself, because the
forward's results don't need it.

A graph that writes into memory (``x.add_(1)``) is cut where the forward ends: its whole backward
is I. Under torch.func's transforms, as in simulated ranks, there is no graph of plain tensors to
cut: there I is the whole pullback too, and W hands over what I has found.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

from ..graphs import ALL_GATHER, base, is_alias, is_item, product, written
from ..tree import Tensor
from .splicing import spliced

Tensors = list[Tensor]


class Sum(NamedTuple):
    """A sum of gradients so far, None before the first, and whether its memory is its own."""

    total: Tensor | None
    own: bool


# (params, carry, micro-batch) to (results to differentiate, further results)
Body = Callable[[Tensors, Tensors, Tensors], tuple[Tensors, Tensors]]

_vjp: Callable[..., Any] = torch.func.vjp  # its stub forgets the auxiliary result

# What is made again from parameters in the backward, besides views.
_CHEAP = {
    ALL_GATHER,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.constant_pad_nd.default,
}


class StageProgram(NamedTuple):
    """The programs of a stage, each a function of lists of tensors.

    Attributes:
        forward: (params, carry, micro-batch) to (results, further results, saved). What is saved
            is what the backward reads.
        input_grad: (params, saved, gradients of the results) to (gradients of the carry's floating
            tensors, due). Empties ``saved``. What is due is what ``weight_grad`` reads.
        weight_grad: (params, due, sums) to the gradients of the params. Empties ``due``. Where
            there is a sum, the gradient is added to it as soon as it exists, and the sum is given.
        backward: (params, saved, gradients of the results, sums) to the gradients of the carry and
            of the params: both halves in one, which holds less.
        owned: for each param, whether the memory of its gradient is nobody else's.
    """

    forward: Callable[[Tensors, Tensors, Tensors], tuple[Tensors, Tensors, Any]]
    input_grad: Callable[[Tensors, Any, Tensors], tuple[Tensors, Any]]
    weight_grad: Callable[[Tensors, Any, Sequence[Sum]], Tensors]
    backward: Callable[[Tensors, Any, Tensors, Sequence[Sum]], tuple[Tensors, Tensors]]
    owned: list[bool] | None


def differentiable(x: Tensor) -> bool:
    """Whether a tensor of a carry has a gradient."""
    return x.is_floating_point() or x.is_complex()


def pulled_program(body: Body) -> StageProgram:
    """The programs as the pullback of ``torch.func.vjp``, which goes through every transform."""

    def forward(params: Tensors, carry: Tensors, part: Tensors) -> tuple[Tensors, Tensors, Any]:
        outs, pullback, aux = _differentiated(body, params, carry, part)
        return outs, aux, [pullback]

    def input_grad(params: Tensors, saved: Any, grads: Tensors) -> tuple[Tensors, Any]:
        dparams, dcarry = saved.pop()(grads)
        return dcarry, dparams

    def weight_grad(params: Tensors, due: Any, sums: Sequence[Sum]) -> Tensors:
        return [g if x.total is None else x.total + g for g, x in zip(due, sums, strict=True)]

    def backward(
        params: Tensors, saved: Any, grads: Tensors, sums: Sequence[Sum]
    ) -> tuple[Tensors, Tensors]:
        dcarry, due = input_grad(params, saved, grads)
        return dcarry, weight_grad(params, due, sums)

    return StageProgram(forward, input_grad, weight_grad, backward, None)


def traced_program(body: Body, params: Tensors, carry: Tensors, part: Tensors) -> StageProgram:
    """Trace a stage, and cut the trace.

    Args:
        body: the stage.
        params: examples of its inputs, which are traced for their shapes, strides and dtypes, as
            are the following.
        carry: contiguous tensors.
        part: a micro-batch.

    Gradients of the results must be contiguous.
    """
    counts = (len(params), len(carry), len(part))
    found: list[int] = []

    def joint(*tensors: Tensor) -> Tensors:
        outs, pullback, aux = _differentiated(body, *_cut(tensors, counts))
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in outs]
        dparams, dcarry = pullback(grads)
        found[:] = [len(outs), len(aux), len(grads), len(dcarry), len(dparams)]
        return [*outs, *aux, *grads, *dcarry, *dparams]

    with disable_proxy_modes_tracing():
        traced = make_fx(joint, tracing_mode="fake", _allow_non_fake_inputs=True)
        module = traced(*params, *carry, *part)
    module.graph.eliminate_dead_code()
    given = [node for node in module.graph.nodes if node.op == "placeholder"]
    (output,) = [node for node in module.graph.nodes if node.op == "output"]
    inputs, results = _cut(given, counts), _cut(output.args[0], found)
    return _programs(module, inputs, results)


def _differentiated(
    body: Body, params: Tensors, carry: Tensors, part: Tensors
) -> tuple[Tensors, Callable[[Tensors], tuple[Tensors, Tensors]], Tensors]:
    places = [place for place, x in enumerate(carry) if differentiable(x)]

    def of_moving(params: Tensors, moving: Tensors) -> tuple[Tensors, Tensors]:
        whole = list(carry)
        for place, x in zip(places, moving, strict=True):
            whole[place] = x
        return body(params, whole, part)

    moving = [carry[place] for place in places]
    if not params and not moving:
        outs, aux = body([], carry, part)
        return outs, lambda grads: ([], []), aux
    outs, pullback, aux = _vjp(of_moving, params, moving, has_aux=True)
    return outs, lambda grads: pullback(grads, retain_graph=False), aux


def _cut(values: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    rest = iter(values)
    return [[next(rest) for _ in range(count)] for count in counts]


def _programs(
    module: GraphModule, inputs: list[list[Node]], results: list[list[Node]]
) -> StageProgram:
    params, carry, part = inputs
    outs, aux, grads, dcarry, dparams = results
    given, graded = {*params, *carry, *part}, set(grads)
    nodes = [*module.graph.nodes]
    if any(written(node) for node in nodes):
        ends = min((nodes.index(node) for node in grads), default=len(nodes))
        forward = set(nodes[:ends]) - given
        again: set[Node] = set()
        first = set(nodes[ends:]) - graded - {nodes[-1]}
        _, read = _closure([*dcarry, *dparams, *first], given | graded | forward)
        last: set[Node] = set()
        later = set(dparams)
    else:
        forward, _ = _closure([*outs, *aux], given)
        forward |= _items(forward)
        again = _made_again(forward, nodes, params)
        known = (forward - again) | given | graded
        first, read = _closure(dcarry, known)
        first |= _items(first)
        last, later = _closure(dparams, known | (first - again))
    kept = [node for node in nodes if node in read | later and node not in {*params, *graded}]
    saved = [node for node in kept if node in forward | given]
    due = [node for node in nodes if node in later and node not in params]

    run_forward = _extract(module, forward, [*params, *carry, *part], [*outs, *aux, *saved])
    run_first = _extract(module, first, [*params, *saved, *grads], [*dcarry, *due])

    @functools.cache
    def run_last(adding: Adding) -> Callable[[Tensors], Tensors]:
        return _extract(module, last, [*params, *due], [], dparams, adding)

    @functools.cache
    def run_both(adding: Adding) -> Callable[[Tensors], Tensors]:
        return _extract(module, first | last, [*params, *saved, *grads], dcarry, dparams, adding)

    def f(params: Tensors, carry: Tensors, part: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        made = run_forward([*params, *carry, *part])
        outs_, aux_, saved_ = _cut(made, (len(outs), len(aux), len(saved)))
        return outs_, aux_, saved_

    def i(params: Tensors, saved: Tensors, grads: Tensors) -> tuple[Tensors, Tensors]:
        made = run_first(_emptied(params, saved, grads))
        return made[: len(dcarry)], made[len(dcarry) :]

    def w(params: Tensors, due: Tensors, sums: Sequence[Sum]) -> Tensors:
        return run_last(_adding(sums))(_emptied(params, due) + _totals(sums))

    def b(
        params: Tensors, saved: Tensors, grads: Tensors, sums: Sequence[Sum]
    ) -> tuple[Tensors, Tensors]:
        box = _emptied(params, saved, grads) + _totals(sums)
        made = run_both(_adding(sums))(box)
        return made[: len(dcarry)], made[len(dcarry) :]

    return StageProgram(f, i, w, b, _owned([*dcarry, *due], dparams, first | last))


class Added(NamedTuple):
    """What a gradient is added to: of which dtype, and whether in place."""

    dtype: torch.dtype
    in_place: bool


# For each param; None: its gradient is added to nothing.
Adding = tuple[Added | None, ...]


def _adding(sums: Sequence[Sum]) -> Adding:
    return tuple(None if x.total is None else Added(x.total.dtype, x.own) for x in sums)


def _totals(sums: Sequence[Sum]) -> Tensors:
    return [x.total for x in sums if x.total is not None]


def _emptied(params: Tensors, *others: Tensors) -> Tensors:
    """All in one list, which alone holds the others from here on."""
    box = list(params)
    for tensors in others:
        box += tensors
        tensors.clear()
    return box


def _owned(others: list[Node], dparams: list[Node], made: set[Node]) -> list[bool]:
    """Whether a gradient may be written to: new memory, which no other result looks at."""
    bases = [base(node) for node in [*others, *dparams]]
    return [
        base(node) in made
        and base(node).op == "call_function"
        and bases.count(base(node)) == 1
        and not any(
            stride == 0 < size - 1
            for size, stride in zip(node.meta["val"].shape, node.meta["val"].stride(), strict=True)
        )
        for node in dparams
    ]


def _closure(targets: Iterable[Node], known: set[Node]) -> tuple[set[Node], set[Node]]:
    """The nodes that make ``targets`` of what is known, and what they read of it."""
    made: set[Node] = set()
    read: set[Node] = set()
    waiting = list(targets)
    while waiting:
        node = waiting.pop()
        if node in known:
            read.add(node)
        elif node not in made:
            made.add(node)
            waiting += node.all_input_nodes
    return made, read


def _items(made: set[Node]) -> set[Node]:
    """The results of operations that have several, each of which is held or freed by itself."""
    return {user for node in made for user in node.users if is_item(user)}


def _made_again(forward: set[Node], nodes: list[Node], params: list[Node]) -> set[Node]:
    """What is made of the parameters without arithmetic."""
    again: set[Node] = set()
    for node in nodes:
        if node not in forward:
            continue
        sources = node.all_input_nodes
        cheap = node.target in _CHEAP or (node.op == "call_function" and is_alias(node))
        if node.op == "get_attr" or (
            cheap and sources and all(x in again or x in params for x in sources)
        ):
            again.add(node)
    return again


def _extract(
    module: GraphModule,
    made: set[Node],
    inputs: list[Node],
    outputs: list[Node],
    summed: Sequence[Node] = (),
    adding: Adding = (),
) -> Callable[[Tensors], Tensors]:
    """A function of a list of tensors, which it empties, so that each is freed at its last use.

    Args:
        module: where the nodes are.
        made: the nodes to run.
        inputs: the nodes whose values are given, in order.
        outputs: the nodes whose values are returned.
        summed: further outputs.
        adding: for each of them, None, or that it is added to a tensor, which is given after the
            inputs; whether in place. The sum is returned.
    """
    graph = Graph()
    box = graph.placeholder("box")
    totals: dict[int, Node] = {}  # by the place in summed
    products: dict[Node, int] = {}
    for place in reversed(range(len(summed))):
        added = adding[place] if adding else None
        if added is not None:
            totals[place] = graph.call_method("pop", (box,))
            chain, alone = product(summed[place]), [*outputs, *summed].count(summed[place]) == 1
            same = added.dtype == summed[place].meta["val"].dtype
            if alone and same and made.issuperset(chain):
                products |= dict.fromkeys(chain, place)
    copies: dict[Node, Node] = {}

    def sum_up(place: int, plain: Any, *args: Node, like: Node) -> None:
        """Add to a total, in place or by ``plain``, an op whose twin in place has its name."""
        dtype, in_place = adding[place]  # type: ignore[misc]
        name, overload = plain._schema.name.removeprefix("aten::"), plain._overloadname
        op = getattr(getattr(torch.ops.aten, name + "_"), overload) if in_place else plain
        totals[place] = graph.call_function(op, (totals[place], *args))
        value = like.meta["val"]
        with disable_proxy_modes_tracing():
            totals[place].meta["val"] = value.new_empty(value.shape, dtype=dtype)

    def sum_up_each(node: Node) -> None:
        for place in totals:
            if summed[place] is node:
                sum_up(place, torch.ops.aten.add.Tensor, copies[node], like=node)

    for node in reversed(inputs):
        copies[node] = graph.call_method("pop", (box,))
    for node in inputs:
        sum_up_each(node)
    for node in module.graph.nodes:
        if node in products:
            if node.target is torch.ops.aten.mm.default:
                place, factors = products[node], [copies[x] for x in node.args]
                sum_up(place, torch.ops.aten.addmm.default, *factors, like=node)
        elif node in made:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            sum_up_each(node)
    sums = [totals.get(place, copies.get(node)) for place, node in enumerate(summed)]
    graph.output([*(copies[node] for node in outputs), *sums])

    @functools.cache  # a trace never needs it
    def run() -> Callable[[Tensors], Tensors]:
        return GraphModule(module, graph).forward

    def extracted(box: Tensors) -> Tensors:
        found = spliced(graph, box)
        return run()(box) if found is None else found

    return extracted
