"""Drive every reward with mutated completions and with hypothesis' texts; nothing may break or be gamed.

    python -m scripts.fuzz_rewards                       # 200 000 inputs per reward; assets/results/fuzz_rewards.json
    python -m scripts.fuzz_rewards --inputs 2000 --only grounding

Of every input: no exception, a finite value inside the task's range, a few milliseconds at most. Of every tenth, also
what must never pay: text behind the answer, junk inside it, a second answer, the answer in the thoughts, the prompt's own
example, and for lists doubled elements and floods. Exit status 1 when anything was found; each finding can be replayed
from its text. The time limit holds for CPU time of this thread; rewards that ask the verifier pool (math) are exempt from
it, their deadline is the pool's.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import sys
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmrl.task import Task, Template
from mmrl.types import RewardContext, Sample, Score
from mmrl.workers.scoring import is_reward_failure
from scripts._bench import RESULTS, parse, write_results
from scripts._mutations import GARBAGE, JUNK, answer_of, flooded, mutate, with_answer
from scripts._reward_cases import RewardCase, all_cases, contexts, example_samples

LIMIT_MS = 8.0
POOLED = ("math",)  # may wait for the verifier pool
PAYS_BY_ITS_RULE = {"detection:v_triune": ("flood",)}
"""Variants a paper's published rule pays for: its 0.6 ** |N_p - N_g| rewards filling up the number. The default does not."""
CORPUS = Path(__file__).resolve().parent.parent / "assets" / "fixtures" / "completions.jsonl"
Setting = tuple[Sample, RewardContext, str, str]  # sample, context, gold text, wrong text


@dataclass
class Findings:
    """What a case did: counts, times, and violations with the text that shows them."""

    inputs: int = 0
    parsed: int = 0
    paid: int = 0
    seconds: float = 0.0
    slowest_ms: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    shown: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kind: str, text: str, why: str) -> None:
        """Count a violation; the first twenty are kept."""
        self.kinds[kind] += 1
        if len(self.shown) < 20:
            self.shown.append({"kind": kind, "why": why, "text": text[:2000]})


class Fuzzer:
    """One reward under fire."""

    def __init__(self, case: RewardCase, seed: int) -> None:
        self.case, self.task = case, case.make()
        self.rng = random.Random(zlib.crc32(f"{case.name}/{seed}".encode()))
        self.found = Findings()
        self.settings: list[Setting] = [
            (s, c, self.task.gold(s, c), self.task.wrong(s, c))
            for s in example_samples(self.task)
            for c in contexts(s)
        ]
        real = [
            json.loads(line)["text"] for line in CORPUS.read_text(encoding="utf-8").splitlines()
        ]
        self.corpus = [
            *real,
            *(g for _, _, g, _ in self.settings),
            *(w for _, _, _, w in self.settings),
        ]

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score | None:
        """Score one text and check what must hold of every text."""
        found, (low, high) = self.found, self.task.value_range
        found.inputs += 1
        began = time.thread_time()
        try:
            score = self.task.score(sample, text, ctx)
        except Exception as error:  # the very thing this script looks for
            found.add("exception", text, f"{type(error).__name__}: {error}")
            return None
        took = 1000 * (time.thread_time() - began)
        found.seconds += took / 1000
        if took > LIMIT_MS and self.case.task not in POOLED:
            took = min(took, *(_timed(self.task, sample, text, ctx) for _ in range(3)))
            if took > LIMIT_MS:
                found.add("slow", text, f"{took:.1f} ms for {len(text)} characters")
        found.slowest_ms = max(found.slowest_ms, took)
        if not math.isfinite(score.value) or not low - 1e-9 <= score.value <= high + 1e-9:
            found.add("range", text, f"{score.value} outside [{low}, {high}]")
        if is_reward_failure(score) and "verifier_timeout" not in (score.reason or ""):
            found.add("reward_error", text, str(score.reason))
        if any(not math.isfinite(v) for v in (*score.parts.values(), *score.metrics.values())):
            found.add(
                "not_finite", text, f"parts {dict(score.parts)}, metrics {dict(score.metrics)}"
            )
        found.parsed += score.parsed
        found.paid += score.value > 0
        return score

    def must_not_pay(self, setting: Setting, text: str, score: Score) -> None:
        """Variants of `text` that must not score more than it does."""
        sample, ctx, gold, wrong = setting
        rng = self.rng
        inside = answer_of(text)
        junk = rng.choice(GARBAGE)
        # native reads texts without a block, too: what is added to one may be its only answer
        whole = (
            "<answer>" in text.rpartition("</think>")[2]
            or getattr(self.task, "answers", "strict") == "strict"
        )
        variants = {"text behind the answer": text + junk} if whole else {}
        if score.parsed:
            if whole:
                variants["two answers"] = text + rng.choice((gold, wrong, text))
            variants["junk inside the answer"] = with_answer(text, inside + rng.choice(JUNK))
            floods = (
                flooded(inside, rng, rng.choice((1, 5, 60)))
                if answer_of(gold).startswith("[")
                else []
            )  # a list is asked
            for name, flood in zip(("doubled", "one repeated", "flood"), floods, strict=False):
                if name in PAYS_BY_ITS_RULE.get(self.case.name, ()):
                    continue
                # near copies may fix a bad answer
                if name != "flood" or score.value >= 0.9 * self.task.value_range[1]:
                    variants[name] = with_answer(text, flood)
            if "<think>" not in text:
                variants["right answer in the thoughts"] = f"<think>{gold}</think>\n{text}"
        for name, variant in variants.items():
            other = self.score(sample, variant, ctx)
            if (
                other is not None
                and self._worth(other) > self._worth(score) + 1e-9
                and not self._thought_pays(name)
            ):
                self.found.add(
                    f"pays: {name}",
                    variant,
                    f"{other.value:.6g} instead of {score.value:.6g} for {text[:300]!r}",
                )

    def _worth(self, score: Score) -> float:
        """What a score pays for its answer. Papers' format rules pay a form wherever it stands in a text, which is theirs."""
        if not getattr(self.task, "pays_unread", False):
            return score.value
        return score.value - score.weights.get("format", 0.0) * score.parts.get("format", 0.0)

    def _thought_pays(self, name: str) -> bool:
        """With answer_format 'think' (or V-Triune's 'think_lines') thoughts are part of the envelope: adding them may fix it."""
        return name == "right answer in the thoughts" and getattr(
            self.task, "answer_format", ""
        ).startswith("think")

    def examples(self) -> None:
        """The prompt's own text, alone and as an answer, and the right answer only in the thoughts: all worth nothing."""
        for sample, ctx, gold, wrong in self.settings:
            template = Template("qwen2_5_vl", ctx.frame)
            content = self.task.messages(sample, template)[-1]["content"]
            prompt = (
                content if isinstance(content, str) else "".join(i.get("text", "") for i in content)
            )
            base = self.task.score(sample, wrong, ctx).value
            shape = getattr(self.task, "shape", "")
            example = with_answer(gold, shape).split("<glue>")[0]
            for kind, text in (
                ("quotes the prompt", prompt),
                ("quotes the example", example),
                ("thoughts only", f"<think>{answer_of(gold)}</think>"),
                ("thoughts only", f"<think>{gold}</think>"),
            ):
                score = self.score(sample, text, ctx)
                if score is not None and score.value > base + 1e-9:
                    self.found.add(
                        f"pays: {kind}", text, f"{score.value:.6g}, a wrong answer gets {base:.6g}"
                    )

    def hypothesis_texts(self, examples: int) -> None:
        """Texts of hypothesis' own making, bare and inside an answer."""

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(
            st.one_of(
                st.text(max_size=200),
                st.text("[](){},.:-0123456789<answer>/ \"'", max_size=120),
                st.recursive(
                    st.floats() | st.integers() | st.text(max_size=8) | st.none(),
                    lambda inner: (
                        st.lists(inner, max_size=5)
                        | st.dictionaries(
                            st.sampled_from(["bbox_2d", "label", "point_2d", "action", "x"]),
                            inner,
                            max_size=4,
                        )
                    ),
                    max_leaves=12,
                ).map(json.dumps),
            ),
            st.booleans(),
            st.integers(0, len(self.settings) - 1),
        )
        def run(text: str, wrapped: bool, which: int) -> None:
            sample, ctx, _, _ = self.settings[which]
            self.score(sample, f"<answer>{text}</answer>" if wrapped else text, ctx)

        run()

    def run(self, inputs: int) -> Findings:
        """All checks until `inputs` texts were scored."""
        self.examples()
        self.hypothesis_texts(max(50, inputs // 100))
        while self.found.inputs < inputs:
            setting = self.rng.choice(self.settings)
            sample, ctx, gold, wrong = setting
            text = mutate(
                self.rng.choice((gold, gold, gold, wrong, self.rng.choice(self.corpus))),
                self.rng,
                self.corpus,
            )
            score = self.score(sample, text, ctx)
            if score is None:
                continue
            partly = 0 < score.value < 0.999 * self.task.value_range[1]
            if self.found.inputs % 10 == 0 or (partly and self.found.inputs % 3 == 0):
                self.must_not_pay(setting, text, score)
        return self.found


def _timed(task: Task, sample: Sample, text: str, ctx: RewardContext) -> float:
    began = time.thread_time()
    task.score(sample, text, ctx)
    return 1000 * (time.thread_time() - began)


def _run(work: tuple[RewardCase, int, int]) -> Findings:
    case, seed, inputs = work
    return Fuzzer(case, seed).run(inputs)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 1 when anything was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=200_000, help="texts per reward")
    parser.add_argument(
        "--pooled-inputs",
        type=int,
        default=None,
        help="the same for rewards that use the verifier pool",
    )
    parser.add_argument(
        "--only",
        default="",
        help="names of rewards that start with one of these, with commas between "
        "them; --record then renews their rows only",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--record", action="store_true", help="write assets/results/fuzz_rewards.json"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parse(parser, argv)
    rows: dict[str, Any] = {}
    cases = [case for case in all_cases() if case.name.startswith(tuple(options.only.split(",")))]
    pooled = options.inputs if options.pooled_inputs is None else options.pooled_inputs
    if not cases:
        parser.error(
            f"expected --only to begin a reward's name, found {options.only!r}; names: "
            f"{', '.join(case.name for case in all_cases())}"
        )
    work = [
        (case, options.seed, pooled if case.task in POOLED else options.inputs) for case in cases
    ]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for case, found in zip(cases, pool.map(_run, work), strict=True):
            row = {
                "inputs": found.inputs,
                "parsed": found.parsed,
                "paid": found.paid,
                "violations": dict(found.kinds),
                "mean_us": round(1e6 * found.seconds / found.inputs, 1),
                "slowest_ms": round(found.slowest_ms, 2),
                **({"shown": found.shown} if found.shown else {}),
            }
            rows[case.name] = row
            print(
                f"{case.name:40} {found.inputs:8} inputs  {row['mean_us']:8.1f} us  slowest {found.slowest_ms:6.2f} ms  "
                f"{dict(found.kinds) or 'clean'}",
                flush=True,
            )
            for shown in found.shown[:3]:
                print(f"    {shown['kind']}: {shown['why']}\n      {shown['text'][:300]!r}")
    if options.record:
        path = RESULTS / "fuzz_rewards.json"
        known = (
            json.loads(path.read_text(encoding="utf-8"))["rewards"]
            if options.only and path.exists()
            else {}
        )
        rows_of = {**known, **rows}
        merged = {case.name: rows_of[case.name] for case in all_cases() if case.name in rows_of}
        print(
            write_results(
                "fuzz_rewards",
                {"limit_ms": LIMIT_MS, "seed": options.seed, "rewards": merged},
                "hypothesis",
            )
        )
    return int(any(row["violations"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
