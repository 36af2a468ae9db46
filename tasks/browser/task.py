"""The task `browser`: reach a goal on a page in a real browser, action by action.

    {"id": "17", "kind": "miniwob/click-test", "seed": 17}
    {"id": "18", "kind": "own/shop", "seed": 18}

A row is one episode: a page and the seed that it is begun with. Train and held-out rows differ in their seeds:

    python -m mmrl.tasks.browser.task train.jsonl --kinds miniwob/click-test,own/shop --seeds 0-999
    python -m mmrl.tasks.browser.task val.jsonl --kinds miniwob/click-test,own/shop --seeds 100000-100099

Needs Chromium and the extra `browser` (Playwright, and MiniWoB++'s pages).
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from mmrl.data.json_lines import json_rows
from mmrl.environment import Environment
from mmrl.errors import ConfigError, DataError, MissingExtraError
from mmrl.files import write_text
from mmrl.registry import register
from mmrl.task import Task, Template
from mmrl.tasks.browser.actions import SPELLINGS, BadAction, read_action, words_for
from mmrl.tasks.browser.environment import BrowserEnvironment, Rules
from mmrl.tasks.browser.pool import Browsers
from mmrl.tasks.browser.sites import find_site, site_names
from mmrl.tasks.parameters import check_known, check_number, check_whole
from mmrl.types import RewardContext, Sample, Score

__all__ = ["Browser", "write_rows"]

_PROMPT = "{goal}\nThe picture shows the page as it is now. Reply with one action at a time, as JSON and nothing else: {actions}"
_POINT_PROMPT = "{goal}"
_DEFAULTS: Mapping[str, Any] = {
    "prompt": None,
    "actions": "json",
    "max_turns": 10,
    "milestones": 0.0,
    "astray": 0.0,
    "processes": 1,
    "limit_s": 20.0,
    "chromium": None,
}
_MOST_SEED = 1 << 53  # beyond it JavaScript's numbers are no longer exact


@functools.cache
def _browsers(processes: int, program: str | None, limit_s: float) -> Browsers:
    """The same browsers for all tasks of a run that ask for such."""
    made = Browsers(processes, program, limit_s)
    atexit.register(made.close)
    return made


@register("browser")
class Browser(Task):
    """Reach a goal on a page. Parameters, all optional:

    prompt      text with {goal}, and {actions} for the list of actions
    actions     how actions are written: 'json' (default), 'native' (also as released models write them) or 'point' (a bare point,
                which is a click)
    max_turns   actions of an episode at most (default 10)
    milestones  share of the reward that is paid on the way to a goal of several steps (default 0)
    astray      share of the scripted player's turns that click anywhere (default 0), for `mmrl sft`
    processes   browsers (default 1); one per core is as fast as it gets
    limit_s     seconds for one action (default 20); a page that needs more is lost, and its episode with it
    chromium    the browser's program (default: the one on PATH)
    """

    headline: ClassVar[str] = "success"
    part_names = ("reward",)
    metric_names: ClassVar[tuple[str, ...]] = ("success",)

    def __init__(self, **params: Any) -> None:
        check_known("browser", params, _DEFAULTS)
        super().__init__(**params)
        self.settings = given = {**_DEFAULTS, **params}
        if given["actions"] not in SPELLINGS:
            raise ConfigError(
                f"expected browser.actions to be one of {', '.join(SPELLINGS)}, found {given['actions']!r}"
            )
        for name in ("max_turns", "processes"):
            check_whole(f"browser.{name}", given[name], 1)
        for name, low, high in (
            ("milestones", 0.0, 1.0),
            ("astray", 0.0, 1.0),
            ("limit_s", 1.0, 600.0),
        ):
            check_number(f"browser.{name}", given[name], low, high)
        prompt = given["prompt"] or (_POINT_PROMPT if given["actions"] == "point" else _PROMPT)
        if not isinstance(prompt, str) or "{goal}" not in prompt:
            raise ConfigError(f"expected a browser.prompt that contains {{goal}}, found {prompt!r}")
        self.rules = Rules(
            prompt.replace("{actions}", words_for(given["actions"])),
            given["actions"],
            given["max_turns"],
            float(given["milestones"]),
            float(given["astray"]),
        )

    def environment(self, template: Template) -> Environment:
        """An episode; its browser is started when it is reset."""
        given = self.settings
        browsers = _browsers(given["processes"], given["chromium"], float(given["limit_s"]))
        return BrowserEnvironment(browsers, template, self.rules)

    def load(self, path: str) -> Iterable[Sample]:
        """Rows of `write_rows`. Raises DataError."""
        for number, row in json_rows(Path(path)):
            yield _sample(row, f"{path}:{number}")

    def messages(self, sample: Sample, template: Template) -> list[dict[str, Any]]:
        """The rules alone: goal and pictures are the page's."""
        asked = self.rules.prompt.replace("{goal}", sample.question)
        return [{"role": "user", "content": [{"type": "text", "text": asked}]}]

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        """Of one answer alone: whether it is an action. What it is worth, the page decides."""
        try:
            read_action(text, self.rules.spelling)
        except BadAction as bad:
            return Score.failure(f"parse_error: {bad}", self.part_names)
        return Score.combine(
            {"reward": 1.0}, {"reward": 1.0}, parsed=True, metrics={"success": 1.0}
        )

    def gold(self, sample: Sample, ctx: RewardContext) -> str:
        """Some action."""
        return "[1, 1]" if self.rules.spelling == "point" else '{"action": "wait"}'

    def wrong(self, sample: Sample, ctx: RewardContext) -> str:
        """What no page takes."""
        return '{"action": "fly"}'

    def example_data(self, folder: str) -> str:
        """Four rows."""
        path = Path(folder) / "browser.jsonl"
        write_rows(path, ["own/pick", "own/form"], range(2))
        return str(path)


def _sample(row: Mapping[str, Any], where: str) -> Sample:
    if not isinstance(row.get("kind"), str):
        raise DataError(f'{where}: expected {{"kind": "own/shop", "seed": 7}}, found {row!r:.80}')
    seed = row.get("seed")
    if type(seed) is not int or not 0 <= seed < _MOST_SEED:
        raise DataError(f"{where}: expected seed as a whole number from 0, found {seed!r}")
    try:
        find_site(row["kind"])
    except (ConfigError, MissingExtraError) as error:
        raise DataError(f"{where}: {error}") from error
    return Sample(
        str(row.get("id", f"{row['kind']}-{seed}")),
        "browser",
        row["kind"],
        row["kind"],
        None,
        params={"kind": row["kind"], "seed": seed},
    )


def write_rows(path: Path, kinds: Iterable[str], seeds: Iterable[int]) -> None:
    """A row for each page and seed, seed by seed. Raises ConfigError for an unknown page."""
    names = [find_site(kind).name for kind in kinds]
    rows = [
        {"id": f"{kind}-{seed}", "kind": kind, "seed": seed} for seed in seeds for kind in names
    ]
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def _seeds(text: str) -> range:
    found = re.fullmatch(r"(\d+)-(\d+)", text)
    if found is None or int(found[2]) < int(found[1]):
        raise argparse.ArgumentTypeError(f"expected FIRST-LAST such as 0-999, found {text!r}")
    return range(int(found[1]), int(found[2]) + 1)


def _main() -> None:
    parser = argparse.ArgumentParser(description="Rows of the task browser.")
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--kinds", default="own/pick", help="names with commas between them")
    parser.add_argument("--seeds", type=_seeds, default=range(100), help="FIRST-LAST")
    parser.add_argument("--list", action="store_true", help="print the pages that are known")
    given = parser.parse_args()
    if given.list:
        print("\n".join(site_names()))
    elif given.file is None:
        parser.error("expected a file to write, or --list")
    else:
        write_rows(given.file, given.kinds.split(","), given.seeds)


if __name__ == "__main__":
    _main()
