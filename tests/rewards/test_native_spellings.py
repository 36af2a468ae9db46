"""Spellings of released models, each with its source, are read at `native` to the right value; hedges of each earn nothing.

native_spellings.json: family, source (a URL), task, text, answer (the truth as samples hold it), params of the row, `verbatim` (the
text stands in the source; else its form does, with other words and numbers), `other` (another answer in the same dialect; default:
the text with other numbers), `frame` (that of the text; default: rel1000) and `resized` (the picture's size after the processor's
resize; default: unchanged). Answers are pixels of a picture of 1000 x 1000, thousandths.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mmrl.coords import CoordFrame
from mmrl.registry import task_from_spec
from mmrl.rewards.gui_actions import SPACES, parse_action
from mmrl.rewards.reading.calls import one_call
from mmrl.types import ImageSize, RewardContext, Sample, Score

ROWS = json.loads(Path(__file__).with_name("native_spellings.json").read_text(encoding="utf-8"))
IDS = [f"{number}-{row['family']}-{row['task']}" for number, row in enumerate(ROWS)]
_DIGIT = re.compile(r"(?<![\w.])0?([0-9])(?=[0-9])")


def score(row: dict[str, Any], text: str, level: str) -> Score:
    task = task_from_spec(row["task"], {"answer_format": "bare", "answers": level})
    params = {"width": 1000, "height": 1000, **row.get("params", {})}
    video = row["task"] in ("tracking", "temporal_grounding")
    sample = Sample(
        "1",
        row["task"],
        "s",
        "q",
        row["answer"],
        () if video else ("a.png",),
        params=params,
        videos=("a.mp4",) if video else (),
    )
    size = ImageSize((1000, 1000), tuple(row.get("resized", (1000, 1000))))
    ctx = RewardContext(1, 1, CoordFrame(row.get("frame", "rel1000")), (size,))
    return task.score(sample, text, ctx)


def other(row: dict[str, Any]) -> str:
    """Another answer in the same dialect."""
    return str(
        row.get("other") or _DIGIT.sub(lambda found: str((int(found[1]) + 3) % 9 + 1), row["text"])
    )


def test_many_families_with_their_sources() -> None:
    assert len(ROWS) >= 60 and len({row["family"] for row in ROWS}) >= 12
    assert all(row["source"].startswith("https://") for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_a_released_models_spelling_is_read_to_its_value(row: dict[str, Any]) -> None:
    found = score(row, row["text"], "native")
    assert found.parsed and found.parts["accuracy"] == pytest.approx(1), (
        found.reason,
        dict(found.detail),
    )
    wrong = score(row, other(row), "native")
    assert wrong.parts["accuracy"] < 0.9, ("another answer is another value", other(row))


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_two_answers_are_none(row: dict[str, Any]) -> None:
    """One call, one number, one letter: the right answer beside another one earns nothing at strict and native."""
    lists = row["task"] in ("detection", "temporal_grounding", "counting", "tracking")
    for between in (" or ", "\n", " and "):
        texts = [row["text"] + between + other(row), other(row) + between + row["text"]]
        # what stands before the thoughts is no answer
        for text in texts[:1] if "<think>" in row["text"] else texts:
            for level in ("strict", "native"):
                found = score(row, text, level)
                # a list of two is an answer where lists are asked for, no better
                limit = 0.75 if lists and found.parsed else 0.0
                assert found.parts["accuracy"] <= limit, (
                    level,
                    text,
                    found.reason,
                    dict(found.detail),
                )


@pytest.mark.parametrize("space", sorted(SPACES))
def test_every_name_of_an_action_keeps_its_arguments_in_every_dialect(space: str) -> None:
    """What the bare JSON means, JSON behind words, a tool call and a function call mean, too."""
    values: dict[str, dict[str, Any]] = {
        "point": {"point": [200, 230]},
        "end": {"end": [300, 330]},
        "text": {"text": "hello world"},
        "app": {"app": "Clock"},
        "direction": {"direction": "left"},
        "keys": {"keys": "ctrl+c"},
    }
    for name, (arguments, others) in SPACES[space].items():
        told = {key: value for argument in arguments for key, value in values[argument].items()}
        for spelt in (name, *others):
            bare = json.dumps({"action": spelt, **told})
            meant = parse_action(bare, space).action
            assert meant is not None, bare
            tool = {"name": "mobile_use", "arguments": {"action": spelt, **told}}
            given = ", ".join(f"{key}={value!r}" for key, value in told.items())
            camel = "".join(part.capitalize() for part in spelt.split("_"))
            for text in (
                f"I do it. {bare}",
                bare.replace('"action"', '"action_type"') + " is next.",
                f"<tool_call>{json.dumps(tool)}</tool_call>",
                f"Thought: so.\nAction: {spelt}({given})",
                f"<action>{camel}({given})</action>",
            ):
                read = one_call(text, space)
                assert read is not None and parse_action(read, space).action == meant, text
