"""GUI grounding: gold is inside in every frame, edges count, hedging never pays, groups vote without the truth."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError
from mmrl.registry import task_from_spec
from mmrl.rewards.gui import region_votes
from mmrl.task import Template
from mmrl.tasks.gui_grounding import GuiGrounding, spell_inside
from mmrl.types import ImageSize, RewardContext, Sample, Score

SCREEN = ImageSize((1920, 1080), (1288, 728))
FRAMES = list(CoordFrame)
PRESETS = [None, *GuiGrounding.presets]


def sample(box: tuple[float, ...] = (900, 500, 1020, 580), **changes: Any) -> Sample:
    made = Sample(
        "1",
        "gui_grounding",
        "web",
        "press OK",
        list(box),
        ("a.png",),
        params={"width": 1920, "height": 1080},
    )
    return replace(made, **changes)


def context(frame: CoordFrame = CoordFrame.ABS_ORIG, size: ImageSize = SCREEN) -> RewardContext:
    return RewardContext(1, 1, frame, (size,))


def score(
    text: str,
    task: GuiGrounding | None = None,
    frame: CoordFrame = CoordFrame.ABS_ORIG,
    **changes: Any,
) -> Score:
    return (task or GuiGrounding()).score(
        sample(**changes), f"<answer>{text}</answer>", context(frame)
    )


@pytest.mark.parametrize(
    ("text", "frame", "hit"),
    [
        ("[960, 540]", CoordFrame.ABS_ORIG, 1),
        ("[500, 500]", CoordFrame.REL1000, 1),
        ("[0.5, 0.5]", CoordFrame.REL1, 1),
        ("[644, 364]", CoordFrame.ABS_RESIZED, 1),
        ("[500, 500]", CoordFrame.ABS_ORIG, 0),
        ("[960, 540]", CoordFrame.REL1000, 0),
        ("[900, 500]", CoordFrame.ABS_ORIG, 1),
        ("[1020, 580]", CoordFrame.ABS_ORIG, 1),
        ("[899, 540]", CoordFrame.ABS_ORIG, 0),
        ("[1021, 540]", CoordFrame.ABS_ORIG, 0),
        ("[960, 581]", CoordFrame.ABS_ORIG, 0),
        ("[850, 450, 1070, 630]", CoordFrame.ABS_ORIG, 1),
        ("[0, 0, 1000, 600]", CoordFrame.ABS_ORIG, 0),
    ],
)
def test_a_point_is_right_in_the_box_of_the_declared_frame(
    text: str, frame: CoordFrame, hit: float
) -> None:
    found = score(text, frame=frame)
    assert found.parsed and found.parts == {"accuracy": hit, "format": 1}
    assert (
        found.metrics["inside"] == found.metrics["correct"] == hit
        and 0 <= found.metrics["closeness"] <= 1
    )


def test_the_picture_shows_where_the_answer_was_read() -> None:
    detail = score("[480, 480, 520, 520]", frame=CoordFrame.REL1000).detail
    assert detail["pred_points"] == [[960, 540]] and detail["gold_points"] == [[960, 540]]
    assert detail["pred_boxes"] == [pytest.approx([921.6, 518.4, 998.4, 561.6])]
    assert score("[480, 480]").detail["pred_boxes"] == [] and json.dumps(detail)
    failed = score("nothing")
    assert (
        failed.detail["gold_boxes"] == [[900, 500, 1020, 580]]
        and failed.detail["pred_points"] == []
    )


@pytest.mark.parametrize(
    "text",
    [
        "[[960, 540], [10, 10]]",
        "[960, 540] [10, 10]",
        "[960, 540] or so",
        "960, 540",
        "",
        "[]",
        '{"point": [960, 540], "point": [1, 1]}',
        '[{"point_2d": [960, 540]}, {"point_2d": [1, 1]}]',
    ],
)
def test_several_points_or_words_beside_one_earn_nothing(text: str) -> None:
    found = score(text)
    assert found.value == 0 and not found.parsed and found.reason
    assert set(found.metrics.values()) == {0.0} and set(found.parts.values()) == {0.0}


def test_two_answers_and_thoughts_earn_nothing() -> None:
    task = GuiGrounding()
    answer = "<answer>[960, 540]</answer>"
    for text in (answer + answer, f"<think>{answer}</think>", "[960, 540]"):
        assert task.score(sample(), text, context()).value == 0


boxes = st.tuples(
    st.integers(0, 1900), st.integers(0, 1060), st.integers(1, 800), st.integers(1, 500)
).map(lambda b: (b[0], b[1], min(1920, b[0] + b[2]), min(1080, b[1] + b[3])))


@settings(deadline=None, max_examples=80)
@given(
    boxes,
    st.sampled_from(FRAMES),
    st.sampled_from(PRESETS),
    st.sampled_from([(112, 84), (1288, 728), (3836, 2156)]),
)
def test_gold_earns_everything_and_wrong_nothing(
    box: tuple[int, ...], frame: CoordFrame, preset: str | None, resized: tuple[int, int]
) -> None:
    task = GuiGrounding(preset=preset)
    row, ctx = sample(box), context(frame, ImageSize((1920, 1080), resized))
    gold, wrong = (
        task.score(row, task.gold(row, ctx), ctx),
        task.score(row, task.wrong(row, ctx), ctx),
    )
    assert gold.parsed and wrong.parsed and wrong.parts["accuracy"] == 0 == wrong.metrics["inside"]
    # a box of whole units: the grid costs something, and the paper does not make up for it
    if preset == "gui_g2":
        assert gold.parts["format"] == 1 and gold.parts["accuracy"] > 0
    elif preset == "gui_r1":
        # whole pixels of the resized picture: a thinner element cannot be pointed at in its form
        whole = "." not in task.gold(row, ctx).partition("<answer>")[2]
        assert gold.parts["accuracy"] == 1 and gold.parts["format"] == float(whole)
    else:
        assert (
            gold.parts["accuracy"] == 1
            and gold.value == pytest.approx(task.value_range[1])
            and gold.metrics["inside"] == 1
        )


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("reply", ["point", "box"])
def test_the_gaussian_of_the_rounded_truth_is_one(frame: CoordFrame, reply: str) -> None:
    task, row = GuiGrounding(mode="gaussian", reply=reply), sample((900, 500, 911, 507))
    ctx = context(frame, ImageSize((1920, 1080), (280, 168)))
    assert task.score(row, task.gold(row, ctx), ctx).value == pytest.approx(1)
    assert reply == "box" or task.gold_answer(row, ctx).count(",") == 1
    exact = GuiGrounding(mode="gaussian", reply=reply, reachable=False)
    assert exact.score(row, exact.gold(row, ctx), ctx).value <= 1


@given(boxes, st.sampled_from(FRAMES))
def test_spelled_points_use_whole_units_where_one_fits(
    box: tuple[int, ...], frame: CoordFrame
) -> None:
    text = spell_inside(box, frame, SCREEN)
    wide = min(
        (box[2] - box[0]) * SCREEN.resized_wh[0] / 1920,
        (box[3] - box[1]) * SCREEN.resized_wh[1] / 1080,
    )
    if frame is CoordFrame.ABS_ORIG or (frame is CoordFrame.ABS_RESIZED and wide > 1):
        assert "." not in text
    if frame is CoordFrame.REL1:
        assert min(len(part.partition(".")[2].rstrip("]")) for part in text.split(",")) >= 3


def test_a_thin_element_gets_the_decimals_it_needs() -> None:
    thin, frame = (100.2, 50.0, 100.9, 1000.0), CoordFrame.REL1000  # 52.19 .. 52.55 of 1000
    text = spell_inside(thin, frame, SCREEN)
    assert text == "[52.4, 486.1]"
    found = score(text, frame=frame, answer=list(thin))
    assert found.metrics["inside"] == 1


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=200), st.sampled_from(FRAMES), st.sampled_from(PRESETS))
def test_any_text_gets_a_bounded_score(text: str, frame: CoordFrame, preset: str | None) -> None:
    task = GuiGrounding(preset=preset)
    for body in (text, f"<answer>{text}</answer>", f"<think></think><answer>{text}</answer>"):
        found = task.score(sample(), body, context(frame))
        assert task.value_range[0] <= found.value <= task.value_range[1] and (
            found.parsed or found.reason
        )


# presets and settings


def test_presets_add_up_as_their_papers_do() -> None:
    g2 = GuiGrounding(preset="gui_g2", frame=None)
    perfect = g2.score(sample(), "[900, 500, 1020, 580]", context())
    assert perfect.value == 3 == g2.value_range[1], "point + coverage + format"
    spelled = g2.score(sample(), '{"bbox_2d": [900, 500, 1020, 580]}', context())
    assert spelled.value == 2, "the paper's format is the bare list"
    point = g2.score(sample(), "[960, 540]", context())
    assert point.value == 1, "a point covers nothing and is no box of four numbers"
    shifted = g2.score(sample(), "[960, 500, 1080, 580]", context())
    assert shifted.value == pytest.approx(
        round(2.718281828**-0.5, 3) + round(2.718281828 ** -(60**2 / (8 * 3600)), 3) + 1
    )
    ui, gui = GuiGrounding(preset="ui_r1", frame=None), GuiGrounding(preset="gui_r1", frame=None)
    edge = "<think>hm</think><answer>[{'action': 'click', 'point': [900, 500], 'input_text': 'no input text'}]</answer>"
    assert ui.score(sample(), edge, context()).value == 2 and gui.score(
        sample(), edge, context()
    ).value == pytest.approx(0.2)
    assert gui.score(
        sample(), edge.replace("900, 500", "901, 501"), context()
    ).value == pytest.approx(1)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"reply": "pont"}, "Did you mean 'point'"),
        ({"label_free": "yes"}, "label_free to be true or false"),
        ({"expand": 0}, "expand in pixels"),
        ({"mode": "insde"}, "Did you mean 'inside'"),
        ({"plain": 1}, "plain to be"),
        ({"accuracy": {"alpha": 1}}, "unknown parameter 'alpha'"),
        ({"preset": "gui_rcp"}, "Did you mean 'gui_rcpo'"),
        ({"replay": "box"}, "Did you mean 'reply'"),
    ],
)
def test_wrong_parameters_are_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GuiGrounding(**params)


def test_the_prompt_asks_for_what_is_scored() -> None:
    for reply, words in (("point", "point to click"), ("box", "bounding box")):
        [message] = GuiGrounding(reply=reply).messages(sample(), Template("t", CoordFrame.REL1000))
        text = message["content"][-1]["text"]
        assert (
            words in text
            and '"press OK"' in text
            and "0-1000" in text
            and ("[x, y]" in text) == (reply == "point")
        )
        assert "{" not in text
    own = GuiGrounding(prompt="{question} [x, y]", reply="box")
    assert own.prompt == "{question} [x, y]", "a prompt of one's own is left alone"


def test_rows_are_checked_when_loading(tmp_path: Path) -> None:
    task = task_from_spec("gui_grounding")
    path = Path(task.example_data(str(tmp_path)) or "")
    rows = list(task.load(str(path)))
    assert len(rows) == 12 and {r.params["platform"] for r in rows} == {"mobile", "desktop", "web"}
    row = json.loads(path.read_text().splitlines()[0])
    path.write_text(json.dumps({**row, "answer": [300, 20, 120, 40]}))
    with pytest.raises(DataError, match=r"x1 < x2.*is it \[x, y, width, height\]"):
        list(GuiGrounding().load(str(path)))


def test_screenspot_boxes_with_a_width_beyond_x_are_sizes_not_corners(tmp_path: Path) -> None:
    """[40, 30, 200, 60] is valid as corners too: only the format tells that it reaches to x = 240, y = 90."""
    from PIL import Image

    Image.new("RGB", (400, 300)).save(tmp_path / "a.png")
    (tmp_path / "screenspot_web.json").write_text(
        json.dumps(
            [
                {
                    "img_filename": "a.png",
                    "instruction": "open",
                    "bbox": [40, 30, 200, 60],
                    "data_type": "text",
                    "data_source": "shop",
                }
            ]
        )
    )
    [row] = GuiGrounding().load(str(tmp_path / "screenspot_web.json"))
    assert (
        row.answer == [40, 30, 240, 90]
        and row.params["platform"] == "web"
        and row.params["ui_type"] == "text"
    )
    task, ctx = GuiGrounding(), context(size=ImageSize((400, 300), (400, 300)))
    assert task.score(row, "<answer>[220, 80]</answer>", ctx).metrics["inside"] == 1


# votes of a group


def group_scores(task: GuiGrounding, texts: list[str], row: Sample) -> list[Score]:
    scores = [task.score(row, text, context()) for text in texts]
    return [task.score_in_group(row, scores, index) for index in range(len(scores))]


def test_a_group_votes_without_the_truth() -> None:
    task = GuiGrounding(label_free=True)
    texts = [
        f"<answer>{p}</answer>" for p in ("[100, 100]", "[110, 100]", "[105, 95]", "[960, 540]")
    ] + ["no answer"]
    final = group_scores(task, texts, sample())
    votes = region_votes([(100, 100), (110, 100), (105, 95), (960, 540), None], (1920, 1080))
    assert [s.parts["accuracy"] for s in final] == pytest.approx(votes)
    assert final[0].value > final[3].value, "agreement is paid, not the truth"
    assert final[3].metrics["inside"] == 1 and final[0].metrics["inside"] == 0, (
        "metrics still tell the truth"
    )
    assert final[4].value == 0 and not final[4].parsed
    for one in final:
        assert one.value == pytest.approx(sum(one.weights[k] * v for k, v in one.parts.items()))


def test_votes_do_not_depend_on_the_truth_and_boxes_vote_as_they_are() -> None:
    task, texts = (
        GuiGrounding(preset="gui_rcpo"),
        ["[100, 100, 200, 200]", "[150, 100, 250, 200]", "[900, 500, 1020, 580]"],
    )
    here = [s.value for s in group_scores(task, texts, sample())]
    assert here == [s.value for s in group_scores(task, texts, sample((0, 0, 10, 10)))]
    assert here == pytest.approx([0.75, 0.75, 0.5])


def test_votes_are_asked_for_only_when_set() -> None:
    assert (
        GuiGrounding.in_group is False
        and not GuiGrounding().in_group
        and GuiGrounding(label_free=True).in_group
    )
    rows = [score("[960, 540]"), score("[1, 1]")]
    assert GuiGrounding().score_in_group(sample(), rows, 0) is rows[0]
    copy = pickle.loads(pickle.dumps(GuiGrounding(label_free=True)))
    assert (
        copy.in_group and copy.score(sample(), "<answer>[960, 540]</answer>", context()).value == 1
    )


def test_rows_without_a_truth_can_vote(tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (1920, 1080)).save(tmp_path / "a.png")
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"image": "a.png", "question": "press OK", "answer": None}) + "\n")
    task = GuiGrounding(label_free=True)
    [row] = task.load(str(path))
    assert row.answer is None
    final = group_scores(
        task,
        [f"<answer>{p}</answer>" for p in ("[100, 100]", "[110, 100]", "[960, 540]")] + ["none"],
        row,
    )
    same = group_scores(
        task,
        [f"<answer>{p}</answer>" for p in ("[100, 100]", "[110, 100]", "[960, 540]")] + ["none"],
        sample(),
    )
    assert [s.value for s in final] == [s.value for s in same] and final[0].value > final[
        2
    ].value > 0
    assert all(set(s.metrics.values()) == {0.0} and s.detail["gold_boxes"] == [] for s in final)
    assert not any(str(s.reason).startswith("reward_error") for s in final)
    assert task.benchmark([(row, final[0])], tmp_path) == {}
    for spell in (task.gold, task.wrong):
        with pytest.raises(DataError, match="found null; check label-free data on rows with a box"):
            spell(row, context())
    with pytest.raises(DataError, match="rows without a truth need label_free: true"):
        GuiGrounding().load(str(path))
    gaussian = GuiGrounding(label_free=True, mode="gaussian", reply="box", answer_format="bare")
    assert gaussian.score(row, "[1, 2, 30, 40]", context()).parsed


def test_a_box_that_was_asked_for_has_four_numbers() -> None:
    asked = GuiGrounding(reply="box")
    assert (
        score("[900, 500, 1020, 580]", asked).parts["format"] == 1
        and score("[960, 540]", asked).parts["format"] == 0
    )
    assert (
        score("[960, 540]").parts["format"] == 1
        and score("[900, 500, 1020, 580]").parts["format"] == 1
    )


def test_samples_without_a_size_can_vote() -> None:
    row = replace(sample(), params={})
    final = group_scores(GuiGrounding(label_free=True), ["<answer>[10, 10]</answer>"] * 3, row)
    assert [s.parts["accuracy"] for s in final] == [1, 1, 1]
