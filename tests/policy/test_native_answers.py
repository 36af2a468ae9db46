"""What families say of their checkpoints' own answers: each with a source or a reason, and read to its value in its frame alone.

The spellings, their sources and values stand in tests/rewards/native_spellings.json too, written down there from the sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from typer.testing import CliRunner

from mmrl.cli.main import app
from mmrl.config import ModelConfig
from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError
from mmrl.policy.families import BUILT_IN
from mmrl.policy.families.native import KINDS, NativeAnswer, native_answers, no_source
from mmrl.policy.loading import template_for
from mmrl.registry import task_from_spec
from mmrl.types import ImageSize, RewardContext, Sample
from tests.rewards.test_native_spellings import ROWS

TASKS = {"grounding": "grounding", "pointing": "gui_grounding", "gui": "gui_grounding"}
TOLD = [
    (family, kind, answer)
    for family in BUILT_IN
    for kind, answer in family.answers.items()
    if answer.frame is not None
]
IDS = [f"{family.name}-{kind}" for family, kind, _ in TOLD]
WIDTH, HEIGHT = 3000, 1500


def stretched(values: Any) -> Any:
    """A truth of a picture of 1000 x 1000 in one of WIDTH x HEIGHT."""
    if isinstance(values, Mapping):
        return {key: stretched(value) if key == "point" else value for key, value in values.items()}
    return [v * (HEIGHT if i % 2 else WIDTH) / 1000 for i, v in enumerate(values)]


def accuracy(row: dict[str, Any], text: str, frame: CoordFrame) -> float:
    """Of `text` for the truth of `row`, read in `frame`."""
    task = task_from_spec(row["task"], {"answer_format": "bare", "answers": "native"})
    params = {"width": WIDTH, "height": HEIGHT, **row.get("params", {})}
    sample = Sample("1", row["task"], "s", "q", stretched(row["answer"]), ("a.png",), params=params)
    size = ImageSize((WIDTH, HEIGHT), tuple(row.get("resized", (1500, 750))))
    return task.score(sample, text, RewardContext(1, 1, frame, (size,))).parts["accuracy"]


@pytest.mark.parametrize("family", BUILT_IN, ids=lambda family: family.name)
def test_every_family_says_all_kinds_and_contradicts_itself_nowhere(family: Any) -> None:
    assert tuple(family.answers) == KINDS
    assert all(answer.source or len(answer.missing) > 20 for answer in family.answers.values())
    # the frame of its prompts is that of boxes; without one there is no source of boxes
    assert family.answers["grounding"].frame is family.frame
    with pytest.raises(TypeError):
        family.answers["gui"] = no_source("nowhere")


@pytest.mark.parametrize(("family", "kind", "answer"), TOLD, ids=IDS)
def test_an_example_is_read_to_its_value_in_its_frame_and_in_no_other(
    family: Any, kind: str, answer: NativeAnswer
) -> None:
    rows = [row for row in ROWS if (row["text"], row["source"]) == (answer.example, answer.source)]
    assert TASKS[kind] in {row["task"] for row in rows}
    for row in rows:
        assert row.get("frame", "rel1000") == answer.frame
        assert accuracy(row, answer.example, answer.frame) == pytest.approx(1)
        assert all(
            accuracy(row, answer.example, frame) < 0.9
            for frame in CoordFrame
            if frame is not answer.frame
        )


def test_most_families_have_a_source_and_the_others_are_named() -> None:
    """A source that is found is written down, not only a reason deleted."""
    without = {
        (family.name, kind)
        for family in BUILT_IN
        for kind, answer in family.answers.items()
        if answer.missing
    }
    silent = {name for name, _ in without if all((name, kind) in without for kind in KINDS)}
    assert silent == {"gemma3", "idefics3", "llava_onevision", "aya_vision", "mistral3"}
    assert len(TOLD) + len(without) == len(KINDS) * len(BUILT_IN)


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"example": "[1, 2]", "frame": CoordFrame.REL1},
        {"example": "[1, 2]", "source": "https://a.example"},
        {"frame": CoordFrame.REL1, "source": "https://a.example"},
        {"example": "[1, 2]", "frame": CoordFrame.REL1, "source": "somebody"},
        {
            "example": "[1, 2]",
            "frame": CoordFrame.REL1,
            "source": "https://a.example",
            "missing": "x",
        },
        {"example": "[1, 2]", "missing": "nothing was found"},
    ],
)
def test_half_an_answer_is_refused(told: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected a NativeAnswer"):
        NativeAnswer(**told)
    with pytest.raises(TypeError):
        native_answers(grounding=no_source("everywhere"), pointing=no_source("everywhere"))  # type: ignore[call-arg]


def test_a_frame_of_clicks_alone_is_told_and_not_taken_for_that_of_boxes() -> None:
    """InternVL's prompts keep the frame of boxes; SmolVLM's error names what is known of its fine-tune."""
    assert template_for("internvl", ModelConfig()).frame is CoordFrame.REL1000
    with pytest.raises(ConfigError, match=r"gui answers of Smol2Operator.* are in rel1"):
        template_for("smolvlm", ModelConfig())
    with pytest.raises(ConfigError, match=r"expected model\.frame") as refused:
        template_for("gemma3", ModelConfig())
    assert "answers of" not in str(refused.value)
    listed = CliRunner().invoke(app, ["families", "list"]).output
    assert listed.count("gui: frame rel1") == 2 and "grounding: frame" not in listed
