"""Mixed: every sample is its member's in prompt, score, metrics and official numbers; unknown types never get through."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from assets.make_task_fixtures import make_all
from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError
from mmrl.registry import BUILT_IN, register, task_from_spec
from mmrl.task import Task, Template
from mmrl.tasks.mixed import Mixed
from mmrl.types import ImageSize, RewardContext, Sample, Score
from mmrl.video.media import image_size

TEMPLATE = Template("t", CoordFrame.ABS_ORIG)


def _context(sample: Sample) -> RewardContext:
    sizes = tuple(ImageSize(size, size) for size in map(image_size, sample.images))
    return RewardContext(1, 1, CoordFrame.ABS_ORIG, sizes)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> str:
    return Mixed().example_data(str(tmp_path_factory.mktemp("examples")))


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_all(tmp_path_factory.mktemp("fixtures"))


def _rows(tmp_path: Path, *rows: Mapping[str, Any]) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


CHOICE = {
    "id": "c",
    "task": "choice",
    "question": "Which?",
    "answer": "B",
    "params": {"options": ["x", "y"]},
}
NUMBER = {"id": "n", "task": "numeric", "question": "How much?", "answer": 4}


def test_every_sample_is_its_members(examples: str) -> None:
    mixed = Mixed()
    samples = list(mixed.load(examples))
    names = {s.task for s in samples}
    assert len(names) >= 5 and names == set(mixed.members) and mixed.headline == "correct"
    for sample in samples:
        alone, ctx = task_from_spec(sample.task), _context(sample)
        assert mixed.messages(sample, TEMPLATE) == alone.messages(sample, TEMPLATE)
        for text in (alone.gold(sample, ctx), alone.wrong(sample, ctx), "", "<answer>", "nonsense"):
            ours, theirs = mixed.score(sample, text, ctx), alone.score(sample, text, ctx)
            assert (ours.value, ours.reason, ours.parts) == (
                theirs.value,
                theirs.reason,
                theirs.parts,
            )
            assert ours.metrics == theirs.metrics
            assert {**theirs.detail, "task": sample.task} == ours.detail
        assert mixed.gold(sample, ctx) == alone.gold(sample, ctx) and mixed.wrong(
            sample, ctx
        ) == alone.wrong(sample, ctx)
        assert mixed.score(sample, mixed.gold(sample, ctx), ctx).metrics["correct"] == 1.0


def test_members_take_their_own_and_the_shared_parameters(tmp_path: Path) -> None:
    mixed = Mixed(
        tasks={"choice": {"prompt": "Q: {question}", "weights": {"accuracy": 1.0}}},
        shared={"answer_format": "bare"},
    )
    choice, number = mixed.load(_rows(tmp_path, CHOICE, NUMBER))
    text = mixed.messages(choice, TEMPLATE)[-1]["content"][-1]["text"]
    assert (
        text.startswith("Q: Which?")
        and "<answer>" not in mixed.messages(number, TEMPLATE)[-1]["content"][-1]["text"]
    )
    assert (
        mixed.score(choice, "B", _context(choice)).value
        == mixed.score(number, "4", _context(number)).value
        == 1.0
    )
    assert mixed.score(choice, "B", _context(choice)).weights["accuracy"] == 1.0
    assert mixed.score(number, "4", _context(number)).weights["accuracy"] == 0.9
    with pytest.raises(
        ConfigError, match=r"mixed\.tasks\.choice: unknown parameter 'promt'.*Did you mean 'prompt'"
    ):
        Mixed(tasks={"choice": {"promt": "x"}})
    wrongs: tuple[dict[str, Any], ...] = (
        {"tasks": ["choice"]},
        {"tasks": {"choice": "x"}},
        {"shared": 3},
        {"reader": "x"},
    )
    for wrong in wrongs:
        with pytest.raises(ConfigError, match=r"as a mapping"):
            Mixed(**wrong)
    with pytest.raises(
        ConfigError, match=r"mixed\.tasks\.choise: unknown task 'choise'.*Did you mean 'choice'"
    ):
        Mixed(tasks={"choise": {}})
    with pytest.raises(ConfigError, match=r"other than mixed itself"):
        Mixed(tasks={"mixed": {}})


def test_an_unknown_type_is_an_error_when_the_file_is_read(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"rows\.jsonl: row 2: expected a task type of grounding, detection, .*, found 'chioce'; "
        r".*Did you mean 'choice'",
    ):
        list(Mixed().load(_rows(tmp_path, NUMBER, {**CHOICE, "task": "chioce"})))
    for name in (
        "mixed",
        "os:system",
        "evil.py:Task",
        str(tmp_path / "evil.py") + ":Evil",
        "package/name",
        "",
        None,
        3,
    ):
        (tmp_path / "evil.py").write_text(
            "raise SystemExit('imported because a data file said so')"
        )
        with pytest.raises(DataError, match=r"row 1: expected"):
            list(Mixed().load(_rows(tmp_path, {**CHOICE, "task": name})))
    mixed = Mixed()
    mixed.on_error = "record"
    assert [s.id for s in mixed.load(_rows(tmp_path, NUMBER, {**CHOICE, "task": "chioce"}))] == [
        "n"
    ]
    assert [r.row for r in mixed.rejected] == [2]
    with pytest.raises(ConfigError, match=r"unknown task type 'chioce'; expected one of grounding"):
        mixed.member("chioce")


def test_one_task_refuses_own_rows_of_others_or_leaves_them_out(tmp_path: Path) -> None:
    path = _rows(
        tmp_path,
        CHOICE,
        NUMBER,
        {k: v for k, v in CHOICE.items() if k != "task"} | {"id": "untold"},
    )
    with pytest.raises(
        DataError,
        match=r"row 2: expected rows of task choice, found a row of task 'numeric'; use task mixed, or "
        r"set reader\.only_mine=true",
    ):
        list(task_from_spec("choice").load(path))
    choice = task_from_spec("choice", {"reader": {"only_mine": True}})
    assert [s.id for s in choice.load(path)] == ["c", "untold"] and dict(choice.skipped) == {
        "task numeric": 1
    }


def test_truth_and_reward_settings_of_each_row_are_checked(tmp_path: Path) -> None:
    bad = {**NUMBER, "id": "m", "params": {"reward": {"weights": {"acuracy": 1}}}}
    with pytest.raises(
        DataError,
        match=r"row 2: sample 'm': params\.reward: weight for unknown reward part 'acuracy'",
    ):
        list(Mixed().load(_rows(tmp_path, CHOICE, bad)))
    with pytest.raises(DataError, match=r"row 1: expected one of A. x; B. y"):
        list(Mixed().load(_rows(tmp_path, {**CHOICE, "answer": "E"})))
    mixed = Mixed(reader={"on_error": "record"})
    assert [s.id for s in mixed.load(_rows(tmp_path, CHOICE, bad))] == ["c"] and len(
        mixed.rejected
    ) == 1


def test_typed_formats_are_mixed_and_skips_are_counted(fixtures: dict[str, str]) -> None:
    mixed = Mixed(reader={"images_only": True})
    samples = list(mixed.load(fixtures["video_r1"]))
    assert Counter(s.task for s in samples) == {"choice": 2, "numeric": 2, "ocr": 1, "open_text": 1}
    assert dict(mixed.skipped) == {"not pictures only: a row with a video": 1}
    regression = next(s for s in samples if s.id == "5")
    near = mixed.score(regression, "<answer>18</answer>", _context(regression))
    assert near.parts["accuracy"] == pytest.approx(0.6) and near.metrics["correct"] == 0.0, (
        "24 against 18: 6 of 10 levels"
    )
    paper = Mixed(tasks={"numeric": {"preset": "video_r1", "answer_format": "answer"}})
    assert paper.score(regression, "<answer>18</answer>", _context(regression)).parts[
        "accuracy"
    ] == pytest.approx(0.75), "1 - 6 / 24"
    for name in (
        "easy_video_r1",
        "easyr1_types",
        "vlm_r1_types",
        "mathvista",
        "mmmu",
        "ui_r1",
        "gui_r1",
        "android_control",
    ):
        mixed = Mixed()
        for sample in mixed.load(fixtures[name]):
            assert (
                mixed.score(sample, mixed.gold(sample, _context(sample)), _context(sample)).value
                >= 0.99
            ), (name, sample.id)


def test_the_range_is_the_union_of_the_members(tmp_path: Path) -> None:
    assert Mixed().value_range == (0.0, 1.0) and Mixed().part_names == ()
    wide = Mixed(tasks={"choice": {"preset": "video_r1"}})
    assert (
        wide.value_range
        == task_from_spec("choice", {"preset": "video_r1"}).value_range
        == (0.0, 2.0)
    )
    assert Mixed(tasks={"choice": {}, "numeric": {}}).part_names == ("accuracy", "format")
    assert (
        Mixed(
            tasks={"choice": {}, "numeric": {"weights": {"accuracy": 1, "repetition": 0.1}}}
        ).part_names
        == ()
    )
    late = Mixed()  # as in a reward worker, which never loads data
    sample = Sample("1", "numeric", "s", "q", 4)
    assert (
        late.score(sample, "<answer>4</answer>", _context(sample)).value == 1.0
        and "numeric" in late.members
    )


def test_summaries_are_named_by_task(examples: str) -> None:
    mixed = Mixed()
    samples = list(mixed.load(examples))
    scores = [mixed.score(s, mixed.gold(s, _context(s)), _context(s)) for s in samples]
    summary = mixed.summarize(scores)
    for name in mixed.members:
        mine = [score for sample, score in zip(samples, scores, strict=True) if sample.task == name]
        for key, value in task_from_spec(name).summarize(mine).items():
            assert summary[f"{name}/{key}"] == value
    lost = mixed.summarize([*scores, Score.failure("timeout")])
    assert (
        lost["no_task"] == pytest.approx(1 / (len(scores) + 1))
        and "no_task" not in summary
        and mixed.summarize([]) == {}
    )


@register("counts_its_group")
class CountsItsGroup(Task):
    """A task of someone's own, scored in its group, with official numbers and a file."""

    in_group = True
    value_range = (-1.0, 3.0)

    def load(self, path: str) -> Sequence[Sample]:
        raise NotImplementedError

    def messages(self, sample: Sample, template: Template) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "text", "text": sample.question}]}]

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        return Score.combine(
            {"accuracy": 0.0}, {"accuracy": 1.0}, parsed=True, metrics={"correct": 0.0}
        )

    def score_in_group(self, sample: Sample, scores: Sequence[Score], index: int) -> Score:
        return Score.combine({"accuracy": 1 / len(scores)}, {"accuracy": 1.0}, parsed=True)

    def gold(self, sample: Sample, ctx: RewardContext) -> str:
        return "x"

    def wrong(self, sample: Sample, ctx: RewardContext) -> str:
        return "y"

    def benchmark(self, pairs: Sequence[tuple[Sample, Score]], folder: Path) -> Mapping[str, float]:
        (folder / "submission.txt").write_text(str(len(pairs)))
        return {"official": float(len(pairs))}


def test_group_scores_and_official_numbers_are_the_members(tmp_path: Path) -> None:
    row = {"id": "g", "task": "counts_its_group", "question": "x", "answer": {"anything": 1}}
    path = _rows(tmp_path, row, CHOICE)
    with pytest.raises(DataError, match=r"list a task of your own in params.tasks"):
        list(Mixed().load(path))
    mixed = Mixed(tasks={"counts_its_group": {}})
    own, choice = mixed.load(path)
    assert (
        own.answer == {"anything": 1}
        and mixed.in_group
        and not Mixed().in_group
        and mixed.value_range == (-1.0, 3.0)
    )
    scores = [mixed.score(own, "a", _context(own))] * 4
    final = mixed.score_in_group(own, scores, 2)
    assert final.value == 0.25 and final.detail["task"] == "counts_its_group"
    others = [
        mixed.score(choice, "<answer>B</answer>", _context(choice)),
        mixed.score(choice, "C", _context(choice)),
    ]
    assert [mixed.score_in_group(choice, others, i) for i in (0, 1)] == others
    folder = tmp_path / "official"
    folder.mkdir()
    numbers = mixed.benchmark([(own, final), (own, final), (choice, others[0])], folder)
    assert numbers["counts_its_group/official"] == 2.0
    assert [str(p.relative_to(folder)) for p in sorted(folder.rglob("*")) if p.is_file()] == [
        "counts_its_group/submission.txt"
    ]


def test_mixed_is_made_from_its_name_and_can_be_copied(tmp_path: Path) -> None:
    mixed = task_from_spec("mixed", {"tasks": {"choice": {}}, "shared": {"answer_format": "think"}})
    assert isinstance(mixed, Mixed) and BUILT_IN["mixed"] == "mmrl.tasks.mixed:Mixed"
    sample = Sample("1", "numeric", "s", "q", 4)
    copied = pickle.loads(pickle.dumps(mixed))
    text = "<think>a</think><answer>4</answer>"
    assert copied.score(sample, text, _context(sample)) == mixed.score(
        sample, text, _context(sample)
    )
    with pytest.raises(ConfigError, match=r"task 'mixed'.*taks"):
        task_from_spec("mixed", {"taks": {}})
