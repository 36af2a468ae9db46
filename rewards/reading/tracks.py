"""Tracks as released models write them -> {"boxes": {time: box}}.

    [{"time": 0.0, "bbox_2d": [..], "label": "cat"}, ...]     Qwen3-VL, with or without a fence and prose
    {"0": [{"label": "cat", "bbox_2d": [..]}], ...}           GLM-V
    {"frame3": [..], "frame 4": [..]}   {"t=1.5": [..]}       keys with their unit in front

    python -c "from mmrl.rewards.reading.tracks import track_in; \
      print(track_in('[{\\"time\\": 0.5, \\"bbox_2d\\": [1, 2, 3, 4]}]'))"
"""

from __future__ import annotations

import json
import re
from typing import Any

from mmrl.rewards.parsing import load_json
from mmrl.rewards.reading.blocks import json_block
from mmrl.rewards.reading.places import strip_box_tokens
from mmrl.rewards.reading.words import Unread

__all__ = ["track_in"]

_TIME_KEYS = ("time", "timestamp", "second", "seconds", "t", "frame", "frame_id", "frame_index")
_BOX_KEYS = ("bbox_2d", "bbox", "box")
_KEY = re.compile(
    r"(?:frame|second|sec|time|t)[ _=:#-]{0,2}([0-9]{1,9}(?:\.[0-9]{1,9})?)", re.IGNORECASE
)


def _entry(item: Any) -> tuple[str, Any] | None:
    if not isinstance(item, dict):
        return None
    times, boxes = ([key for key in keys if key in item] for keys in (_TIME_KEYS, _BOX_KEYS))
    if len(times) != 1 or len(boxes) != 1:
        return None
    return str(item[times[0]]), item[boxes[0]]


def _keys(table: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in table.items():
        found = _KEY.fullmatch(key.strip())
        name = found[1] if found else key
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
            value = value[0]  # the one object of a frame (GLM-V)
        if isinstance(value, dict):
            boxes = [k for k in _BOX_KEYS if k in value]
            value = value[boxes[0]] if len(boxes) == 1 else value
        if name in out:
            raise Unread("duplicate_keys")
        out[name] = value
    return out


def track_in(text: str) -> str | None:
    """The track of a text as JSON in the canonical spelling; None without any.

    Raises Unread: several_values, duplicate_keys, hedged.
    """
    block = json_block(strip_box_tokens(text))
    if block is None:
        return None
    try:
        value = load_json(block)
    except (ValueError, RecursionError):
        return block
    if isinstance(value, dict):
        inner = value.get("boxes")
        if isinstance(inner, dict):
            return json.dumps({**value, "boxes": _keys(inner)})
        if isinstance(inner, list) and "time" in value:
            entries = _entries(inner)
            return json.dumps({**value, "boxes": entries}) if entries is not None else block
        return json.dumps(_keys(value)) if "boxes" not in value else block
    entries = _entries(value) if isinstance(value, list) else None
    return block if entries is None else json.dumps({"boxes": entries})


def _entries(items: list[Any]) -> dict[str, Any] | None:
    """{time: box} of a list of objects; None where one has no time or no box."""
    found = [_entry(item) for item in items]
    if not found or any(entry is None for entry in found):
        return None
    table: dict[str, Any] = {}
    for entry in found:
        assert entry is not None
        if entry[0] in table:
            raise Unread("duplicate_keys")
        table[entry[0]] = entry[1]
    return table
