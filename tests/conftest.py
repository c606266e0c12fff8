"""Settings of all tests."""

from collections.abc import Iterator

import pytest
import torch

from tests.processes import close_pools


@pytest.fixture(autouse=True, scope="session")
def _session() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    close_pools()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
