r"""What the reward part `format` pays: the envelope that was asked for, or a paper's own rule, by name.

    envelope              1 when the whole text is the envelope of the answer_format and its answer could be read: the default
    tags                  the envelope's tags alone, whatever stands in them (Video-R1, VLM-R1 grpo_jsonl, UI-R1, VideoChat-R1,
                          R1-V, OneThinker: fullmatch of <think>.*?</think>\s*<answer>.*?</answer>)
    vlm_r1_rec            thoughts, then an answer, and in it braces around four whole numbers in brackets, wherever they stand
                          (VLM-R1 format_reward_rec)
    v_triune_tags         0.25 for each of the four tags that stands once on a line of its own (V-Triune MathVerifyVerifier)
    v_triune_boxes        an answer on lines of its own with a labelled box (V-Triune DetectionVerifier.verify_format)
    perception_r1         Qwen2-VL's spelling of one object with special tokens (PR1; there the bars of the tokens are not escaped)
    perception_r1_counting  the same of a name and one box or more behind it, or [] for none (PR1 pr1_counting_format_reward)
    temporal_r1           the tags around {"start_time": "..", "end_time": ".."} (Temporal-R1 tvg_format_reward)
    gui_r1                the tags around a list of actions with 'action', 'point' and 'input_text' (GUI-R1 r1gui_format_reward)
    gui_g2                [x1,y1,x2,y2] of whole numbers and nothing else (GUI-G2 format_reward)
    r1_sgg                the tags around a graph with "objects" and "relationships" whose ids exist (R1-SGG format_reward)
    videochat_r1_glue     think, answer and a <glue> of [(start, end), ...] (VideoChat-R1 grpo_gqa)
    videochat_r1_boxes    the tags around a list of boxes (VideoChat-R1 tracking_format_reward, which wants eight)
    easyvideo_r1          1 for an <answer> of the right type, 0.5 for one of another type, 0 without (EasyVideoR1 video_rl)
    easyvideo_r1_unified  the same in its unified_rl recipe: numbers and yes/no must be the whole answer

All but the first are paid for texts whose answer cannot be read, too: their papers judge the form apart from the answer. A
second block of a tag, which their lazy patterns let pass, and a block inside the thoughts earn nothing here. Each rule is linear
in the length.

    python -c "from mmrl.rewards.format_rules import make_format_rule as m; print(m('easyvideo_r1')('<answer>B</answer>'))"
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from mmrl.errors import ConfigError, did_you_mean
from mmrl.rewards.format import check_answer_format, format_reward
from mmrl.rewards.objects import parse_objects
from mmrl.rewards.parsing import MAX_TEXT_CHARS, json_once, strip_end_tokens

__all__ = ["FORMAT_RULES", "PAYS_UNREAD", "glue_spans", "make_format_rule"]

_Rule = Callable[[str, str, str], float]
"""rule(text, answer_format, kind) -> [0, 1]; `kind` is the task's name."""

_ANSWER_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_REC = re.compile(r"\[\d+,\s*\d+,\s*\d+,\s*\d+\]")
_TAG_LINES = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
_PERCEPTION = re.compile(
    r"<\|object_ref_start\|>[^<]*<\|object_ref_end\|><\|box_start\|>[^<]*<\|box_end\|>(?:<\|im_end\|>)?\s*"
)
_PERCEPTION_BOXES = re.compile(
    r"(?:<\|object_ref_start\|>[^<]*<\|object_ref_end\|>(?:<\|box_start\|>[^<]*<\|box_end\|>)+|\[\])(?:<\|im_end\|>)?\s*"
)
_TEMPORAL = re.compile(r'\{\s*"start_time"\s*:\s*"[0-9.]+"\s*,\s*"end_time"\s*:\s*"[0-9.]+"\s*\}')
_GUI_G2 = re.compile(r"\[\s*\d+\s*,\s*\d+\s*,\s*\d+\s*,\s*\d+\s*\]")
_SPAN = r"\(\d+(?:\.\d+)?,\s*\d+(?:\.\d+)?\)"
_GLUE = re.compile(rf"\[(?:{_SPAN}(?:,\s*{_SPAN})*,?)?\]")
_GLUE_BLOCK = re.compile(r"\s*<glue>([^<]*)</glue>\s*")
_LETTER = re.compile(r"(?<![^\W_])[A-J](?![^\W_])|^[a-j][.)]?$")
_NUMBER_WORDS = re.compile(
    r"\b(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundred|thousand)\b",
    re.IGNORECASE,
)
_DIGIT = re.compile(r"[0-9]")
_YES_NO = re.compile(r"\b(?:yes|no|true|false)\b", re.IGNORECASE)
_EMPTY_TEXT = "no input text"


def _envelope(text: str, answer_format: str, kind: str) -> float:
    return format_reward(text, answer_format)


def _inside(text: str) -> str | None:
    """What stands in the one answer of a text that is the think envelope and nothing else; None for any other text."""
    if not format_reward(text, "think"):
        return None
    return text.rpartition("<answer>")[2].partition("</answer>")[0].strip()


def _answers(text: str) -> list[str]:
    """What stands between <answer> tags, in order, stripped: a block ends at the first closing tag. Linear in the length."""
    if text.count("<") == 2:  # one block and no other tag, as nearly always
        opened, closed = text.find("<answer>"), text.find("</answer>")
        if 0 <= opened < closed:
            return [text[opened + len("<answer>") : closed].strip()]
    found, start = [], None
    for tag in _ANSWER_TAG.finditer(text):
        if not tag[1]:
            start = tag.end() if start is None else start
        elif start is not None:
            found.append(text[start : tag.start()].strip())
            start = None
    return found


def _json(text: str, python: bool = False) -> Any:
    """The value of a JSON text (or, with `python`, of Python's spelling of it); None for anything else."""
    try:
        return json_once(text) if python else json.loads(text)
    except (ValueError, RecursionError):
        return None


def _vlm_r1_rec(text: str, answer_format: str, kind: str) -> float:
    thoughts, found, tail = text.partition("</think>")
    blocks = _answers(tail)
    if (
        "<think>" not in thoughts
        or not found
        or len(blocks) != 1
        or not tail.lstrip().startswith("<answer>")
    ):
        return 0.0
    inside = blocks[0]
    opened, closed = inside.find("{"), inside.rfind("}")
    return float(0 <= opened < closed and _REC.search(inside, opened, closed) is not None)


def _v_triune_tags(text: str, answer_format: str, kind: str) -> float:
    return sum(text.count(tag) == 1 for tag in _TAG_LINES) / len(_TAG_LINES)


def _v_triune_boxes(text: str, answer_format: str, kind: str) -> float:
    if text.count("\n<answer>\n") != 1 or text.count("\n</answer>") != 1:
        return 0.0
    for found in (parse_objects(inside) for inside in _answers(text)[:1]):
        ordered = any(box[0] <= box[2] and box[1] <= box[3] for _, box in found.objects)
        # there, [] earns nothing even where it is right
        return float(found.reason is None and (ordered or not found.objects))
    return 0.0


def _perception_r1(text: str, answer_format: str, kind: str) -> float:
    return float(_PERCEPTION.fullmatch(text.replace("<|endoftext|>", "")) is not None)


def _perception_r1_counting(text: str, answer_format: str, kind: str) -> float:
    return float(_PERCEPTION_BOXES.fullmatch(text.replace("<|endoftext|>", "")) is not None)


def _temporal_r1(text: str, answer_format: str, kind: str) -> float:
    inside = _inside(text)
    return float(inside is not None and _TEMPORAL.fullmatch(inside) is not None)


def _gui_r1_action(action: Any) -> bool:
    if not isinstance(action, dict) or not {"action", "point", "input_text"} <= action.keys():
        return False
    name, point, said = action["action"], action["point"], action["input_text"]
    if (
        not isinstance(name, str)
        or not isinstance(said, str)
        or not isinstance(point, list)
        or len(point) < 2
    ):
        return False
    if not all(type(v) is int for v in point[:2]):
        return False
    if name in ("type", "select", "open_app") and said == _EMPTY_TEXT:
        return False
    return name != "scroll" or said in ("left", "right", "up", "down")


def _gui_r1(text: str, answer_format: str, kind: str) -> float:
    inside = _inside(text)
    actions = None if inside is None else _json(inside, python=True)
    return float(isinstance(actions, list) and all(map(_gui_r1_action, actions)))


def _gui_g2(text: str, answer_format: str, kind: str) -> float:
    return float(_GUI_G2.fullmatch(strip_end_tokens(text)) is not None)


def _r1_sgg_graph(graph: Any) -> bool:
    if not isinstance(graph, dict) or not all(
        isinstance(graph.get(key), list) for key in ("objects", "relationships")
    ):
        return False
    objects, relations = graph["objects"], graph["relationships"]
    for item in objects:
        box = item.get("bbox") if isinstance(item, dict) else None
        if not isinstance(box, list) or len(box) != 4 or not isinstance(item.get("id"), str):
            return False
        if not all(isinstance(v, (int, float)) for v in box):
            return False
    ids = {item["id"] for item in objects}
    return all(
        isinstance(r, dict)
        and isinstance(r.get("predicate"), str)
        and isinstance(r.get("subject"), str)
        and isinstance(r.get("object"), str)
        and r["subject"] in ids
        and r["object"] in ids
        for r in relations
    )


def _r1_sgg(text: str, answer_format: str, kind: str) -> float:
    inside = _inside(text)
    return float(
        inside is not None and _r1_sgg_graph(_json(inside.replace("```", " ").replace("json", " ")))
    )


def glue_spans(glue: str) -> list[tuple[float, float]] | None:
    """The spans of VideoChat-R1's [(start, end), ...]; None for any other spelling and where a span ends before it starts."""
    spans = _json(glue, python=True) if _GLUE.fullmatch(glue) else None
    if not isinstance(spans, list) or not all(start <= end for start, end in spans):
        return None
    return [(float(start), float(end)) for start, end in spans]


def _videochat_glue(text: str, answer_format: str, kind: str) -> float:
    head, found, tail = strip_end_tokens(text).partition("</answer>")
    block = _GLUE_BLOCK.fullmatch(tail)
    if not found or block is None or not format_reward(head + found, "think"):
        return 0.0
    return float(glue_spans(block[1]) is not None)


def _videochat_boxes(text: str, answer_format: str, kind: str) -> float:
    inside = _inside(text)
    boxes = None if inside is None else _json(inside, python=True)
    return float(
        isinstance(boxes, list)
        and bool(boxes)
        and all(isinstance(box, list) and len(box) == 4 for box in boxes)
    )


def _numbers(value: Any, count: int) -> bool:
    if not isinstance(value, list) or len(value) != count:
        return False
    try:
        return all(isinstance(float(v), float) for v in value)
    except (TypeError, ValueError, OverflowError):
        return False


_JSON_SHAPES: Mapping[str, Callable[[Any], bool]] = {
    "temporal_grounding": lambda v: _numbers(v.get("time"), 2),
    "grounding": lambda v: _numbers(v.get("boxes"), 4),
    "st_grounding": lambda v: _numbers(v.get("time"), 2) and isinstance(v.get("boxes"), dict),
    "tracking": lambda v: isinstance(v.get("boxes"), dict),
}


def _shaped(inside: str, kind: str) -> bool:
    value = _json(inside)
    return isinstance(value, dict) and _JSON_SHAPES[kind](value)


def _float_like(inside: str) -> bool:
    try:
        return isinstance(float(inside.replace(",", "")), float)
    except ValueError:
        return False


def _typed(inside: str, kind: str, whole: bool) -> bool:
    if kind == "choice":
        return _LETTER.search(inside) is not None
    if kind in ("numeric", "counting"):
        return (
            _float_like(inside)
            if whole
            else bool(_DIGIT.search(inside) or _NUMBER_WORDS.search(inside))
        )
    if kind == "boolean":
        return (
            inside.lower() in ("yes", "no", "true", "false")
            if whole
            else _YES_NO.search(inside) is not None
        )
    return kind not in _JSON_SHAPES or _shaped(inside, kind)


def _easyvideo_r1(text: str, answer_format: str, kind: str) -> float:
    found = _answers(text.rpartition("</think>")[2])
    if len(found) != 1 or not found[0]:
        return 0.0
    return 1.0 if _typed(found[0], kind, whole=False) else 0.5


def _easyvideo_r1_unified(text: str, answer_format: str, kind: str) -> float:
    found = _answers(text.rpartition("</think>")[2])
    if len(found) != 1:
        return 0.0
    return 1.0 if found[0] and _typed(found[0], kind, whole=True) else 0.5


def _judge(rule: _Rule, answer_format: str, kind: str, text: str) -> float:
    return rule(text, answer_format, kind) if len(text) <= MAX_TEXT_CHARS else 0.0


FORMAT_RULES: Mapping[str, _Rule] = {
    "envelope": _envelope,
    "tags": _envelope,
    "vlm_r1_rec": _vlm_r1_rec,
    "v_triune_tags": _v_triune_tags,
    "v_triune_boxes": _v_triune_boxes,
    "perception_r1": _perception_r1,
    "perception_r1_counting": _perception_r1_counting,
    "temporal_r1": _temporal_r1,
    "gui_r1": _gui_r1,
    "gui_g2": _gui_g2,
    "r1_sgg": _r1_sgg,
    "videochat_r1_glue": _videochat_glue,
    "videochat_r1_boxes": _videochat_boxes,
    "easyvideo_r1": _easyvideo_r1,
    "easyvideo_r1_unified": _easyvideo_r1_unified,
}
PAYS_UNREAD = frozenset(FORMAT_RULES) - {"envelope"}
"""Rules that also pay texts whose answer cannot be read."""


def make_format_rule(
    rule: str, answer_format: str = "answer", kind: str = ""
) -> Callable[[str], float]:
    """value(whole text) in [0, 1] of the rule called `rule`; `kind` is the task's name, by which EasyVideoR1's rules judge.

    Raises ConfigError for an unknown rule or answer_format. The value never raises on any text.
    """
    check_answer_format(answer_format)
    if rule not in FORMAT_RULES:
        raise ConfigError(
            f"unknown format_rule {rule!r}; expected one of {', '.join(FORMAT_RULES)}."
            f"{did_you_mean(str(rule), FORMAT_RULES)}"
        )
    if FORMAT_RULES[rule] is _envelope:
        return functools.partial(format_reward, answer_format=answer_format)
    return functools.partial(_judge, FORMAT_RULES[rule], answer_format, kind)
