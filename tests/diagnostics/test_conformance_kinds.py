"""`mmrl tasks check` on answers that are no boxes: points, clicks, texts without pictures, presets that add up, votes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from mmrl.cli.main import app
from mmrl.diagnostics.conformance import check_task
from mmrl.errors import ConfigError
from mmrl.registry import BUILT_IN
from mmrl.tasks.scenes import make_scenes
from tests.diagnostics.test_conformance import failed, problems
from tests.kits.engine_kit import tiny_folder

pytestmark = pytest.mark.slow  # whole checks of several tasks

# Tasks without boxes: a point in the frame of the prompt, a click on a box, and a text about no picture at all.
OTHERS = '''
import json
from pathlib import Path
from mmrl import Sample, Score
from mmrl.coords import from_orig, to_orig
from mmrl.tasks.base import AnswerError, AnswerTask, picture_size
from mmrl.rewards.parsing import parse_boxes


class Pointing(AnswerTask):
    """Points in original pixels; the accuracy falls with the distance, so that rounding costs something."""
    name, ask, shape, metric_names = "pointing", "Point at {question}, {frame}.", "[x, y]", ("correct",)
    own_params = {"shift": 0.0, "scale": 1.0}
    def factories(self):
        return {"accuracy": lambda mode: self.reward, "format": self.format_factory()}
    def check_answer(self, value, frame, sizes, params): return value
    def truth(self, sample): return sample.answer
    def reward(self, predicted, sample, ctx):
        far = max(abs(a - b) for a, b in zip(predicted.value, self.truth(sample)))
        return max(0.0, 1.0 - far / 5)
    def parse(self, answer, sample, ctx):
        try:
            x, y = json.loads(answer)
            size = picture_size(sample, ctx)
            point = to_orig((float(x), float(y)), ctx.frame, size.resized_wh, size.orig_wh)
        except (ValueError, TypeError, OverflowError, RecursionError) as err:
            raise AnswerError("no_point") from err
        if not all(abs(v) < 1e9 for v in point): raise AnswerError("no_point")
        return list(point)
    def measure(self, value, sample, ctx): return {"correct": float(value == self.truth(sample))}
    def describe(self, value, sample, ctx):
        return {"pred_points": [value] if value else [], "gold_points": [list(self.truth(sample))]}
    def spell(self, point, sample, ctx):
        size = picture_size(sample, ctx)
        x, y = from_orig(point, ctx.frame, size.resized_wh, size.orig_wh)
        places = 3 if ctx.frame.value == "rel1" else 0
        return f"[{round(x, places):g}, {round(y, places):g}]"
    def gold_answer(self, sample, ctx):
        return self.spell([v + self.settings["shift"] for v in self.truth(sample)], sample, ctx)
    def wrong_answer(self, sample, ctx): return self.spell([v + 40 for v in self.truth(sample)], sample, ctx)
    def example_data(self, folder):
        from PIL import Image
        Path(folder).mkdir(parents=True, exist_ok=True)
        rows = []
        for n in range(3):
            Image.new("RGB", (190, 127), (90, 120, 90)).save(f"{folder}/{n}.png")
            rows.append({"id": str(n), "image": f"{n}.png", "question": "it", "answer": [30.0 + 31 * n, 20.0 + 17 * n]})
        Path(folder, "data.jsonl").write_text("".join(json.dumps(r) + "\\n" for r in rows))
        return f"{folder}/data.jsonl"
    def load(self, path):
        self.skipped = {"other split": 2}
        rows = [json.loads(x) for x in Path(path).read_text().splitlines()]
        return [Sample(r["id"], self.name, "s", r["question"], r["answer"], (f"{Path(path).parent}/{r['image']}",)) for r in rows]


class Clicking(Pointing):
    """The truth is a box; the middle of it is the answer."""
    name = "clicking"
    def truth(self, sample): return [sample.answer[0] + 25, sample.answer[1] + 25]
    def describe(self, value, sample, ctx):
        x, y = sample.answer
        return {"pred_points": [value] if value else [], "gold_boxes": [[x, y, x + 50, y + 50]]}


class Saying(Pointing):
    """A word about nothing."""
    name, ask, shape = "saying", "{question}", "a word"
    presets = {"sum": {"weights": {"accuracy": 1.0, "format": 1.0}, "normalise": False}}
    def reward(self, predicted, sample, ctx): return self.settings["scale"] * float(predicted.value == sample.answer)
    def parse(self, answer, sample, ctx):
        if not answer.isalpha(): raise AnswerError("no_word")
        return answer
    def measure(self, value, sample, ctx): return {"correct": float(value == sample.answer)}
    def describe(self, value, sample, ctx): return {"gold_text": sample.answer, **({"pred_text": value} if value else {})}
    def gold_answer(self, sample, ctx): return sample.answer
    def wrong_answer(self, sample, ctx): return "wrong"
    def example_data(self, folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        return str(Path(folder))
    def load(self, path): return [Sample(str(n), self.name, "s", f"Say right{n}", "right" + "abc"[n]) for n in range(3)]


class Voting(Saying):
    """The majority of a group is right; `bad` pays failures, which must not be."""
    name, own_params = "voting", {**Saying.own_params, "bad": False}
    in_group = True
    def score_in_group(self, sample, scores, index):
        if self.settings["bad"]: return Score.combine({"vote": 0.5}, {"vote": 1.0}, parsed=True)
        return scores[index]
'''


@pytest.fixture(scope="module")
def tiny() -> str:
    return tiny_folder()


@pytest.fixture
def others(tmp_path: Path) -> Path:
    path = tmp_path / "others.py"
    path.write_text(OTHERS, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["Pointing", "Clicking"])
def test_points_are_judged_by_the_grid_of_the_frame_like_boxes(
    name: str, others: Path, tiny: str, tmp_path: Path
) -> None:
    result = check_task(f"{others}:{name}", model=tiny, out=tmp_path / "out")
    assert result.ok, [f for f in result.findings if not f.ok]
    assert (
        result.rounds and result.lowest_gold["abs_orig"] == 1 and result.lowest_gold["rel1"] < 0.999
    ), "rounding cost something"
    assert result.skipped == {"other split": 2}
    for color in ((0, 170, 60), (245, 130, 0)):
        with Image.open(result.pictures[0]) as picture:
            upper = picture.convert("RGB").crop((12, 8, 460, 300))
        assert color in {c for _, c in upper.getcolors(1 << 24) or []}, "a cross on the picture"


def test_a_point_further_off_than_rounding_is_no_gold(
    others: Path, tiny: str, tmp_path: Path
) -> None:
    result = check_task(
        f"{others}:Pointing", model=tiny, params={"shift": 2.0}, out=tmp_path / "out", limit=2
    )
    assert "gold scores 1" in failed(result) and "frame abs_orig" in problems(
        result, "gold scores 1"
    )


def test_texts_without_pictures_are_checked_and_drawn_and_get_no_tolerance(
    others: Path, tiny: str, tmp_path: Path
) -> None:
    result = check_task(f"{others}:Saying", model=tiny, out=tmp_path / "out")
    assert result.ok and not result.rounds and len(result.pictures) == 3, [
        f for f in result.findings if not f.ok
    ]
    with Image.open(result.pictures[0]) as picture:
        seen = {c for _, c in picture.convert("RGB").getcolors(1 << 24) or []}
    assert {(0, 170, 60), (245, 130, 0)} <= seen, "gold and wrong text in their colours"
    low = check_task(f"{others}:Saying", model=tiny, params={"scale": 0.9}, out=tmp_path / "low")
    assert failed(low) == {"gold scores 1"}, "0.9 is enough for rounded boxes only"


def test_a_preset_that_adds_parts_up_is_held_to_its_own_sum(
    others: Path, tiny: str, tmp_path: Path
) -> None:
    both = check_task(
        f"{others}:Saying", model=tiny, params={"preset": "sum"}, out=tmp_path / "sum"
    )
    assert both.ok and both.lowest_gold["rel1"] == 2
    half = check_task(
        f"{others}:Saying",
        model=tiny,
        params={"preset": "sum", "scale": 0.5},
        out=tmp_path / "half",
    )
    assert failed(half) == {"gold scores 1"}, "1.5 of 2 is not gold"


def test_scores_of_a_group_are_checked_where_a_task_has_them(
    others: Path, tiny: str, tmp_path: Path
) -> None:
    assert check_task(f"{others}:Voting", model=tiny, out=tmp_path / "good").ok
    bad = check_task(f"{others}:Voting", model=tiny, params={"bad": True}, out=tmp_path / "bad")
    assert failed(bad) == {"groups are scored alike"} and "could not be parsed" in problems(
        bad, "groups are scored alike"
    )


def test_the_list_shows_what_each_task_is(monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(app, ["tasks", "list"])
    for words in (
        "grounding",
        "Find one object.",
        "answer: [x1, y1, x2, y2]; headline: iou; presets: v_triune",
    ):
        assert words in done.output
    assert "Beside the parameters" not in done.output
    monkeypatch.setitem(BUILT_IN, "lost", "mmrl.tasks.nowhere:Lost")
    done = CliRunner().invoke(app, ["tasks", "list"])
    assert (
        done.exit_code == 1
        and "cannot be imported: ModuleNotFoundError" in done.output
        and "Find one object." in done.output
    )


def test_the_command_takes_a_preset(tiny: str, tmp_path: Path) -> None:
    out = ["--model", tiny, "--out", str(tmp_path / "out"), "--limit", "2"]
    good = CliRunner().invoke(
        app, ["tasks", "check", "grounding", "--preset", "perception_r1", *out]
    )
    assert good.exit_code == 0, good.output
    bad = CliRunner().invoke(
        app, ["tasks", "check", "grounding", "--preset", "perception_r2", *out]
    )
    assert isinstance(bad.exception, ConfigError) and "Did you mean 'perception_r1'" in str(
        bad.exception
    )


def test_rejected_rows_are_shown_with_their_reasons(tmp_path: Path) -> None:
    good = Path(make_scenes(tmp_path, count=2, seed=1))
    broken = json.loads(good.read_text(encoding="utf-8").splitlines()[0]) | {
        "id": "gone",
        "image": "gone.png",
    }
    (tmp_path / "rows.jsonl").write_text(
        json.dumps(broken) + "\n" + good.read_text(encoding="utf-8"), encoding="utf-8"
    )
    result = check_task(
        "grounding",
        str(tmp_path / "rows.jsonl"),
        params={"reader": {"on_error": "record"}},
        out=str(tmp_path / "out"),
    )
    assert (result.samples, result.rejected) == (2, 1)
    assert "row 1" in result.rejected_shown[0] and "gone.png" in result.rejected_shown[0]
