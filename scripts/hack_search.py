"""Search each reward for an answer that pays without looking: the best blind reward beside an honest half-right answer.

    python -m scripts.hack_search                           # assets/results/hack_search.{json,md}
    python -m scripts.hack_search --only detection          # renews these rows of the record only
    python -m scripts.hack_search --quick --only counting   # a look; recorded nowhere

One answer is given to every question: whole pictures, grids, copies, scattered or degenerate boxes, the other questions' truths,
spans to the end of the clip, the longest text, the right number of points anywhere. From the best of them hill climbing goes on,
over numbers and words of valid answers. It is led by the mean reward over a training half of the questions and judged on the
other half; an answer that lies far behind after a few questions is not put to the others. A search ends after a million scores
(--evaluations). Cheap rewards, those that make at least 500 a second, get there in the time that a search has (--seconds); the
table marks the dearer ones, which ended by time.

The honest answer beside it is half right: half of the objects and none invented, a box of IoU 0.5, half of the span or of the
words; where a reward only knows right and wrong, half of the answers are right (and the rest guessed, where the question names its
options). Padded: half of a list, filled up to the right number with items anywhere.

Every default must hold (blind below honest, padding not above it): exit status 1 where one does not. Published rules and further
modes that do not hold are named in the table; a policy that finds their answer raises the alarm `same_answer` in training.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import json
import math
import multiprocessing
import random
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.registry import BUILT_IN, resolve_task
from mmrl.rewards.format import wrap_answer
from scripts._bench import parse, results_folder, write_results
from scripts._hack_data import CLASSES, Asked, asked, half_list, half_right, spelled
from scripts._hack_moves import Guess, form_of, kind_of, loose, moved, seeds, spell, truth_of
from scripts._reward_cases import RewardCase, all_cases

__all__ = ["Search", "all_rewards", "main", "verdict"]

TRAIN, HELD_OUT = 32, 64
_FIRST = (4, 8, 16)  # questions after which a guess that lies too far behind is given up
_SHARE_BEHIND = (0.4, 0.2, 0.1)  # how far that is, as a share of the reward's range
_KEPT = 24
_POOLED = ("math",)  # asks the verifier's process: its time is real time
_GROUP = 8
_IDLE = 4000  # changes in a row that lead to no new answer: the answers are exhausted
_OPTIONS = {"choice": 4, "boolean": 2, "classification": len(CLASSES), "spatial": 4}
_FURTHER: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "detection": (
        {"mode": "vlm_r1_map50"},
        {"mode": "v_triune", "accuracy": {"size_penalty": "hardened"}},
    ),
    "gui_grounding": ({"mode": "gaussian"}, {"mode": "distance"}),
    "maze": ({"mode": "progress"},),
    "jigsaw": ({"mode": "pieces"},),
    "ocr": ({"mode": "ned"}, {"mode": "cer"}, {"mode": "anls"}),
    "numeric": ({"mode": "mra"}, {"mode": "regression"}),
}
"""Modes that scripts._reward_cases has no case of."""


def all_rewards() -> Iterator[RewardCase]:
    """Every default, preset and mode, each once; the anchors of thoughts are no answer and left out."""
    for task in BUILT_IN:
        for case in all_cases():
            if case.task == task and "anchors" not in case.params.get("weights", {}):
                yield case
        for params in _FURTHER.get(task, ()):
            yield RewardCase(f"{task}:" + ",".join(str(v) for v in params.values()), task, params)


@dataclass
class Search:
    """The search against one reward."""

    case: RewardCase
    most: int
    seconds: float
    seed: int = 0
    evaluations: int = 0
    spent: float = 0.0
    exhausted: bool = False
    top: list[tuple[float, Guess]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.task: Any = self.case.make()
        self.kind = kind_of(self.task)
        self.rng = random.Random(zlib.crc32(f"{self.case.name}/{self.seed}".encode()))
        both = asked(self.task, TRAIN + HELD_OUT, self.seed)
        self.train, self.held_out = both[:TRAIN], both[TRAIN:]

    def reward(self, text: str, one: Asked) -> tuple[float, float]:
        """(total, accuracy part) of an answer text; where a group votes, of an answer that its whole group gives."""
        wrapped = wrap_answer(text, self.task.answer_format)
        score = self.task.score(one.sample, wrapped, one.ctx)
        if self.task.in_group:
            score = self.task.score_in_group(one.sample, [score] * _GROUP, 0)
        return score.value, score.parts.get("accuracy", 0.0)

    def mean(self, guess: Guess, questions: Sequence[Asked], best: float = -math.inf) -> float:
        """Mean reward of a guess; -inf for one that lies far behind `best` after the first questions."""
        total, texts = 0.0, dict[Hashable, str]()
        for count, one in enumerate(questions, 1):
            form = form_of(self.kind, guess, one)
            if (text := texts.get(form)) is None:
                text = texts[form] = spell(self.task, self.kind, guess, one)
            total += self.reward(text, one)[0]
            self.evaluations += 1
            if total < (best - self.slack.get(count, math.inf)) * count:
                return -math.inf
        return total / len(questions)

    @functools.cached_property
    def slack(self) -> Mapping[int, float]:
        """How far behind a guess may be after so many questions."""
        low, high = self.task.value_range
        return {
            count: share * float(high - low)
            for count, share in zip(_FIRST, _SHARE_BEHIND, strict=True)
        }

    def run(self) -> dict[str, Any]:
        """Search, judge the best guess on the held-out half, and measure the honest answers there."""
        clock = time.perf_counter if self.case.task in _POOLED else time.thread_time
        began = clock()
        answers = self.search(lambda: clock() - began < self.seconds)
        self.spent = clock() - began
        trained, best = self.top[0]
        example = spell(self.task, self.kind, best, self.held_out[0])
        searched = self.evaluations
        ended = "answers" if self.exhausted else "evaluations" if searched >= self.most else "time"
        return {
            "task": self.case.task,
            "blind": self.mean(best, self.held_out),
            "blind_accuracy": self.accuracy(best),
            "trained": trained,
            "family": best.family,
            "answer": example,
            "evaluations": searched,
            "answers": answers,
            "ended": ended,
            "seconds": self.spent,
            **self.honest(),
            "padded": self.padded(),
        }

    def search(self, going: Callable[[], bool]) -> int:
        """Judge the guesses to begin with, then neighbours of the best; returns how many different answers were judged."""
        start = seeds(self.task, self.kind, self.train, self.rng)
        pool = [guess.text for guess in start if guess.text]
        # of their hashes: a million lists of boxes would not fit into memory
        seen, idle = set[int](), 0
        for guess in dict.fromkeys(start):
            seen.add(hash(guess))
            self.keep(self.mean(guess, self.train), guess)
        while self.evaluations < self.most and going() and not self.exhausted:
            parent = self.top[min(int(self.rng.expovariate(0.3)), len(self.top) - 1)][1]
            guess = moved(self.kind, parent, pool, self.rng)
            idle = idle + 1 if hash(guess) in seen else 0
            self.exhausted = idle > _IDLE
            if not idle:
                seen.add(hash(guess))
                self.keep(self.mean(guess, self.train, self.top[-1][0]), guess)
        return len(seen)

    def keep(self, value: float, guess: Guess) -> None:
        """Among the best that are known, each value once per family."""
        if value > -math.inf and (len(self.top) < _KEPT or value > self.top[-1][0]):
            self.top.append((value, guess))
            self.top.sort(key=lambda entry: -entry[0])
            del self.top[_KEPT:]

    def padded(self) -> float | None:
        """What half of the list earns when it is filled up to the right number with items anywhere; None for other answers."""
        if self.kind not in ("objects", "points"):
            return None
        values = []
        for number, one in enumerate(self.held_out):
            points = self.kind == "points"
            true = one.sample.params["points"] if points else one.sample.answer
            kept = list(half_list(true, number))
            junk = Guess(
                "", tuple(loose(self.kind, self.rng) for _ in range(len(true) - len(kept)))
            )
            found, params = truth_of(self.kind, junk, one)
            if points:
                text = spelled(self.task, one, len(true), points=[*kept, *params["points"]])
            else:
                text = spelled(self.task, one, [*kept, *found])
            values.append(self.reward(text, one)[0])
        return _mean(values)

    def accuracy(self, guess: Guess) -> float:
        """Mean accuracy part over the held-out half."""
        return _mean(
            [self.reward(spell(self.task, self.kind, guess, one), one)[1] for one in self.held_out]
        )

    def honest(self) -> dict[str, Any]:
        """The half-right answer, what it earns, and what right answers earn."""
        rights, wrongs, halves, parts = list[float](), list[float](), list[float](), list[float]()
        words = ""
        for number, one in enumerate(self.held_out):
            texts = (
                self.task.gold_answer(one.sample, one.ctx),
                self.task.wrong_answer(one.sample, one.ctx),
            )
            for values, text in zip((rights, wrongs), texts, strict=True):
                values.append(self.reward(text, one)[0])
            if (found := half_right(self.task, one, number)) is not None:
                words, (value, part) = found[0], self.reward(found[1], one)
                halves.append(value)
                parts.append(part)
        right = _mean(rights)
        if halves and sum(part > 0 for part in parts) >= 0.9 * len(parts):
            return {"right": right, "honest": _mean(halves), "honest_answer": words}
        if self.task.in_group:
            return {
                "right": right,
                "honest": self._votes(),
                "honest_answer": "half of a group's answers",
            }
        options = _OPTIONS.get(self.task.name)
        known = 0.5 + (0.5 / options if options else 0.0)
        return {
            "right": right,
            "honest": known * right + (1 - known) * _mean(wrongs),
            "honest_answer": "half of the answers" + (", the rest guessed" if options else ""),
        }

    def _votes(self) -> float:
        """Mean reward of a group of which half click right and the others anywhere."""
        values = []
        for one in self.held_out:
            texts = [self.task.gold_answer(one.sample, one.ctx)] * (_GROUP // 2) + [
                f"[{self.rng.randrange(1000)}, {self.rng.randrange(1000)}]"
                for _ in range(_GROUP // 2)
            ]
            scores = [
                self.task.score(one.sample, wrap_answer(text, self.task.answer_format), one.ctx)
                for text in texts
            ]
            values += [self.task.score_in_group(one.sample, scores, i).value for i in range(_GROUP)]
        return _mean(values)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def verdict(row: Mapping[str, Any]) -> str:
    """holds: blind earns less than honest, or no accuracy at all, and filling up a list does not pay; else what pays."""
    if row["blind"] >= row["honest"] - 1e-9 and row["blind_accuracy"] > 0.01:
        return "pays for guessing"
    return (
        "pays for padding"
        if row["padded"] is not None and row["padded"] > row["honest"] + 0.01
        else "holds"
    )


def standing(name: str, row: Mapping[str, Any]) -> str:
    """default, preset (a published rule) or mode."""
    head, _, tail = name.partition(":")
    return (
        "default"
        if not tail
        else "preset"
        if tail in getattr(resolve_task(head), "presets", {})
        else "mode"
    )


def _run(work: tuple[RewardCase, int, float, int]) -> dict[str, Any]:
    case, most, seconds, seed = work
    row = Search(case, most, seconds, seed).run()
    return {
        key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()
    }


_ENDED = {"answers": " (all answers)", "evaluations": "", "time": " (time)"}


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The rows as a page of Markdown, what pays for guessing first."""
    lines = [
        "# What answers earn that are given without looking",
        "",
        "Written by `python -m scripts.hack_search`; how it searches and what half right means stands there. Blind: the best "
        "answer found on a training half of the questions, judged on the other half. A reward holds where blind earns less "
        "than honest, and where half of a list earns no more when it is padded to the right number with items anywhere.",
        "",
        "A search ends after a million evaluations; (time): earlier, at its limit of CPU time; (all answers): none left.",
        "",
        "| reward | | right | honest, half right | | the same padded | blind | best blind answer | evaluations | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    order = sorted(
        rows,
        key=lambda n: (
            verdict(rows[n]) == "holds",
            ("default", "preset", "mode").index(standing(n, rows[n])),
        ),
    )
    for name in order:
        r = rows[name]
        shown = r["answer"].replace("|", "\\|").replace("\n", " ")
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        found = verdict(r)
        lines.append(
            f"| {name} | {standing(name, r)} | {r['right']:.3f} | {r['honest']:.3f} | {r['honest_answer']} | "
            f"{'' if r['padded'] is None else format(r['padded'], '.3f')} | "
            f"{r['blind']:.3f} | {r['family']}: `{shown}` | {r['evaluations']:,}{_ENDED[r['ended']]} | "
            f"{found if found == 'holds' else f'**{found}**'} |"
        )
    return "\n".join(lines) + "\n"


def record(name: str, row: Mapping[str, Any], seed: int) -> None:
    """Put a row into the record and write its page; searches may run beside each other."""
    path = results_folder() / "hack_search.json"
    with open(Path(tempfile.gettempdir()) / "mmrl_hack_search.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = json.loads(path.read_text(encoding="utf-8"))["rewards"] if path.exists() else {}
        known[name] = row
        merged = {case.name: known[case.name] for case in all_rewards() if case.name in known}
        questions = {"train": TRAIN, "held_out": HELD_OUT}
        write_results("hack_search", {"seed": seed, "questions": questions, "rewards": merged})
        path.with_suffix(".md").write_text(table(merged), encoding="utf-8")


def chosen(only: Sequence[str], exact: bool = False, defaults: bool = False) -> list[RewardCase]:
    """The rewards whose names begin with one of `only` (or are one of them), in the order of `only`."""
    fits = str.__eq__ if exact else str.startswith
    found = {case.name: case for name in only for case in all_rewards() if fits(case.name, name)}
    return [case for case in found.values() if not (defaults and case.params)]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 1 when a default pays for guessing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--evaluations", type=int, default=1_000_000, help="scores per reward at most"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=2000.0,
        help="CPU time per reward at most (math: real time)",
    )
    parser.add_argument(
        "--only",
        default="",
        help="names of rewards that start with one of these, with commas between them",
    )
    parser.add_argument("--exact", action="store_true", help="--only has whole names")
    parser.add_argument("--defaults", action="store_true", help="only the defaults of the tasks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--quick", action="store_true", help="2,000 evaluations each, recorded nowhere"
    )
    options = parse(parser, argv)
    cases = chosen(options.only.split(","), options.exact, options.defaults)
    if not cases:
        parser.error(
            f"expected --only to begin a reward's name, found {options.only!r}; names: "
            f"{', '.join(case.name for case in all_rewards())}"
        )
    most = 2_000 if options.quick else options.evaluations
    work = [(case, most, options.seconds, options.seed) for case in cases]
    rows: dict[str, Any] = {}
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        runs = map(_run, work) if options.jobs == 1 else pool.map(_run, work)
        for case, row in zip(cases, runs, strict=True):
            rows[case.name] = row
            if not options.quick:
                record(case.name, row, options.seed)
            print(
                f"{case.name:36} right {row['right']:.3f}  honest {row['honest']:.3f}  blind {row['blind']:.3f}  "
                f"{row['evaluations']:9,} evaluations  {verdict(row)}: {row['family']}  {row['answer'][:60]!r}",
                flush=True,
            )
    return int(
        any(
            verdict(row) != "holds"
            for name, row in rows.items()
            if standing(name, row) == "default"
        )
    )


if __name__ == "__main__":
    sys.exit(main())
