"""The Triton sign packing, interpreted, against plain torch."""

import pytest
import torch

from zero_fn.kernels import sign_pack, sign_packing, sign_unpack


@pytest.mark.parametrize("block", [8, 64, 1024])
def test_equals_plain_torch(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, error = torch.randn(2, 3 * block), torch.randn(2, 3 * block)
    counts = torch.tensor([[block, block, 0], [block, 5, 1]], dtype=torch.int32)
    want = sign_pack(x, error, counts, block)
    whole = sign_unpack(*want[:2])
    monkeypatch.setattr(sign_packing, "_triton_takes", lambda x, block: True)
    got = sign_pack(x, error, counts, block)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1:], want[1:])  # sums in another order
    torch.testing.assert_close(sign_unpack(*got[:2]), whole)
