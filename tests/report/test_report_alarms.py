"""What the report says of alarms: that there were none only where there could have been, and a dead run in red."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mmrl.report import build_report
from tests.report.test_report import Page

DEAD = {
    "train/grad_norm": 0.0,
    "train/parse_rate": 0.0,
    "train/clipped_share": 0.984,
    "train/groups/asked": 12,
    "train/groups/kept": 0,
    "train/groups/failed": 0,
}


def page_of(
    run: Path, rows: list[dict[str, float | None]], alarms: list[dict[str, object]] | None = None
) -> Page:
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": i, **row}) + "\n" for i, row in enumerate(rows, 1))
    )
    (run / "alarms.jsonl").write_text("".join(json.dumps(a) + "\n" for a in alarms or []))
    return Page(build_report(run))


def reds(page: Page) -> int:
    return sum(attrs.get("class") == "dead" for _, attrs in page.tags)


def test_a_run_in_which_nothing_was_trained_says_so_in_red_and_is_never_calm(
    new_run: Callable[..., Path],
) -> None:
    run = new_run()
    for alarms in ([], [{"step": 3, "name": "parse_rate", "message": "0%", "severity": "error"}]):
        page = page_of(run, [DEAD] * 12, alarms)
        assert (
            "Nothing was trained in any of the 12 steps: 0.0 % of answers kept the format, 98.4 % were cut at the length "
            "limit, 0.0 % of groups had signal." in page.text
        )
        assert reds(page) == 2, "at the top and beside the alarms"
        assert ('class="calm"' in page.source) is False


@pytest.mark.check_takes(2)
@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "No step has been taken yet: no alarm could be raised."),
        (
            [{"train/grad_norm": 0.5}] * 2,
            "No alarm was raised in 2 steps; most count 3 steps in a row.",
        ),
        (
            [{"train/grad_norm": 0.5}, *[{"train/grad_norm": 0.0}] * 3],
            "No alarm was raised in 4 steps.",
        ),
        ([{"train/grad_norm": None}] * 4, "Nothing was trained in any of the 4 steps."),
        (
            [{"train/grad_norm": 0.0, "train/groups/asked": "many", "train/groups/kept": None}] * 3,
            "Nothing was trained",
        ),
    ],
)
def test_no_alarm_is_said_of_a_run_that_could_have_raised_one(
    rows: list[dict[str, float | None]], said: str, new_run: Callable[..., Path]
) -> None:
    page = page_of(new_run(), rows)
    assert said in page.text and ('class="calm"' in page.source) == (
        said == "No alarm was raised in 4 steps."
    )
