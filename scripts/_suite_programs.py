"""The benchmarks' own programs from all replies of a suite to its numbers, for scripts.record_suites.

Scripts run whole, in a process of their own, on files in their own layout. `random.choice` gives a word that is no option, so that
a reply of which the program makes nothing is wrong instead of drawn; packages that only load data or print stand for nothing.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts._extractor_runs import _Echo
from scripts._peer_code import load
from scripts._suite_texts import LETTERS

__all__ = ["mathvista", "mmmu", "vsibench", "whole"]

Case = Mapping[str, Any]
_STAND_INS = """
import random, sys, types
random.choice = lambda values: "drawn"
def stand_in(name, **members):
    module = types.ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module
"""


def whole(script: Path, arguments: Sequence[str], folder: Path, stand_ins: str = "") -> str:
    """What a script prints that runs as it stands in `folder`, after `stand_ins`. Raises RuntimeError with its last words."""
    code = "\n".join(
        (
            _STAND_INS,
            stand_ins,
            "import runpy",
            f"sys.argv = {[str(script), *arguments]!r}",
            f"sys.path[:0] = {[str(script.parent), str(script.parent.parent)]!r}",
            f"runpy.run_path({str(script)!r}, run_name='__main__')",
        )
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{script} ended with status {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def mmmu(code: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """main_parse_and_eval.py on a folder of outputs, then main_eval_only.py on the answers it took out of them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subjects: dict[str, list[dict[str, Any]]] = {}
        for case in cases:
            row, truth = case["row"], case["row"]["answer"]
            options = ast.literal_eval(row["options"])
            subject = row["id"].removeprefix("validation_").rpartition("_")[0]
            subjects.setdefault(subject, []).append(
                {
                    "id": row["id"],
                    "question_type": "short-answer"
                    if row["question_type"] == "open"
                    else row["question_type"],
                    "answer": ast.literal_eval(truth) if truth.startswith("[") else truth,
                    "response": case["reply"],
                    "all_choices": list(LETTERS[: len(options)]),
                    "index2ans": dict(zip(LETTERS, options, strict=False)),
                }
            )
        for subject, rows in subjects.items():
            (folder / "out" / subject).mkdir(parents=True)
            (folder / "out" / subject / "output.json").write_text(
                json.dumps(rows), encoding="utf-8"
            )
        whole(
            code / "mmmu" / "main_parse_and_eval.py", ["--path", "out", "--subject", "ALL"], folder
        )
        parsed = [
            row
            for subject in subjects
            for row in json.loads(
                (folder / "out" / subject / "parsed_output.json").read_text(encoding="utf-8")
            )
        ]
        each = {
            subject: json.loads(
                (folder / "out" / subject / "result.json").read_text(encoding="utf-8")
            )
            for subject in sorted(subjects)
        }
        answers = {
            row["id"]: {"question_type": row["question_type"], "ground_truth": row["answer"]}
            for row in parsed
        }
        outputs = {
            row["id"]: row["parsed_pred"] if "index2ans" in row else row["response"]
            for row in parsed
        }
        (folder / "answers.json").write_text(json.dumps(answers), encoding="utf-8")
        (folder / "outputs.json").write_text(json.dumps(outputs), encoding="utf-8")
        printed = whole(
            code / "mmmu" / "main_eval_only.py",
            ["--output_path", "outputs.json", "--answer_path", "answers.json"],
            folder,
        )
    right = {row["id"]: row["judge"] == "Correct" for row in parsed}
    return {
        "values": [float(right[case["row"]["id"]]) for case in cases],
        "subjects": each,
        "printed": ast.literal_eval(printed.strip().splitlines()[-1]),
        "drawn": sum(row["parsed_pred"] == "drawn" for row in parsed),
    }


_MATHVISTA = """
import pandas
def _by_key_or_place(self, key, get=pandas.Series.__getitem__):  # as pandas did before version 3
    return get(self, key) if not isinstance(key, int) else self.iloc[key]
pandas.Series.__getitem__ = _by_key_or_place
from rapidfuzz.distance import Levenshtein as _distances
stand_in("Levenshtein", distance=_distances.distance)
stand_in("datasets", load_dataset=lambda *a, **k: [])
stand_in("word2number", w2n=None)
"""


def mathvista(code: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """extract_answer on each reply (quick_extract; what a language model would be asked gets the reply back), then
    calculate_score.py --ignore_empty_extractions."""
    take = load(code / "evaluation" / "extract_answer.py", demo_prompt="")["extract_answer"]
    results = {}
    for case in cases:
        problem = {**case["row"], "query": case["row"]["question"], "response": case["reply"]}
        results[problem["pid"]] = {
            **problem,
            "extraction": take(_Echo(case["reply"]), case["reply"], problem, quick_extract=True),
        }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "out.json").write_text(json.dumps(results), encoding="utf-8")
        whole(
            code / "evaluation" / "calculate_score.py",
            [
                "--output_dir",
                ".",
                "--output_file",
                "out.json",
                "--score_file",
                "scores.json",
                "--ignore_empty_extractions",
            ],
            folder,
            _MATHVISTA,
        )
        judged = json.loads((folder / "out.json").read_text(encoding="utf-8"))
        scores = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    return {
        "values": [float(judged[case["row"]["pid"]]["true_false"]) for case in cases],
        "scores": {
            key: scores[key]
            for key in ("average", "question_type", "answer_type", "source", "task", "skills")
        },
    }


def vsibench(code: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """vsibench_process_results on each reply, vsibench_aggregate_results on all."""
    import pandas

    silent = types.SimpleNamespace(info=lambda *a: None)
    space = load(
        code / "lmms_eval" / "tasks" / "vsibench" / "utils.py",
        pd=pandas,
        eval_logger=silent,
        datasets=types.SimpleNamespace(Dataset=object),
    )
    found = [
        space["vsibench_process_results"](dict(case["row"]), [case["reply"]])["vsibench_score"]
        for case in cases
    ]
    numbers = space["vsibench_aggregate_results"](found)
    values = [float(row["accuracy" if "accuracy" in row else "MRA:.5:.95:.05"]) for row in found]
    return {
        "values": values,
        "numbers": {key: value for key, value in numbers.items() if isinstance(value, float)},
    }


PROGRAMS: Mapping[str, Callable[[Path, Sequence[Case]], dict[str, Any]]] = {
    "mmmu": mmmu,
    "mathvista": mathvista,
    "vsibench": vsibench,
}
