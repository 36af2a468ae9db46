"""How the peers' functions are called: a judge takes a `Case` and gives (format, total) as the peer's own code computes them.

Each maker takes the folder of a checkout. The truth is spelled as the peer's data holds it; the sum of the parts is the peer's.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scripts._peer_cases import Case, objects
from scripts._peer_code import load

__all__ = [
    "Judge",
    "easyvideo",
    "easyvideo_unified",
    "fenced",
    "gui_g2",
    "gui_r1",
    "onethinker",
    "pr1",
    "pr1_counting",
    "pr1_detection",
    "r1_sgg",
    "r1_v",
    "temporal_r1",
    "ui_r1",
    "v_triune",
    "v_triune_math",
    "video_r1",
    "videochat",
    "vlm_r1_od",
    "vlm_r1_rec",
]

Judge = Callable[[Case], tuple[float, float]]


def _chat(text: str) -> list[list[dict[str, str]]]:
    return [[{"content": text}]]


def fenced(items: Sequence[tuple[str, Any]]) -> str:
    return f"```json\n{objects(items)}\n```"


# boxes


class _Coco:
    """COCO and COCOeval over a dict, as the peers' changed copies of pycocotools take it."""

    @staticmethod
    def classes() -> dict[str, Any]:
        """The installed pycocotools, whose COCO is given a dict."""
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval

        class OfDict(COCO):
            def __init__(self, dataset: dict[str, Any] | None = None) -> None:
                super().__init__()
                if dataset is not None:
                    self.dataset = dataset
                    self.createIndex()

        return {"COCO": OfDict, "COCOeval": COCOeval}


def v_triune(folder: Path, label: str | None = None, term: str = "iou_max_label_first") -> Judge:
    os.environ["DET_IOU_THRESHOLD"] = "dynamic"
    helper = load(folder / "reward_server/utils/det_helper.py")
    kept = {k: v for k, v in helper.items() if callable(v) and not k.startswith("__")}
    space = load(
        folder / "reward_server/verify.py",
        classes=("Verifier", "BaseVerifier", "DetectionVerifier", "MathVerifyVerifier"),
        **kept,
        **_Coco.classes(),
    )

    def judge(case: Case) -> tuple[float, float]:
        step, total = case.progress
        verifier = space["DetectionVerifier"](
            is_training=True,
            step=step,
            total_steps=total,
            det_reward_ratio={term: 1.0, "iou_completeness": 0.3},
        )
        rows = [{"bbox": case.truth, "label": label}] if label else case.truth
        truth = objects([(row["label"], row["bbox"]) for row in rows], "'")
        form = verifier.verify_format(case.text)
        accuracy = verifier.verify_accuracy(case.text, f"<answer> {truth} </answer>")["final_score"]
        return form, (accuracy + 0.1 * form) / 1.1

    return judge


def v_triune_math(folder: Path) -> Judge:
    space = load(
        folder / "reward_server/verify.py",
        classes=("Verifier", "BaseVerifier", "MathVerifyVerifier"),
    )
    verifier = space["MathVerifyVerifier"](is_training=True, step=1, total_steps=1)

    def judge(case: Case) -> tuple[float, float]:
        form = verifier.verify_format(case.text)
        return form, (
            verifier.verify_accuracy(case.text, rf"\boxed{{{case.truth}}}") + 0.1 * form
        ) / 1.1

    return judge


def pr1(folder: Path) -> Judge:
    os.environ["LOG_DIR"] = tempfile.mkdtemp()
    helper = load(folder / "src/open_r1/utils.py")
    space = load(
        folder / "src/open_r1/rewards.py",
        extract_bbox_answer=helper["extract_bbox_answer"],
        compute_iou=helper["compute_iou"],
    )

    def judge(case: Case) -> tuple[float, float]:
        form = space["pr1_grounding_format_reward"](_chat(case.text))[0]
        return form, form + space["pr1_grounding_reward"](
            _chat(case.text), [str(list(case.truth))]
        )[0]

    return judge


def pr1_counting(folder: Path) -> Judge:
    helper = load(folder / "src/open_r1/utils.py")
    space = load(
        folder / "src/open_r1/rewards.py",
        **{
            name: helper[name]
            for name in ("pr1_counting_format_reward", "extract_boxes", "num_scale")
        },
    )

    def judge(case: Case) -> tuple[float, float]:
        chat = [[{"content": case.text}]]
        return space["pr1_counting_format_reward"](chat)[0], space["pr1_counting_reward"](
            chat, [case.params["points"]]
        )[0]

    return judge


def pr1_detection(folder: Path, penalty: bool) -> Judge:
    # the switch is spelled so
    os.environ.update(LOG_DIR=tempfile.mkdtemp(), DO_PENAIlty=str(penalty))
    helper, forms = (
        load(folder / "src/open_r1/utils.py", classes=("HungarianMatcher",)),
        list[float](),
    )
    ids = {**helper["get_cate_to_id"](), "sofa": 63}  # couch there

    def parse_json(*args: Any) -> Any:
        found = helper["parse_json"](*args)
        forms[:] = [float(found[2])] if len(found) == 3 else []
        return found

    space = load(
        folder / "src/open_r1/rewards.py",
        parse_json=parse_json,
        get_cate_to_id=lambda: ids,
        **{name: helper[name] for name in ("HungarianMatcher", "calculate_reward")},
    )

    def judge(case: Case) -> tuple[float, float]:
        forms.clear()
        truth = {
            "target_id": [ids[row["label"]] for row in case.truth],
            "target_box": [[float(v) for v in row["bbox"]] for row in case.truth],
        }
        total = space["pr1_detection_reward"](_chat(case.text), [truth])[0]
        return sum(forms), total

    return judge


def vlm_r1_rec(folder: Path) -> Judge:
    from PIL import Image

    space = load(
        folder / "src/open-r1-multimodal/src/open_r1/vlm_modules/qwen_module.py",
        ("iou_reward", "format_reward_rec"),
        Dict=dict,
    )
    images = Path(tempfile.mkdtemp())

    def judge(case: Case) -> tuple[float, float]:
        (width, height), path = case.resized, images / f"{case.size[0]}x{case.size[1]}.png"
        if not path.exists():
            Image.new("RGB", case.size).save(path)
        form = space["format_reward_rec"](_chat(case.text))[0]
        value = space["iou_reward"](
            _chat(case.text),
            [f"<answer> {list(case.truth)} </answer>"],
            image_path=[[str(path)]],
            image_grid_thw=[[1, height / 14, width / 14]],
        )[0]
        return form, form + value

    return judge


def vlm_r1_od(folder: Path, method: str) -> Judge:
    space = load(folder / "src/open-r1-multimodal/src/open_r1/grpo_jsonl.py", **_Coco.classes())

    def judge(case: Case) -> tuple[float, float]:
        truth = fenced([(row["label"], row["bbox"]) for row in case.truth])
        form = space["format_reward"](_chat(case.text))[0]
        value = space["accuracy_reward"](
            _chat(case.text), [f"<answer> {truth} </answer>"], accu_reward_method=[method]
        )[0]
        return form, form + float(value)

    return judge


class _Hashable(dict[str, Any]):
    """R1-SGG's format reward puts objects into a set, which plain dicts cannot be put into."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True, default=str))


def r1_sgg(folder: Path, functions: Sequence[str]) -> Judge:
    def same(a: str, b: str) -> float:
        return float(a.partition(".")[0].lower() == b.partition(".")[0].lower())

    space = load(folder / "open_r1/grpo.py")
    space["json"] = SimpleNamespace(loads=lambda text: json.loads(text, object_hook=_Hashable))
    space["category_semantic_similarity"] = same  # in place of spaCy's word vectors: see the note

    def judge(case: Case) -> tuple[float, float]:
        truth = {
            "objects": [
                {
                    "id": o["id"],
                    "bbox": [v / s for v, s in zip(o["bbox"], case.size * 2, strict=True)],
                }
                for o in case.truth["objects"]
            ],
            "relationships": [
                dict(zip(("subject", "predicate", "object"), r, strict=True))
                for r in case.truth["relations"]
            ],
        }
        given = {"image_id": [0], "task_type_list": ["sgg"]}
        form = space["format_reward"](_chat(case.text), **given)[0]
        return form, form + sum(
            float(space[name](_chat(case.text), [truth], box_scale=[case.resized], **given)[0])
            for name in functions
        )

    return judge


# clicks and actions


def ui_r1(folder: Path, click: bool) -> Judge:
    space = load(folder / "src/ui_r1/src/open_r1/grpo_json_action_coord.py")

    def judge(case: Case) -> tuple[float, float]:
        truth = (
            case.truth if isinstance(case.truth, dict) else {"action": "click", "bbox": case.truth}
        )
        name = {"type": "input_text"}.get(truth["action"], truth["action"])
        box = truth.get("bbox", [0, 0, 0, 0])
        solution = [f"<answer>[{{'action': '{name}' ,'coordinate': {list(box)} }}]</answer>"]
        form = space["format_reward"](_chat(case.text))[0]
        kind, place = (
            space[f"accuracy_reward_{part}"](_chat(case.text), solution, [[1, 1]])[0]
            for part in ("action", "coord")
        )
        return form, form + place + (0.0 if click else kind)

    return judge


def gui_r1(folder: Path) -> Judge:
    space = load(folder / "verl/utils/reward_score/r1gui.py")
    names = {"navigate_back": "press_back", "navigate_home": "press_home"}

    def judge(case: Case) -> tuple[float, float]:
        truth = (
            case.truth if isinstance(case.truth, dict) else {"action": "click", "bbox": case.truth}
        )
        said = truth.get("text") or truth.get("app") or truth.get("direction") or "no input text"
        place = truth.get("bbox") or truth.get("point") or [-100, -100]
        found = space["r1gui_compute_score"](
            case.text,
            json.dumps(
                {
                    "action": names.get(truth["action"], truth["action"]),
                    "gt_bbox": place,
                    "input_text": said,
                }
            ),
        )
        return found["format"], found["overall"]

    return judge


def gui_g2(folder: Path) -> Judge:
    space = load(folder / "src/gui_g2/src/open_r1/gaussian_grpo.py")

    def judge(case: Case) -> tuple[float, float]:
        form = space["format_reward"](_chat(case.text))[0]
        return form, form + sum(
            float(space[f"gaussian_{part}_reward"](_chat(case.text), [case.truth])[0])
            for part in ("point", "plane")
        )

    return judge


# texts


def video_r1(folder: Path, kind: str) -> Judge:
    space = load(folder / "src/r1-v/src/open_r1/grpo.py")

    def judge(case: Case) -> tuple[float, float]:
        form = space["format_reward"](_chat(case.text))[0]
        return form, form + space["accuracy_reward"](
            _chat(case.text), [f"<answer>{case.truth}</answer>"], problem_type=[kind]
        )[0]

    return judge


def r1_v(folder: Path) -> Judge:
    space = load(folder / "src/r1-v/src/open_r1/grpo.py", **_math_verify())

    def judge(case: Case) -> tuple[float, float]:
        form = space["format_reward"](_chat(case.text))[0]
        return form, form + space["accuracy_reward"](
            _chat(case.text), [f"<answer> {case.truth} </answer>"]
        )[0]

    return judge


def _math_verify() -> dict[str, Any]:
    import math_verify

    return {"parse": math_verify.parse, "verify": math_verify.verify}


def _spelled(case: Case, kind: str) -> str:
    if kind == "boolean":
        return "Yes" if case.truth else "No"
    if kind == "temporal grounding":
        return json.dumps({"time": case.truth[0]})
    if kind == "spatial grounding":
        return json.dumps({"boxes": case.truth})
    return json.dumps(case.truth) if isinstance(case.truth, dict) else str(case.truth)


def _batch(score: Callable[..., Any], kind: str, **options: Any) -> Judge:
    def judge(case: Case) -> tuple[float, float]:
        found = score(
            [
                {
                    "response": case.text,
                    "ground_truth": _spelled(case, kind),
                    "data_type": "video",
                    "problem_type": kind,
                    "response_length": len(case.text),
                }
            ],
            **options,
        )[0]
        return found["format"], found["overall"]

    return judge


def easyvideo(folder: Path, kind: str) -> Judge:
    score = load(folder / "examples/video_rl/reward_function/video_reward.py")["compute_score"]
    return _batch(score, kind, debug_sample_rate=0.0)


def easyvideo_unified(folder: Path, kind: str) -> Judge:
    import importlib

    sys.path.insert(0, str(folder / "examples/unified_rl/reward_function"))
    return _batch(importlib.import_module("unified").compute_score, kind)


def onethinker(folder: Path, kind: str) -> Judge:
    score = load(
        folder / "EasyR1/verl/reward_function/onethinker_reward.py", RewardModelClient=None
    )["compute_score"]
    return _batch(score, kind)


# times


def temporal_r1(folder: Path) -> Judge:
    space = load(folder / "verl/utils/reward_score/tvg.py")

    def judge(case: Case) -> tuple[float, float]:
        length = case.params["duration"]
        total = space["tvg_compute_score"](case.text, [v / length for v in case.truth[0]], length)
        return space["tvg_format_reward"](case.text), total

    return judge


def videochat(folder: Path, kind: str) -> Judge:
    space = load(folder / "src/open_r1/grpo_tasks.py")
    parts = {
        "tg": ("format_reward_tg", ("iou_timestamp_reward",)),
        "tracking": ("tracking_format_reward", ("tracking_iou_reward",)),
        "gqa": ("format_reward_gqa", ("answer_reward", "iou_glue_reward")),
    }[kind]

    def truth(case: Case) -> Any:
        if kind == "tg":
            return case.truth[0]
        if kind == "tracking":
            return {"answer": [[v / 1000 for v in box] for box in case.truth["boxes"].values()]}
        return {"answer": case.truth["choice"], "glue": case.truth["spans"]}

    def judge(case: Case) -> tuple[float, float]:
        form = space[parts[0]]([case.text])[0]
        total = form
        for name in parts[1]:
            total += float(
                space[name]([case.text], [truth(case)], durations=[case.params["duration"]])[0]
            )
        return form, total

    return judge
