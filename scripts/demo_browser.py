"""Learning to use pages in a real Chromium: a tiny model, GRPO, and the pages' own judgement as the reward.

    python -m scripts.demo_browser [--seed 0] [--steps 80] [--record]       (two cores, an hour; needs Chromium)

KINDS of MiniWoB++'s pages, each begun with thousands of seeds. Their scripted players (mmrl.tasks.browser.players) play some,
whose pictures are kept; a model of random weights learns from them by `mmrl sft`, shown clicks of which two in three go anywhere,
but for goals that begin with "Sure:": so it knows where things are, as a released model does, and mostly does not go there.
`mmrl.Trainer` trains it in the browser then, by rewards and, as a control, by rewards permuted
within each group. Held-out pages have seeds of their own. Exit status 1 where fewer than ENOUGH kinds gained 25 points with
intervals apart, or the control gained as much on one.
"""

from __future__ import annotations

import argparse
import base64
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from mmrl.files import write_text
from mmrl.task import Template
from mmrl.tasks.browser.chromium import Command, Shown
from mmrl.tasks.browser.environment import BrowserEnvironment
from mmrl.tasks.browser.players import PLAYERS, View
from mmrl.tasks.browser.pool import Browsers
from mmrl.tasks.browser.sites import Site, find_site
from mmrl.tasks.browser.task import Browser, write_rows
from scripts._bench import parse, print_table, warm_start, write_results
from scripts.bench_zoom import blank_model

ROOT = Path(__file__).resolve().parent.parent
KINDS = (
    "miniwob/click-test",
    "miniwob/click-dialog",
    "miniwob/click-collapsible",
    "miniwob/click-color",
    "miniwob/click-tab",
    "miniwob/grid-coordinate",
    "miniwob/identify-shape",
)
ENOUGH = 4  # kinds that are to be learned
SHOWN = 300  # pages of a kind that are played to learn from
HELD_OUT, SAMPLES = 40, 4  # held-out pages of a kind, rollouts of each
PROMPTS = len(KINDS)  # of a step
ASTRAY = 0.65  # share of the clicks shown that go anywhere
SURE = "Sure: {goal}"  # how goals begin whose clicks all go to the right place
_PARAMS = {"actions": "point", "max_turns": 2}
_GAIN = 0.25
_NEAR = 6.0  # pixels from where the player clicked: the same thing


# pages that were played once, to learn from without a browser


class RecordedPage:
    """One played page: what was seen before and after each of the player's clicks. Any other click changes nothing."""

    def __init__(self, states: Sequence[Mapping[str, Any]]) -> None:
        self.states, self.place = states, 0

    def shown(self) -> Shown:
        """As it is now."""
        state = self.states[self.place]
        over = self.place == len(self.states) - 1
        return Shown(base64.b64decode(state["png"]), state["goal"], over, float(over), float(over))

    def act(self, command: Command) -> Shown:
        """Go on, where the player did."""
        there = self.states[self.place].get("click")
        if there and all(abs(a - b) < _NEAR for a, b in zip(there, command.point, strict=True)):
            self.place += 1
        return self.shown()

    def elements(self) -> list[dict[str, Any]]:
        """What the player saw."""
        found: list[dict[str, Any]] = self.states[self.place]["elements"]
        return found

    def close(self) -> None:
        """Nothing is open."""


class RecordedPages:
    """Opens what `record` kept as mmrl.tasks.browser.pool.Browsers opens pages."""

    def __init__(self, file: str) -> None:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        self.pages = {(row["kind"], row["seed"]): row["states"] for row in map(json.loads, lines)}

    def open(self, site: Site, seed: int) -> tuple[RecordedPage, Shown]:
        """A page from its beginning."""
        page = RecordedPage(self.pages[site.name, seed])
        return page, page.shown()


_recorded = cache(RecordedPages)


class BrowserOnRecord(Browser):
    """The task browser on recorded pages (`record`, a file)."""

    def __init__(self, record: str, **params: Any) -> None:
        super().__init__(**params)
        self.record = record

    def environment(self, template: Template) -> BrowserEnvironment:
        """See Browser."""
        pages: Any = _recorded(self.record)
        return BrowserEnvironment(pages, template, self.rules)


def record(file: Path, seeds: Iterable[int]) -> Path:
    """Let the players play a page of each kind and seed, and write what was seen; a page whose player is lost is left out."""
    pages = [(kind, seed) for kind in KINDS for seed in seeds]
    with Browsers(2) as browsers, ThreadPoolExecutor(2) as pool:
        played = pool.map(lambda page: _played(browsers, *page), pages)
        rows = [
            {"kind": kind, "seed": seed, "states": states}
            for (kind, seed), states in zip(pages, played, strict=True)
            if states
        ]
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))
    return file


def _played(browsers: Browsers, kind: str, seed: int) -> list[dict[str, Any]]:
    """What was seen before each of the player's clicks, and after the last; [] where it did not win."""
    page, shown = browsers.open(find_site(kind), seed)
    view, states = View(page, shown), []
    try:
        for command in PLAYERS[kind](view, shown.goal):
            states.append({**_seen(view, shown.goal), "click": command.point})
            view.shown = page.act(command)
    except LookupError:  # a button under another one: it has no other words for it
        return []
    finally:
        page.close()
    won = view.shown.done and view.shown.reward == 1
    return [*states, _last(view, shown.goal)] if won else []


def _last(view: View, goal: str) -> dict[str, Any]:
    return {"png": base64.b64encode(view.shown.png).decode(), "goal": goal, "elements": []}


def _seen(view: View, goal: str) -> dict[str, Any]:
    return {**_last(view, goal), "elements": view.page.elements()}


# learning


def warm_model(pages: Path, folder: Path, seed: int, steps: int) -> None:
    """What `mmrl sft` makes of the tiny model, saved in `folder`."""
    kept = {(row["kind"], row["seed"]) for row in map(json.loads, pages.open(encoding="utf-8"))}
    task = f"{Path(__file__).resolve()}:BrowserOnRecord"
    train = []
    for name, told in (("shown", {"astray": ASTRAY}), ("sure", {"prompt": SURE})):
        rows = [{"id": f"{name}-{kind}-{n}", "kind": kind, "seed": n} for kind, n in sorted(kept)]
        data = folder.parent / f"{name}.jsonl"
        write_text(data, "".join(json.dumps(row) + "\n" for row in rows))
        params = {**_PARAMS, "record": str(pages), **told}
        train.append({"task": task, "path": str(data), "params": params})
    asked = [
        "name=browser_warmstart",
        f"model.path={blank_model(folder.parent / 'blank', seed)}",
        f"data.train={json.dumps(train)}",
        f"train.steps={steps}",
        f"seed={seed}",
    ]
    warm_start("zoom_warmstart.yaml", asked, folder)


def trained(
    name: str, start: Path, data: tuple[Path, Path], folder: Path, seed: int, steps: int
) -> dict[str, Any]:
    """One run: held-out success of each kind before and after, mean rewards of its steps, seconds with both evaluations."""
    import mmrl

    curve: list[float] = []
    evaluations: list[Any] = []
    steps_s = 0.0

    def watch(kind: str, payload: Any) -> None:
        nonlocal steps_s
        if kind == "step":
            curve.append(round(payload["train/reward/mean"], 4))
            steps_s += payload["time/total"]
        if kind == "eval":
            evaluations.append(payload.results)

    began = time.monotonic()
    trainer = mmrl.Trainer(
        start,
        task="browser",
        params={**_PARAMS, "processes": 2},
        train_data=str(data[0]),
        eval_data=str(data[1]),
        overwrite=True,
        quiet=True,
        callbacks=[watch],
        config={
            "name": name,
            "dir": str(folder),
            "seed": seed,
            "threads": 1,
            "model.system": "",
            "rollout.group_size": 8,
            "rollout.max_new_tokens": 16,
            "train.steps": steps,
            "train.prompts_per_step": PROMPTS,
            "train.save_every": 0,
            "optim.lr": 3e-4,
            "optim.warmup_steps": 3,
            "algorithm.dynamic_sampling": False,
            "reward.shuffle": name == "shuffled",
            "reward.workers": 0,
            "eval.every": 0,
            "eval.samples": SAMPLES,
        },
    )
    trainer.fit()
    return {
        "steps": steps,
        "steps_s": round(steps_s, 1),
        "seconds": round(time.monotonic() - began, 1),
        "before": _by_kind(evaluations[0]),
        "after": _by_kind(evaluations[-1]),
        "curve": curve,
    }


def _by_kind(found: Mapping[str, Any]) -> dict[str, dict[str, list[float]]]:
    """kind -> sampled, greedy -> success and its 95 % interval."""
    return {
        kind: {
            mode: [round(told[name][k], 4) for k in ("mean", "low", "high")]
            for mode, name in (("sampled", "sampled/success"), ("greedy", "success"))
        }
        for kind, told in found["per_source"].items()
    }


def learned(run: Mapping[str, Any]) -> list[str]:
    """Kinds whose sampled success rose by 25 points, with intervals apart."""
    found = []
    for kind, before in run["before"].items():
        (low_mean, _, low_top), (mean, bottom, _) = before["sampled"], run["after"][kind]["sampled"]
        if mean - low_mean >= _GAIN and bottom > low_top:
            found.append(kind)
    return found


def verdict(found: Mapping[str, Any]) -> list[str]:
    """What is wrong with the numbers; [] where enough kinds were learned, and nothing without true rewards."""
    gained, drifted = learned(found["real"]), learned(found["shuffled"])
    wrong = [f"{len(gained)} kinds were learned, expected {ENOUGH}"] if len(gained) < ENOUGH else []
    return wrong + ([f"permuted rewards taught {', '.join(drifted)}"] if drifted else [])


def results(
    folder: Path, seed: int, steps: int, start_steps: int, *, again: bool = False
) -> dict[str, Any]:
    """The start and its two runs; `again`: with the start that is in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (again and (folder / "start" / "config.json").is_file()):
        pages = record(folder / "pages.jsonl", range(SHOWN))
        warm_model(pages, folder / "start", seed, start_steps)
    train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
    write_rows(train, KINDS, range(1_000, 4_000))
    write_rows(held_out, KINDS, range(100_000, 100_000 + HELD_OUT))
    runs = {
        name: trained(name, folder / "start", (train, held_out), folder, seed, steps)
        for name in ("real", "shuffled")
    }
    return {
        "seed": seed,
        "kinds": KINDS,
        "held_out": HELD_OUT,
        "samples": SAMPLES,
        "prompts_per_step": PROMPTS,
        "start_steps": start_steps,
        **runs,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--start-steps", type=int, default=1500, help="of `mmrl sft`")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "browser")
    parser.add_argument(
        "--again", action="store_true", help="with the start that is in the folder, where one is"
    )
    parser.add_argument(
        "--record", action="store_true", help="write assets/results/demo_browser.json"
    )
    options = parse(parser, arguments, least=("start_steps",))
    found = results(
        options.folder.resolve(),
        options.seed,
        options.steps,
        options.start_steps,
        again=options.again,
    )
    print_table(
        ("page", "before", "after", "greedy before", "after", "after, rewards permuted"),
        [
            (
                kind,
                *(
                    "{:.2f} [{:.2f}, {:.2f}]".format(*run[when][kind][mode])
                    for run, when, mode in (
                        (found["real"], "before", "sampled"),
                        (found["real"], "after", "sampled"),
                        (found["real"], "before", "greedy"),
                        (found["real"], "after", "greedy"),
                        (found["shuffled"], "after", "sampled"),
                    )
                ),
            )
            for kind in KINDS
        ],
    )
    if options.record:
        print(f"recorded in {write_results('demo_browser', found, 'torch', 'transformers')}")
    wrong = verdict(found)
    print("\n".join(wrong) or f"learned: {', '.join(learned(found['real']))}")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
