"""`mmrl score` gives exactly the logged scores for the same reward, and says what another would have given."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mmrl.cli.main import app
from mmrl.config import DataSource, load_config
from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError, RegistryError
from mmrl.evaluation.rescore import rescore, summary_rows, write_rescored
from mmrl.policy.tiny import TinySpec, build_tiny
from mmrl.registry import task_from_spec
from mmrl.tasks.scenes import make_scenes
from mmrl.training.runlog import rollout_rows
from mmrl.training.trainer import Trainer
from mmrl.types import (
    ImageSize,
    RewardContext,
    Rollout,
    RolloutGroup,
    Sample,
    Score,
    StopReason,
    Turn,
)
from mmrl.workers.scorer import Scorer
from mmrl.workers.scoring import ScoreJob

# A reward of everything a reward may look at, so that a context which is not quite the logged one shows.
WITNESS = """
import zlib
from mmrl import Score
from mmrl.tasks.grounding import Grounding


class Witness(Grounding):
    name, part_names = "witness", ("seen", "length")

    def __init__(self, salt="", **params):
        super().__init__(**params)
        self.salt = salt

    def score(self, sample, text, ctx):
        seen = repr((self.salt, sample, text, ctx))
        parts = {"seen": zlib.crc32(seen.encode()) / 2**32, "length": min(1.0, len(text) / 90)}
        return Score.combine(parts, {"seen": 0.7, "length": 0.3}, parsed=len(text) > 20,
                             reason=None if len(text) > 20 else "short", metrics={"iou": parts["seen"]})
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real run of two steps, with one held-out picture that cannot be read."""
    folder = tmp_path_factory.mktemp("rescoring")
    build_tiny(TinySpec(), folder / "tiny")
    (folder / "witness.py").write_text(WITNESS, encoding="utf-8")
    train = make_scenes(folder / "train", count=6, seed=0, difficulty={0: 1.0, 1: 1.0})
    held_out = make_scenes(folder / "eval", count=4, seed=1)
    picture = folder / "eval" / "images" / "scene-1-000002.png"
    # its header is whole, so the reader does not notice
    picture.write_bytes(picture.read_bytes()[:500])
    task = f"{folder}/witness.py:Witness"
    config = load_config(
        None,
        [
            f"dir={folder}",
            "name=run",
            f"model.path={folder}/tiny",
            "rollout.group_size=3",
            "rollout.max_new_tokens=12",
            "train.steps=2",
            "train.prompts_per_step=2",
            "train.save_every=0",
            "eval.every=0",
            "eval.samples=2",
            "eval.best_metric=sampled/iou",
            "data.on_error=record",
        ],
    )
    config.data.train = [DataSource(task=task, path=train, params={"salt": "pepper"})]
    circles = (
        str(Path(__file__).parents[1] / "plugin_package" / "shape_counting.py") + ":CountCircles"
    )
    counted = task_from_spec(circles).example_data(str(folder / "circles"))
    assert counted is not None
    config.data.eval = [
        DataSource(task=task, path=held_out, params={"salt": "salt"}),
        DataSource(task=circles, path=counted, limit=3),
    ]
    Trainer(config).fit()
    return folder / "run"


def logs(run: Path) -> list[Path]:
    return [
        *sorted((run / "rollouts").glob("*.jsonl")),
        *sorted((run / "eval").glob("*/predictions.jsonl")),
    ]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


@pytest.mark.slow
def test_the_same_reward_gives_exactly_the_logged_scores(run: Path) -> None:
    files = logs(run)
    assert len(files) == 4
    values = set()
    for file in files:
        result = rescore(file)
        logged = [row["score"] for row in lines(file)]
        assert len(result.rows) == len(logged) > 0 and not result.broken
        for row, score in zip(result.rows, logged, strict=True):
            assert (row.new.value, row.new.parsed, row.new.reason) == (
                score["value"],
                score["parsed"],
                score["reason"],
            )
            assert (
                dict(row.new.parts) == score["parts"] and dict(row.new.metrics) == score["metrics"]
            )
            assert not row.changed
            values.add(row.new.value)
    assert len(values) > 20  # the test would see nothing if all rewards were alike


@pytest.mark.slow
def test_evaluation_averages_a_metric_over_the_tasks_that_measure_it(run: Path) -> None:
    """All answers of one task fail here, without any metric: its headline is a 0 of its own rows, not missing."""
    results = json.loads(
        (run / "eval" / "step_000002" / "results.json").read_text(encoding="utf-8")
    )
    for mode in ("greedy", "sampled"):
        assert (results[mode]["exact"]["mean"], results[mode]["exact"]["n"]) == (0.0, 3)
        rows = [
            r
            for r in lines(run / "eval" / "step_000002" / "predictions.jsonl")
            if r["mode"] == mode
        ]
        ious = [r["score"]["metrics"].get("iou", 0.0) for r in rows if r["source"] != "circles"]
        assert results[mode]["iou"]["mean"] == pytest.approx(sum(ious) / len(ious))
        assert results[mode]["iou"]["n"] == 4 and results[mode]["reward"]["n"] == 7


def test_parameters_that_a_logged_task_does_not_take_are_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match="'salt'"):
        rescore(run / "eval" / "step_000002" / "predictions.jsonl", params={"salt": "other"})


def test_pictures_that_could_not_be_read_stay_failures(run: Path) -> None:
    result = rescore(run / "eval" / "step_000002" / "predictions.jsonl")
    unread = [row for row in result.rows if row.row["stop"] == "error"]
    assert len(unread) == 3  # one greedy, two sampled
    assert all((row.new.reason or "").startswith("input_error") for row in unread)


def test_other_parameters_are_merged_over_the_logged_ones(run: Path) -> None:
    file = run / "rollouts" / "step_000002.jsonl"
    assert not any(row.changed for row in rescore(file, params={"salt": "pepper"}).rows)
    result = rescore(file, params={"salt": "other"})
    assert all(row.changed for row in result.rows)
    assert [row.old.parts["length"] for row in result.rows] == [
        row.new.parts["length"] for row in result.rows
    ]


def test_another_task_scores_with_its_own_parameters_only(run: Path) -> None:
    file = run / "rollouts" / "step_000001.jsonl"
    result = rescore(file, "grounding", {"mode": "dynamic"})
    assert all(set(row.new.parts) == {"accuracy", "format"} for row in result.rows)
    with pytest.raises(RegistryError, match="Did you mean 'grounding'"):
        rescore(file, "groundin")


def test_the_summary_is_the_mean_over_all_completions_per_source(run: Path) -> None:
    result = rescore(run / "rollouts" / "step_000001.jsonl", params={"salt": "other"})
    table = {(r["source"], r["measure"]): r for r in summary_rows(result.rows)}
    for source in {row.source for row in result.rows}:
        chosen = [row for row in result.rows if row.source == source]
        entry = table[source, "reward"]
        assert entry["n"] == len(chosen) == entry["changed"]
        assert entry["old"] == pytest.approx(sum(row.old.value for row in chosen) / len(chosen))
        assert entry["new"] == pytest.approx(sum(row.new.value for row in chosen) / len(chosen))
        assert table[source, "part/length"]["changed"] == 0
        assert table[source, "parse_rate"]["new"] == sum(row.new.parsed for row in chosen) / len(
            chosen
        )


def test_broken_lines_are_kept_with_their_number_and_reason(run: Path, tmp_path: Path) -> None:
    source = lines(run / "rollouts" / "step_000001.jsonl")
    file = tmp_path / "damaged.jsonl"
    rows = [
        json.dumps(source[0]),
        "{cut short",
        json.dumps({**source[1], "frame": "pixels"}),
        "[1, 2]",
        json.dumps({k: v for k, v in source[2].items() if k != "sample"}),
        "",
        json.dumps(source[3]),
    ]
    file.write_bytes("\n".join(rows).encode() + b"\n\xff\xfe\n")
    result = rescore(file)
    assert [row.line for row in result.rows] == [1, 7] and not any(
        row.changed for row in result.rows
    )
    assert [line.line for line in result.broken] == [2, 3, 4, 5, 8]
    reasons = {line.line: line.reason for line in result.broken}
    assert "pixels" in reasons[3] and "found list" in reasons[4] and "'sample'" in reasons[5]
    out = tmp_path / "new" / "scores.jsonl"
    write_rescored(result, out)
    written = lines(out)
    assert [row.get("line") for row in written] == [None, 2, 3, 4, 5, None, 8]
    assert written[1]["text"] == "{cut short" and written[0]["score"] == written[0]["old_score"]


def test_completions_with_odd_line_separators_stay_one_line(run: Path, tmp_path: Path) -> None:
    row = lines(run / "rollouts" / "step_000001.jsonl")[0]
    file = tmp_path / "odd.jsonl"
    file.write_text(
        json.dumps({**row, "text": "a\u2028b\x85c\rd"}, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    [only] = rescore(file).rows
    assert only.row["text"] == "a\u2028b\x85c\rd"


def test_files_without_a_completion_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"found none in \d+ lines; first: line 1"):
        rescore(run / "metrics.jsonl")
    with pytest.raises(DataError, match="expected rollouts"):
        rescore(tmp_path / "none.jsonl")


def test_the_command_prints_old_and_new_and_writes_the_rows(run: Path, tmp_path: Path) -> None:
    source = run / "rollouts" / "step_000002.jsonl"
    file = tmp_path / "rollouts.jsonl"
    shutil.copy(source, file)
    with file.open("a", encoding="utf-8") as handle:
        handle.write("{cut")
    out = tmp_path / "new.jsonl"
    count = len(lines(source))
    done = CliRunner().invoke(app, ["score", str(file), "--param", "salt=other", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert all(
        word in done.output
        for word in ("reward", "parse_rate", "part/seen", "logged", "1 lines could not")
    )
    written = lines(out)
    assert len(written) == count + 1 and written[-1]["line"] == count + 1


# rewards that need the whole group

WINDOW = Sample(
    "w",
    "gui_grounding",
    "screens",
    "the button",
    (0, 0, 9, 9),
    ("w.png",),
    params={"width": 400, "height": 300},
)
PLACES = {
    "a": ["[100, 100]", "[110, 100]", "[300, 200]", "none"],
    "b": ["[20, 20]", "[20, 20]", "[350, 250]", "[21, 20]"],
}


def _label_free_log(path: Path, count: int, keyed: bool) -> list[Score]:
    """Groups of label-free pointing, scored and logged as the trainer does it; returns the scores each text gets by itself."""
    params = {"label_free": True}
    task, origin = (
        task_from_spec("gui_grounding", params),
        {
            "task_spec": "gui_grounding",
            "task_params": params,
            "image_sizes": [{"orig_wh": (400, 300), "resized_wh": (400, 300)}],
        },
    )
    ctx = RewardContext(
        2, 5, CoordFrame.ABS_ORIG, (ImageSize((400, 300), (400, 300)),), num_tokens=1, max_tokens=64
    )
    jobs = [
        [
            ScoreJob(0, replace(WINDOW, id=name), f"<answer>{place}</answer>", ctx)
            for place in PLACES[name]
        ]
        for name in list(PLACES)[:count]
    ]
    with Scorer([("gui_grounding", params)], [task], workers=0) as scorer:
        alone, scored = [scorer.score(group) for group in jobs], scorer.score_groups(jobs)
    groups = [
        RolloutGroup(
            group[0].sample,
            tuple(
                Rollout((Turn((1,), job.text, (0.0,), StopReason.EOS),), score)
                for job, score in zip(group, scores, strict=True)
            ),
            key=(2, place, 0),
        )
        for place, (group, scores) in enumerate(zip(jobs, scored, strict=True))
    ]
    rows = rollout_rows(groups, "abs_orig", 5, 64, {group.key: origin for group in groups})
    if keyed:
        rows = [
            {**row, "key": group.key}
            for row, group in zip(rows, [g for g in groups for _ in g.rollouts], strict=True)
        ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [score for group in alone for score in group]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 1])
@pytest.mark.parametrize("keyed", [True, False])
def test_groups_that_judge_themselves_are_rescored_as_groups(
    tmp_path: Path, count: int, keyed: bool
) -> None:
    file = tmp_path / "step_000002.jsonl"
    alone = _label_free_log(file, count, keyed)
    result = rescore(file)
    assert len(result.rows) == 4 * count and not result.broken
    assert [row for row in result.rows if row.changed] == []
    assert [dict(row.new.parts) for row in result.rows] == [
        dict(row.old.parts) for row in result.rows
    ]
    assert any(
        row.new.value != score.value for row, score in zip(result.rows, alone, strict=True)
    ), "the group matters here"
    paid = rescore(file, params={"label_free": False})
    assert [row.new.value for row in paid.rows] == [score.value for score in alone], (
        "by the truth, one by one"
    )
    wider = rescore(file, params={"expand": 200.0})
    assert any(row.changed for row in wider.rows)


@pytest.mark.slow
def test_predictions_are_rescored_as_evaluations_score_them(tmp_path: Path) -> None:
    """The greedy one by itself, the samples of a prompt as a group, the only sample of a prompt by itself."""
    file = tmp_path / "step_000002.jsonl"
    alone = [score.value for score in _label_free_log(file, 2, False)]
    logged = lines(file)
    grouped = [row["score"]["value"] for row in logged]
    assert grouped != alone
    for mode, few, expected in (
        ("greedy", logged, alone),
        ("sampled", logged, grouped),
        ("sampled", logged[::4], alone[::4]),
    ):
        rows = [
            {k: v for k, v in {**row, "mode": mode}.items() if k not in ("step", "total_steps")}
            for row in few
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        assert [row.new.value for row in rescore(file).rows] == expected, mode
