"""Which function of which peer judges which preset, on which completions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts import _peer_cases as boxes
from scripts import _peer_cases_texts as texts
from scripts import _peer_cases_video as video
from scripts import _peer_judges as judge
from scripts._peer_cases import Case, lines, objects, tagged, think
from scripts._peer_judges import Judge

__all__ = ["RUNS", "Run"]


@dataclass(frozen=True)
class Run:
    """One preset beside its peer. `judge(folder of the checkout)` makes the judge; `note` says what had to be put in its place."""

    task: str
    preset: str
    repository: str
    file: str
    functions: tuple[str, ...]
    cases: Callable[[], Iterator[Case]]
    judge: Callable[[Path], Judge]
    note: str = ""
    published: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    variant: str = ""

    @property
    def name(self) -> str:
        """task:preset, and the variant where its settings are not the preset's."""
        return f"{self.task}:{self.preset}" + (f" {self.variant}" if self.variant else "")


def _spaced(answer: str) -> str:
    """The think envelope with spaces inside the answer's tags, as R1-V's prompt and data have it."""
    return think(f" {answer} ")


def _box_json(numbers: Sequence[float]) -> str:
    return json.dumps({"boxes": list(numbers)})


def _bbox_2d(numbers: Sequence[float]) -> str:
    return f'```json\n{{"bbox_2d": {json.dumps(list(numbers))}}}\n```'


def _tokens(numbers: Sequence[float]) -> str:
    pairs = ",".join(
        f"({','.join(f'{v:g}' for v in numbers[k : k + 2])})" for k in range(0, len(numbers), 2)
    )
    return f"<|object_ref_start|>the dog<|object_ref_end|><|box_start|>{pairs}<|box_end|><|im_end|>"


def _named_boxes(boxes: Sequence[Sequence[float]]) -> str:
    """One name and the boxes behind it, as PR1's counting asks for them."""
    name, _, end = _tokens([0, 0, 0, 0]).partition("<|box_start|>(0,0),(0,0)<|box_end|>")
    return name + "".join(_tokens(box).removeprefix(name).removesuffix(end) for box in boxes) + end


def _plain(answer: str) -> str:
    return answer


def _labelled(numbers: Sequence[float]) -> str:
    return objects([("dog", numbers)], "'")


_EASY = "examples/video_rl/reward_function/video_reward.py"
_UNIFIED = "examples/unified_rl/reward_function/unified.py"
_ONE = "EasyR1/verl/reward_function/onethinker_reward.py"
_VIDEO = "src/r1-v/src/open_r1/grpo.py"
_CHAT = "src/open_r1/grpo_tasks.py"
_SGG = (
    "As it stands, its format_reward is 0 for every graph with an object, because it puts dicts into a set: it is run with "
    "dicts that can be hashed. The similarity of labels is 1 for equal ones and 0 for others instead of spaCy's word vectors, "
    "which are no part of the repository."
)
_COCO = "COCO and COCOeval are the installed pycocotools instead of the peer's copy."


def _easy(
    task: str,
    kind: str,
    cases: Callable[[], Iterator[Case]],
    preset: str = "easyvideo_r1",
    **more: Any,
) -> Run:
    return Run(
        task,
        preset,
        "EasyVideoR1",
        _EASY,
        ("compute_score",),
        cases,
        lambda f: judge.easyvideo(f, kind),
        **more,
    )


def _one(task: str, kind: str, cases: Callable[[], Iterator[Case]], **more: Any) -> Run:
    return Run(
        task,
        "onethinker",
        "OneThinker",
        _ONE,
        ("compute_score",),
        cases,
        lambda f: judge.onethinker(f, kind),
        **more,
    )


def _r1(task: str, kind: str, cases: Callable[[], Iterator[Case]], preset: str = "video_r1") -> Run:
    return Run(
        task,
        preset,
        "Video-R1",
        _VIDEO,
        ("accuracy_reward", "format_reward"),
        cases,
        lambda f: judge.video_r1(f, kind),
    )


def _pr1_detection(penalty: bool, **more: Any) -> Run:
    return Run(
        "detection",
        "perception_r1",
        "PR1",
        "src/open_r1/rewards.py",
        ("pr1_detection_reward",),
        lambda: boxes.detection_cases(_plain, judge.fenced, "[]"),
        lambda f: judge.pr1_detection(f, penalty),
        "DO_PENAIlty is True, the code's default."
        if penalty
        else "DO_PENAIlty is False, as in local_scripts/train/train_qwen2_2b_vl_detection.sh.",
        **more,
    )


def _json_span(start: Any, end: Any) -> str:
    return f'{{"time": [{start}, {end}]}}'


_SHARED = {"accuracy": {"over": "shared"}}
_TRUTH = {"over": "truth"}
RUNS: tuple[Run, ...] = (
    Run(
        "grounding",
        "v_triune",
        "One-RL-to-See-Them-All",
        "reward_server/verify.py",
        ("DetectionVerifier",),
        lambda: boxes.boxes_cases(
            lines,
            _labelled,
            lambda many: objects([("dog", b) for b in many], "'"),
            progress=(5, 100),
        ),
        lambda f: judge.v_triune(f, "dog"),
    ),
    Run(
        "grounding",
        "perception_r1",
        "PR1",
        "src/open_r1/rewards.py",
        ("pr1_grounding_reward", "pr1_grounding_format_reward"),
        lambda: boxes.boxes_cases(_plain, _tokens, lambda many: "".join(map(_tokens, many))),
        judge.pr1,
    ),
    Run(
        "grounding",
        "vlm_r1",
        "VLM-R1",
        "src/open-r1-multimodal/src/open_r1/vlm_modules/qwen_module.py",
        ("iou_reward", "format_reward_rec"),
        lambda: (
            c
            for about in (dict[str, Any](), {"size": (2000, 1000)})
            for c in boxes.boxes_cases(
                think,
                _bbox_2d,
                lambda many: json.dumps([{"bbox_2d": list(b)} for b in many]),
                resized=(980, 980),
                **about,
            )
        ),
        judge.vlm_r1_rec,
    ),
    _easy(
        "grounding",
        "spatial grounding",
        lambda: boxes.boxes_cases(
            tagged, _box_json, lambda many: json.dumps({"boxes": [list(b) for b in many]})
        ),
    ),
    Run(
        "detection",
        "v_triune",
        "One-RL-to-See-Them-All",
        "reward_server/verify.py",
        ("DetectionVerifier",),
        lambda: boxes.detection_cases(
            lines, lambda items: objects(items, "'"), "[]", progress=(5, 100)
        ),
        judge.v_triune,
        _COCO,
        {"accuracy": {"matching": "published"}},
    ),
    Run(
        "detection",
        "v_triune",
        "One-RL-to-See-Them-All",
        "reward_server/verify.py",
        ("DetectionVerifier",),
        lambda: boxes.detection_cases(
            lines, lambda items: objects(items, "'"), "[]", progress=(5, 100)
        ),
        lambda f: judge.v_triune(f, term="iou_max_iou_first"),
        _COCO,
        {"accuracy": {"weights": {"iou_max_iou_first": 1.0}, "matching": "published"}},
        {"accuracy": {"weights": {"iou_max_iou_first": 1.0}}},
        "iou_max_iou_first",
    ),
    Run(
        "detection",
        "vlm_r1",
        "VLM-R1",
        "src/open-r1-multimodal/src/open_r1/grpo_jsonl.py",
        ("accuracy_reward", "format_reward"),
        lambda: boxes.detection_cases(think, judge.fenced, "None"),
        lambda f: judge.vlm_r1_od(f, "odLength"),
        _COCO,
    ),
    Run(
        "detection",
        "vlm_r1_weighted_sum",
        "VLM-R1",
        "src/open-r1-multimodal/src/open_r1/grpo_jsonl.py",
        ("accuracy_reward", "format_reward"),
        lambda: boxes.detection_cases(think, judge.fenced, "None"),
        lambda f: judge.vlm_r1_od(f, "weighted_sum"),
        _COCO,
        {"accuracy": {"matching": "published"}},
    ),
    _pr1_detection(True),
    _pr1_detection(False, settings={"accuracy": {"penalty": 0.0}}, variant="no_penalty"),
    Run(
        "counting",
        "perception_r1",
        "PR1",
        "src/open_r1/rewards.py",
        ("pr1_counting_reward",),
        lambda: boxes.counting_cases(_named_boxes),
        judge.pr1_counting,
    ),
    Run(
        "scene_graph",
        "r1_sgg_soft",
        "R1-SGG",
        "open_r1/grpo.py",
        ("node_acc_reward", "node_box_reward", "edge_reward", "format_reward"),
        lambda: boxes.graph_cases(think),
        lambda f: judge.r1_sgg(f, ("node_acc_reward", "node_box_reward", "edge_reward")),
        _SGG,
        {"accuracy": _TRUTH},
    ),
    Run(
        "scene_graph",
        "r1_sgg_hard",
        "R1-SGG",
        "open_r1/grpo.py",
        ("edge_hard_reward", "format_reward"),
        lambda: boxes.graph_cases(think),
        lambda f: judge.r1_sgg(f, ("edge_hard_reward",)),
        _SGG,
        {"accuracy": _TRUTH},
    ),
    Run(
        "gui_grounding",
        "ui_r1",
        "UI-R1",
        "src/ui_r1/src/open_r1/grpo_json_action_coord.py",
        ("accuracy_reward_coord", "format_reward"),
        lambda: texts.click_cases(think, "[{'action': 'click', 'coordinate': [X]}]"),
        lambda f: judge.ui_r1(f, True),
    ),
    Run(
        "gui_grounding",
        "gui_r1",
        "GUI-R1",
        "verl/utils/reward_score/r1gui.py",
        ("r1gui_compute_score",),
        lambda: texts.click_cases(
            think, "[{'action': 'click', 'point': [X], 'input_text': 'no input text'}]"
        ),
        judge.gui_r1,
    ),
    Run(
        "gui_grounding",
        "gui_g2",
        "GUI-G2",
        "src/gui_g2/src/open_r1/gaussian_grpo.py",
        ("gaussian_point_reward", "gaussian_plane_reward", "format_reward"),
        lambda: texts.click_cases(_plain, "[X]", "box"),
        judge.gui_g2,
    ),
    Run(
        "gui_action",
        "ui_r1",
        "UI-R1",
        "src/ui_r1/src/open_r1/grpo_json_action_coord.py",
        ("accuracy_reward_action", "accuracy_reward_coord", "format_reward"),
        lambda: texts.action_cases(think, ("coordinate", None)),
        lambda f: judge.ui_r1(f, False),
    ),
    Run(
        "gui_action",
        "gui_r1",
        "GUI-R1",
        "verl/utils/reward_score/r1gui.py",
        ("r1gui_compute_score",),
        lambda: texts.action_cases(think, ("point", "input_text"), True),
        judge.gui_r1,
    ),
    _r1("choice", "multiple choice", lambda: texts.choice_cases(think)),
    _easy("choice", "multiple choice", lambda: texts.choice_cases(tagged)),
    _easy("boolean", "boolean", lambda: texts.boolean_cases(tagged)),
    _r1("numeric", "numerical", lambda: texts.number_cases(think)),
    _r1("numeric", "regression", lambda: texts.number_cases(think), "video_r1_regression"),
    _easy("numeric", "numerical", lambda: texts.number_cases(tagged)),
    _easy("numeric", "regression", lambda: texts.number_cases(tagged), "easyvideo_r1_regression"),
    _r1("ocr", "OCR", lambda: texts.text_cases(think)),
    Run(
        "ocr",
        "easyvideo_r1",
        "EasyVideoR1",
        _UNIFIED,
        ("compute_score",),
        lambda: texts.text_cases(tagged),
        lambda f: judge.easyvideo_unified(f, "ocr"),
    ),
    _r1("open_text", "free-form", lambda: texts.text_cases(think)),
    _easy("open_text", "open-ended", lambda: texts.text_cases(tagged)),
    Run(
        "open_text",
        "easyvideo_r1_unified",
        "EasyVideoR1",
        _UNIFIED,
        ("compute_score",),
        lambda: texts.text_cases(tagged),
        lambda f: judge.easyvideo_unified(f, "open-ended"),
    ),
    Run(
        "math",
        "v_triune",
        "One-RL-to-See-Them-All",
        "reward_server/verify.py",
        ("MathVerifyVerifier",),
        lambda: texts.math_cases(lines, True),
        judge.v_triune_math,
    ),
    Run(
        "math",
        "r1_v",
        "R1-V",
        _VIDEO,
        ("accuracy_reward", "format_reward"),
        lambda: texts.math_cases(_spaced, False),
        judge.r1_v,
    ),
    _easy("math", "math", lambda: texts.math_cases(tagged, False)),
    _easy("temporal_grounding", "temporal grounding", lambda: video.span_cases(tagged, _json_span)),
    Run(
        "temporal_grounding",
        "temporal_r1",
        "Temporal-R1",
        "verl/utils/reward_score/tvg.py",
        ("tvg_compute_score", "tvg_format_reward"),
        lambda: video.span_cases(think, lambda a, b: f'{{"start_time": "{a}", "end_time": "{b}"}}'),
        judge.temporal_r1,
    ),
    Run(
        "temporal_grounding",
        "videochat_r1",
        "VideoChat-R1",
        _CHAT,
        ("iou_timestamp_reward", "format_reward_tg"),
        lambda: video.span_cases(think, lambda a, b: f"{a} to {b}"),
        lambda f: judge.videochat(f, "tg"),
    ),
    _one("temporal_grounding", "temporal grounding", lambda: video.span_cases(think, _json_span)),
    Run(
        "grounded_qa",
        "videochat_r1",
        "VideoChat-R1",
        _CHAT,
        ("answer_reward", "iou_glue_reward", "format_reward_gqa"),
        video.glue_cases,
        lambda f: judge.videochat(f, "gqa"),
    ),
    _easy(
        "st_grounding",
        "spatial-temporal grounding",
        lambda: video.tube_cases(tagged),
        published=_SHARED,
    ),
    _one(
        "st_grounding",
        "spatial-temporal grounding",
        lambda: video.tube_cases(think),
        published=_SHARED,
    ),
    _easy("tracking", "tracking", lambda: video.track_cases(tagged), published=_SHARED),
    _one("tracking", "tracking", lambda: video.track_cases(think)),
    Run(
        "tracking",
        "videochat_r1",
        "VideoChat-R1",
        _CHAT,
        ("tracking_iou_reward", "tracking_format_reward"),
        lambda: video.track_cases(think, listed=True),
        lambda f: judge.videochat(f, "tracking"),
    ),
)
"""Every preset whose paper's reward code is public."""
