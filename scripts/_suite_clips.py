"""Rows and programs of the suites about clips with options, for scripts.record_suites; see scripts._suite_rows and _suite_programs.

python -c "from scripts._suite_clips import mlvu_rows; print(mlvu_rows()[0])"
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import random
import re
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts._extractor_cases import OPEN, YES_NO
from scripts._peer_code import load
from scripts._suite_programs import whole
from scripts._suite_rows import Case, choices
from scripts._suite_texts import LETTERS, plain

__all__ = [
    "longvideobench",
    "longvideobench_rows",
    "mlvu",
    "mlvu_rows",
    "mlvu_test_rows",
    "mvbench",
    "mvbench_rows",
    "tempcompass",
    "tempcompass_judged",
    "tempcompass_rows",
    "videomme",
    "videomme_rows",
    "videommmu",
    "videommmu_rows",
    "yes_no",
    "yes_no_rows",
]

MVBENCH = (
    "action_sequence",
    "action_prediction",
    "object_interaction",
    "action_antonym",
    "fine_grained_action",
    "unexpected_action",
    "object_existence",
    "moving_direction",
    "moving_count",
    "moving_attribute",
    "counterfactual_inference",
    "object_shuffle",
    "action_count",
    "state_change",
    "character_order",
    "action_localization",
    "scene_transition",
    "fine_grained_pose",
    "egocentric_navigation",
    "episodic_reasoning",
)
_ASPECTS = ("action", "direction", "speed", "order", "attribute_change")
_KINDS = {
    "action": ("fine-grained action", "coarse-grained action"),
    "direction": ("object motion", "camera motion"),
    "speed": ("absolute speed", "relative speed"),
    "attribute_change": (
        "color & light change",
        "size & shape change",
        "combined change",
        "other change",
    ),
}


def videomme_rows() -> list[Case]:
    """Questions of Video-MME: short, medium and long videos of six domains."""
    from_list, tasks = (
        ("Knowledge", "Sports Competition", "Life Record"),
        ("Counting Problem", "OCR Problems", "Action Reasoning"),
    )
    rng = random.Random(81)
    found: list[Case] = []
    for number, (options, right, reply) in enumerate(
        case for case in choices(82) if len(case[0]) == 4
    ):
        shown = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False)]
        place = number % 3
        found.append(
            {
                "row": {
                    "question_id": f"{number:03}-1",
                    "videoID": f"clip{place}",
                    "duration": rng.choice(["short", "medium", "long"]),
                    "domain": from_list[place],
                    "sub_category": ("Geography", "Football", "Food")[place],
                    "task_type": rng.choice(tasks),
                    "question": "Which one is it?",
                    "options": shown,
                    "answer": right,
                },
                "reply": reply,
            }
        )
    return found


def videomme(code: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """eval_your_results of the file that the script asks for, and extract_characters_regex on each reply."""
    space = load(code / "evaluation" / "eval_your_results.py")
    read = space["extract_characters_regex"]
    items = [
        {
            "missing": False,
            "duration_category": row["duration"],
            "video_category": row["domain"],
            "video_subcategory": row["sub_category"],
            "questions": [{**row, "response": case["reply"]}],
        }
        for case in cases
        for row in [case["row"]]
    ]
    printed = io.StringIO()
    with (
        tempfile.NamedTemporaryFile("w", suffix=".json") as file,
        contextlib.redirect_stdout(printed),
    ):
        json.dump(items, file)
        file.flush()
        space["eval_your_results"](
            file.name,
            ["short", "medium", "long"],
            skip_missing=True,
            return_task_types_accuracy=True,
        )
    parts = printed.getvalue().split("Evaluation on ")[1:]
    overall = [float(re.findall(r"Overall: +([\d.]+)%", part)[0]) for part in parts]
    unread = [case["row"]["duration"] for case in cases if read(case["reply"]) == ""]
    return {
        "values": [float(read(case["reply"]) == case["row"]["answer"]) for case in cases],
        "overall": dict(zip(("short", "medium", "long", "all"), overall, strict=True)),
        "left_out": {name: unread.count(name) for name in ("short", "medium", "long")},
    }


def mvbench_rows() -> list[Case]:
    """Twelve questions of each of MVBench's 20 tasks."""
    found = [case for case in choices(83) if len(case[0]) <= 5]
    rng = random.Random(84)
    picked = rng.sample(found, len(found) // len(MVBENCH) * len(MVBENCH))
    return [
        {
            "row": {
                "task": MVBENCH[number % len(MVBENCH)],
                "video": "clip.mp4",
                "question": "What happens?",
                "candidates": options,
                "answer": options[LETTERS.index(right)],
            },
            "reply": reply,
        }
        for number, (options, right, reply) in enumerate(picked)
    ]


def _cells(file: Path, *marks: str) -> list[str]:
    """Of each mark, the code of the notebook's one cell that has it."""
    cells = [
        "".join(cell["source"]) for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]
    ]
    return [next(text for text in cells if mark in text) for mark in marks]


def mvbench(code: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """The notebook's cell that asks and counts, and the one that averages, with check_ans; infer_mvbench gives the first line of
    the reply behind "(", as there."""
    notebook = code / "video_chat2" / "mvbench.ipynb"
    checks, loop, average = _cells(
        notebook, "def check_ans(", "check_ans(pred=pred", "final_res['Avg']"
    )
    space: dict[str, Any] = {
        "json": json,
        "tqdm": lambda values: values,
        "open": lambda *a: io.StringIO(),
        "print": lambda *a: None,
    }
    exec(checks, space)

    def examples(asked: Sequence[Case]) -> list[dict[str, Any]]:
        return [
            {
                "task_type": case["row"]["task"],
                "reply": case["reply"],
                "answer": f"({LETTERS[case['row']['candidates'].index(case['row']['answer'])]}) {case['row']['answer']}",
            }
            for case in asked
        ]

    def asked(example: Mapping[str, Any], return_prompt: str, **_: Any) -> str:
        said: str = return_prompt + example["reply"].strip().split("\n")[0]
        return said

    def judged(example: Mapping[str, Any], letter: str) -> bool:
        return bool(space["check_ans"](asked(example, "("), f"({letter}) it"))

    values: list[float | None] = []
    for case, example in zip(cases, examples(cases), strict=True):
        right = [
            letter
            for letter in LETTERS[: len(case["row"]["candidates"])]
            if judged(example, letter)
        ]
        values.append(None if len(right) > 1 else float(judged(example, example["answer"][1])))
    space |= {
        "dataset": examples(
            [case for case, value in zip(cases, values, strict=True) if value is not None]
        ),
        "infer_mvbench": asked,
    }
    exec(loop, space)
    exec(average, space)
    return {"values": values, "numbers": space["final_res"]}


def tempcompass_rows() -> list[Case]:
    """Multiple-choice questions of TempCompass about two videos, in five aspects."""
    return [
        {
            "row": {
                "video": f"clip{number % 4}",
                "dim": _ASPECTS[number % 5],
                "answer": f"{right}. {options[LETTERS.index(right)]}",
                "question": "\n".join(
                    [
                        "What is it?",
                        *(
                            f"{letter}. {option}"
                            for letter, option in zip(LETTERS, options, strict=False)
                        ),
                    ]
                ),
            },
            "reply": reply,
        }
        for number, (options, right, reply) in enumerate(
            case for case in choices(85) if len(case[0]) <= 4
        )
    ]


def yes_no_rows() -> list[Case]:
    """Yes-or-no questions of TempCompass."""
    replies = [(reply, truth) for truth in ("yes", "no") for reply in YES_NO if plain(reply)]
    return [
        {
            "row": {
                "video": f"clip{number % 4}",
                "dim": _ASPECTS[number % 5],
                "question": "Does it fall?",
                "answer": truth,
            },
            "reply": reply,
        }
        for number, (reply, truth) in enumerate(replies)
    ]


_TEMPCOMPASS = """
stand_in("requests")
"""


def _rating(verdict: Mapping[str, Any]) -> float:
    return float(verdict["rating"])


def tempcompass_judged(
    code: Path,
    cases: Sequence[Case],
    form: str,
    value: Callable[[Mapping[str, Any]], float | None] = _rating,
) -> dict[str, Any]:
    """eval_FORM.py --disable_llm, whole, on predictions as its runners write them; `value` of each verdict."""
    predictions: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for number, case in enumerate(cases):
        row = case["row"]
        predictions.setdefault(row["video"], {}).setdefault(row["dim"], []).append(
            {
                "question": row["question"],
                "answer": row["answer"],
                "prediction": case["reply"],
                "number": number,
            }
        )
    about = {
        f"clip{place}": {
            "eval_dim": {dim: {"type": kinds[place % len(kinds)]} for dim, kinds in _KINDS.items()}
        }
        for place in range(4)
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "predictions" / "us").mkdir(parents=True)
        (folder / "predictions" / "us" / f"{form}.json").write_text(
            json.dumps(predictions), encoding="utf-8"
        )
        (folder / "meta_info.json").write_text(json.dumps(about), encoding="utf-8")
        printed = whole(
            code / f"eval_{form}.py", ["--video_llm", "us", "--disable_llm"], folder, _TEMPCOMPASS
        )
        judged = json.loads(
            (folder / "auto_eval_results_disable_llm" / "us" / f"{form}.json").read_text(
                encoding="utf-8"
            )
        )
    values: list[float | None] = [0.0] * len(cases)
    for video, aspects in predictions.items():
        for dim, rows in aspects.items():
            for row, verdict in zip(rows, judged[video][dim], strict=True):
                values[row["number"]] = value(verdict)
    lines = printed.splitlines()
    return {
        "values": values,
        "printed": ast.literal_eval(lines[lines.index("Accuracy Results:") + 1]),
    }


def tempcompass(code: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """eval_multi-choice.py."""
    return tempcompass_judged(code, cases, "multi-choice")


def yes_no(code: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """eval_yes_no.py."""
    return tempcompass_judged(code, cases, "yes_no")


_TRACKS = ("Perception", "Comprehension", "Adaptation")


def videommmu_rows() -> list[Case]:
    """Questions of Video-MMMU's three tracks; open ones in Adaptation."""
    subjects, rows = ("Biology", "Art_Theory", "Finance"), []
    for number, (options, right, reply) in enumerate(choices(86)):
        row = {
            "track": _TRACKS[number % 3],
            "question_type": "multiple-choice",
            "options": options,
            "answer": right,
        }
        rows.append((row, reply))
    rows += [
        ({"track": "Adaptation", "question_type": "open", "options": [], "answer": truth}, reply)
        for reply, truth in OPEN
        if plain(reply) and isinstance(truth, str) and truth != "[1, 2, 3]"
    ]
    return [
        {
            "row": {
                "id": f"dev_{subjects[number % 3]}_{number}",
                "question": "What is shown?",
                **row,
            },
            "reply": reply,
        }
        for number, (row, reply) in enumerate(rows)
    ]


def videommmu(code: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """videoperception_process_results on each reply, videoperception_aggregate_results on each track."""
    space = load(code / "lmms_eval" / "tasks" / "videommmu" / "utils.py")
    found = [
        space["videoperception_process_results"](case["row"], [case["reply"]])["mmmu_acc"]
        for case in cases
    ]
    values = [float(space["evaluate_mmmu"]([row])[1]["acc"]) for row in found]
    tracks = {
        track: [
            row for row, case in zip(found, cases, strict=True) if case["row"]["track"] == track
        ]
        for track in _TRACKS
    }
    return {
        "values": values,
        "tracks": {
            track: {
                "overall": space["videoperception_aggregate_results"](rows),
                "items": len(rows),
                "left_out": sum(row["parsed_pred"] == "API Error" for row in rows),
            }
            for track, rows in tracks.items()
        },
    }


def longvideobench_rows() -> list[Case]:
    """Questions of LongVideoBench in its four lengths, with two to five candidates."""
    groups, kinds = (15, 60, 600, 3600), ("S2E", "E3E", "TOS", "SAA")
    return [
        {
            "row": {
                "id": f"clip_{number}",
                "video_path": "clip.mp4",
                "question": "Which one?",
                "candidates": options,
                "correct_choice": LETTERS.index(right),
                "duration": 12.5,
                "duration_group": groups[number % 4],
                "question_category": kinds[number // 4 % 4],
                "subtitle_path": "clip_en.json",
                "starting_timestamp_for_subtitles": 0.0,
            },
            "reply": reply,
        }
        for number, (options, right, reply) in enumerate(
            case for case in choices(87) if len(case[0]) <= 5
        )
    ]


def longvideobench(code: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """longvideobench_process_results on each reply, longvideobench_aggregate_results on all and on each length."""
    silent = types.SimpleNamespace(info=lambda *a: None)
    space = load(code / "lmms_eval" / "tasks" / "longvideobench" / "utils.py", eval_logger=silent)
    space["random"] = types.SimpleNamespace(choice=lambda values: "drawn")
    found = []
    for case in cases:
        padded = [*case["row"]["candidates"], *["N/A"] * 5][:5]
        doc = {**case["row"], **{f"option{number}": option for number, option in enumerate(padded)}}
        found.append(space["longvideobench_process_results"](doc, [case["reply"]])["lvb_acc"])
    groups = sorted({row["duration_group"] for row in found})
    whole_set = space["longvideobench_aggregate_results"](found)
    return {
        "values": [float(row["answer"] == row["parsed_pred"]) for row in found],
        "overall": whole_set,
        "lengths": {
            str(group): space["longvideobench_aggregate_results"](
                [row for row in found if row["duration_group"] == group]
            )
            for group in groups
        },
        "drawn": sum(row["parsed_pred"] == "drawn" for row in found),
    }


MLVU = {
    "plotQA": "1_plotQA",
    "needle": "2_needle",
    "ego": "3_ego",
    "count": "4_count",
    "order": "5_order",
    "anomaly_reco": "6_anomaly_reco",
    "topic_reasoning": "7_topic_reasoning",
}
_TEST_TASKS = ("PQA", "NQA", "ER", "AC", "AO", "AR", "TR", "SQA", "TQA")


def _mlvu_rows(seed: int, kinds: Sequence[str], most: int) -> list[Case]:
    return [
        {
            "row": {
                "question_id": f"q{number}",
                "question_type": kinds[number % len(kinds)],
                "video": "clip.mp4",
                "duration": 200.0,
                "question": "Which one?",
                "candidates": options,
                "answer": options[LETTERS.index(right)],
            },
            "reply": reply,
        }
        for number, (options, right, reply) in enumerate(
            case for case in choices(seed) if len(case[0]) <= most
        )
    ]


def mlvu_rows() -> list[Case]:
    """Questions of MLVU's dev set, seven tasks."""
    return _mlvu_rows(88, tuple(MLVU), 4)


def mlvu_test_rows() -> list[Case]:
    """Questions of MLVU's test set, nine tasks, up to seven candidates."""
    return _mlvu_rows(89, _TEST_TASKS, 9)


def mlvu(code: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """main of choice_bench.py, whole but for its loader of videos; the place left for a model gives the reply."""
    space = load(
        code / "evaluation" / "multiple_choice_evaluation" / "choice_bench.py", Dataset=object
    )
    written: list[io.StringIO] = []

    def told(examples: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        for example in examples:
            space["pred"] = example["reply"]
            yield example

    def kept(*_: Any) -> Any:
        written.append(io.StringIO())
        return contextlib.nullcontext(written[-1])

    examples = [
        {
            "task_type": row["question_type"],
            "video": row["video"],
            "question": row["question"],
            "reply": case["reply"],
            "answer": f"({LETTERS[row['candidates'].index(row['answer'])]}) {row['answer']}",
        }
        for case in cases
        for row in [case["row"]]
    ]
    space |= {"MLVU": lambda *a: examples, "tqdm": told, "open": kept}
    space["main"]()
    lists, numbers = (json.loads(text.getvalue()) for text in written)
    return {
        "values": [
            float(space["check_ans"](pred=row["pred"], gt=row["gt"])) for row in lists["res_list"]
        ],
        "numbers": numbers,
    }
