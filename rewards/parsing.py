"""Model text -> answer text -> boxes, by strict rules that cannot be gamed and that fail with a named reason.

Envelope: what stands in <think>...</think> never counts; outside it exactly one <answer>...</answer> must exist.
Several answers, a nested or unclosed one, or an answer only inside the thoughts is a failure, so hedging never pays.
Text after the answer does not change the answer (the format reward frowns on it, see mmrl.rewards.format).

Boxes, anywhere four numbers are meant, in one of these spellings and nothing beside them:

    [x1, y1, x2, y2]      (x1, y1), (x2, y2)      <|box_start|>(x1,y1),(x2,y2)<|box_end|>
    {"bbox_2d": [...]}    [{"bbox_2d": [...], "label": "cat"}]   (also bbox, box, boxes; single quotes; ```json fences)

Model text is data: JSON, or Python's spelling of it rewritten as JSON; never eval. Every step is linear in the length.

    python -c "from mmrl.rewards.parsing import parse_boxes; print(parse_boxes('[1, 2, 3.5, 4]'))"
"""

from __future__ import annotations

import functools
import json
import math
import re
from typing import Any, NamedTuple, NoReturn

__all__ = [
    "ANSWER_FORMATS",
    "Box",
    "BoxParse",
    "Extraction",
    "MAX_ANSWER_CHARS",
    "MAX_COORDINATE",
    "MAX_TEXT_CHARS",
    "extract_answer",
    "json_once",
    "load_json",
    "number_list",
    "parse_boxes",
    "strict_json",
    "strip_end_tokens",
    "strip_fence",
]

Box = tuple[float, float, float, float]

MAX_TEXT_CHARS = 400_000
"""Longer completions are not searched at all ('too_long')."""
MAX_ANSWER_CHARS = 4_000
"""Longer answers are not parsed ('answer_too_long'): one box needs under 100 characters."""
MAX_COORDINATE = 1e7
"""Larger magnitudes are refused ('out_of_range'), so no area overflows."""
ANSWER_FORMATS = ("answer", "think", "think_lines", "bare")
"""'answer': an <answer> block; 'think': <think> then <answer>; 'think_lines': the same with each tag on its own line; 'bare':
the whole text is the answer."""

_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "</s>", "<|eot_id|>", "<|end_of_text|>", "<pad>")
_BOX_KEYS = ("bbox_2d", "bbox", "box", "boxes")
_NUMBER = r" ?([+-]?[0-9]{1,12}(?:\.[0-9]{1,12})?) ?"
# matched against text whose white space is collapsed to single spaces, so no run of spaces can make it backtrack
_TWO_POINTS = re.compile(
    r"(?:"
    + re.escape("<|object_ref_start|>")
    + r"[^<]*"
    + re.escape("<|object_ref_end|>")
    + r" ?)?"
    r"(?P<open>" + re.escape("<|box_start|>") + r" ?)?"
    r"\(" + _NUMBER + "," + _NUMBER + r"\) ?,? ?\(" + _NUMBER + "," + _NUMBER + r"\) ?"
    r"(?P<close>" + re.escape("<|box_end|>") + r")?"
)
_FENCE = re.compile(r"```(?:json|JSON)?[ \t]*\n?")
_PYTHON = re.compile(
    r"""[^'"]+|'[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*"|['"]""", re.DOTALL
)
_WORDS = {"(": "[", ")": "]", "True": "true", "False": "false", "None": "null"}
_PLAIN_NUMBER = re.compile(r"\s{0,4}[+-]?[0-9]{1,12}(?:\.[0-9]{1,12})?\s{0,4}")
_SPARE_COMMA = re.compile(r"(?<=[\w\])}]),(?=\s*[\])}])|^,(?=\s*[\])}])")
# all that _WORDS and _SPARE_COMMA change
_TO_REWRITE = re.compile(r"[()]|True|False|None|,\s*[\])}]")
_BEGINNINGS = frozenset("[{(\"'-+.0123456789tfnTFNI \t\r\n")
_ESCAPES = re.compile(r"\\x[0-9a-fA-F]{2}|\\.|\"", re.DOTALL)


class Extraction(NamedTuple):
    """`answer` is the text inside the answer block, or None with the `reason`."""

    answer: str | None
    reason: str | None = None


class BoxParse(NamedTuple):
    """Boxes in the order written, in whatever frame the text uses; empty with the `reason` when parsing failed."""

    boxes: tuple[Box, ...]
    reason: str | None = None


def strip_end_tokens(text: str) -> str:
    """`text` without surrounding white space and without the end-of-turn tokens a decoder may have kept."""
    end = len(text)
    # an index moves instead of the text being copied: a text full of tokens stays linear
    while True:
        while end and text[end - 1].isspace():
            end -= 1
        if not text.endswith(_END_TOKENS, 0, end):
            return text[:end].strip()
        end -= next(len(token) for token in _END_TOKENS if text.endswith(token, 0, end))


def _after_thoughts(text: str) -> Extraction:
    """The text behind the thoughts. A chat template may have opened <think> already, so a lone </think> is fine."""
    opened, closed = text.count("<think>"), text.count("</think>")
    if opened > 1 or closed > 1:
        return Extraction(None, "several_thoughts")
    if opened and not closed:
        return Extraction(None, "unclosed_think")
    if not closed:
        return Extraction(text)
    head, _, tail = text.partition("</think>")
    if opened and "<think>" not in head:
        return Extraction(None, "thoughts_out_of_order")
    if opened and "<answer>" in head.partition("<think>")[0]:
        return Extraction(None, "answer_before_thoughts")
    return Extraction(tail)


def extract_answer(text: str, answer_format: str = "answer") -> Extraction:
    """The one answer of a completion, stripped, or the reason why there is none.

    Reasons: empty, too_long, several_thoughts, unclosed_think, thoughts_out_of_order, answer_before_thoughts,
    no_answer, unclosed_answer, several_answers, answer_out_of_order. With answer_format 'bare' everything after the
    thoughts is the answer. Never raises on any text.
    """
    if len(text) > MAX_TEXT_CHARS:
        return Extraction(None, "too_long")
    rest = text
    if "think>" in text:
        behind = _after_thoughts(text)
        if behind.answer is None:
            return behind
        rest = behind.answer
    if answer_format == "bare":
        bare = strip_end_tokens(rest)
        return Extraction(bare) if bare else Extraction(None, "empty")
    opened, closed = rest.count("<answer>"), rest.count("</answer>")
    if opened > 1 or closed > 1:
        return Extraction(None, "several_answers")
    if not opened:
        return Extraction(None, "no_answer" if rest.strip() else "empty")
    if not closed:
        return Extraction(None, "unclosed_answer")
    inside, found, _ = rest.partition("<answer>")[2].partition("</answer>")
    return Extraction(inside.strip()) if found else Extraction(None, "answer_out_of_order")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"not a number: {name}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("duplicate keys")
    return table


_STRICT = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_unique)
_LENIENT = json.JSONDecoder(parse_constant=float, object_pairs_hook=_unique)
# made once: json.loads makes a decoder for each text where it is given hooks, which takes longer than to read one box


def strict_json(text: str, broken_numbers: bool = False) -> Any:
    """The JSON value; raises ValueError or RecursionError, also for a key given twice, and for NaN and Infinity unless
    `broken_numbers` keeps them as floats, which no box may hold."""
    return (_LENIENT if broken_numbers else _STRICT).decode(text)


def strip_fence(text: str) -> str:
    """`text` stripped, without the ``` or ```json fence around it, if there is one."""
    text = text.strip()
    if text.startswith("```") and text.endswith("```") and len(text) > 6:
        return _FENCE.sub("", text[:-3], count=1).strip()
    return text


def _escape(found: re.Match[str]) -> str:
    """A piece of Python's string as JSON spells it."""
    piece = found.group()
    return f"\\u00{piece[2:]}" if len(piece) == 4 else {'"': '\\"', "\\'": "'"}.get(piece, piece)


def _as_json(found: re.Match[str]) -> str:
    """A string of Python, or what stands between strings, as JSON spells it; raises ValueError for an unclosed quote."""
    piece = found[0]
    if piece[0] in "'\"":
        if len(piece) == 1:
            raise ValueError("unclosed string")
        inside = piece[1:-1]
        return (
            f'"{_ESCAPES.sub(_escape, inside)}"'
            if "\\" in inside or '"' in inside
            else f'"{inside}"'
        )
    if not _TO_REWRITE.search(piece):
        return piece
    for python, json_word in _WORDS.items():
        piece = piece.replace(python, json_word)
    return _SPARE_COMMA.sub("", piece)


def load_json(text: str, broken_numbers: bool = False) -> Any:
    """The value of JSON, or of Python's spelling of it (single quotes, tuples, True, False, None, a spare comma at the end of a
    list), as data: runs nothing. `broken_numbers`: see `strict_json`.

    What stands inside strings keeps its characters. An object that gives one key twice is refused: whichever counted, the
    other would be a second answer. Raises ValueError or RecursionError, also for NaN. Linear in the length.
    """
    if text[:1] not in _BEGINNINGS:  # most texts that are no value show it here
        raise ValueError("expected a JSON value")
    if (
        "'" in text
        and '"' not in text
        and "\\" not in text
        and not text.count("'") % 2
        and not _TO_REWRITE.search(text)
    ):
        # a Python list of plain strings and numbers
        return strict_json(text.replace("'", '"'), broken_numbers)
    try:
        return strict_json(text, broken_numbers)
    except json.JSONDecodeError:
        rewritten = _PYTHON.sub(_as_json, text)
        if rewritten == text:
            raise
        return strict_json(rewritten, broken_numbers)


@functools.lru_cache(maxsize=2)
def json_once(text: str) -> Any:
    """The value that `load_json` gives, kept for the next who asks: the form of an answer is judged right after its content. It is
    shared, so nobody may change it; what raises is not kept."""
    return load_json(text)


def number_list(value: Any) -> list[int | float] | None:
    """A list of numbers, or of numbers as texts (["100", "20.5"]); None for anything else."""
    if not isinstance(value, list):
        return None
    for v in value:
        if type(v) is not float and type(v) is not int:
            break
    else:
        return value
    texts = [v for v in value if isinstance(v, str)]
    if len(texts) != len(value) or not all(_PLAIN_NUMBER.fullmatch(v) for v in texts):
        return None
    return [float(v) for v in texts]


def _find_boxes(value: Any) -> list[list[float]] | str:
    """Raw number lists found in a JSON value, or a reason."""
    if isinstance(value, dict):
        keys = [k for k in _BOX_KEYS if k in value]
        if len(keys) != 1:
            return "ambiguous_keys" if keys else "no_box_key"
        return _find_boxes(value[keys[0]]) if isinstance(value[keys[0]], list) else "not_a_box"
    if not isinstance(value, list):
        return "not_a_box"
    if not value:
        return "no_box"
    if (numbers := number_list(value)) is not None:
        return [numbers]
    found: list[list[float]] = []
    for item in value:
        if not isinstance(item, dict) and number_list(item) is None:
            return "not_a_box"
        inner = _find_boxes(item)
        if isinstance(inner, str):
            return inner
        found += inner
    return found


def _check(raw: list[list[float]]) -> BoxParse:
    boxes: list[Box] = []
    for numbers in raw:
        if len(numbers) != 4:
            return BoxParse((), "wrong_count")
        # False for nan, inf and huge integers
        if not all(-MAX_COORDINATE <= v <= MAX_COORDINATE for v in numbers):
            return BoxParse(
                (),
                "not_finite"
                if any(isinstance(v, float) and not math.isfinite(v) for v in numbers)
                else "out_of_range",
            )
        boxes.append((float(numbers[0]), float(numbers[1]), float(numbers[2]), float(numbers[3])))
    return BoxParse(tuple(boxes))


def parse_boxes(answer: str) -> BoxParse:
    """All boxes of an answer text; the text must be boxes and nothing else.

    Reasons: answer_too_long, not_a_box, no_box, no_box_key, ambiguous_keys, wrong_count, not_finite, out_of_range.
    Numbers are ASCII integers or decimals; order and extent are not judged here. Never raises on any text.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return BoxParse((), "answer_too_long")
    answer = strip_fence(answer)
    points = (
        _TWO_POINTS.fullmatch(" ".join(answer.split())) if answer.startswith(("(", "<|")) else None
    )
    if points:
        if bool(points["open"]) != bool(points["close"]):
            return BoxParse((), "not_a_box")
        return _check([[float(points[i]) for i in (2, 3, 4, 5)]])
    try:
        value = load_json(answer)
    except (ValueError, RecursionError) as err:
        return BoxParse((), "not_finite" if str(err).startswith("not a number") else "not_a_box")
    found = _find_boxes(value)
    return BoxParse((), found) if isinstance(found, str) else _check(found)
