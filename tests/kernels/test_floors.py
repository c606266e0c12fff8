"""The floors of kernels, counted by hand."""

import pytest
import torch

from zero_fn.kernels.floors import Floor, adamw_floor, attention_floor

F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("storage", "each"),
    [
        ({}, 28),  # p g m v, p m v
        ({"grads": BF16}, 26),
        ({"grads": BF16, "copies": BF16}, 28),
        ({"params": BF16, "grads": BF16}, 22),
        ({"params": BF16, "grads": BF16, "moments": BF16}, 14),
        ({"params": torch.float64, "grads": torch.float64, "moments": torch.float64}, 56),
    ],
)
def test_bytes_of_adam(storage: dict[str, torch.dtype], each: int) -> None:
    assert adamw_floor([10, 0, 1], **storage).bytes == 11 * each


def test_seconds() -> None:
    # 1e9 values at the copy bandwidth of an H200: the 6.5 ms of any kernel that moves them once
    assert adamw_floor([10**9]).seconds(4.3e12) == pytest.approx(6.5e-3, rel=0.01)
    assert Floor(bytes=10, flops=100).seconds(bandwidth=10, rate=10) == 10


def test_attention() -> None:
    forward = attention_floor(2, 4, 10, 30, 8, 0.5, kv_heads=2, dtype=F32)
    # q and out of 80 rows, k and v of 120, and a log-sum a query
    assert forward.bytes == 4 * (2 * 80 * 8 + 2 * 120 * 8 + 80)
    assert forward.exponentials == 80 * 30 // 2
    assert forward.flops == 2 * 2 * 8 * forward.exponentials
    backward = attention_floor(2, 4, 10, 30, 8, 0.5, kv_heads=2, dtype=F32, backward=True)
    # besides: out's gradient, dq, dk, dv
    assert backward.bytes - forward.bytes == 4 * (2 * 80 * 8 + 2 * 120 * 8)
    assert backward.flops == 5 * 2 * 8 * backward.exponentials
