"""Signs packed and unpacked: against plain loops, with and without numpy, and what is refused."""

import pytest
import torch

from zero_fn.kernels import sign_pack, sign_packing, sign_unpack


@pytest.mark.parametrize("numpy", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_plain_loops(
    numpy: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not numpy:
        monkeypatch.setattr(sign_packing, "np", None)
    monkeypatch.setattr(sign_packing, "PIECE", 32)  # several pieces
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
