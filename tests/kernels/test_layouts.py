"""Layouts: block for block DeepSpeed's, equal to plain loops, and values."""

import copy
import gc
import json
import pickle
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from zero_fn.kernels import Layout
from zero_fn.kernels.layout_drawing import text
from zero_fn.kernels.layout_tiles import tiles_of
from zero_fn.kernels.layouts import find

DEEPSPEED = json.loads(
    (Path(__file__).parents[1] / "data" / "deepspeed_layouts.json").read_text(encoding="utf-8")
)
BUILDER = {
    "FixedSparsityConfig": Layout.fixed,
    "VariableSparsityConfig": Layout.variable,
    "BigBirdSparsityConfig": Layout.bigbird,
    "BSLongformerSparsityConfig": Layout.bslongformer,
    "LocalSlidingWindowSparsityConfig": Layout.local_sliding_window,
}


@pytest.mark.parametrize("case", DEEPSPEED, ids=lambda c: f"{c['config']} {c['args']}")
def test_equals_what_deepspeed_built(case: dict[str, Any]) -> None:
    layout = BUILDER[case["config"]](case["seq_len"], **case["args"])
    want = torch.tensor([[[int(x) for x in row] for row in head] for head in case["layout"]])
    assert torch.equal(layout.to_mask(), want.bool())


# Plain-loop definitions: whether row i sees column j of n, in blocks.

Sees = Callable[[int, int, int], bool]


def loop(n: int, sees: Sees) -> Tensor:
    return torch.tensor([[sees(i, j, n) for j in range(n)] for i in range(n)]).view(n, n)


def fixed(i: int, j: int, n: int) -> bool:
    """Windows of 3 with the last block global; in a shorter last window its last block."""
    last = n - n % 3
    is_global = j % 3 == 2 if j < last else j == min(last + 2, n - 1)
    return i // 3 == j // 3 or is_global


LOOPS: list[tuple[Callable[..., Layout], dict[str, Any], Sees]] = [
    (Layout.dense, {}, lambda i, j, n: True),
    (Layout.causal, {}, lambda i, j, n: j <= i),
    (Layout.fixed, {"num_local_blocks": 3}, fixed),
    (
        Layout.fixed,
        {"num_local_blocks": 3, "attention": "unidirectional"},
        lambda i, j, n: j <= i and fixed(i, j, n),
    ),
    (
        Layout.variable,
        {"local_window_blocks": [1, 2], "global_block_indices": [3]},
        lambda i, j, n: (i + 1) // 2 == (j + 1) // 2 or j == 3,
    ),
    (
        Layout.bigbird,
        {"num_random_blocks": 0, "num_sliding_window_blocks": 5, "num_global_blocks": 2},
        lambda i, j, n: abs(i - j) <= 2 or i < 2 or j < 2,
    ),
    (
        Layout.bslongformer,
        {"global_block_indices": [1], "global_block_end_indices": [3]},
        lambda i, j, n: abs(i - j) <= 1 or i in (1, 2) or j in (1, 2),
    ),
    (
        Layout.bslongformer,
        {"attention": "unidirectional", "global_block_indices": [1, 4]},
        lambda i, j, n: j <= i and (abs(i - j) <= 1 or i in (1, 4) or j in (1, 4)),
    ),
    (Layout.local_sliding_window, {}, lambda i, j, n: 0 <= i - j <= 1),
    (
        Layout.dilated,
        {"num_sliding_window_blocks": 5, "dilation": 3},
        lambda i, j, n: abs(i - j) in (0, 3, 6),
    ),
    (
        Layout.dilated,
        {"num_sliding_window_blocks": 3, "attention": "unidirectional"},
        lambda i, j, n: i - j in (0, 2),
    ),
    (
        Layout.strided,
        {"stride": 4, "num_local_blocks": 2},
        lambda i, j, n: abs(i - j) < 2 or (i - j) % 4 == 0,
    ),
    (
        Layout.strided,
        {"stride": 3, "attention": "unidirectional"},
        lambda i, j, n: j <= i and (i - j < 3 or (i - j) % 3 == 0),
    ),
]


@pytest.mark.parametrize("number", range(len(LOOPS)), ids=lambda i: f"{LOOPS[i][0].__name__} {i}")
@pytest.mark.parametrize("length", [0, 1, 16, 80, 205])
def test_equals_a_plain_loop(number: int, length: int) -> None:
    build, arguments, sees = LOOPS[number]
    layout = build(length, block=16, **arguments)
    n = -(-length // 16)
    assert torch.equal(layout.to_mask()[0], loop(n, sees).bool())
    assert layout.q_len == layout.k_len == length


def test_causal_and_documents_hold_for_each_element() -> None:
    seen = Layout.causal(45, block=16, k_len=70).to_dense()[0]
    assert torch.equal(seen, torch.ones(45, 70, dtype=torch.bool).tril())
    lengths = [20, 1, 0, 19, 64, 7]
    owner = torch.tensor([d for d, length in enumerate(lengths) for _ in range(length)])
    for block in (16, 32, 64, 128):
        layout = Layout.document(lengths, block=block)
        assert torch.equal(layout.to_dense()[0], owner[:, None] == owner)


def test_random_blocks() -> None:
    def extra(layout: Layout) -> Tensor:
        base = Layout.bigbird(320, num_random_blocks=0)
        return (layout.to_mask() & ~base.to_mask()).sum((1, 2))

    shared = Layout.bigbird(320, num_heads=3, num_random_blocks=2)
    assert shared.patterns == 1
    assert (extra(shared) > 0).all()
    own = Layout.bigbird(320, num_heads=3, num_random_blocks=2, different_layout_per_head=True)
    assert own.patterns == 3
    assert own is Layout.bigbird(
        320, num_heads=3, num_random_blocks=2, different_layout_per_head=True
    )
    assert shared is not Layout.bigbird(320, num_heads=3, num_random_blocks=2, seed=1)
    for build in (Layout.bigbird, Layout.variable):
        mask = build(320, num_random_blocks=3, attention="unidirectional").to_mask()[0]
        assert not mask.triu(1).any()
        full = build(320, num_random_blocks=20).to_mask()
        assert full.all()
    rows = Layout.variable(320, num_random_blocks=3, local_window_blocks=[1]).to_mask()[0]
    assert (rows[:, 1:].sum(1) >= 1).all()


# Algebra


@st.composite
def layouts(draw: Any, block: int = 16, q_len: int = 70, k_len: int = 45) -> Layout:
    """Any layout: blocks, a triangle, documents, and the union or intersection of two."""
    heads = draw(st.sampled_from([1, 1, 3]))
    shape = heads, -(-q_len // block), -(-k_len // block)
    bits = draw(st.integers(0, 2 ** (shape[0] * shape[1] * shape[2]) - 1))
    mask = torch.tensor([bool(bits >> i & 1) for i in range(shape[0] * shape[1] * shape[2])])
    layout = Layout.from_mask(mask.view(shape), block, q_len, k_len)
    return layout.tril() if draw(st.booleans()) else layout


@settings(deadline=None, max_examples=25)
@given(layouts(), layouts())
def test_union_intersection_and_triangle(a: Layout, b: Layout) -> None:
    assert torch.equal((a | b).to_dense(), a.to_dense() | b.to_dense())
    assert torch.equal((a & b).to_dense(), a.to_dense() & b.to_dense())
    assert torch.equal((a | b).tril().to_dense(), (a.to_dense() | b.to_dense()).tril())
    assert a | a is a
    assert a & a is a
    assert a | b is b | a
    assert a & (a | b) is (a if a.heads >= b.heads else a & (a | b))


def test_documents_combine() -> None:
    first, second = Layout.document([20, 30, 14]), Layout.document([33, 31])
    for got, want in (
        (first & second, first.to_dense() & second.to_dense()),
        (first | second, first.to_dense() | second.to_dense()),
        (first.tril() | second, first.to_dense().tril() | second.to_dense()),
    ):
        assert torch.equal(got.to_dense(), want)
    assert first & second is Layout.document([20, 13, 17, 14])


@settings(deadline=None, max_examples=20)
@given(
    layouts(),
    st.sampled_from([16, 32, 128]),
    st.sampled_from([8, 16, 64]),
    st.booleans(),
)
def test_tiles_of_any_size_hold_the_same(
    layout: Layout, rows: int, columns: int, transposed: bool
) -> None:
    tiles = tiles_of(layout, rows, columns, transposed)
    lines, others = -(-layout.q_len // rows), -(-layout.k_len // columns)
    grid = torch.zeros(layout.patterns, lines, others, rows, columns, dtype=torch.bool)
    table = torch.cat([tiles.table, torch.ones(1, rows, columns, dtype=torch.bool)])
    count = others if transposed else lines
    for pattern in range(layout.patterns):
        for line in range(count):
            at = pattern * count + line
            for i in range(int(tiles.ptr[at]), int(tiles.ptr[at + 1])):
                other = int(tiles.others[i])
                place = (other, line) if transposed else (line, other)
                assert not grid[pattern][place].any()
                grid[pattern][place] = table[tiles.masks[i]]
    seen = grid.transpose(2, 3).reshape(layout.patterns, lines * rows, others * columns)
    seen = seen[list(layout.head_patterns), : layout.q_len]
    assert torch.equal(seen[..., : layout.k_len], layout.to_dense())
    assert not seen[..., layout.k_len :].any()


def test_compressed_columns() -> None:
    layout = Layout.bigbird(200, num_heads=2, different_layout_per_head=True).tril()
    ptr, rows, places = layout.columns()
    mask = torch.zeros(2, layout.q_blocks, layout.k_blocks, dtype=torch.bool)
    for p in range(2):
        for column in range(layout.k_blocks):
            own = slice(ptr[p * layout.k_blocks + column], ptr[p * layout.k_blocks + column + 1])
            assert (layout.cols[places[own]] == column).all()
            assert (rows[own].diff() > 0).all()
            mask[p, rows[own].long(), column] = True
    assert torch.equal(mask, layout.to_mask())


# Values


def test_equal_layouts_are_one_object() -> None:
    layout = Layout.fixed(100, num_heads=2)
    assert Layout.fixed(100, num_heads=2) is layout
    assert Layout.from_mask(layout.to_mask(), 16, 100, 100) is layout
    assert Layout.fixed(101, num_heads=2) is not layout
    assert copy.copy(layout) is layout
    assert copy.deepcopy(layout) is layout
    assert pickle.loads(pickle.dumps(layout)) is layout
    assert {layout: 1}[Layout.fixed(100, num_heads=2)] == 1
    assert find(layout.key) is layout
    with pytest.raises(AttributeError):
        layout.q_len = 7  # type: ignore[misc]


def test_a_layout_that_is_gone_is_missed_loudly() -> None:
    key = Layout.dense(77, block=32).key
    gc.collect()
    with pytest.raises(LookupError, match="keep a reference to the Layout"):
        find(key)


def test_heads_with_equal_patterns_share_them() -> None:
    layout = Layout.fixed(
        256, num_heads=4, different_layout_per_head=True, num_different_global_patterns=2
    )
    assert layout.head_patterns == (0, 1, 0, 1)
    assert layout.density == layout.to_mask().float().mean().item()


def test_a_million_tokens_take_no_time_or_room() -> None:
    for build in (Layout.bigbird, Layout.local_sliding_window, Layout.dilated):
        start = time.perf_counter()
        layout = build(1 << 20, block=64)
        # Milliseconds; a dense mask of 16384 × 16384 blocks takes longer to fill.
        assert time.perf_counter() - start < 20
        assert sum(x.nbytes for x in (layout.row_ptr, layout.cols, layout.masks)) < 2 << 20


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, None])
def test_made_anywhere(context: Any) -> None:
    size = random.Random(str(context)).randrange(100, 1000)  # not made before
    with (context or torch.enable_grad)():
        layout = Layout.document([size, 7]).tril()
    for x in (layout.row_ptr, layout.cols, layout.masks, layout.tiles):
        assert not x.is_inference()
        assert not x.requires_grad

    def f(x: Tensor) -> Tensor:
        made = Layout.document([size, 9]).tril()
        assert type(made.tiles) is Tensor
        assert not torch._C._functorch.is_functorch_wrapped_tensor(made.tiles)
        return x.sum() * made.density

    torch.func.vmap(torch.func.grad(f))(torch.ones(2, 3))
    with torch.device("meta"):
        assert Layout.document([size, 8]).tiles.device.type == "cpu"


# FlexAttention


def test_from_a_block_mask() -> None:
    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((q - k).abs() < 20 + 10 * h) | (k == 3)

    given = create_block_mask(near, None, 2, 150, 100, device="cpu", BLOCK_SIZE=32)
    layout = Layout.from_block_mask(given)
    want = create_mask(near, None, 2, 150, 100, device="cpu")[0]
    assert torch.equal(layout.to_dense(), want)
    assert layout.block == 32


@pytest.mark.parametrize(
    "layout",
    [
        Layout.causal(150, block=32),
        Layout.document([40, 50, 61], block=16) | Layout.bslongformer(151, block=16),
        Layout.bigbird(128, num_heads=2, different_layout_per_head=True).tril(),
        Layout.dense(48, block=16, k_len=70),
    ],
    ids=repr,
)
def test_to_a_block_mask_and_back(layout: Layout) -> None:
    there = layout.to_block_mask()
    seen = create_mask(there.mask_mod, None, layout.heads, layout.q_len, layout.k_len, device="cpu")
    assert torch.equal(seen[0], layout.to_dense())
    assert Layout.from_block_mask(there) is layout


def test_block_masks_that_no_layout_is() -> None:
    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    with pytest.raises(ValueError, match=r"blocks of \(256, 256\)"):
        Layout.from_block_mask(
            create_block_mask(causal, None, None, 512, 512, device="cpu", BLOCK_SIZE=256)
        )
    with pytest.raises(ValueError, match="batch of 2"):
        Layout.from_block_mask(create_block_mask(causal, 2, None, 256, 256, device="cpu"))


# Pictures


def test_text() -> None:
    layout = Layout.causal(80, block=16)
    assert text(layout).splitlines() == ["▒····", "█▒···", "██▒··", "███▒·", "████▒"]
    assert repr(layout) == "Layout(80 × 80, any heads, block 16, 15 blocks, density 0.6)"
    assert str(layout) == f"{layout!r}\n{text(layout)}"
    many = text(Layout.local_sliding_window(1 << 16, block=64)).splitlines()
    assert len(many) == len(many[0]) <= 48
    assert text(Layout.dense(0)) == ""
    with pytest.raises(IndexError, match="head 1 of a layout with 1"):
        text(layout, head=1)


def test_plot() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ax = plt.subplots()[1]
    for layout in (Layout.bigbird(300, num_heads=2), Layout.dense(0)):
        assert layout.plot(ax, head=layout.heads - 1) is ax
        assert layout.plot().get_xlabel() == "key"
    plt.close("all")


# Errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout.dense(10, block=24), "block=24; one of 16, 32, 64, 128"),
        (lambda: Layout.dense(-1), "length -1"),
        (lambda: Layout.dense(10, num_heads=0), "num_heads=0"),
        (lambda: Layout.fixed(64, attention="causal"), "'unidirectional' or 'bidirectional'"),
        (
            lambda: Layout.fixed(
                64, attention="unidirectional", horizontal_global_attention=True
            ),
            "horizontal_global_attention=True",
        ),
        (lambda: Layout.fixed(64, num_global_blocks=3), "num_local_blocks=4 is no multiple"),
        (
            lambda: Layout.fixed(
                64, num_different_global_patterns=5, different_layout_per_head=True
            ),
            "room for 1 to 4",
        ),
        (lambda: Layout.fixed(64, num_different_global_patterns=2), "different_layout_per_head"),
        (lambda: Layout.variable(64, local_window_blocks=[]), r"local_window_blocks=\[\]"),
        (lambda: Layout.variable(64, global_block_indices=[3], global_block_end_indices=[3]), "3"),
        (lambda: Layout.variable(64, global_block_end_indices=[3, 4]), "1 global_block_indices"),
        (lambda: Layout.variable(64, num_random_blocks=5), "num_random_blocks=5 of 4"),
        (lambda: Layout.bigbird(64, num_random_blocks=5), "num_random_blocks=5 of 4"),
        (lambda: Layout.bslongformer(64, num_sliding_window_blocks=0), "1 or more"),
        (lambda: Layout.dilated(64, dilation=0), "dilation=0"),
        (lambda: Layout.strided(64, stride=0), "stride=0"),
        (lambda: Layout.document([3, -1]), r"lengths=\[3, -1\]"),
        (lambda: Layout.from_mask(torch.ones(2, 2)), r"torch.float32 of shape \(2, 2\)"),
        (lambda: Layout.from_mask(torch.ones(2, 2).bool(), seq_len=300), "300 queries"),
        (lambda: Layout.dense(5) | Layout.dense(6), "union of layouts with q_len 5 and 6"),
        (lambda: Layout.dense(5, block=16) & Layout.dense(5, block=32), "block 16 and 32"),
        (lambda: Layout.dense(5, num_heads=2) | Layout.dense(5, num_heads=3), "2 and 3 heads"),
    ],
)  # fmt: skip
def test_errors(make: Callable[[], Layout], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
