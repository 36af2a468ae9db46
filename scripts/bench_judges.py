"""How long a step waits for its judge: 64 completions and a judge of 0.2 s, all at once and one by one.

    python -m scripts.bench_judges                              # assets/results/bench_judges.json

The judge is a real HTTP server in a process of its own that sleeps before it answers (scripts/_judge_server.py); completions are
scored as in training, by the task `judged` in a reward process, pipes and the store of verdicts included. Each round asks new
questions; the process with the event loop is warm, as from a run's second step on.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

from mmrl.coords import CoordFrame
from mmrl.registry import task_from_spec
from mmrl.types import RewardContext, Sample
from mmrl.workers.scorer import Scorer
from mmrl.workers.scoring import ScoreJob
from scripts._bench import parse, print_table, spread, write_results
from scripts._judge_server import judge_server

CONCURRENCY = (64, 8, 1)


def _jobs(count: int, start: int) -> list[ScoreJob]:
    ctx = RewardContext(1, 100, CoordFrame.ABS_ORIG)
    return [
        ScoreJob(
            0,
            Sample(f"{start + i}", "judged", "bench", f"Question {start + i}?", "red"),
            f"<answer>score {i % 11}</answer>",
            ctx,
        )
        for i in range(count)
    ]


def _round(url: str, concurrency: int, completions: int, start: int) -> float:
    params: dict[str, Any] = {
        "task": "open_text",
        "judge": {"url": url, "model": "sleeps", "concurrency": concurrency},
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        Scorer([("judged", params)], [task_from_spec("judged", params)], verdicts=folder) as scorer,
    ):
        scorer.score(_jobs(1, start))
        began = time.perf_counter()
        scores = scorer.score(_jobs(completions, start + 1))
        seconds = time.perf_counter() - began
    expected = [i % 11 / 10 for i in range(completions)]
    assert [round(s.value, 6) for s in scores] == expected, "each got its own verdict"
    assert all(s.metrics["judge_calls"] == 1 and not s.metrics["judge_kept"] for s in scores)
    return seconds


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--completions", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.2, help="that the judge takes")
    parser.add_argument("--rounds", type=int, default=5)
    options = parse(parser, least=("completions",))
    rows: dict[str, list[float]] = {str(c): [] for c in CONCURRENCY}
    with judge_server(options.seconds) as url:
        for number in range(options.rounds):
            for place, concurrency in enumerate(CONCURRENCY):
                start = (number * len(CONCURRENCY) + place) * (options.completions + 1)
                rows[str(concurrency)].append(_round(url, concurrency, options.completions, start))
    found = {name: spread(values) for name, values in rows.items()}
    print_table(
        ["requests at once", "seconds", "smallest", "largest"],
        [
            [name, *(f"{value[k]:.3f}" for k in ("median", "min", "max"))]
            for name, value in found.items()
        ],
    )
    path = write_results(
        "bench_judges",
        {
            "completions": options.completions,
            "judge_s": options.seconds,
            "rounds": options.rounds,
            "seconds_by_requests_at_once": found,
            "one_by_one_over_at_once": found["1"]["median"] / found["64"]["median"],
        },
        "httpcore",
    )
    print(path)


if __name__ == "__main__":
    main()
