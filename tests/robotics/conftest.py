from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kits.prepared_kit import MANISKILL, TINY, prepared_simulators


@pytest.fixture(scope="module")
def tiny_workers() -> Iterator[None]:
    """Workers for tiny simulators: a run starts some, and each would import numpy and mmrl for a third of a second."""
    with prepared_simulators(*TINY):
        yield


@pytest.fixture(scope="module")
def maniskill_workers() -> Iterator[None]:
    """Workers for ManiSkill, whose import takes seconds."""
    with prepared_simulators(*MANISKILL):
        yield
