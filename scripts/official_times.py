"""Official numbers of answers that overshoot: each benchmark's own program on the files that mmrl wrote, beside mmrl's numbers.

For Charades-STA, ActivityNet Captions, QVHighlights and NExT-GQA the official truths are read as they are, answers are made by a
seed (true times plus noise of 8 s; some reversed, without length, without end, given twice or unreadable), and go the whole way as
texts: parse, score, benchmark, submission files. Then the benchmark's own program reads those files. `repaired` is what the same
answers would get if predictions and truths were sorted and clipped to the video first: what mmrl did until 2026-11-23.

    python -m scripts.official_times --data DATA --programs PROGRAMS     writes assets/results/official_times.{json,md}
    python -m scripts.official_times --check                             the table belongs to the numbers, and they agree

DATA: charades/charades_sta_test.txt and Charades_v1_test.csv, activitynet/val_2.json, qvhighlights/highlight_val_release.jsonl,
nextgqa/{test.csv, gsub_test.json, map_vid_vidorID.json}; no videos, only their names count. PROGRAMS: checkouts named moment_detr,
NExT-GQA, VideoChat-R1, TALL, VideoX, lmms-eval. moment_detr's needs scikit-learn.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.coords import CoordFrame
from mmrl.registry import task_from_spec
from mmrl.rewards.choice import LETTERS
from mmrl.rewards.temporal import clip_spans
from mmrl.tasks.metrics import nextgqa, qvhighlights, temporal
from mmrl.tasks.readers import read_any
from mmrl.tasks.spans import duration_of, true_spans, video_id
from mmrl.types import RewardContext, Sample, Score
from scripts._official_times_programs import PROGRAMS, run_program

__all__ = ["RESULTS", "SETS", "answer_of", "differences", "markdown", "measure_set"]

RESULTS = Path(__file__).resolve().parents[1] / "assets" / "results" / "official_times.json"
_CTX = RewardContext(1, 1, CoordFrame.REL1000)
_NOISE_S = 8.0
_KINDS = ("near",) * 15 + ("reversed", "instant", "endless", "twice", "nothing")
Pairs = Sequence[tuple[Sample, Score]]


def _noisy(rng: random.Random, span: Sequence[float], kind: str) -> list[float]:
    """The span with noise at both ends, to tenths of a second, never before 0 (the text programs read no minus)."""
    start, end = sorted(max(0.0, round(time + rng.gauss(0, _NOISE_S), 1)) for time in span)
    if kind == "reversed":
        return [end, start]
    return (
        [start, start] if kind == "instant" else [start, 1e6] if kind == "endless" else [start, end]
    )


def answer_of(rng: random.Random, sample: Sample, form: str) -> str:
    """An answer's text: `to` (one span), `windows` (a list) or `choice` (an option and a span); '' is kept for unreadable ones."""
    kind = rng.choice(_KINDS)
    if kind == "nothing":
        return "It never happens."
    spans = [_noisy(rng, span, kind) for span in true_spans(sample)]
    if form == "to":
        return f"{spans[0][0]} to {spans[0][1]}"
    if form == "windows":
        rng.shuffle(spans)
        return json.dumps(spans * 2 if kind == "twice" else spans)
    letter = sample.answer["choice"] if rng.random() < 0.7 else rng.choice(LETTERS[:5])
    return json.dumps({"answer": letter, "time": rng.choice(spans)})


def _touch(folder: Path, names: Sequence[str]) -> Path:
    """Empty videos: readers ask only whether they are there."""
    for name in names:
        (folder / f"{name}.mp4").parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.mp4").touch()
    return folder


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _charades(data: Path, scratch: Path) -> tuple[list[Sample], Any]:
    file = data / "charades/charades_sta_test.txt"
    videos = _touch(
        scratch, sorted({line.split()[0] for line in file.read_text(encoding="utf-8").splitlines()})
    )
    return read_any(file, "charades_sta", video_root=str(videos), probe=False).samples, None


def _activitynet(data: Path, scratch: Path) -> tuple[list[Sample], Any]:
    file = data / "activitynet/val_2.json"
    videos = _touch(scratch, list(json.loads(file.read_text(encoding="utf-8"))))
    return read_any(file, "activitynet", video_root=str(videos), probe=False).samples, None


def _qvhighlights(data: Path, scratch: Path) -> tuple[list[Sample], Any]:
    file = data / "qvhighlights/highlight_val_release.jsonl"
    rows = _rows(file)
    videos = _touch(scratch, [row["vid"] for row in rows])
    truth = [
        {key: row[key] for key in ("qid", "query", "duration", "vid", "relevant_windows")}
        for row in rows
    ]
    return read_any(file, "qvhighlights", video_root=str(videos), probe=False).samples, truth


def _nextgqa(data: Path, scratch: Path) -> tuple[list[Sample], Any]:
    truth = json.loads((data / "nextgqa/gsub_test.json").read_text(encoding="utf-8"))
    videos = _touch(scratch, list(truth))
    return read_any(data / "nextgqa", "nextgqa", video_root=str(videos), probe=False).samples, truth


SETS: Mapping[str, dict[str, Any]] = {
    "Charades-STA test": {
        "read": _charades,
        "task": "temporal_grounding",
        "form": "to",
        "headline": ("R1@0.5", "mIoU"),
        "programs": ("TALL", "VideoChat-R1", "lmms-eval"),
    },
    "ActivityNet Captions val_2": {
        "read": _activitynet,
        "task": "temporal_grounding",
        "form": "to",
        "headline": ("R1@0.5", "mIoU"),
        "programs": ("VideoChat-R1", "VideoX"),
    },
    "QVHighlights val": {
        "read": _qvhighlights,
        "task": "temporal_grounding",
        "form": "windows",
        "headline": ("MR-full-mAP", "MR-full-R1@0.5"),
        "programs": ("moment_detr",),
    },
    "NExT-GQA test": {
        "read": _nextgqa,
        "task": "grounded_qa",
        "form": "choice",
        "headline": ("Acc@GQA", "mIoU"),
        "programs": ("NExT-GQA",),
    },
}
"""Name -> how it is read, asked and scored; `headline` are the numbers of the table."""


def _score(
    samples: Sequence[Sample], task_name: str, form: str, files: Path
) -> tuple[Pairs, dict[str, float]]:
    """Answers from text to submission files; answers.jsonl holds what the programs that read texts need."""
    params = {
        "answer_format": "think",
        **({"spelling": "to", "spans": "one"} if form == "to" else {}),
    }
    task, rng, pairs, lines = task_from_spec(task_name, params), random.Random(20261123), [], []
    for sample in samples:
        said = answer_of(rng, sample, form)
        text = f"<think>I look for it.</think><answer>{said}</answer>"
        pairs.append((sample, task.score(sample, text, _CTX)))
        lines.append(
            json.dumps(
                {
                    "vid": video_id(sample),
                    "sentence": sample.question,
                    "truth": true_spans(sample)[0],
                    "said": said,
                    "text": text,
                    "duration": duration_of(sample),
                }
            )
            + "\n"
        )
    (files / "answers.jsonl").write_text("".join(lines), encoding="utf-8")
    return pairs, dict(task.benchmark(pairs, files))


def _repaired(pairs: Pairs, form: str) -> dict[str, float]:
    """The numbers of sorted and clipped predictions and truths."""

    def fix(spans: Sequence[Sequence[float]], sample: Sample) -> list[list[float]]:
        return [
            list(span) for span in clip_spans([sorted(span) for span in spans], duration_of(sample))
        ]

    said = [
        fix((score.detail.get("pred_spans") or []) if score.parsed else [], sample)
        for sample, score in pairs
    ]
    true = [fix(true_spans(sample), sample) for sample, _ in pairs]
    if form == "to":
        return temporal.evaluate(dict(enumerate(said)), dict(enumerate(true)))
    if form == "windows":
        rows = [
            {
                "qid": i,
                "pred_relevant_windows": [[*w, 1 - k / len(spans)] for k, w in enumerate(spans)],
            }
            for i, spans in enumerate(said)
        ]
        return qvhighlights.evaluate(
            rows,
            [
                {"qid": i, "duration": 150, "relevant_windows": spans}
                for i, spans in enumerate(true)
            ],
        )
    answers = {
        f"v_{i}": {
            "answer": sample.answer["choice"],
            "prediction": str(score.detail.get("pred_text") or " ")[0],
        }
        for i, (sample, score) in enumerate(pairs)
    }
    return nextgqa.evaluate(
        {f"v_{i}": spans[0] for i, spans in enumerate(said) if spans},
        {"v": {"location": dict(enumerate(true))}},
        answers,
    )


def _ours(name: str, numbers: Mapping[str, float], pairs: Pairs) -> dict[str, float]:
    """What has to equal the program's numbers: under its own rule where ours is another one, as the table says below."""
    if name == "lmms-eval":
        found = {
            i: span
            for i, (_, score) in enumerate(pairs)
            if (span := temporal.first_span(score)) is not None
        }
        return temporal.evaluate(
            found, {i: true_spans(s) for i, (s, _) in enumerate(pairs)}, reversed_as="sorted"
        )
    if name == "VideoX":
        ious = [
            temporal.best_iou(temporal.first_span(score), true_spans(sample))
            for sample, score in pairs
        ]
        return {
            **numbers,
            **{
                f"R1@{level:g}": sum(iou > level for iou in ious) / len(ious)
                for level in temporal.LEVELS
            },
        }
    if name in ("NExT-GQA", "moment_detr"):
        return {
            key.removeprefix("official/"): value
            for key, value in numbers.items()
            if key.startswith("official/")
        }
    return dict(numbers)


def measure_set(name: str, data: Path, programs: Path) -> dict[str, Any]:
    """One set from its official files to both sides' numbers."""
    chosen = SETS[name]
    read: Callable[[Path, Path], tuple[list[Sample], Any]] = chosen["read"]
    with tempfile.TemporaryDirectory() as temporary:
        files, videos = Path(temporary) / "files", Path(temporary) / "videos"
        files.mkdir()
        samples, truth = read(data, videos)
        if isinstance(truth, list):
            (files / "truth.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in truth), encoding="utf-8"
            )
        elif truth is not None:
            (files / "truth.json").write_text(json.dumps(truth), encoding="utf-8")
        pairs, numbers = _score(samples, chosen["task"], chosen["form"], files)
        found = [
            {**run_program(program, programs, files), "ours": _ours(program, numbers, pairs)}
            for program in chosen["programs"]
        ]
    for row in found:
        row["ours"] = {key: row["ours"][key] for key in row["numbers"] if key in row["ours"]}
    return {
        "samples": len(samples),
        "unreadable": sum(not score.parsed for _, score in pairs),
        "numbers": numbers,
        "repaired": _repaired(pairs, chosen["form"]),
        "programs": found,
    }


def differences(results: Mapping[str, Any]) -> list[str]:
    """Numbers in which mmrl (under the program's rule) and the program differ by more than 1e-9, or 0.005 + 1e-9 where it rounds to
    two decimals (moment_detr)."""
    wrong = []
    for name, row in results["sets"].items():
        for program in row["programs"]:
            near = 1e-9 + 0.005 * (program["repository"] == "jayleicn/moment_detr")
            wrong += [
                f"{name}: {key}: {program['repository']} {value}, mmrl {program['ours'].get(key)}"
                for key, value in program["numbers"].items()
                if abs(value - program["ours"].get(key, 1e9)) > near
            ]
            wrong += [f"{name}: nothing from {program['repository']}"] * (not program["numbers"])
    return wrong


_ABOUT = """# Official numbers of answers that overshoot

Written by `python -m scripts.official_times` on {date}. Answers are seeded: true times plus noise of 8 s; one in twenty each is
reversed, without length, ends at 1,000,000 s, is given twice, or is unreadable. They go from text to submission files; the program
named reads those files (or texts). Equal means within 1e-9, or to the two decimals that moment_detr prints. The last column is what
sorted and clipped predictions and truths would give: the defect that was fixed.

| set | answers | truths outside | answers outside, reversed | program | number | official | mmrl | all numbers | repaired |
|---|---|---|---|---|---|---|---|---|---|
"""
_RULES = """
lmms-eval sorts the two times of an answer: mmrl's `reversed_as="sorted"`. VideoX counts IoUs above the level, not from it on.
NExT-GQA leaves out questions without a prediction and pays a moment inside the truth, and moment_detr takes a reversed window as
long as a true one for a hit (0 / 0): both are mmrl's `official/` numbers; its own count every question and pay neither.
"""


def markdown(results: Mapping[str, Any]) -> str:
    """The table."""
    lines, bad = [], differences(results)
    for name, row in results["sets"].items():
        n = row["numbers"]
        said = f"{n['num_outside']:,.0f}, {n['num_reversed']:,.0f}"
        for program in row["programs"]:
            repository, found, ours = program["repository"], program["numbers"], program["ours"]
            equal = (
                "differ"
                if any(text.startswith(f"{name}:") and repository in text for text in bad)
                else "equal"
            )
            what = f"{repository} ({program['commit'][:7]}): {program['what']}"
            for key in SETS[name]["headline"]:
                cells = (
                    name,
                    f"{row['samples']:,}",
                    f"{n['num_truths_outside']:,.0f}",
                    said,
                    what,
                    key,
                    f"{found[key]:.4f}",
                    f"{ours[key]:.4f}",
                    f"{len(found)} {equal}",
                    f"{row['repaired'][key]:.4f}",
                )
                lines.append(f"| {' | '.join(cells)} |\n")
    return _ABOUT.format(date=results["date"]) + "".join(lines) + _RULES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the programs and write both files, or check them; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--programs", type=Path)
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args(arguments)
    if not asked.check:
        if asked.data is None or asked.programs is None:
            parser.error(
                f"expected --data and --programs (checkouts of {', '.join(repo for repo, _, _ in PROGRAMS.values())})"
            )
        import datetime

        results = {
            "date": datetime.date.today().isoformat(),
            "sets": {name: measure_set(name, asked.data, asked.programs) for name in SETS},
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        RESULTS.with_suffix(".md").write_text(markdown(results), encoding="utf-8")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    wrong = differences(results)
    if RESULTS.with_suffix(".md").read_text(encoding="utf-8") != markdown(results):
        wrong.append(f"{RESULTS.with_suffix('.md').name} is not the table of {RESULTS.name}")
    count = sum(
        len(program["numbers"]) for row in results["sets"].values() for program in row["programs"]
    )
    print("\n".join(wrong) or f"{count} official numbers, all equal")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
