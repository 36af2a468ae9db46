"""mmrl from Python: a script or a notebook trains with its own reward, task and rows, and gets what the command line gets."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mmrl
from mmrl.cli.run import train_command
from mmrl.config import AlgorithmConfig, DataSource, LoraSettings, RunConfig, load_config
from mmrl.data.memory_rows import stored
from mmrl.errors import ConfigError, DataError, RegistryError
from mmrl.library import _tree
from mmrl.registry import OFFERED, adopt, carried, resolve_task, task_from_spec, using
from mmrl.tasks.scenes import make_scenes
from mmrl.training.identity import check_identity, run_identity
from mmrl.workers.scorer import Scorer
from mmrl.workers.scoring import ScoreJob, is_reward_failure, score_one
from tests.kits.engine_kit import ENVIRONMENT, REPO

MODEL = REPO / "assets" / "tiny_vlm"
CONTEXT = mmrl.RewardContext(1, 1, mmrl.CoordFrame.REL1000)
SHORT = {
    "train.steps": 2,
    "train.prompts_per_step": 4,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 10,
    "eval.samples": 0,
    "data.prompt_cache_gib": 0.1,
}
SCRIPT = """
import mmrl
from PIL import Image

open("ran", "a").write("x")


@mmrl.reward(metrics=["length"])
def brevity(completion, sample):
    return {"reward": 1 / (1 + len(completion.split(sample.answer)[0])), "length": len(completion)}


class Shout(mmrl.Task):
    def load(self, path):
        return [mmrl.Sample(str(i), "shout", "shout", "Shout.", i) for i in range(6)]

    def messages(self, sample, template):
        return [{"role": "user", "content": [{"type": "text", "text": sample.question}]}]

    def score(self, sample, text, ctx):
        return mmrl.Score.combine({"capitals": sum(c.isupper() for c in text) / max(1, len(text))}, {"capitals": 1.0}, parsed=True)

    def gold(self, sample, ctx):
        return "OH"

    def wrong(self, sample, ctx):
        return "oh"


rows = [{"image": Image.new("RGB", (56, 56), color), "question": "Which color?", "answer": color, "place": i}
        for i, color in enumerate(["red", "green", "blue"] * 4)]
settings = %r
seen = []
trainer = mmrl.Trainer(model=%r, reward=brevity, train_data=rows, config={**settings, "eval.every": 0}, quiet=True,
                       callbacks=[lambda kind, payload: seen.append(kind)])
trainer.fit()
assert seen == ["checked", "start", "step", "step", "checkpoint", "end"], seen
found = mmrl.evaluate(trainer.checkpoint, reward=brevity, data=rows[:3])
assert found.results["protocol"]["max_new_tokens"] == settings["rollout.max_new_tokens"], "the run's own"
assert found.results["greedy"]["length"]["mean"] > 0
mmrl.Trainer(model=%r, task=Shout, train_data="ran", config={**settings, "name": "shout"}, quiet=True).fit()
"""


def rows(number: int = 8) -> list[dict[str, Any]]:
    rng = np.random.default_rng(3)
    return [
        {
            "image": rng.integers(0, 255, (56, 56, 3), dtype=np.uint8),
            "question": "the red square",
            "answer": [4, 5, 30, 31],
        }
        for _ in range(number)
    ]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def judged(function: Any, text: str = "red", answer: Any = "red", **settings: Any) -> mmrl.Score:
    cls = mmrl.library._task_of(function, settings)  # type: ignore[attr-defined]
    return score_one(cls(), ScoreJob(0, mmrl.Sample("0", "t", "s", "q", answer), text, CONTEXT))


@pytest.mark.slow
def test_a_script_without_a_main_guard_trains_with_what_it_defines(tmp_path: Path) -> None:
    """From an empty folder, rewards in worker processes; the second party is the run's own log."""
    (tmp_path / "script.py").write_text(SCRIPT % (SHORT, str(MODEL), str(MODEL)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**ENVIRONMENT, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "ran").read_text() == "x", "a worker ran the script again"
    assert "warning" not in done.stdout.lower()
    logged = [
        row
        for path in sorted((tmp_path / "runs/run/rollouts").glob("*.jsonl"))
        for row in lines_of(path)
    ]
    assert logged
    for row in logged:
        expected = 1 / (1 + len(row["text"].split(row["sample"]["answer"])[0]))
        assert row["score"]["value"] == pytest.approx(expected, abs=1e-9) and row["score"][
            "metrics"
        ]["length"] == len(row["text"])
        assert row["sample"]["params"]["place"] in range(12), "further keys of a row are params"
    shouted = lines_of(tmp_path / "runs/shout/rollouts/step_000001.jsonl")
    assert {row["score"]["reason"] for row in shouted} == {None}
    stopped = subprocess.run(
        [sys.executable, "-m", "mmrl.cli.main", "resume", "runs/run", "train.steps=+1"],
        cwd=tmp_path,
        env={**ENVIRONMENT, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert stopped.returncode == 2 and "mmrl.Trainer(..., resume=True)" in stopped.stderr.replace(
        "\n", " "
    ), stopped.stderr


@pytest.mark.slow
def test_rows_in_memory_train_as_the_same_rows_in_a_file(tmp_path: Path) -> None:
    """The second party is `mmrl train` on files, bit for bit."""
    make_scenes(tmp_path / "scenes", 12, seed=5, background="graded")
    file = tmp_path / "scenes" / "data.jsonl"
    in_memory = [{**row, "image": Image.open(file.parent / row["image"])} for row in lines_of(file)]
    settings = {**SHORT, "rollout.max_new_tokens": 24, "model.system": ""}
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {{path: {MODEL}}}\n")
    data = f'data.train=[{{task: grounding, path: {file}, params: {{prompt: "{{question}}"}}}}]'
    typed = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    train_command(
        config, [*typed, data, f"dir={tmp_path / 'a'}"], resume=False, overwrite=False, quiet=True
    )
    trainer = mmrl.Trainer(
        model=MODEL,
        task="grounding",
        params={"prompt": "{question}"},
        train_data=in_memory,
        quiet=True,
        config={**settings, "dir": str(tmp_path / "b")},
    )
    row = trainer.fit()
    assert row["train/grad_norm"] > 0 and trainer.report().exists()
    one, other = (
        lines_of(folder / "metrics.jsonl") for folder in (tmp_path / "a/run", trainer.folder)
    )
    measured = ("time/", "perf/", "speed/", "memory/")
    for a, b in zip(one, other, strict=True):
        assert {k: v for k, v in a.items() if not k.startswith(measured)} == {
            k: v for k, v in b.items() if not k.startswith(measured)
        }
    longer = mmrl.Trainer(
        model=MODEL,
        task="grounding",
        params={"prompt": "{question}"},
        train_data=in_memory,
        resume=True,
        config={**settings, "dir": str(tmp_path / "b"), "train.steps": 3},
        quiet=True,
    )
    assert longer.fit()["step"] == 3, "the same rows are the same data to a resumed run"


def test_what_a_function_returns_is_a_score() -> None:
    assert judged(lambda text, sample: text == sample.answer).value == 1.0
    assert judged(lambda text, sample: np.float32(0.5)).value == 0.5
    table = judged(lambda text, sample: {"reward": 0.25, "words": 3})
    assert (table.value, table.metrics) == (0.25, {"words": 3.0})
    assert judged(lambda text, sample, context: context.step / 4).value == 0.25
    assert judged(lambda text, sample, scale=2: scale / 4).value == 0.5
    assert judged(lambda text, sample: -1.0, low=-1.0).value == -1.0


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda text, sample: None, "reward_none"),
        (
            lambda text, sample: 2.0,
            "reward_error: ValueError: expected a value in [0, 1], found 2.0",
        ),
        (lambda text, sample: float("nan"), "reward_error: ValueError"),
        (
            lambda text, sample: "good",
            "reward_error: TypeError: expected a number for 'reward', found str 'good'",
        ),
        (
            lambda text, sample: {"iou": 1},
            "reward_error: TypeError: expected a mapping with the key 'reward'",
        ),
        (lambda text, sample: 1 / 0, "reward_error: ZeroDivisionError"),
    ],
)
def test_what_is_no_reward_is_a_recorded_failure(function: Any, reason: str) -> None:
    found = judged(function)
    assert found.value == 0.0 and not found.parsed and (found.reason or "").startswith(reason)
    assert is_reward_failure(found), "says nothing of the completion, so is left out of training"


@pytest.mark.parametrize(
    "function",
    [lambda text: 1.0, lambda: 1.0, lambda a, b, c, d: 1.0, "text", int, lambda a, b, *, c: 1.0],
)
def test_a_function_of_another_form_is_refused_where_it_is_written(function: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected a (reward that takes|function) "):
        mmrl.reward(function)


@pytest.mark.slow
def test_a_closure_scores_in_a_worker_process() -> None:
    """By value: the worker cannot import a function that a test makes."""
    wanted = {"red": 0.75}

    def look_up(text: str, sample: mmrl.Sample) -> float:
        assert os.getpid() != parent, "in the parent"
        return wanted.get(text, 0.0)

    parent = os.getpid()
    name, _ = mmrl.library._named(None, look_up, None)  # type: ignore[attr-defined]
    assert name == f"{OFFERED}look_up"
    task = task_from_spec(name, {})
    jobs = [
        ScoreJob(0, mmrl.Sample("0", "t", "s", "q", ""), text, CONTEXT) for text in ("red", "blue")
    ]
    with Scorer([(name, {})], [task], workers=1) as scorer:
        assert [score.value for score in scorer.score(jobs)] == [0.75, 0.0]


def test_objects_of_another_script_are_named_and_explained() -> None:
    with pytest.raises(
        RegistryError, match=r"'python:gone' is a Python object of the script.*resume=True"
    ):
        resolve_task("python:gone")
    mmrl.library._named(None, lambda text, sample: 1.0, None)  # type: ignore[attr-defined]
    assert carried() == b"", "only what a worker is to score with goes there"
    adopt(carried({"python:<lambda>"}))
    adopt(b"")
    assert resolve_task("python:<lambda>").value_range == (0.0, 1.0)


@pytest.mark.slow
def test_trainers_with_rewards_of_one_name_keep_their_own() -> None:
    first, second = (
        mmrl.Trainer(reward=lambda text, sample, pays=pays: pays, train_data=rows(1))
        for pays in (0.25, 0.75)
    )
    job = ScoreJob(0, mmrl.Sample("0", "t", "s", "q", ""), "", CONTEXT)
    for trainer, pays in ((first, 0.25), (second, 0.75)):
        spec, cls = trainer._object  # type: ignore[misc]
        with using(spec, cls), Scorer([(spec, {})], [task_from_spec(spec)], workers=1) as scorer:
            assert [s.value for s in scorer.score([job])] == [pays] and score_one(
                task_from_spec(spec), job
            ).value == pays
            name, _ = mmrl.library._named(None, lambda text, sample: 1.0, None)  # type: ignore[attr-defined]
            assert name == f"{spec}-2", "an evaluation in a callback"
            assert score_one(task_from_spec(spec), job).value == pays
            with (
                pytest.raises(ConfigError, match="another reward of the name"),
                using(spec, resolve_task(str(name))),
            ):
                pass


@pytest.mark.slow
def test_a_reward_that_cannot_be_sent_is_named_and_spoils_no_other() -> None:
    lock = threading.Lock()

    def locked(text: str, sample: mmrl.Sample) -> float:
        with lock:
            return 1.0

    name, _ = mmrl.library._named(None, locked, None)  # type: ignore[attr-defined]
    with pytest.raises(
        ConfigError, match=r"'python:locked' cannot be sent.*inside the function.*workers: 0"
    ):
        Scorer([(str(name), {})], [task_from_spec(str(name))], workers=1)
    test_a_closure_scores_in_a_worker_process()


def test_a_run_is_not_resumed_with_another_reward_unnoticed() -> None:
    def mild(text: str, sample: mmrl.Sample) -> float:
        return 0.5

    def strict(text: str, sample: mmrl.Sample) -> float:
        return 0.25

    strict.__name__ = "mild"
    one, same, other = (
        mmrl.Trainer(reward=found, train_data=rows(1)).config
        for found in (mild, mmrl.reward(mild), strict)
    )
    assert one == same
    with pytest.raises(ConfigError, match="version"):
        check_identity(*(run_identity(config.model_dump(mode="json")) for config in (one, other)))


def test_methods_and_objects_are_rewards_too() -> None:
    class Judge:
        __slots__ = ("pays",)

        def __init__(self) -> None:
            self.pays = 0.5

        def __call__(self, text: str, sample: mmrl.Sample) -> float:
            return self.pays

        def reward(self, text: str, sample: mmrl.Sample, context: mmrl.RewardContext) -> float:
            return self.pays / 2

    judge = Judge()
    assert [judged(mmrl.reward(found)).value for found in (judge, judge.reward)] == [0.5, 0.25]
    assert judged(mmrl.reward(low=-1.0)(judge.__call__)).value == 0.5


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_with_the_parameters_of_its_run(tmp_path: Path) -> None:
    rows = make_scenes(tmp_path / "rows", 6, seed=3)
    asked = {"task": "grounding", "params": {"prompt": "{question}"}}
    trainer = mmrl.Trainer(
        model=MODEL,
        train_data=rows,
        quiet=True,
        config={**SHORT, "name": "asks", "dir": str(tmp_path), "model.system": ""},
        **asked,
    )
    trainer.fit()
    alone = mmrl.evaluate(trainer.checkpoint, task="grounding", data=rows)
    told = mmrl.evaluate(trainer.checkpoint, data=rows, **asked)
    other = mmrl.evaluate(
        trainer.checkpoint, task="grounding", data=rows, params={"prompt": "Where? {question}"}
    )
    said = [[p["text"] for p in found.predictions] for found in (alone, told, other)]
    assert said[0] == said[1] != said[2]


@pytest.mark.slow
def test_how_a_run_read_its_file_says_nothing_of_other_rows(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.jsonl"
    theirs.write_text(json.dumps({"problem": "Say it.", "solution": "it"}))
    columns = {"reader": {"columns": {"question": "problem", "answer": "solution"}}}
    trainer = mmrl.Trainer(
        model=MODEL,
        task="open_text",
        params=columns,
        train_data=theirs,
        quiet=True,
        config={**SHORT, "train.steps": 1, "name": "columns", "dir": str(tmp_path)},
    )
    trainer.fit()
    rows = [{"question": "Say it.", "answer": "it"}]
    own = mmrl.evaluate(trainer.checkpoint, task="open_text", data=rows)
    read = mmrl.evaluate(trainer.checkpoint, task="open_text", data=theirs, params=columns)
    assert [p["text"] for p in own.predictions] == [p["text"] for p in read.predictions]


@pytest.mark.slow
def test_a_finished_run_that_is_continued_gives_its_last_row(tmp_path: Path) -> None:
    def made(resume: bool) -> mmrl.Trainer:
        return mmrl.Trainer(
            model=MODEL,
            reward=lambda text, sample: float(len(text) % 2),
            train_data=[{"question": "Say it.", "answer": ""}],
            quiet=True,
            config={**SHORT, "name": "done", "dir": str(tmp_path)},
            resume=resume,
        )

    with pytest.raises(
        ConfigError, match=r"expected a run to continue in .*done, found none.*'auto'"
    ):
        made(resume=True).fit()
    first = made(resume=False).fit()
    assert made(resume=True).fit() == json.loads(json.dumps(first)) and first["step"] == 2


def test_settings_are_those_of_the_command_line(tmp_path: Path) -> None:
    """Defaults that follow from another key do so here, too, and what the caller holds stays as it is."""
    file = tmp_path / "run.yaml"
    file.write_text("train: {steps: 5}\n")
    wanted = load_config(file, ["algorithm.importance_sampling_level=sequence"])
    for config in (file, load_config(file), {"train": {"steps": 5}}):
        assert (
            mmrl.Trainer(
                config=config, overrides={"algorithm.importance_sampling_level": "sequence"}
            ).config
            == wanted
        )
    given: dict[str, Any] = {"train": {"steps": 5, "save_every": 1}}
    trainer = mmrl.Trainer(config=given, overrides={"train": {"steps": 3}})
    assert (
        trainer.config.train.steps,
        trainer.config.train.save_every,
        given["train"]["steps"],
    ) == (3, 1, 5)


def test_an_override_of_the_method_brings_the_defaults_of_the_new_one() -> None:
    """Those that a method brought were set by nobody."""

    def methods(first: dict[str, Any], **then: str) -> AlgorithmConfig:
        config = RunConfig.model_validate({"algorithm": first})
        whole = RunConfig.model_validate(config.model_dump(mode="json"))
        assert whole == config, "the file that a run writes names every key"
        over = {f"algorithm.{key}": value for key, value in then.items()}
        return mmrl.Trainer(config=config, overrides=over).config.algorithm

    assert (
        methods({"importance_sampling_level": "sequence"}, importance_sampling_level="token")
        == AlgorithmConfig()
    )
    assert methods({"advantage": "gae"}, advantage="grpo") == AlgorithmConfig()
    assert methods({"advantage": "gae"}, advantage="rloo", advantage_scale="none") == (
        AlgorithmConfig(advantage="rloo", advantage_scale="none")
    )
    kept = methods(
        {"importance_sampling_level": "sequence", "clip_low": 0.1},
        importance_sampling_level="token",
    )
    assert (kept.clip_low, kept.clip_high) == (0.1, 0.28), "what was set stays"


def test_a_method_set_from_python_has_the_defaults_of_a_file() -> None:
    ppo = AlgorithmConfig(advantage="gae")
    wanted = RunConfig.model_validate({"algorithm": {"advantage": "gae"}})
    assert RunConfig(algorithm=ppo) == wanted and wanted.algorithm.critic.level == "token"
    assert ppo.critic.level == "turn", "what the caller holds stays as it is"
    ppo.advantage = "grpo"
    assert ppo == AlgorithmConfig()


def test_what_was_set_inside_a_section_is_set() -> None:
    config = RunConfig()
    config.train.steps = 5
    config.model.lora = LoraSettings()
    config.data.train = [DataSource(task="counting", path="rows.jsonl")]
    trainer = mmrl.Trainer(config=config, overrides={"data.train.0.limit": 3})
    ours = trainer.config
    assert ours.train.steps == 5 and ours.model.lora == LoraSettings()
    assert (ours.data.train[0].limit, config.data.train[0].limit) == (3, None)


def test_official_answers_are_for_evaluation() -> None:
    for params in ({"answers": "official"}, {"tasks": {"choice": {"answers": "official"}}}):
        with pytest.raises(
            ConfigError, match="answers: official reads as a benchmark's program does"
        ):
            mmrl.Trainer(task="mixed", params=params, train_data=rows(1))


@pytest.mark.parametrize("how", [{"task": "grounding"}, {"reward": lambda text, sample: 1.0}])
def test_an_error_of_a_row_in_memory_names_no_file_that_is_gone(how: Mapping[str, Any]) -> None:
    wrong = [{"image": "gone.png", "question": "q", "answer": [0, 0, 1, 1]}]
    with pytest.raises(DataError, match=r"gone\.png") as found:
        mmrl.evaluate(MODEL, data=wrong, **how)
    assert str(found.value).startswith("data: row 1: ")
    assert "mmrl tasks check" not in str(found.value) and "mmrl-rows-" not in str(found.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"task": "grounding", "reward": lambda text, sample: 1.0, "train_data": "x"},
            "found both",
        ),
        ({"train_data": [{"question": "q"}]}, "expected a task or a reward for the data"),
        ({"reward": lambda text, sample: 1.0}, "expected train_data, found none"),
        ({"task": "groundin", "train_data": "x"}, "Did you mean 'grounding'"),
        ({"task": 7, "train_data": "x"}, "expected a task's name, a mmrl.Task class"),
        ({"model": mmrl.RunConfig()}, "found RunConfig; give it as config=...; its model.path"),
        ({"model": 7}, "expected a folder or hub name, found int; give its path"),
        ({"config": {"train.stepz": 3}}, "unknown key 'train.stepz'"),
        ({"config": {"train.steps": 3, "train.steps.more": 3}}, "goes below 'steps'"),
    ],
)
def test_what_does_not_go_together_is_said_at_once(options: Mapping[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, RegistryError), match=words.replace(".", r"\.")):
        mmrl.Trainer(**options)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "at least one row"),
        ({"question": "q"}, "found one mapping"),
        ([["q"]], "row 0.*a row of type list"),
        ([{"question": "q", "answer": {1, 2}}], "row 0.*a value of type set"),
        ([{"question": "q", "answer": float("nan")}], "row 0"),
        ([{"question": "q", "image": b"no picture"}], "row 0.*cannot identify image"),
        ([{"question": "q", "image": 3}], "row 0.*a picture of type int"),
        ([{"question": "q", "frmae": "rel1000"}], "row 0.*nearly 'frame'"),
        ([{"question": "q", "image": "https://x.org/a.png"}], "row 0.*download it first"),
        (
            [{"question": "q", "audio": {"path": None, "array": np.zeros(9), "sampling_rate": 8}}],
            "row 0.*found a sound in memory, with the keys path, array.*write it to a file",
        ),
        ([{"question": "q", "audio": np.zeros(9)}], "row 0.*a sound of type ndarray; write it"),
        ([{"question": "q", "audios": [{"bytes": b"x"}]}], "row 0.*a sound in memory"),
    ],
)
def test_rows_that_cannot_be_written_are_named(data: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        stored(data, tmp_path)
    assert not list(tmp_path.rglob("*.jsonl")), "nothing half written"


def test_sounds_are_named_by_their_files(tmp_path: Path) -> None:
    """Also of datasets' decoded column, where its path is that of a file."""
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    decoded = {"path": str(tmp_path / "a.wav"), "array": np.zeros(9), "sampling_rate": 8}
    for row in ({"audio": decoded}, {"audios": [decoded]}, {"audio": tmp_path / "a.wav"}):
        path = stored([{"question": "q", "answer": "a", **row}], tmp_path)
        (read,) = task_from_spec("open_text", {}).load(str(path))
        assert read.audios == (str(tmp_path / "a.wav"),)


def test_the_same_rows_are_one_file_however_they_come(tmp_path: Path) -> None:
    """As arrays, PIL pictures, encoded bytes, or a datasets.Dataset, which is the second party."""
    import io

    import datasets

    def encoded(array: Any) -> bytes:
        buffer = io.BytesIO()
        Image.fromarray(array).save(buffer, format="PNG")
        return buffer.getvalue()

    plain = rows(2)
    pictures = [{**row, "image": Image.fromarray(row["image"])} for row in plain]
    raw = [{**row, "image": encoded(row["image"])} for row in plain]
    table = datasets.Dataset.from_list(
        [{**row, "image": {"bytes": encoded(row["image"]), "path": None}} for row in plain],
        features=datasets.Features(
            {
                "image": datasets.Image(),
                "question": datasets.Value("string"),
                "answer": datasets.List(datasets.Value("int64")),
            }
        ),
    )
    paths = {stored(found, tmp_path, "train") for found in (plain, pictures, raw, table)}
    assert len(paths) == 1
    samples = list(task_from_spec("grounding", {}).load(str(paths.pop())))
    assert [(s.question, tuple(s.answer), s.source) for s in samples] == [
        ("the red square", (4, 5, 30, 31), "train")
    ] * 2
    assert np.array_equal(np.asarray(Image.open(samples[0].images[0])), plain[0]["image"])
    assert stored(samples, tmp_path, "again") != stored(plain, tmp_path, "again"), (
        "samples carry ids and sources of their own"
    )
    assert [
        s.answer for s in task_from_spec("grounding", {}).load(str(stored(samples, tmp_path)))
    ] == [s.answer for s in samples]


def test_rows_keep_their_task_orientation_and_numbers(tmp_path: Path) -> None:
    turned = Image.new("CMYK", (30, 20))
    turned.getexif()[274] = 6
    row = {
        "task": "counting",
        "question": "red squares",
        "answer": np.int64(3),
        "image": turned,
        "note": np.arange(2),
    }
    path = stored([row], tmp_path)
    (sample,) = task_from_spec("mixed", {}).load(str(path))
    assert (sample.task, sample.answer, sample.params["note"]) == ("counting", 3, [0, 1])
    assert (sample.params["width"], sample.params["height"]) == (20, 30), "as viewers show it"
    assert (
        Path(path).parent.stat().st_mode & 0o777 == Path(tmp_path, ".data").stat().st_mode & 0o777
    )
    (again,) = task_from_spec("mixed", {}).load(str(stored([sample], tmp_path)))
    assert again.task == "counting"


def test_dotted_and_nested_keys_mean_the_same() -> None:
    assert _tree({"train.steps": 3, "train": {"save_every": 2}, "optim": {"lr": 1.0}}) == {
        "train": {"steps": 3, "save_every": 2},
        "optim": {"lr": 1.0},
    }
    trainer = mmrl.Trainer(
        config={"train": {"steps": 3}, "train.save_every": 1}, overrides={"seed": 5}
    )
    assert (trainer.config.train.steps, trainer.config.train.save_every, trainer.config.seed) == (
        3,
        1,
        5,
    )
    robots = mmrl.Trainer(config=REPO / "configs" / "robot_tiny.yaml", overrides={"env.slots": 3})
    assert type(robots.config).__name__ == "EmbodiedConfig" and robots.config.env.slots == 3  # type: ignore[attr-defined]


def test_importing_mmrl_stays_light() -> None:
    code = "import mmrl, sys; mmrl.Sample; assert 'torch' not in sys.modules; mmrl.load_config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, cwd=REPO, check=True, timeout=120)


def run_python(code: Path, folder: Path) -> str:
    """What it writes to standard output."""
    done = subprocess.run(
        [sys.executable, str(code)],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_example_learns(tmp_path: Path) -> None:
    (tmp_path / "assets").symlink_to(REPO / "assets")
    said = run_python(REPO / "examples" / "library.py", tmp_path)
    after = re.search(r"\{'mean': ([\d.]+)", said.splitlines()[-1])
    before = re.search(r"reward \(greedy\) +│ ([\d.]+)", said)
    assert before is not None and after is not None and float(after[1]) > float(before[1]) > 0.3, (
        said
    )


@pytest.mark.slow
def test_the_snippet_of_the_readme_runs(tmp_path: Path) -> None:
    found = re.search(
        r"```python\n(import mmrl\n.*?)```",
        (REPO / "README.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    assert found is not None
    held_out = [{"question": "Say cup.", "answer": "cup"}] * 3
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    code = (
        found[1]
        .replace("Qwen/Qwen2.5-VL-3B-Instruct", str(MODEL))
        .replace('"train.steps": 100', '"train.steps": 1')
    )
    assert str(MODEL) in code and '"train.steps": 1,' in code
    (tmp_path / "snippet.py").write_text(
        f"rows = [{{'question': f'Say {{n}}.', 'answer': str(n)}} for n in range(20)]\n{code}"
        "\nprint(found['greedy']['reward']['n'])"
    )
    assert run_python(tmp_path / "snippet.py", tmp_path).splitlines()[-1] == "3"


def test_former_names_of_the_rollout_types_warn_for_one_release() -> None:
    import mmrl

    for old, new in (
        ("Completion", mmrl.Turn),
        ("Trajectory", mmrl.Rollout),
        ("Group", mmrl.RolloutGroup),
    ):
        with pytest.warns(DeprecationWarning, match=f"mmrl.{old} is called mmrl.{new.__name__}"):
            assert getattr(mmrl, old) is new
