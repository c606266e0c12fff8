"""Signs packed and unpacked: plain loops, compiled C, numpy and torch agree; what is refused."""

import logging
import shutil
from pathlib import Path

import pytest
import torch

from zero_fn.kernels import native, sign_pack, sign_packing, sign_packing_native, sign_unpack

WAYS = ("compiled", "numpy", "torch")


def go(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take one of the ways of a CPU."""
    if way == "compiled" and not shutil.which("cc"):
        pytest.skip("no compiler")
    monkeypatch.setattr(sign_packing, "PIECE", 32)  # several pieces
    monkeypatch.setattr(sign_packing_native, "SHARE", 32)  # several threads
    if way != "compiled":
        monkeypatch.setattr(sign_packing_native, "takes", lambda *given: False)
    if way == "torch":
        monkeypatch.setattr(sign_packing, "np", None)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_plain_loops(way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    go(way, monkeypatch)
    x, error = torch.randn(3, 48, dtype=dtype), torch.randn(3, 48, dtype=dtype)
    x[0, 3] = error[0, 3] = -0.0
    counts = torch.tensor([[16, 16, 16], [16, 3, 0], [1, 16, 9]])
    bits, scales, rest = sign_pack(x, error, counts, 16)
    back = sign_unpack(bits, scales)
    for row in range(3):
        for block in range(3):
            n = int(counts[row, block])
            here = slice(block * 16, block * 16 + 16)
            total = (x + error)[row, here].clone()
            total[n:] = 0
            scale = total.abs().sum() / max(n, 1)
            torch.testing.assert_close(scales[row, block], scale)
            for place in range(16):
                bit = bits[row, block * 2 + place // 8] >> (7 - place % 8) & 1
                assert bool(bit) == bool(torch.signbit(total[place]))
                value = -scale if bit else scale
                torch.testing.assert_close(back[row, here][place], value)
                lost = total[place] - value if place < n else torch.zeros((), dtype=dtype)
                torch.testing.assert_close(rest[row, here][place], lost)


def test_all_ways_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Usual blocks and odd ones, full, partial and empty; the same bits whatever packed them."""
    for block in (8, 24, 32, 1024, 8192):
        x = torch.randn(7 * block) * torch.randn(7 * block).exp()
        x[3], x[5] = -0.0, 1e-42
        error = torch.randn(7 * block).where(torch.rand(7 * block) < 0.5, -x)
        counts = torch.tensor([block, block - 1, 3, 0, block, block, 1])
        found = []
        for way in WAYS:
            with monkeypatch.context() as patch:
                go(way, patch)
                bits, scales, rest = sign_pack(x, error, counts, block)
                found.append((bits, scales, rest, sign_unpack(bits, scales)))
        for bits, scales, rest, back in found[1:]:
            assert torch.equal(bits, found[0][0])
            for got, want in zip((scales, rest, back), found[0][1:], strict=True):
                # sums of 8192 float32 values in another order
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_block_does_not_depend_on_its_neighbours(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(way, monkeypatch)
    x, counts = torch.randn(9, 1024), torch.full((9, 1), 1024)
    counts[4] = 1000
    together = sign_pack(x, torch.zeros_like(x), counts)
    for row in range(9):
        one = x[row : row + 1]
        for got, want in zip(sign_pack(one, 0 * one, counts[row : row + 1]), together, strict=True):
            assert torch.equal(got[0], want[row])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_spoils_its_block_alone(
    way: str, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(way, monkeypatch)
    x, counts = torch.randn(96), torch.tensor([32, 32, 32])
    x[40] = bad
    bits, scales, rest = sign_pack(x, torch.zeros(96), counts, 32)
    back = sign_unpack(bits, scales)
    for values in (back, rest):
        assert values[:32].isfinite().all()
        assert values[64:].isfinite().all()
    assert not back[32:64].isfinite().any()


def test_without_a_compiler_it_runs_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "broken.c"
    source.write_text("this is not C")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.INFO, "zero_fn.kernels"):
        assert native.library(source) is None
    assert not shutil.which("cc") or "broken.c is not compiled" in caplog.text
    monkeypatch.setattr(shutil, "which", lambda name: None)
    source.write_text("int one(void) { return 1; }")
    native.library.cache_clear()
    assert native.library(source) is None
    native.library.cache_clear()


def test_what_is_compiled_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not shutil.which("cc"):
        pytest.skip("no compiler")
    source = tmp_path / "one.c"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for number in (1, 1, 2):
        source.write_text(f"int one(void) {{ return {number}; }}")
        native.library.cache_clear()
        made = native.library(source)
        assert made is not None
        assert made.one() == number
    assert len(list((tmp_path / "zero_fn").iterdir())) == 2  # and nothing left lying about
    native.library.cache_clear()


def test_nothing_is_packed_to_nothing() -> None:
    bits, scales, rest = sign_pack(torch.zeros(0), torch.zeros(0), torch.zeros(0), 8)
    assert bits.shape == scales.shape == rest.shape == (0,)
    assert sign_unpack(bits, scales).shape == (0,)


def test_what_does_not_fit_is_refused() -> None:
    x, counts = torch.zeros(16), torch.zeros(2)
    for arguments, message in (
        ((x, x, counts, 12), "multiple of 8"),
        ((x, x[:8], counts, 8), "error"),
        ((x.half(), x.half(), counts, 8), "float32"),
        ((x[:12], x[:12], counts, 8), "pad it"),
        ((x, x, counts[:1], 8), "one for each block"),
    ):
        with pytest.raises(ValueError, match=message):
            sign_pack(*arguments)
    with pytest.raises(ValueError, match="no whole number of bytes"):
        sign_unpack(torch.zeros(3, dtype=torch.uint8), counts)
