"""Kill runs whose rollouts take several turns with SIGKILL, in the midst of collecting them, and resume each time.

    OMP_NUM_THREADS=1 python -m scripts.torture_turns --kills 6 --seed 0      (some fifteen minutes on two cores)

Three runs, each once undisturbed and once killed: `pages` acts in a real Chromium (two browsers, the trainer's own children),
`pages behind a generator` has them below a generator process, so that browsers are what the trainer's child started, and `tool`
looks again with the task zoom's tool while groups that are whole are trained on. Most kills come within a rollout, after its first
turns: the process is asked for its stack (SIGUSR2) and for the turn that it is at. After each, no browser, driver, server or worker
may be left, whoever its parent is by then, and every checkpoint must be readable. In the end the killed run must equal the
undisturbed one bit for bit: metrics but for clocks, every step once, evaluations, every turn of the logged rollouts, weights,
optimizer and run state.

An untrained model writes letters without sense: what it writes is read as a place (`place_of`), which is clicked in the page or
looked at from close by, and a part of its letters earns something, so that groups have signal. Pages, tools and all that is kept of
them are as they always are. Writes assets/results/torture_turns.json; exit status 1 when a check fails.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mmrl.coords import from_orig
from mmrl.environment import Environment, Outcome
from mmrl.task import Template
from mmrl.tasks.browser.environment import BrowserEnvironment
from mmrl.tasks.browser.task import Browser, write_rows
from mmrl.tasks.zoom import Zoom, ZoomEnvironment
from mmrl.types import Turn
from scripts._bench import parse, write_results
from scripts._torture_runs import (
    Kill,
    Run,
    half_written,
    killed,
    left_in,
    played_out,
    promises,
    rows_of,
    shared_memory,
    wait_for,
)
from scripts.torture_resume import differences

__all__ = ["PARTS", "Clicks", "Looks", "place_of", "torture"]

TURNS = 3
_KINDS = ("own/menu", "own/settings", "miniwob/click-button-sequence")
_PATIENCE_S = 60.0
_PHASES = {
    "checkpoint": ("in save_checkpoint",),
    "evaluation": ("in _evaluate",),
    "report": ("in build_report",),
    "update": ("in add", "in finish"),
    "later turn": tuple(f"in turn {n}\n" for n in range(2, TURNS + 1)),
    "first turn": ("in turn 1\n",),
    "first look": ("in begin",),
    "rollout": ("in _train_step",),
    "loading": ("in __init__",),
}
_WANTED = (
    "later turn",
    "later turn",
    "first turn",
    "first look",
    "evaluation",
    "checkpoint",
    "any",
)


def place_of(text: str) -> tuple[float, float]:
    """A place that a text stands for, as shares of width and height below 1: equal texts name equal places."""
    codes = [ord(c) for c in text]
    return sum(codes[::2]) % 97 / 97, sum(codes[1::2]) % 89 / 89


def earned(text: str) -> float:
    """What a turn earns: the share of its characters that are letters of the alphabet's first half, of all turns together 1."""
    return sum("a" <= c <= "m" for c in text.lower()) / max(1, len(text)) / TURNS


class _Clicking(BrowserEnvironment):
    def step(self, turn: Turn) -> Outcome:
        size = self.sizes[-1]
        place = [
            share * side for share, side in zip(place_of(turn.text), size.orig_wh, strict=True)
        ]
        said = from_orig(place, self.template.frame, size.resized_wh, size.orig_wh)
        outcome = super().step(replace(turn, text=json.dumps([round(v) for v in said])))
        return replace(outcome, reward=earned(turn.text))


class Clicks(Browser):
    """The task `browser`, in which any text is a click."""

    def environment(self, template: Template) -> Environment:
        """An episode on a page."""
        made = super().environment(template)
        assert isinstance(made, BrowserEnvironment)
        return _Clicking(made.browsers, template, made.rules)


class _Looking(ZoomEnvironment):
    def step(self, turn: Turn) -> Outcome:
        assert self.size is not None
        height, width = self.tools.pixels.shape[:2]
        x, y = place_of(turn.text)
        box = [x * width / 2, y * height / 2, (x + 1) * width / 2, (y + 1) * height / 2]
        outcome = super().step(replace(turn, text=self._call(box, self.size)))
        return replace(outcome, reward=earned(turn.text))


class Looks(Zoom):
    """The task `zoom`, in which any text is a look at a place."""

    def environment(self, template: Template) -> Environment:
        """A rollout; its picture is read when it is reset."""
        return _Looking(template, self.settings)


_PAGES = {
    "task": f"{Path(__file__).resolve()}:Clicks",
    # a machine that does other things beside is slow: no page may be lost by it, for then runs differ
    "params": {"actions": "point", "max_turns": TURNS, "processes": 2, "limit_s": 300.0},
}
_TOOL = {
    "task": f"{Path(__file__).resolve()}:Looks",
    "params": {"view": 112, "max_turns": TURNS, "prompt": "{question}"},
}
PARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pages": (_PAGES, {"schedule": {"kind": "serial"}}),
    "pages behind a generator": (
        _PAGES,
        {"schedule": {"kind": "serial"}, "engine": {"generator": {"kind": "process"}}},
    ),
    "tool": (_TOOL, {"schedule": {"kind": "pipelined", "order": "key"}}),
}
"""Name -> its task, and what its configuration says beside."""


def prepare(folder: Path, part: str, steps: int) -> dict[str, Any]:
    """Model and data of one part under `folder`; its configuration."""
    from mmrl.policy.tiny import TinySpec, build_tiny
    from mmrl.tasks.zoom_pictures import make_zoom_pictures

    task, changes = PARTS[part]
    folder.mkdir(parents=True)
    build_tiny(
        TinySpec(hidden=64, heads=2, kv=1, vision_hidden=32, vision_heads=2, max_patches=16),
        folder / "model",
    )
    rows = {}
    for name, count, seed in (("train", 8, 0), ("eval", 1, 1000)):
        if task is _PAGES:
            rows[name] = str(folder / f"{name}.jsonl")
            write_rows(Path(rows[name]), _KINDS, range(seed, seed + count))
        else:
            rows[name] = make_zoom_pictures(folder / name, 3 * count, seed)
    return {
        "dir": str(folder / "runs"),
        "seed": 0,
        "threads": 1,
        "model": {"path": str(folder / "model"), "device": "cpu", "system": ""},
        "data": {name: [{**task, "path": path}] for name, path in rows.items()},
        "rollout": {"group_size": 4, "max_new_tokens": 8},
        "optim": {"lr": 0.003, "schedule": "cosine", "warmup_steps": 2},
        "algorithm": {"epochs": 2},
        "eval": {"every": 2, "samples": 1, "gallery": 2},
        "train": {
            "steps": steps,
            "prompts_per_step": 3,
            "save_every": 1,
            "keep_last": 2,
            "log_rollouts": 3,
        },
        **changes,
    }


def _moment(run: Run, rng: random.Random, step: int, wanted: str) -> str:
    """Wait until the run is at this step and does what is wanted; what it was doing then, as its stack says."""
    wait_for(run, lambda: run.rows >= step, 0.02, 600.0)
    if wanted == "checkpoint":
        wait_for(run, lambda: run.saving, 0.0005, _PATIENCE_S)
        return "checkpoint" if run.saving else run.phase()
    if wanted == "any":
        time.sleep(rng.random() * 3.0)
    else:
        wait_for(run, lambda: run.phase() == wanted, 0.01, _PATIENCE_S)
        time.sleep(rng.random() * 0.05)
    return run.phase()


def _kills(run: Run, rng: random.Random, kills: int, wanted: tuple[str, ...]) -> Iterator[Kill]:
    """Start, kill, resume ..., each kill in its share of the steps; yields each and leaves the run finished."""
    for number in range(kills):
        run.start(resume=run.path.exists())
        # a step of the run is left: a moment that is not seen in this one comes again
        step = min(int((number + rng.random()) * run.steps / kills), max(0, run.steps - 2))
        kill = killed(run, _moment(run, rng, step, wanted[number % len(wanted)]))
        if kill is None:
            run.finish()
            return
        yield kill
    run.start(resume=run.path.exists())
    run.finish()


def _turns(run: Path) -> list[int]:
    """Of each logged rollout."""
    lines = [
        line
        for file in sorted((run / "rollouts").glob("*.jsonl"))
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    # a rollout of one turn is logged as an answer is
    return [len(json.loads(line).get("turns", ("",))) for line in lines]


def _torture_one(
    folder: Path, part: str, rng: random.Random, kills: int, steps: int
) -> dict[str, Any]:
    """One part: an undisturbed run and a killed one, compared."""
    tree = prepare(folder, part, steps)
    # behind a generator the trainer's stack does not tell the turn
    behind = "engine" in PARTS[part][1]
    wanted = ("rollout", "evaluation", "any") if behind else _WANTED
    with Run(folder, tree, "calm", _PHASES) as calm, Run(folder, tree, "killed", _PHASES) as torn:
        start_s, total_s = played_out(calm)
        print(f"{part}: undisturbed {total_s:.0f} s, {start_s:.0f} s of them to start", flush=True)
        record, damage, left = [], list[str](), 0
        for kill in _kills(torn, rng, kills, wanted):
            record.append(kill)
            damage += half_written(torn.path, all_files=False)
            left += len(list(torn.scratch.iterdir()))
            print(
                f"killed after {kill.seconds:6.2f} s: {kill.phase} (checkpoint {kill.checkpoint}; {kill.workers} processes gone "
                f"within {kill.gone_s:.2f} s)",
                flush=True,
            )
        same = differences(calm.path, torn.path)
        turns = _turns(torn.path)
        checks = {
            **promises(torn, record, damage),
            "every_kill": len(record) == kills,
            "no_rollout_failed": not any(r["train/groups/failed"] for r in rows_of(torn.path)),
            "several_turns": sum(turns) > 1.5 * len(turns),
            "every_rollout_is_there": len(turns) == steps * 3 * 4,
            **{f"identical: {name}": equal for name, equal in same.items()},
        }
    for name, good in checks.items():
        print(f"{'ok' if good else 'FAILED':7} {name}", flush=True)
    return {
        "undisturbed_s": round(total_s, 1),
        "kills": [asdict(k) for k in record],
        "turns": {str(n): count for n, count in sorted(Counter(turns).items())},
        "temporary_files_left": left,
        "damage": damage,
        "checks": checks,
    }


def torture(
    folder: Path, *, kills: int, seed: int, steps: int, parts: tuple[str, ...] = tuple(PARTS)
) -> dict[str, Any]:
    """The whole torture under `folder`, `kills` of each part; the record that is written."""
    rng, shared = random.Random(seed), shared_memory()
    found = {
        part: _torture_one(folder / str(number), part, rng, kills, steps)
        for number, part in enumerate(parts)
    }
    record = [kill for one in found.values() for kill in one["kills"]]
    left = left_in(shared)
    checks = {
        "no_shared_memory_left": not left,
        "all_parts": all(all(one["checks"].values()) for one in found.values()),
    }
    return {
        "what": "`mmrl train` on pages in a real Chromium and on pictures with a visual tool, killed with SIGKILL within rollouts "
        "of several turns and at other moments and resumed each time, compared with an undisturbed run",
        "seed": seed,
        "steps": steps,
        "num_kills": len(record),
        "phases": dict(sorted(Counter(k["phase"] for k in record).items())),
        "most_processes": max((k["workers"] for k in record), default=0),
        "left_in_shared_memory": left,
        "longest_until_workers_gone_s": max((k["gone_s"] for k in record), default=0.0),
        "parts": found,
        "checks": checks,
        "passed": all(checks.values()),
    }


def main() -> int:
    """Command line; exit status 1 when a check fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=6, help="of each part")
    parser.add_argument("--steps", type=int, default=6, help="training steps of each run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument(
        "--keep", type=Path, default=None, help="work in this new folder and keep the runs"
    )
    options = parse(parser)
    folder = options.keep or Path(tempfile.mkdtemp(prefix="mmrl-torture-"))
    try:
        record = torture(
            folder,
            kills=options.kills,
            seed=options.seed,
            steps=options.steps,
            parts=tuple(options.parts),
        )
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(
        f"{'passed' if record['passed'] else 'FAILED'}: {record['num_kills']} kills, {record['phases']}"
    )
    print(write_results("torture_turns", record, "numpy", "torch", "playwright"))
    return 0 if record["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
