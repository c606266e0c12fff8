"""Philox against the published known answers, and in every transform."""

import pytest
import torch

from zero_fn.kernels import philox
from zero_fn.kernels.random_words import words_at

# Salmon et al.'s known answers (kat_vectors of Random123): counter, key, words.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0"),
]
ANSWERS = [
    "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "408f276d 41c83b0e a20bc7c6 6d5451fd",
    "d16cfe09 94fdcceb 5001e420 24126ea1",
]


def words(text: str) -> list[torch.Tensor]:
    return [torch.tensor(int(word, 16)) for word in text.split()]


@pytest.mark.parametrize(("given", "answer"), [*zip(KNOWN, ANSWERS, strict=True)])
def test_known_answers(given: tuple[str, str], answer: str) -> None:
    counter, key = words(given[0]), words(given[1])
    got = words_at(tuple(counter), (key[0], key[1]))
    assert [int(word) for word in got] == [int(word) for word in words(answer)]


def test_the_op_is_the_rounds_at_each_counter() -> None:
    key, data = torch.tensor([7, 2**32 - 1]), torch.tensor(-3)
    count = (1 << 14) + 3  # more than is computed at a time
    got = philox(key, data, count, 5)
    assert got.shape == (count, 4)
    assert 0 <= got.min() <= got.max() < 2**32
    for i in (0, 1, (1 << 14) - 1, 1 << 14, count - 1):
        counter = torch.tensor(i), data & 0xFFFFFFFF, (data >> 32) & 0xFFFFFFFF, torch.tensor(5)
        assert got[i].tolist() == [int(x) for x in words_at(counter, (key[0], key[1]))]


def test_maps_over_keys_and_data() -> None:
    keys, data = torch.arange(6).view(3, 2), torch.arange(3) - 1
    rows = [[philox(k, d, 2) for d in data] for k in keys]
    want = torch.stack([torch.stack(row) for row in rows])
    over_data = torch.func.vmap(lambda k, d: philox(k, d, 2), (None, 0))
    assert torch.equal(torch.func.vmap(over_data, (0, None))(keys, data), want)
    assert torch.equal(philox(keys, data, 2), want[range(3), range(3)])


def test_the_op_obeys_torchs_rules() -> None:
    op = torch.ops.zero_fn.philox.default
    arguments = torch.tensor([1, 2]), torch.tensor(3), 5, 0
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_too_many_counters() -> None:
    with pytest.raises(ValueError, match="philox at 4294967296 counters; a call has at most"):
        philox(torch.tensor([1, 2]), torch.tensor(0), 2**32)
