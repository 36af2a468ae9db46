"""Run the benchmarks' own programs from replies to numbers and write both to assets/fixtures/suites.

    git clone https://github.com/MMMU-Benchmark/MMMU code/MMMU     # and the others of REPOSITORIES, at their commits
    python -m scripts.record_suites --code code                    # --only mmmu,vsibench

One JSON file per suite: repository, commit and files of the program, how it ran, the rows of the benchmark in the form of its
release (of each only what differs from `row`, the most frequent values) with a reply and the `value` that the program gives it, and
`official`, the program's numbers over all of them. tests/evaluation/test_suite_goldens.py writes those rows as the release has
them, gives the replies to `mmrl eval` in the place of a model's, and compares. No line of the programs is kept in this project.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scripts import _suite_boxes, _suite_clips, _suite_pictures, _suite_programs, _suite_rows
from scripts._extractor_runs import REPOSITORIES
from scripts._peer_code import quiet

__all__ = ["FIXTURES", "RUNS", "Golden", "main", "record"]

FIXTURES = Path(__file__).resolve().parent.parent / "assets" / "fixtures" / "suites"
Cases = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Golden:
    """One suite: the checkout and files of its program, the rows, and who runs it."""

    name: str
    folder: str
    files: tuple[str, ...]
    rows: Callable[[], Any]
    run: Callable[[Path, Any], dict[str, Any]]
    note: str


RUNS: tuple[Golden, ...] = (
    Golden(
        "mmmu",
        "MMMU",
        ("mmmu/main_parse_and_eval.py", "mmmu/main_eval_only.py", "mmmu/utils/eval_utils.py"),
        _suite_rows.mmmu,
        _suite_programs.mmmu,
        "Both scripts, whole. Where the program draws an option at random (`drawn` rows), the draw is none of them: wrong.",
    ),
    Golden(
        "mathvista",
        "MathVista",
        ("evaluation/extract_answer.py", "evaluation/calculate_score.py"),
        _suite_rows.mathvista,
        _suite_programs.mathvista,
        "extract_answer with quick_extract; where it asks a language model, that gives the reply. calculate_score.py, whole, "
        "with --ignore_empty_extractions: without it an empty reply is the shortest choice. Package Levenshtein: rapidfuzz's.",
    ),
    Golden(
        "vsibench",
        "thinking-in-space",
        ("lmms_eval/tasks/vsibench/utils.py",),
        _suite_rows.vsibench,
        _suite_programs.vsibench,
        "vsibench_process_results and vsibench_aggregate_results.",
    ),
    Golden(
        "videomme",
        "Video-MME",
        ("evaluation/eval_your_results.py",),
        _suite_clips.videomme_rows,
        _suite_clips.videomme,
        "The authors' script on the file that it asks for. It leaves replies without a letter out of its denominators "
        "(`left_out`); here they are wrong.",
    ),
    Golden(
        "mvbench",
        "Ask-Anything",
        ("video_chat2/mvbench.ipynb",),
        _suite_clips.mvbench_rows,
        _suite_clips.mvbench,
        "check_ans and the two cells that count and average. Replies that are right whatever the truth is are left out.",
    ),
    Golden(
        "tempcompass_mc",
        "TempCompass",
        ("eval_multi-choice.py", "utils/eval_utils.py"),
        _suite_clips.tempcompass_rows,
        _suite_clips.tempcompass,
        "The script, whole, with --disable_llm.",
    ),
    Golden(
        "tempcompass_yes_no",
        "TempCompass",
        ("eval_yes_no.py", "utils/eval_utils.py"),
        _suite_clips.yes_no_rows,
        _suite_clips.yes_no,
        "The script, whole, with --disable_llm.",
    ),
    Golden(
        "videommmu",
        "VideoMMMU",
        ("lmms_eval/tasks/videommmu/utils.py",),
        _suite_clips.videommmu_rows,
        _suite_clips.videommmu,
        "videoperception_process_results and videoperception_aggregate_results, track by track. Empty replies are left out of "
        "its denominators (`left_out`); here they are wrong. Its question type perception is never right there (read as text).",
    ),
    Golden(
        "longvideobench",
        "lmms-eval",
        ("lmms_eval/tasks/longvideobench/utils.py",),
        _suite_clips.longvideobench_rows,
        _suite_clips.longvideobench,
        "longvideobench_process_results and longvideobench_aggregate_results. Where the program "
        "draws an option at random (`drawn` rows), the draw is none of them: wrong.",
    ),
    Golden(
        "mlvu_dev",
        "MLVU",
        ("evaluation/multiple_choice_evaluation/choice_bench.py",),
        _suite_clips.mlvu_rows,
        _suite_clips.mlvu,
        "main, with the reply in the place left for a model.",
    ),
    Golden(
        "mlvu_test",
        "MLVU",
        ("evaluation/multiple_choice_evaluation/choice_bench.py",),
        _suite_clips.mlvu_test_rows,
        _suite_clips.mlvu,
        "main of the dev set's script on the test set's tasks: those answers are scored by a server.",
    ),
    Golden(
        "coco",
        "pycocotools",
        ("pycocotools/cocoeval.py",),
        _suite_boxes.coco_rows,
        _suite_boxes.coco,
        "COCO(annotations).loadRes(results), COCOeval. `results` is the results file, `value` counts a picture's boxes in it.",
    ),
    Golden(
        "coco_edges",
        "pycocotools",
        ("pycocotools/cocoeval.py",),
        _suite_boxes.coco_edge_rows,
        _suite_boxes.coco,
        "As coco, with annotations beyond their pictures, without height, and outside.",
    ),
    Golden(
        "lvis",
        "lvis-api",
        ("lvis/lvis.py", "lvis/results.py", "lvis/eval.py"),
        _suite_boxes.lvis_rows,
        _suite_boxes.lvis,
        "LVISEval(annotations, results, 'bbox').run(), with numpy.float for the numpy of its time. `results` without the "
        "categories that it ignores in a picture.",
    ),
    Golden(
        "ovdeval",
        "OVDEval",
        ("eval.py",),
        _suite_boxes.ovdeval_rows,
        _suite_boxes.ovdeval,
        "The script, whole, subset by subset. Annotation ids begin at 1: pycocotools never matches the id 0 of the release.",
    ),
    Golden(
        "pixmo_count",
        "molmo",
        ("olmo/eval/evaluators.py",),
        _suite_pictures.pixmo_count_rows,
        _suite_pictures.pixmo_count,
        "PointCountEval on texts, with one process on the CPU for its ranks on GPUs.",
    ),
    Golden(
        "pageocr",
        "Fox",
        ("eval_tools/eval_ocr_test.py",),
        _suite_pictures.pageocr_rows,
        _suite_pictures.pageocr,
        "The script, whole, on English pages; METEOR, which needs a download, stands for nothing. On an empty answer the script "
        "ends with an error (its precision is None); here that is 0, so that the distance, 1, counts. `value` is a page's.",
    ),
    Golden(
        "refcoco",
        "lmms-eval",
        ("lmms_eval/tasks/refcoco/utils_rec.py",),
        _suite_pictures.refcoco_rows,
        _suite_pictures.refcoco,
        "refcoco_bbox_rec_process_result and refcoco_bbox_rec_aggregation_result, boxes as shares of the picture.",
    ),
    Golden(
        "screenspot_v2",
        "lmms-eval",
        ("lmms_eval/tasks/screenspot_v2/utils.py",),
        _suite_pictures.screenspot_v2_rows,
        _suite_pictures.screenspot_v2,
        "screenspot_v2_process_results and the three means; boxes as shares of the picture.",
    ),
    Golden(
        "tempcompass_matching",
        "TempCompass",
        ("eval_caption_matching.py", "utils/eval_utils.py"),
        _suite_pictures.matching_rows,
        _suite_pictures.matching,
        "The script, whole, with --disable_llm, on captions named by letters. Replies that its rules cannot match, which a "
        "language model would judge, are left out.",
    ),
)


def record(run: Golden, code: Path) -> dict[str, Any]:
    """The fixture of one suite."""
    repository, commit = REPOSITORIES.get(run.folder) or (
        f"package {run.folder}",
        version(run.folder),
    )
    cases = run.rows()
    with quiet():
        official = run.run(code / run.folder, cases)
    judged = [
        (case, value)
        for case, value in zip(cases, official.pop("values"), strict=True)
        if value is not None
    ]
    cases, values = [case for case, _ in judged], [value for _, value in judged]
    usual = {
        key: Counter(json.dumps(case["row"][key]) for case in cases).most_common(1)[0][0]
        for key in cases[0]["row"]
    }
    cases = [
        {
            "row": {
                key: value for key, value in case["row"].items() if json.dumps(value) != usual[key]
            },
            "reply": case["reply"],
            "value": round(value, 9),
        }
        for case, value in zip(cases, values, strict=True)
    ]
    return {
        "suite": run.name,
        "repository": repository,
        "commit": commit,
        "files": list(run.files),
        "note": run.note,
        "official": official,
        "row": {key: json.loads(value) for key, value in usual.items()},
        "cases": cases,
    }


def _written(found: Mapping[str, Any]) -> str:
    """A line for every row."""
    head = {key: value for key, value in found.items() if key != "cases"}
    rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in found["cases"])
    return json.dumps(head, ensure_ascii=False)[:-1] + f',\n "cases": [\n{rows}\n ]}}\n'


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.record_suites", description="Run the benchmarks' own programs."
    )
    parser.add_argument("--code", type=Path, required=True, help="folder with the checkouts")
    parser.add_argument("--out", type=Path, default=FIXTURES)
    parser.add_argument("--only", default="", help="names, with commas between them")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for run in RUNS:
        if not args.only or run.name in args.only.split(","):
            found = record(run, args.code.resolve())
            (args.out / f"{run.name}.json").write_text(_written(found), encoding="utf-8")
            print(f"{run.name:16} {len(found['cases'])} rows")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
