"""The task zoom and its visual tools: what a look at the whole does not tell, what calls show, how templates write tools."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError
from mmrl.policy.tool_messages import with_tools, without_tool_role
from mmrl.rollout.episodes import begin, play_scripted
from mmrl.task import Template
from mmrl.tasks.tool_calls import BadCall, ToolCall, read_call
from mmrl.tasks.visual_tools import PictureTools, described, fitted
from mmrl.tasks.zoom import Zoom
from mmrl.tasks.zoom_pictures import SIGNS, STRIPES, draw_signs, make_zoom_pictures
from mmrl.types import ImageSize, Sample, StopReason, Turn
from tests.kits.engine_kit import policy

TEMPLATE = Template("", CoordFrame.ABS_RESIZED)
SHOWN = ImageSize((112, 112), (112, 112))


def samples(folder: Path, count: int = 8, **options: Any) -> list[Sample]:
    return list(Zoom().load(make_zoom_pictures(folder, count, 3, **options)))


def turn(text: str) -> Turn:
    return Turn((1,), text, (0.0,), StopReason.EOS)


def call(*box: float) -> str:
    said = {"name": "zoom", "arguments": {"bbox_2d": list(box)}}
    return f"<tool_call>\n{json.dumps(said)}\n</tool_call>"


def test_the_whole_picture_is_the_same_for_every_answer_and_the_crop_is_not() -> None:
    wholes, crops = set(), set()
    for mark in STRIPES:
        pixels, boxes = draw_signs(np.random.default_rng(5), [("red", mark), ("blue", "white")])
        # torch's own mean of 4 x 4 pixels, too
        mean = torch.nn.functional.avg_pool2d(
            torch.tensor(pixels).permute(2, 0, 1).float()[None], 4
        )
        wholes.add((fitted(pixels, 112).tobytes(), mean.numpy().tobytes()))
        x1, y1, x2, y2 = boxes[0]
        crops.add(fitted(pixels[y1:y2, x1:x2], 72).tobytes())
    assert len(wholes) == 1 and len(crops) == len(STRIPES)


def test_pictures_of_other_seeds_are_others_and_rows_depend_on_seed_and_place_alone(
    tmp_path: Path,
) -> None:
    files = {}
    for name, count, seed in (("a", 3, 1), ("b", 2, 1), ("c", 3, 2)):
        path = Path(make_zoom_pictures(tmp_path / name, count, seed))
        files[name] = [p.read_bytes() for p in sorted((path.parent / "images").iterdir())]
    assert files["a"][:2] == files["b"] and not set(files["a"]) & set(files["c"])
    with pytest.raises(ConfigError, match="found count=1, size=500"):
        make_zoom_pictures(tmp_path / "d", 1, 1, size=500)


@pytest.mark.parametrize(
    ("calls", "begins"), [("function", "<function=zoom>"), ("arg_key", "zoom\n<arg_key>bbox_2d")]
)
def test_the_scripted_player_calls_as_the_models_template_asks(
    calls: Any, begins: str, tmp_path: Path
) -> None:
    sample = samples(tmp_path)[0]
    said = []
    for template in (TEMPLATE, replace(TEMPLATE, calls=calls)):
        environment = Zoom(view=112).environment(template)
        environment.reset(sample, 0)
        environment.shown([SHOWN])
        said.append(environment.scripted(np.random.default_rng(0)))
    assert begins in str(said[1]) and begins not in str(said[0])
    assert read_call(str(said[0])) == read_call(str(said[1]), described(["zoom"]))
    assert environment.step(turn(str(said[1]))).info["found"] == 1.0


def test_a_zoom_shows_the_region_of_the_file(tmp_path: Path) -> None:
    sample = samples(tmp_path)[0]
    environment = Zoom(view=112).environment(TEMPLATE)
    first = environment.reset(sample, 0)
    assert first.images[0].shape == (112, 112, 3) and first.tools == described(["zoom"])
    environment.shown([SHOWN])
    said = environment.scripted(np.random.default_rng(0))
    assert said is not None
    outcome = environment.step(turn(said))
    assert outcome.observation is not None and outcome.info["found"] == 1.0
    # PIL's own crop and resize of the file, by the box that was written
    asked = read_call(said)
    assert asked is not None
    box = tuple(4 * v for v in asked.arguments["bbox_2d"])
    with Image.open(sample.images[0]) as picture:
        expected = picture.crop(box)
    (seen,) = outcome.observation.images
    longer = max(expected.size)
    side = tuple(round(v * 112 / longer) for v in expected.size)
    np.testing.assert_array_equal(
        seen,
        np.asarray(
            expected
            if longer == 112
            else expected.reduce(longer // 112)
            if longer % 112 == 0
            else expected.resize(side, Image.Resampling.BOX)
        ),
    )
    (mark,) = outcome.marks
    assert mark.image == 0 and mark.at == tuple(v / 4 for v in box)
    answer = environment.scripted(np.random.default_rng(0))
    assert answer == f"<answer>{sample.answer}</answer>"
    last = environment.step(turn(answer))
    assert last.terminated and last.reward == last.info["correct"] == last.info["looked"] == 1.0


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("<tool_call>no call</tool_call>", "as JSON in the tool call"),
        (call(1, 2, 3, 40) * 2, "expected one tool call in a turn, found 2"),
        ('<tool_call>{"name": "shell", "arguments": {}}</tool_call>', "expected a call of zoom"),
        # told without what the chat template marks pictures with
        ('<tool_call>{"name": "<|image_pad|>", "arguments": {}}</tool_call>', "'< |image_pad|>'"),
        (call(50, 50, 40, 60), "x1 < x2"),
        (call(500, 500, 600, 600), "inside the picture"),
        ('<tool_call>{"name": "zoom", "arguments": {"bbox_2d": [0, 0, 1e400, 5]}}', "bbox_2d"),
    ],
)
def test_a_call_that_cannot_be_followed_is_told_why(said: str, why: str, tmp_path: Path) -> None:
    environment = Zoom().environment(TEMPLATE)
    environment.reset(samples(tmp_path, 1)[0], 0)
    environment.shown([SHOWN])
    outcome = environment.step(turn(said))
    assert outcome.observation is not None and not outcome.parsed and not outcome.observation.images
    (content,) = outcome.observation.messages[0]["content"]
    assert why in content["text"] and outcome.info["bad_calls"] == 1.0


def test_words_that_are_no_answer_end_with_nothing(tmp_path: Path) -> None:
    environment = Zoom().environment(TEMPLATE)
    environment.reset(samples(tmp_path, 1)[0], 0)
    environment.shown([SHOWN])
    outcome = environment.step(turn("cyan purple orange white"))
    assert outcome.terminated and outcome.reward == 0.0 and not outcome.parsed


def test_rotate_and_mark_show_the_whole_picture_and_leave_the_original() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    kept, size = pixels.copy(), ImageSize((60, 40), (60, 40))
    tools = PictureTools(pixels, ("rotate", "mark"), 60)
    turned = tools.use(ToolCall("rotate", {"degrees": 90}), CoordFrame.ABS_ORIG, size)
    # clockwise, as PIL calls 270
    with Image.fromarray(pixels) as picture:
        np.testing.assert_array_equal(
            turned, np.asarray(picture.transpose(Image.Transpose.ROTATE_270))
        )
    marked = tools.use(ToolCall("mark", {"bbox_2d": [10, 10, 30, 30]}), CoordFrame.ABS_ORIG, size)
    assert (marked != kept).any(axis=2).sum() == 4 * 20 - 4
    np.testing.assert_array_equal(tools.pixels, kept)
    with pytest.raises(BadCall, match="expected a call of rotate, mark"):
        tools.use(ToolCall("zoom", {"bbox_2d": [10, 10, 30, 30]}), CoordFrame.ABS_ORIG, size)


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"tool": []}, "unknown parameter 'tool'"),
        ({"tools": ["zom"]}, "expected tools of zoom, rotate, mark, read, measure, found 'zom'"),
        ({"tools": [["zoom"]]}, "expected tools of"),
        ({"max_turns": 0}, "zoom.max_turns"),
        ({"read_limit_s": 0}, "zoom.read_limit_s"),
        ({"at_once": 2}, "zoom.at_once"),
        ({"prompt": "?"}, "zoom.prompt"),
    ],
)
def test_wrong_settings_are_refused(params: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Zoom(**params)


def test_a_wrong_row_is_refused(tmp_path: Path) -> None:
    row = {"image": "a.png", "question": "?", "answer": "x", "options": ["y", "z"]}
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(row), encoding="utf-8")
    with pytest.raises(DataError, match=r"data\.jsonl:1: expected options .* the answer 'x'"):
        list(Zoom().load(str(path)))


def test_tools_are_written_by_a_template_that_has_a_place_and_into_the_system_text_otherwise() -> (
    None
):
    tools, messages = described(["zoom"]), [{"role": "user", "content": "red sign"}]
    model = policy()
    plain = model.encoder.prompt_of(messages, [], "a", tools)
    text = model.processor.tokenizer.decode(plain.ids_P)
    assert text.startswith("<|im_start|>system\n# Tools") and '"name": "zoom"' in text
    assert with_tools([{"role": "system", "content": "Be brief."}], tools)[0]["content"].startswith(
        "Be brief.\n\n# Tools\n\n"
    )
    answered = without_tool_role({"role": "tool", "content": [{"type": "image"}]})
    assert [answered["role"], *(part["type"] for part in answered["content"])] == [
        "user",
        "text",
        "image",
        "text",
    ]
    before = model.processor.chat_template
    found = []
    # the second one asks for calls as Mistral's template does, which are not read
    for form in ("<tool_call>", "[TOOL_CALLS]"):
        own = (
            f"{{%- if tools %}}own words: {{{{ tools[0].function.name }}}} {form}\n{{% endif -%}}\n"
        )
        try:
            model.processor.chat_template = own + before
            model.encoder.__dict__.pop("_shows_tools", None)
            shown = model.encoder.prompt_of(messages, [], "a", tools)
        finally:
            model.processor.chat_template = before
            model.encoder.__dict__.pop("_shows_tools", None)
        found.append(model.processor.tokenizer.decode(shown.ids_P))
    assert found[0].startswith("own words: zoom <tool_call>\n<|im_start|>user")
    assert "# Tools" not in found[0] and found[1] == text


def test_a_scripted_player_is_shown_what_a_policy_would_be(tmp_path: Path) -> None:
    """Looks and answers, or guesses; its turns are those of a rollout, with the tool's picture behind the first."""
    rows, model = samples(tmp_path, 12), policy()
    task = Zoom(view=112, at_once=0.5)
    episodes = [begin(model, row, task, 1, (0, i))[0] for i, row in enumerate(rows)]
    rollouts = play_scripted(model, episodes, [(0, i) for i in range(len(rows))])
    assert all(r.error is None for r in rollouts)
    looked = [r for r in rollouts if len(r.turns) == 2]
    assert 0 < len(looked) < len(rollouts)
    for rollout in looked:
        assert rollout.score is not None and rollout.score.value == 1.0
        first, second = rollout.turns
        assert len(second.prompt.visuals) == 2 and len(first.prompt.visuals) == 1
        assert torch.equal(second.prompt.ids_P[: first.prompt.length], first.prompt.ids_P)
    assert {row.question.split()[0] for row in rows} <= set(SIGNS)
