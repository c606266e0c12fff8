"""Which rank holds what: boxes against what the ranks hold, and how it looks."""

import math
from typing import Any

import pytest
import torch

import zero_fn as zf


def held(params: Any, mesh: zf.Mesh, cut: Any) -> Any:
    return zf.spmd(cut, mesh)(params)


def test_boxes_are_what_ranks_hold() -> None:
    """The share of a leaf that a rank's box covers is what it holds without padding."""
    mesh = zf.Mesh(dp=3, tp=2)
    params = {"w": torch.randn(4, 10), "b": torch.randn(7), "up": torch.randn(6, 5)}
    rules = {"w": 1, "b": None, "up": 0}
    state = held(params, mesh, lambda p: zf.shard(zf.slice_params(p, rules, "tp"), 3))
    picture = zf.show_sharding(state, mesh)
    assert picture.axes == {"dp": 3, "tp": 2}
    assert picture.ranks[1] == "dp0 tp1"
    for row in picture.rows:
        x = params[row.name]
        whole = 4 * x.numel() * (2 if rules[row.name] is None else 1)
        assert sum(row.bytes) == whole, row


def test_stage_0_is_whole_everywhere_and_stage_3_in_parts() -> None:
    mesh = zf.Mesh(dp=4)
    params = {"blocks": [{"w": torch.zeros(8, 2)} for _ in range(3)], "b": torch.zeros(3)}
    for stage, share in ((0, 1), (3, 4)):
        picture = zf.show_sharding(held(params, mesh, lambda p, s=stage: zf.shard(p, s)), mesh)
        rows = {row.name: row for row in picture.rows}
        assert rows["blocks.0…2.w"].count == 3
        assert rows["blocks.0…2.w"].bytes == (3 * 64 // share,) * 4
        assert sum(rows["b"].bytes) == 12 * (4 if stage == 0 else 1)


def test_text_and_html() -> None:
    mesh = zf.Mesh(dp=2, tp=2)
    state = held(
        {"w": torch.zeros(4, 4)}, mesh, lambda p: zf.shard(zf.slice_params(p, {"w": 1}, "tp"), 3)
    )
    text = str(zf.show_sharding(state, mesh))
    assert "▀▀▀▀····" in text
    assert "····▄▄▄▄" in text
    page = zf.show_sharding(state, mesh)._repr_html_()
    assert page.count("<svg") == 4
    assert "dp1 tp1" in page


def test_the_step_s_state_and_plain_leaves() -> None:
    mesh = zf.Mesh(dp=2)
    init, _ = zf.train_step(lambda p, x: (x @ p).mean(), zf.adamw(0.1), mesh, stage=2)
    picture = zf.show_sharding(init(torch.ones(5)))
    assert {row.look for row in picture.rows} >= {"f32[5]"}
    assert any(row.bytes == (12, 8) for row in picture.rows)
    many = zf.show_sharding({"x": torch.zeros(2)}, zf.Mesh(dp=40).abstract())
    assert "and 8 ranks more" in str(many)
    assert "and 8 ranks more" in many._repr_html_()


def test_meshes_that_do_not_agree() -> None:
    state = held(torch.zeros(6), zf.Mesh(dp=2), lambda p: zf.shard(p, 1))
    with pytest.raises(ValueError, match="was cut for 2 ranks of 'dp', and there are 3"):
        zf.show_sharding(state, zf.Mesh(dp=3))


def test_a_program_s_memory_is_drawn() -> None:
    mesh = zf.Mesh(dp=2).abstract()
    init, step = zf.train_step(lambda p, x: torch.tanh(x @ p).mean(), zf.adamw(0.1), mesh, stage=3)
    program = step.trace(init(torch.ones(64, 64)), torch.ones(4, 64))  # type: ignore[attr-defined]
    axes = program.draw_memory()
    assert axes.get_ylabel() == "KiB on one rank"
    # what is drawn ends at the peak
    top = max(path.vertices[:, 1].max() for c in axes.collections for path in c.get_paths())
    assert math.isclose(top * 1024, program.peak().bytes, rel_tol=1e-6)
    assert program.draw_memory(axes) is axes
