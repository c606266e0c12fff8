"""What DeepSpeed is known for: the quick ones always, the others with ``-m slow``."""

import pytest

from zero_fn.costs.claims import (
    CLAIMS,
    Row,
    hundred,
    markdown,
    onebit,
    report,
    sequences,
    thirteen,
    trillion,
    turing,
)
from zero_fn.models import gpt


def test_one_bit_adam_sends_5_times_less_than_float32() -> None:
    *amounts, beside_float32, beside_float16 = onebit(gpt.Config(512, 32, 2, 4, 256), ranks=8)
    assert [row.holds for row in amounts] == [None] * 3
    # (0.15 + 0.85 / 32) without scales and padding
    assert 5.3 < float(beside_float32.found.split()[0]) < 5.67
    assert beside_float32.holds
    assert not beside_float16.holds  # the warm-up travels in float32 here


def test_a_page_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    text = markdown(CLAIMS[0], [Row("a", "b", True), Row("c", "d", None)])
    assert "| a | b | yes |\n| c | d |  |" in text
    assert "It hangs on this:" in text
    with pytest.raises(ValueError, match="no claim 'trilion'"):
        report("trilion")
    assert not capsys.readouterr().out


@pytest.mark.slow
def test_a_trillion_parameters_fit_800_v100s() -> None:
    assert [row.holds for row in trillion()] == [True, False, True]


@pytest.mark.slow
def test_13_billion_fit_one_v100_and_its_host() -> None:
    assert [row.holds for row in thirteen()] == [False, True]


@pytest.mark.slow
def test_100_billion_fit_400_v100s_at_stage_1() -> None:
    assert [row.holds for row in hundred()] == [False, True]


@pytest.mark.slow
def test_turing_nlg_fits_with_slices_of_4() -> None:
    assert [row.holds for row in turing()] == [False, True]


@pytest.mark.slow
def test_sequences_are_10_times_longer() -> None:
    scores, dense, sparse = sequences()
    assert scores.holds is None
    assert dense.holds
    assert sparse.holds
