"""Settings of all tests."""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.processes import close_pools


@pytest.fixture(autouse=True, scope="session")
def _session() -> Iterator[None]:
    # One thread where pytest-xdist runs the tests on both cores.
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
    yield
    close_pools()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
