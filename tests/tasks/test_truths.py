"""What is read from a sample is read once for its completions, and never taken for another sample's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmrl.tasks.truths import MOST_KEPT, of_sample
from mmrl.types import Sample

SAMPLE = Sample("1", "counting", "s", "birds", 3)


def test_once_per_sample_and_settings_and_never_for_another_one() -> None:
    asked: list[tuple[Sample, int]] = []

    @of_sample
    def doubled(sample: Sample, times: int = 2) -> int:
        """Doc."""
        asked.append((sample, times))
        return int(sample.answer) * times

    assert [doubled(SAMPLE), doubled(SAMPLE), doubled(SAMPLE, 3), doubled(SAMPLE, times=4)] == [
        6,
        6,
        9,
        12,
    ]
    assert len(asked) == 3 and doubled.__doc__ == "Doc."
    equal, other = replace(SAMPLE), replace(SAMPLE, answer=5)
    assert equal == SAMPLE and doubled(equal) == 6 and doubled(other) == 10 and len(asked) == 5
    # samples that nobody holds: their ids are free for others as soon as they are let go
    for number in range(2 * MOST_KEPT):
        assert doubled(replace(SAMPLE, answer=number)) == 2 * number
    assert doubled(SAMPLE) == 6 and len(asked) == 6 + 2 * MOST_KEPT


def test_what_raises_is_asked_again() -> None:
    @of_sample
    def broken(sample: Sample) -> int:
        raise ValueError("no truth")

    for _ in range(2):
        with pytest.raises(ValueError, match="no truth"):
            broken(SAMPLE)
