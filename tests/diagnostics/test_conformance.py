"""`mmrl tasks check` passes good tasks, and names exactly what is wrong with bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from mmrl.cli.main import app
from mmrl.config import RunConfig, load_config
from mmrl.coords import CoordFrame
from mmrl.diagnostics._conformance_levels import level_lines
from mmrl.diagnostics.conformance import Conformance, check_task, load_encoder
from mmrl.errors import ConfigError, RegistryError
from mmrl.policy.tiny import TinySpec, build_tiny
from mmrl.tasks.grounding import FRAME_WORDS, Grounding
from mmrl.tasks.scenes import make_scenes

PLUGIN = Path(__file__).parents[1] / "plugin_package" / "shape_counting.py"

# Each class breaks some promises, and the checks named beside it must fail, no other.
BROKEN = '''
import importlib.util, sys, os, random, time
from mmrl import CoordFrame, Sample, Score
from mmrl.tasks.grounding import Grounding

spec = importlib.util.spec_from_file_location("counting_base", os.environ["COUNTING"])
base = importlib.util.module_from_spec(spec)
sys.modules["counting_base"] = base
spec.loader.exec_module(base)


class BadData(base.CountCircles):
    """One id for all, sets as answers, another order every time."""
    name = "bad_data"
    def load(self, path):
        samples = [Sample("same", "t", "s", x.question, {x.answer, x.answer + 1}, x.images) for x in super().load(path)]
        random.SystemRandom().shuffle(samples)
        return samples
    def gold(self, sample, ctx): return f"<answer>{min(sample.answer)}</answer>"
    def wrong(self, sample, ctx): return "<answer>9</answer>"
    def score(self, sample, text, ctx):
        plain = Sample(sample.id, "t", "s", sample.question, min(sample.answer), sample.images)
        return super().score(plain, text, ctx)


class BadReward(base.CountCircles):
    """Credit for the wrong number and for garbage, a total that is not the sum, an error for emoji."""
    name = "bad_reward"
    def score(self, sample, text, ctx):
        if text[:1] > "\\uffff": raise UnicodeError("no emoji please")
        good = super().score(sample, text, ctx)
        if not good.parsed: return Score(0.05, True, "hm", good.parts, good.weights)
        return Score(0.5, True, None, {"accuracy": 0.5, "format": 1.0}, good.weights, good.metrics)


class BadState(base.CountCircles):
    """Needs load() before score(), gives less every time, and sums up by dividing by the number of rows."""
    name, headline = "bad_state", "accuracy"
    def load(self, path):
        self.loaded = super().load(path)
        return self.loaded
    def score(self, sample, text, ctx):
        score = super().score(sample, text, ctx)
        self.calls = getattr(self, "calls", 0) + 1
        known = hasattr(self, "loaded")
        if not score.parsed or known: value = score
        else: value = Score.failure("not_loaded", self.part_names, score.weights)
        return Score(value.value, value.parsed, value.reason, value.parts, value.weights, {"calls": self.calls})
    def summarize(self, rows): return {"mean": sum(r.value for r in rows) / len(rows)}


class BadPrompt(base.CountCircles):
    """Forgets the picture."""
    name = "bad_prompt"
    def messages(self, sample, template): return [{"role": "user", "content": sample.question}]


class WrongFrame(Grounding):
    """Writes pixels of the original picture whatever the prompt asks for."""
    name = "wrong_frame"
    def gold(self, sample, ctx):
        box = ", ".join(str(round(v)) for v in sample.answer)
        return f"<answer>[{box}]</answer>"


class NoSamples(base.CountCircles):
    """Rows where samples are expected."""
    name = "no_samples"
    def load(self, path): return [{"id": "1", "question": "How many?"}]


class Hangs(base.CountCircles):
    """Never comes back from a long text, and dies of an unclosed tag."""
    name = "hangs"
    def score(self, sample, text, ctx):
        if len(text) > 1000: time.sleep(1000)
        if text == "<answer>": os._exit(1)
        return super().score(sample, text, ctx)
'''


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny(TinySpec(), folder)
    return str(folder)


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COUNTING", str(PLUGIN))
    path = tmp_path / "broken.py"
    path.write_text(BROKEN, encoding="utf-8")
    return path


def failed(result: Conformance) -> set[str]:
    return {finding.check for finding in result.findings if not finding.ok}


def problems(result: Conformance, check: str) -> str:
    return " | ".join(
        p for finding in result.findings if finding.check == check for p in finding.problems
    )


@pytest.mark.slow
def test_grounding_keeps_its_contract_and_its_boxes_can_be_seen(tiny: str, tmp_path: Path) -> None:
    result = check_task("grounding", model=tiny, out=tmp_path, limit=12)
    assert result.ok, [f for f in result.findings if not f.ok]
    assert (
        result.samples == 12
        and 0 < result.tokens["min"] <= result.tokens["median"] <= result.tokens["max"]
    )
    assert set(result.lowest_gold) == {"abs_orig", "abs_resized", "rel1000", "rel1"}
    assert result.lowest_gold["abs_orig"] == 1 and min(result.lowest_gold.values()) > 0.95
    assert len(result.pictures) == 12
    with Image.open(result.pictures[0]) as picture:
        colors = {color for _, color in picture.convert("RGB").getcolors(1 << 24) or []}
    assert {(0, 170, 60), (245, 130, 0)} <= colors
    written = json.loads((tmp_path / "conformance.json").read_text(encoding="utf-8"))
    assert written["ok"] and len(written["findings"]) == len(result.findings) >= 16


def test_a_task_without_boxes_passes_too(tiny: str, tmp_path: Path) -> None:
    result = check_task(
        f"{PLUGIN}:CountCircles", model=tiny, params={"question": "Circles?"}, out=tmp_path
    )
    assert result.ok, [f for f in result.findings if not f.ok]


@pytest.mark.check_takes(2)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("BadData", {"ids are unique", "loading is deterministic", "samples survive the log"}),
        (
            "BadReward",
            {
                "gold scores 1",
                "wrong scores 0",
                "garbage scores 0 with a reason",
                "value is the weighted sum",
                "value in [0, 1], nothing raised",
            },
        ),
        (
            "BadState",
            {
                "scores are repeatable",
                "a worker scores the same",
                "summarize takes anything",
                "headline is measured",
            },
        ),
        ("BadPrompt", {"one image item per picture", "prompts encode and fit"}),
    ],
)
def test_broken_promises_are_named_and_no_others(
    name: str, expected: set[str], broken: Path, tiny: str, tmp_path: Path
) -> None:
    result = check_task(f"{broken}:{name}", model=tiny, out=tmp_path / "out", limit=6)
    assert failed(result) == expected
    assert not result.ok
    assert all(
        f.problems and f.fix and f.expected and f.count >= len(f.problems)
        for f in result.findings
        if not f.ok
    )


@pytest.mark.slow
def test_a_gold_answer_in_the_wrong_frame_is_found_in_exactly_the_other_frames(
    broken: Path, tiny: str, tmp_path: Path
) -> None:
    result = check_task(f"{broken}:WrongFrame", model=tiny, out=tmp_path / "out", limit=6)
    assert failed(result) == {"gold scores 1"}
    assert result.lowest_gold["abs_orig"] == 1 and result.lowest_gold["rel1000"] < 0.2
    assert "frame rel1" in problems(result, "gold scores 1")


@pytest.mark.slow
def test_a_reward_that_hangs_or_dies_does_not_take_the_check_along(
    broken: Path, tiny: str, tmp_path: Path
) -> None:
    result = check_task(f"{broken}:Hangs", model=tiny, out=tmp_path / "out", limit=2, timeout_s=2.0)
    assert failed(result) == {"garbage scores 0 with a reason", "value in [0, 1], nothing raised"}
    found = problems(result, "garbage scores 0 with a reason")
    assert "reward_timeout" in found and "stopped after 3 texts" in found
    assert "reward_crash" in problems(result, "value in [0, 1], nothing raised")


def test_what_is_no_sample_is_a_finding_not_a_crash(
    broken: Path, tiny: str, tmp_path: Path
) -> None:
    result = check_task(f"{broken}:NoSamples", model=tiny, out=tmp_path / "out")
    assert "load gave a dict" in problems(result, "samples are frozen and picklable")


def test_unreadable_data_is_a_finding_not_a_crash(tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("no json\n", encoding="utf-8")
    result = check_task("grounding", path, model=tiny, out=tmp_path / "out")
    assert failed(result) == {"data loads"} and "data.jsonl" in problems(result, "data loads")


@pytest.mark.slow
def test_a_picture_that_vanished_is_named_and_the_others_are_checked(
    tiny: str, tmp_path: Path
) -> None:
    data = make_scenes(tmp_path / "scenes", count=4, seed=0)
    cut = tmp_path / "scenes" / "images" / "scene-0-000001.png"
    cut.write_bytes(cut.read_bytes()[:400])
    result = check_task("grounding", data, model=tiny, out=tmp_path / "out")
    assert failed(result) == {"prompts encode and fit"}
    assert "scene-0-000001" in problems(result, "prompts encode and fit")
    assert len(result.pictures) == 3


def test_names_and_models_that_do_not_exist_are_the_users_error(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="Did you mean 'grounding'"):
        check_task("groundin", model=tiny, out=tmp_path)
    with pytest.raises(ConfigError, match="expected --model"):
        check_task("grounding", model=str(tmp_path / "none"), out=tmp_path)


@pytest.mark.slow
def test_the_command_prints_a_table_and_its_status_says_whether_all_is_well(
    broken: Path, tiny: str, tmp_path: Path
) -> None:
    out = ["--model", tiny, "--out", str(tmp_path / "out"), "--limit", "4"]
    good = CliRunner().invoke(app, ["tasks", "check", "grounding", "--param", "mode=dynamic", *out])
    assert (
        good.exit_code == 0 and "gold scores 1" in good.output and "prompt tokens" in good.output
    ), good.output
    assert (
        "native    in a sentence, without <answer>" in good.output
        and "none      in a doubt" in good.output
    ), good.output
    assert json.loads((tmp_path / "out" / "conformance.json").read_text())["spellings"][
        "as asked"
    ] == {"strict": 4}
    bad = CliRunner().invoke(app, ["tasks", "check", f"{broken}:BadPrompt", *out])
    assert bad.exit_code == 1
    assert all(word in bad.output for word in ("failed", "expected", "found", "fix", "image items"))


def test_levels_of_spellings_are_told_apart() -> None:
    read = {
        "as asked": {"strict": 4},
        "in a sentence": {"native": 3, "none": 1},
        "in a doubt": {"none": 4},
    }
    assert list(level_lines(read)) == [
        "strict    as asked",
        "native    in a sentence (3 of 4)",
        "none      in a sentence (1 of 4), in a doubt",
    ]
    assert list(level_lines({})) == []


def coco_file(folder: Path) -> Path:
    """Two pictures with boxes whose wrong answers touch the right ones by rounding: an IoU of 2e-18 and 3e-17."""
    boxes = [((442, 110), [91.46, 11.16, 20.03, 15.46]), ((171, 200), [38.69, 113.8, 42.89, 7.22])]
    for number, (size, _) in enumerate(boxes):
        Image.new("RGB", size).save(folder / f"{number}.png")
    (folder / "instances.json").write_text(
        json.dumps(
            {
                "images": [
                    {"id": n, "file_name": f"{n}.png", "width": w, "height": h}
                    for n, ((w, h), _) in enumerate(boxes)
                ],
                "annotations": [
                    {
                        "id": n,
                        "image_id": n,
                        "category_id": 1,
                        "bbox": box,
                        "area": box[2] * box[3],
                        "iscrowd": 0,
                    }
                    for n, (_, box) in enumerate(boxes)
                ],
                "categories": [{"id": 1, "name": "cat"}],
            }
        )
    )
    return folder / "instances.json"


def test_a_wrong_box_that_touches_by_rounding_is_wrong_enough(tiny: str, tmp_path: Path) -> None:
    result = check_task("detection", coco_file(tmp_path), model=tiny, out=tmp_path / "out")
    assert result.ok, [str(f) for f in result.findings if not f.ok]


def test_rows_are_sent_to_another_task_only_where_its_answers_look_alike(tmp_path: Path) -> None:
    from mmrl.tasks.readers import read_any

    with pytest.raises(
        ConfigError, match=r"holds task detection, found task choice.*written anew"
    ) as caught:
        read_any(coco_file(tmp_path), task="choice")
    assert "types" not in str(caught.value)
    (tmp_path / "page_ocr.json").write_text("[]")
    with pytest.raises(
        ConfigError, match=r"holds task ocr, found task chart.*reader\.types=\{'ocr': 'chart'\}"
    ):
        read_any(tmp_path / "page_ocr.json", "pageocr", task="chart")


@pytest.mark.slow
def test_a_configuration_sets_model_prompt_pixels_limits_and_parameters(
    tiny: str, tmp_path: Path
) -> None:
    data = make_scenes(tmp_path / "scenes", count=3, seed=0)
    plain = check_task("grounding", data, model=tiny, out=tmp_path / "plain")
    tree: dict[str, Any] = {
        "model": {
            "path": tiny,
            "frame": "rel1000",
            "system": "Be brief. " * 30,
            "max_prompt_tokens": 4000,
        },
        "data": {
            "train": [
                {"task": "grounding", "path": "elsewhere.jsonl"},
                {
                    "task": "grounding",
                    "path": data,
                    "params": {"prompt": "Find {question} {frame} " * 40},
                },
            ]
        },
    }

    def check(out: str, given: str | None = data, **options: Any) -> Conformance:
        return check_task(
            "grounding", given, out=tmp_path / out, config=RunConfig.model_validate(tree), **options
        )

    long = check("long")
    assert long.ok and long.model == tiny and long.tokens["min"] > plain.tokens["max"] + 100, (
        "system text and prompt count"
    )
    tree["data"]["train"][1]["params"] = {}
    tree["model"]["system"] = None
    wide = check("wide")
    tree["data"] |= {"min_pixels": 784, "max_pixels": 3136}
    small = check("small")
    assert small.ok and small.tokens["max"] < wide.tokens["max"], "fewer pixels, fewer tokens"
    assert (
        check("over", params={"prompt": "Find {question} {frame} " * 40}).tokens["min"]
        > small.tokens["max"]
    )
    tree["model"]["max_prompt_tokens"] = int(small.tokens["max"]) - 1
    short = check("short")
    assert failed(short) == {"prompts encode and fit"} and "max_prompt_tokens" in problems(
        short, "prompts encode and fit"
    )
    del tree["data"]["train"][0]
    assert check("own", None).data == data, "without data: what the run trains on"


def test_the_frame_of_a_configuration_is_asked_for_and_drawn(tiny: str, tmp_path: Path) -> None:
    data = make_scenes(tmp_path / "scenes", count=1, seed=0)
    for frame in CoordFrame:
        config = load_config(
            None, [f"model.path={tiny}", f"model.frame={frame.value}", "model.system=Look."]
        )
        encoder, name = load_encoder(None, tmp_path, config)
        task = Grounding()
        text = encoder.text(next(iter(task.load(data))), task)
        assert (
            encoder.template.frame is frame
            and FRAME_WORDS[frame] in text
            and "Look." in text
            and name == tiny
        )


@pytest.mark.slow
def test_a_configuration_without_the_task_or_with_broken_rows_is_named(
    tiny: str, tmp_path: Path
) -> None:
    data = make_scenes(tmp_path / "scenes", count=3, seed=0)
    with Path(data).open("a", encoding="utf-8") as file:
        file.write("no json\n")
    config = load_config(
        None,
        [
            f"model.path={tiny}",
            f"data.train=[{{task: grounding, path: {data}}}]",
            "data.on_error=record",
        ],
    )
    result = check_task("grounding", out=tmp_path / "out", config=config)
    assert result.ok and result.rejected == 1, "the run would list the row and go on"
    with pytest.raises(
        ConfigError, match=r"task 'groundin'.*found grounding\. Did you mean 'grounding'"
    ):
        check_task("groundin", out=tmp_path / "out", config=config)
    with pytest.raises(ConfigError, match=r"expected model\.path"):
        check_task(
            "grounding",
            out=tmp_path / "out",
            config=load_config(
                None,
                [
                    f"model.path={tmp_path / 'none'}",
                    f"data.train=[{{task: grounding, path: {data}}}]",
                ],
            ),
        )


@pytest.mark.slow
def test_the_command_takes_a_configuration(tiny: str, tmp_path: Path) -> None:
    data = make_scenes(tmp_path / "scenes", count=3, seed=0)
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {{path: {tiny}, max_prompt_tokens: 20}}\n"
        f"data: {{train: [{{task: grounding, path: {data}}}]}}\n",
        encoding="utf-8",
    )
    done = CliRunner().invoke(
        app, ["tasks", "check", "grounding", "--config", str(file), "--out", str(tmp_path / "out")]
    )
    assert (
        done.exit_code == 1
        and "at most 20 prompt tokens" in done.output
        and data in done.output.replace("\n", "")
    )
