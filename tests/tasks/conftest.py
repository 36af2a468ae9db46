"""The committed video fixtures, as the tests of their readers want them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tasks.video_sets_kit import copied, copier


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name -> path to read of every video fixture, to be left as they are."""
    return copied(tmp_path_factory.mktemp("video_fixtures"))


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], Path]:
    """own(name) -> the path of a video fixture copied to a folder that a test may change."""
    return copier(tmp_path)
