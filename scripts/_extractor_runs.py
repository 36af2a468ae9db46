"""How each benchmark's own functions are called on one reply, for scripts.record_extractors.

A judge gives, for a case {text, ...}: the letters (or words, or truths among the case's) for which the program calls the reply
right, "chance" where it draws one at random, or the numbers it reads. Programs that need packages or data run without them as
scripts._peer_code.load does it.
"""

from __future__ import annotations

import ast
import json
import os
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts._extractor_cases import (
    BOXES,
    CHOICES,
    COUNTS,
    MATHVISTA_NUMBERS,
    NUMBERS,
    OPEN,
    OPTIONS,
    POINTS,
    YES_NO,
)
from scripts._peer_code import load

__all__ = ["COUNTED", "REPOSITORIES", "RUNS", "Run", "point_count_eval"]

REPOSITORIES: Mapping[str, tuple[str, str]] = {
    "MMMU": ("MMMU-Benchmark/MMMU", "bb0b95a945998d91dfef37e969e07d49d1139438"),
    "MathVista": ("lupantech/MathVista", "53d525874bdde205128e6b160b7357a88277d479"),
    "Ask-Anything": ("OpenGVLab/Ask-Anything", "4dd8210b030374bb0c510a57dfbe916f70d3ef71"),
    "TempCompass": ("llyx97/TempCompass", "e1b463166400633e6061962d890a9ae85db29f70"),
    "thinking-in-space": (
        "vision-x-nyu/thinking-in-space",
        "51e089c3ae69b9435e9489058610f5b3964c56a8",
    ),
    "MLVU": ("JUNJIE99/MLVU", "fd060c10a43ea48a35100a22688a927b8e531199"),
    "VideoMMMU": ("EvolvingLMMs-Lab/VideoMMMU", "88b4ac3e07326eaabda3a4afe8e7f30dd02bc143"),
    "Video-MME": ("BradyFU/Video-MME", "4e7566d36f63121fc72f040654d6f38f83f30125"),
    "lmms-eval": ("EvolvingLMMs-Lab/lmms-eval", "75571cfe0fa36ca5ec2e6aa2bb268f9d38295af3"),
    "OVDEval": ("om-ai-lab/OVDEval", "2ba0aa95bf71988207599d7b78cf0005ea6c9e19"),
    "lvis-api": ("lvis-dataset/lvis-api", "7d7f07def11da91f8b2710ce352c62a78fd5a7ad"),
    "Fox": ("ucaslcl/Fox", "82f720ce7a00c422f1afead18f2a3cc791dc3f14"),
    "molmo": ("allenai/molmo", "793fa387edfd6fd0f5b21eb8e0a7620a1f3799e1"),
    "SeeClick": ("njucckevin/SeeClick", "0ef37ac4d7aaf37ba7b990e3e3c3ca77e1fb8f93"),
}
"""Folder -> (repository, commit) that the recorded verdicts come from."""

Case = Mapping[str, Any]
Judge = Callable[[Case], Any]
LETTERS = "ABCD"
CHANCE = "chance"


@dataclass(frozen=True)
class Run:
    """One extractor of mmrl.rewards.official for one task, the program beside it, and the replies."""

    extractor: str
    task: str
    folder: str
    file: str
    functions: tuple[str, ...]
    make: Callable[[Path], Judge]
    cases: Sequence[Case]
    note: str = ""


class _Drawn:
    """Stands for their `random`: what is drawn is known for it."""

    @staticmethod
    def choice(values: Sequence[Any]) -> str:
        return CHANCE


def _space(file: Path) -> dict[str, Any]:
    """The file's functions; names that their annotations need stand for nothing."""
    nothing = types.SimpleNamespace(Dataset=object, Image=object)
    space = load(
        file, datasets=nothing, Dataset=object, Image=nothing, PIL=nothing, load_dataset=None
    )
    space["random"] = _Drawn
    return space


def _right(drawn: Any, correct: Callable[[str], bool]) -> Any:
    return CHANCE if drawn == CHANCE else [letter for letter in LETTERS if correct(letter)]


def _mmmu_choice(file: str) -> Callable[[Path], Judge]:
    def make(folder: Path) -> Judge:
        space = _space(folder / file)

        def judge(case: Case) -> Any:
            said = space["parse_multi_choice_response"](
                case["text"], list(LETTERS), dict(zip(LETTERS, OPTIONS, strict=True))
            )
            return _right(said, lambda letter: bool(space["eval_multi_choice"](letter, said)))

        return judge

    return make


def _mmmu_open(file: str) -> Callable[[Path], Judge]:
    def make(folder: Path) -> Judge:
        space = _space(folder / file)
        return lambda case: bool(
            space["eval_open"](case["truth"], space["parse_open_response"](case["text"]))
        )

    return make


def _notebook(file: Path, *names: str) -> dict[str, Any]:
    """Functions of a notebook's cells."""
    space: dict[str, Any] = {}
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code" and any(f"def {name}(" in text for name in names):
            found = ast.parse(text).body
            kept: list[ast.stmt] = [
                node for node in found if isinstance(node, ast.FunctionDef) and node.name in names
            ]
            exec(compile(ast.Module(kept, []), str(file), "exec"), space)
    return space


def _mvbench(folder: Path) -> Judge:
    check = _notebook(folder / "video_chat2" / "mvbench.ipynb", "check_ans")["check_ans"]

    def judge(case: Case) -> Any:
        # return_prompt, and the line of infer_mvbench that removes explanations
        said = "(" + case["text"].strip().split("\n")[0]
        return [
            letter
            for letter, option in zip(LETTERS, OPTIONS, strict=True)
            if check(said, f"({letter}) {option}")
        ]

    return judge


def _mlvu(folder: Path) -> Judge:
    check = _space(folder / "evaluation" / "multiple_choice_evaluation" / "choice_bench.py")[
        "check_ans"
    ]
    return lambda case: [
        letter
        for letter, option in zip(LETTERS, OPTIONS, strict=True)
        if check(case["text"], f"({letter}) {option}")
    ]


def _videomme(folder: Path) -> Judge:
    read = _space(folder / "evaluation" / "eval_your_results.py")["extract_characters_regex"]
    return lambda case: [letter for letter in LETTERS if read(case["text"]) == letter]


def _longvideobench(folder: Path) -> Judge:
    space = _space(folder / "lmms_eval" / "tasks" / "longvideobench" / "utils.py")

    def judge(case: Case) -> Any:
        said = space["parse_multi_choice_response"](
            case["text"], list(LETTERS), dict(zip(LETTERS, OPTIONS, strict=True))
        )
        return _right(said, lambda letter: bool(space["eval_multi_choice"](letter, said)))

    return judge


def _vsibench(kind: str, metric: str, truths: Sequence[Any]) -> Callable[[Path], Judge]:
    def make(folder: Path) -> Judge:
        process = _space(folder / "lmms_eval" / "tasks" / "vsibench" / "utils.py")[
            "vsibench_process_results"
        ]

        def judge(case: Case) -> Any:
            found = {
                truth: process({"question_type": kind, "ground_truth": truth}, [case["text"]])[
                    "vsibench_score"
                ][metric]
                for truth in truths
            }
            return (
                [truth for truth, value in found.items() if value == 1]
                if metric == "accuracy"
                else {str(truth): round(float(value), 6) for truth, value in found.items()}
            )

        return judge

    return make


def _tempcompass(file: str, truths: Mapping[str, str]) -> Callable[[Path], Judge]:
    """Their loop over predictions with --disable_llm, one prediction and truth at a time."""

    def make(folder: Path) -> Judge:
        space = load(
            folder / file,
            os=os,
            json=json,
            tqdm=lambda values: values,
            print_result=lambda results: None,
            multi_choice_evaluation_prompt="",
            yes_no_evaluation_prompt="",
        )

        def judge(case: Case) -> Any:
            found = []
            for name, truth in truths.items():
                results: dict[str, Any] = {}
                row = {"question": "", "answer": truth, "prediction": case["text"]}
                space["main"]({"v": {"action": [row]}}, results, "/dev/null", True)
                found += [name] * (results["v"]["action"][0]["rating"] == 1)
            return found

        return judge

    return make


def _distance(one: str, other: str) -> int:
    """Edit distance, as the package Levenshtein has it, which their script imports."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        last, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (a != b))
    return row[-1]


class _Echo:
    """Stands for the language model that extracts answers: it gives the reply itself."""

    def __init__(self, reply: str) -> None:
        self.reply = reply

    def get_response(self, user_prompt: str) -> str:
        return self.reply


def _mathvista(kind: str) -> Callable[[Path], Judge]:
    def make(folder: Path) -> Judge:
        take = load(folder / "evaluation" / "extract_answer.py", demo_prompt="")["extract_answer"]
        score = load(folder / "evaluation" / "calculate_score.py", distance=_distance)

        def judge(case: Case) -> Any:
            params = case.get("params", {})
            row = {
                "question_type": kind,
                "answer_type": params.get("answer_type", "text"),
                "choices": list(OPTIONS),
                "query": "",
                "pid": "1",
                "precision": params.get("precision"),
            }
            said = take(_Echo(case["text"]), case["text"], row, quick_extract=True)
            said = score["normalize_extracted_answer"](
                said, list(OPTIONS), kind, row["answer_type"], row["precision"]
            )
            if kind == "free_form":
                return bool(score["safe_equal"](said, case["truth"]))
            return [
                letter
                for letter, option in zip(LETTERS, OPTIONS, strict=True)
                if score["safe_equal"](said, option)
            ]

        return judge

    return make


def _refcoco(folder: Path) -> Judge:
    read = _space(folder / "lmms_eval" / "tasks" / "refcoco" / "utils_rec.py")[
        "parse_float_sequence_within"
    ]
    return lambda case: read(case["text"])


def _seeclick(folder: Path) -> Judge:
    space = _space(folder / "pretrain" / "process_utils.py")

    def judge(case: Case) -> Any:
        try:  # the lines of screenspot_test.py around the two functions
            if "box" in case["text"]:
                first, second = space["extract_bbox"](case["text"])[:2]
                return [(first[0] + second[0]) / 2 / 1000, (first[1] + second[1]) / 2 / 1000]
            return space["pred_2_point"](case["text"])
        except (UnboundLocalError, ValueError):  # it counts them as wrong format
            return None

    return judge


def _points(folder: Path) -> Judge:
    read = _space(folder / "lmms_eval" / "tasks" / "screenspot_v2" / "utils.py")["_parse_point"]
    return lambda case: read(case["text"])


def point_count_eval(folder: Path) -> Callable[[Sequence[str], Sequence[int]], dict[str, float]]:
    """Molmo's PointCountEval on replies and counts: its numbers. One process on the CPU stands for its ranks on GPUs."""
    import numpy
    import torch

    one = types.SimpleNamespace(all_gather_into_tensor=lambda out, mine: out.copy_(mine))
    space = load(
        folder / "olmo" / "eval" / "evaluators.py",
        classes=("PointCountEval",),
        Evaluator=object,
        MeanMetric=object,
    )
    space |= {"dist": one, "get_world_size": lambda: 1}
    space["torch"] = types.SimpleNamespace(
        int32=torch.int32,
        device=lambda *_: torch.device("cpu"),
        tensor=torch.tensor,
        zeros=torch.zeros,
        full=torch.full,
        cat=torch.cat,
    )
    space["mean_metric"] = lambda values: float(numpy.mean(values))
    program = space["PointCountEval"]()

    def numbers(replies: Sequence[str], counts: Sequence[int]) -> dict[str, float]:
        speaker = types.SimpleNamespace(decode=lambda ids: replies[int(ids[0])])
        said = {
            "predictions": [numpy.array([place]) for place in range(len(replies))],
            "prompts": None,
        }
        return dict(program([{"count": count} for count in counts], said, speaker))

    return numbers


COUNTED = (*range(21), 100)


def _pixmo_count(folder: Path) -> Judge:
    numbers = point_count_eval(folder)
    return lambda case: [count for count in COUNTED if numbers([case["text"]], [count])["correct"]]


_CHOICES = [{"text": text} for text in CHOICES]
_OPEN = [{"text": text, "truth": truth} for text, truth in OPEN]
_MMMU, _VIDEOMMMU = "mmmu/utils/eval_utils.py", "lmms_eval/tasks/videommmu/utils.py"
_VSI = "lmms_eval/tasks/vsibench/utils.py"
_TEMPCOMPASS = {
    letter: f"{letter}. {option}" for letter, option in zip(LETTERS, OPTIONS, strict=True)
}
_EVALS = ("extract_answer", "normalize_extracted_answer", "get_most_similar", "safe_equal")
_PARSE = ("parse_multi_choice_response", "eval_multi_choice")
RUNS: tuple[Run, ...] = (
    Run("mmmu", "choice", "MMMU", _MMMU, _PARSE, _mmmu_choice(_MMMU), _CHOICES),
    Run(
        "mmmu",
        "open_text",
        "MMMU",
        _MMMU,
        ("parse_open_response", "eval_open"),
        _mmmu_open(_MMMU),
        _OPEN,
    ),
    Run("videommmu", "choice", "VideoMMMU", _VIDEOMMMU, _PARSE, _mmmu_choice(_VIDEOMMMU), _CHOICES),
    Run(
        "videommmu",
        "open_text",
        "VideoMMMU",
        _VIDEOMMMU,
        ("parse_open_response", "eval_open"),
        _mmmu_open(_VIDEOMMMU),
        _OPEN,
    ),
    Run(
        "mvbench",
        "choice",
        "Ask-Anything",
        "video_chat2/mvbench.ipynb",
        ("check_ans",),
        _mvbench,
        _CHOICES,
    ),
    Run(
        "mlvu",
        "choice",
        "MLVU",
        "evaluation/multiple_choice_evaluation/choice_bench.py",
        ("check_ans",),
        _mlvu,
        _CHOICES,
    ),
    Run(
        "videomme",
        "choice",
        "Video-MME",
        "evaluation/eval_your_results.py",
        ("extract_characters_regex",),
        _videomme,
        _CHOICES,
    ),
    Run(
        "longvideobench",
        "choice",
        "lmms-eval",
        "lmms_eval/tasks/longvideobench/utils.py",
        _PARSE,
        _longvideobench,
        _CHOICES,
    ),
    Run(
        "vsibench",
        "choice",
        "thinking-in-space",
        _VSI,
        ("vsibench_process_results",),
        _vsibench("route_planning", "accuracy", LETTERS),
        _CHOICES,
    ),
    Run(
        "vsibench",
        "numeric",
        "thinking-in-space",
        _VSI,
        ("vsibench_process_results",),
        _vsibench("object_counting", "MRA:.5:.95:.05", ("3", "3.2", "4", "12")),
        [{"text": text} for text in NUMBERS],
    ),
    Run(
        "tempcompass",
        "choice",
        "TempCompass",
        "eval_multi-choice.py",
        ("main",),
        _tempcompass("eval_multi-choice.py", _TEMPCOMPASS),
        _CHOICES,
        "--disable_llm",
    ),
    Run(
        "tempcompass",
        "boolean",
        "TempCompass",
        "eval_yes_no.py",
        ("main", "extract_pred"),
        _tempcompass("eval_yes_no.py", {"yes": "yes", "no": "no"}),
        [{"text": text} for text in YES_NO],
        "--disable_llm",
    ),
    Run(
        "mathvista",
        "choice",
        "MathVista",
        "evaluation/",
        _EVALS,
        _mathvista("multi_choice"),
        _CHOICES,
        "quick_extract; the language model's stand-in gives the reply itself",
    ),
    Run(
        "mathvista",
        "numeric",
        "MathVista",
        "evaluation/",
        _EVALS,
        _mathvista("free_form"),
        [
            {"text": text, "truth": truth, "params": params}
            for text, truth, params in MATHVISTA_NUMBERS
        ],
        "quick_extract; the language model's stand-in gives the reply itself",
    ),
    Run(
        "pixmo_count",
        "counting",
        "molmo",
        "olmo/eval/evaluators.py",
        ("PointCountEval",),
        _pixmo_count,
        [{"text": text} for text in COUNTS],
    ),
    Run(
        "refcoco",
        "grounding",
        "lmms-eval",
        "lmms_eval/tasks/refcoco/utils_rec.py",
        ("parse_float_sequence_within",),
        _refcoco,
        [{"text": text} for text in BOXES],
    ),
    Run(
        "screenspot",
        "gui_grounding",
        "SeeClick",
        "pretrain/process_utils.py",
        ("extract_bbox", "pred_2_point"),
        _seeclick,
        [{"text": text} for text in POINTS],
    ),
    Run(
        "screenspot_points",
        "gui_grounding",
        "lmms-eval",
        "lmms_eval/tasks/screenspot_v2/utils.py",
        ("_parse_point",),
        _points,
        [{"text": text} for text in POINTS],
    ),
)
