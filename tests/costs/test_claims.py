"""What DeepSpeed is known for, and the page of it; the plans behind it with ``-m slow``."""

from pathlib import Path

import pytest

from zero_fn.costs.claims import CLAIMS, Row, markdown, onebit, report
from zero_fn.models import gpt

PAGE = Path(__file__).parents[2] / "docs" / "claims.md"


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


HOLDS = {
    "a trillion parameters": [True, False, True],
    "13 billion on one GPU": [False, True],
    "100 billion": [False, True],
    "Turing-NLG": [False, True],
    "sequences 10 times longer": [None, True, True],
    "1-bit Adam": [None, None, None, True, False],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOLDS)
def test_the_page_is_what_the_plans_say(name: str) -> None:
    (claim,) = [claim for claim in CLAIMS if claim.name == name]
    rows = list(claim.rows())
    assert [row.holds for row in rows] == HOLDS[name]
    assert markdown(claim, rows) in PAGE.read_text()


def test_the_page_has_every_claim() -> None:
    text = PAGE.read_text()
    for claim in CLAIMS:
        whole = markdown(claim, [])
        title, said = whole.split("| set-up")[0], whole.split("|---|---|---|")[1]
        assert title in text
        assert said in text
