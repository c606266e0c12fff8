"""Every pair of features trains to what it has to, or is refused when the step is built."""

from pathlib import Path

import torch

from .combinations import FEATURES, compared_with, page, params, trained

PAGE = Path(__file__).parents[1] / "docs" / "combinations.md"


def test_the_page_is_what_the_pairs_say() -> None:
    # a pair that trains to something else, or is refused at its first step, is an error there
    assert page() + "\n" == PAGE.read_text()


def test_what_changes_the_numbers_does() -> None:
    alone = trained(frozenset())
    assert all((alone[name] - x).abs().max() > 0.1 for name, x in params().items())
    for feature in FEATURES:
        found = trained(frozenset({feature}))
        same = all(torch.allclose(found[name], x, rtol=1e-9) for name, x in alone.items())
        assert same is not bool(compared_with(frozenset({feature}))), feature
