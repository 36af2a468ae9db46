"""An evaluation that is cut off keeps what it has judged, and --resume gives the numbers of one that was never cut off."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import mmrl
from mmrl.cli.main import app
from mmrl.errors import ConfigError
from mmrl.evaluation.places import evaluation_place
from mmrl.evaluation.progress import (
    PARTIAL,
    Asked,
    Progress,
    entries_of,
    judged_of,
    samples_mark,
    weights_mark,
)
from mmrl.evaluation.tables import Judged
from mmrl.tasks.scenes import make_scenes
from mmrl.types import Sample, Score
from tests.kits.engine_kit import read_jsonl, tiny_folder

ASKED = Asked({"model": "m", "video": {"fps": 2.0}, "data": ["a"], "none": {}}, 40)
SAMPLES = 154  # of the real evaluations: chunks of 16, 64, 64 and 10
SAMPLE = Sample("1", "grounding", "a", "where?", [1, 2, 3, 4])


def begun(folder: Path, *suites: str) -> Path:
    """An evaluation in `folder` that judged 16 of 40 samples and was killed."""
    with Progress(folder, dict.fromkeys(suites or [""], ASKED)) as progress:
        for suite in suites or [""]:
            progress.part(suite).keep((0, 0, 15), [{"row": 1}], 16)
    return folder


def resumed(folder: Path, asked: Asked = ASKED) -> Progress:
    return Progress.resumed([folder], {"": asked}, "the same command")


# what is kept


def test_whole_units_are_kept_and_a_torn_line_is_not(tmp_path: Path) -> None:
    begun(tmp_path)
    with (tmp_path / PARTIAL).open("a") as file:
        file.write('{"part": "", "unit": [0, 16, 31], "samples": 16, "jud')  # killed while it wrote
    with resumed(tmp_path) as progress:
        part = progress.part("")
        assert part.judged((0, 0, 15)) == [{"row": 1}] and part.judged((0, 16, 31)) is None
        part.keep((0, 16, 31), [{"row": 2}], 16)
        part.keep((0, 0, 15), [{"row": 3}], 16)  # a clip was added to its rows
    with resumed(tmp_path) as again:
        part = again.part("")
        assert part.judged((0, 16, 31)) == [{"row": 2}] and part.judged((0, 0, 15)) == [{"row": 3}]
        (tmp_path / "results.json").write_text("{}")
        again.complete = True
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]  # and no lock


def test_another_question_is_refused_and_says_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun(tmp_path)
    capsys.readouterr()
    others = {
        r"video\.fps was 2\.0, now 1\.0": {**ASKED.settings, "video": {"fps": 1.0}},
        "none was {}, now None": {**ASKED.settings, "none": None},
        r"data was None, now \[\]": {**ASKED.settings, "data": []},
    }
    for words, settings in others.items():
        with (
            pytest.raises(ConfigError, match=words) as error,
            resumed(tmp_path, Asked(settings, 40)),
        ):
            pass
        assert "model" not in str(error.value)
    with pytest.raises(ConfigError, match=r"b\.model was None"):
        Progress.resumed([tmp_path], {"": ASKED, "b": ASKED}, "")
    assert capsys.readouterr().err == ""
    with resumed(tmp_path) as progress:  # nothing is lost by it
        assert progress.part("").judged((0, 0, 15))


@pytest.mark.parametrize(
    "content",
    ["", "no json\n", '{"asked": {}}\n{"unit": 1}\n', "[1]\n", '{"asked": 1}\n', "\xff\n"],
)
def test_a_file_that_we_did_not_write_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / PARTIAL).write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match="evaluate again"):
        resumed(tmp_path)


def test_a_row_costs_its_odd_field_alone(tmp_path: Path) -> None:
    score = Score(0.5, True, parts={"a": 0.5}, weights={"a": 1.0}, detail={"size": (3, 4)})
    row = {"id": "1", "score": asdict(score), "odd": {(0, 1): 3}, "text": "half \ud800"}
    [entry] = entries_of([Judged(row, SAMPLE, score, 0, 7, 0)])
    assert "odd" not in entry["row"] and list(entry["row"]["left_out"]) == ["'odd'"]
    [back] = judged_of([entry], 0, {7: SAMPLE})
    assert back.score == replace(score, detail={"size": [3, 4]}) and back.place == 7
    assert back.row["text"] == row["text"]
    entry["row"]["score"]["value"] = float("nan")
    with pytest.raises(ConfigError, match="evaluate again"):
        judged_of([entry], 0, {7: SAMPLE})


def test_marks_tell_weights_and_samples_apart(tmp_path: Path) -> None:
    name = "Qwen/Qwen2.5-VL-3B-Instruct"
    assert weights_mark(name, "abc") != weights_mark(name, "def")
    large = bytearray(40 << 20)
    (tmp_path / "model.safetensors").write_bytes(large)
    one = weights_mark(str(tmp_path))
    os.utime(tmp_path / "model.safetensors", (1, 1))  # fetched again
    (tmp_path / ".eval.lock").write_text("")  # of nobody's model
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "results.json").write_text("{}")
    assert weights_mark(str(tmp_path)) == one
    large[::1000] = b"x" * len(large[::1000])  # trained: as long as before
    (tmp_path / "model.safetensors").write_bytes(large)
    assert weights_mark(str(tmp_path)) != one
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "manifest.json").write_text("{}")
    sealed = weights_mark(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")  # the manifest says what is in it
    assert weights_mark(str(tmp_path)) == sealed

    assert samples_mark([SAMPLE]) == samples_mark([replace(SAMPLE)])
    others = [
        replace(SAMPLE, question="who?"),
        replace(SAMPLE, answer=[1, 2, 3, 5]),
        replace(SAMPLE, params={"grid": {(0, 1): 3}}),
        replace(SAMPLE, params={"grid": {(0, 1): 4}}),
        replace(SAMPLE, params={"grid": {1, 2}}),
        replace(SAMPLE, params={"grid": {1, 3}}),
        replace(SAMPLE, params={"grid": np.array([1, 3])}),
        replace(SAMPLE, params={"grid": np.array([1, 4])}),
    ]
    assert len({samples_mark([SAMPLE]), *(samples_mark([s]) for s in others)}) == 1 + len(others)
    objects = [replace(SAMPLE, params={"scene": object()}) for _ in range(2)]
    assert samples_mark(objects[:1]) == samples_mark(objects[1:])  # wherever they lie in memory
    named = [replace(SAMPLE, images=(path,)) for path in ("a.png", os.path.abspath("a.png"))]
    assert samples_mark(named[:1]) == samples_mark(named[1:])  # however the file was named


# where it goes on


def test_resume_finds_the_newest_that_was_asked_for_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="found none; leave resuming out"):
        evaluation_place("model", "val", resume=True)
    home = Path("runs/eval/model")
    for number, name in enumerate(["val", "val-2", "val-10", "val-other", "val-2-b"]):
        begun(home / name)
        os.utime(home / name / PARTIAL, (number, number))
    place = evaluation_place("model", "val", resume=True)
    assert place.cut_off == (home / "val-10", home / "val-2", home / "val")
    with Progress(home / "val-10", {"": Asked({"model": "other"}, 40)}):
        pass
    assert not (home / "val-10").exists(), "nothing was judged"
    with Progress(home / "val-10", {"": Asked({"model": "other"}, 40)}) as other:
        other.part("").keep((0, 0, 15), [], 16)
    with evaluation_place("model", "val", resume=True).begin({"": ASKED}) as progress:
        assert progress.folder == home / "val-2"
    for name in ("val", "val-2", "val-10"):
        (home / name / PARTIAL).unlink()
        (home / name / "results.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"the one in .*val is complete"):
        evaluation_place("model", "val", resume=True)


def test_out_takes_no_second_evaluation(tmp_path: Path) -> None:
    begun(tmp_path / "suites", "refcoco_val", "refcoco_testA")
    with pytest.raises(ConfigError, match="with --resume goes on with it"):
        evaluation_place("model", "val", tmp_path / "suites")
    place = evaluation_place("model", "val", tmp_path / "suites", resume=True)
    assert place.cut_off == (tmp_path / "suites",)
    with pytest.raises(ConfigError, match=r"refcoco_val\.model was 'm', now None"):
        place.begin({"": ASKED})  # of one task
    for file in ("results.json", "suites.json"):
        (tmp_path / file).mkdir()
        with pytest.raises(ConfigError, match=r"found .* with one; name another folder"):
            evaluation_place("model", "val", tmp_path)
        (tmp_path / file).rmdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert evaluation_place("model", "val", tmp_path).folder == tmp_path


def test_what_is_left_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "val"
    with pytest.raises(KeyboardInterrupt), Progress(folder, {"": ASKED}):
        raise KeyboardInterrupt  # before anything was judged
    assert not folder.exists() and capsys.readouterr().err == ""
    with pytest.raises(ZeroDivisionError), Progress(folder, {"a": ASKED, "b": ASKED}) as progress:
        progress.part("b").keep((0, 0, 15), [], 16)
        progress.part("b").keep((0, 0, 15), [], 16)
        (tmp_path / "link").symlink_to(folder)
        with (
            pytest.raises(ConfigError, match="to be free"),
            Progress(tmp_path / "link", {"": ASKED}),
        ):
            pass  # another process would write into the same folder
        raise ZeroDivisionError
    assert f"kept in {folder}: 16 of 40 (b); the same command with" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == [PARTIAL]


# the real thing: another process, killed


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("resume")
    data = make_scenes(folder / "val", SAMPLES, seed=3)
    model = tiny_folder()
    return [
        *("eval", str(model), "--task", "grounding", "--data", str(data), "--samples", "2"),
        *("rollout.max_new_tokens=8", "model.device=cpu", "threads=1"),
    ]


# a job of a shell in the background ignores SIGINT, and so would its children
_COMMAND = (
    "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from mmrl.cli.main import main\nmain()\n"
)


def mmrl_process(arguments: list[str]) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", _COMMAND, *arguments]
    return subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def cut(arguments: list[str], partial: Path, sign: int) -> str:
    """Run it until a chunk is judged, of four, send it `sign`, and give what it said to standard error."""
    process = mmrl_process(arguments)
    until = time.monotonic() + 300
    while not partial.exists() or partial.read_bytes().count(b"\n") < 2:
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.02)
    process.send_signal(sign)
    said = process.communicate(timeout=120)[1]
    assert process.returncode != 0
    return said


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_evaluation_goes_on_bit_for_bit(
    command: list[str], tmp_path: Path, sign: int
) -> None:
    out = tmp_path / "out"
    said = cut([*command, "--out", str(out)], out / PARTIAL, sign)
    kept = (out / PARTIAL).read_bytes()
    if sign == signal.SIGINT:
        assert f" of {SAMPLES}; the same command with --resume goes on there" in said
    assert not (out / "results.json").exists()

    refused = CliRunner().invoke(app, [*command, "--out", str(out)])
    assert refused.exit_code and "--resume" in str(refused.exception)
    other = [*command, "--samples", "1", "--out", str(out), "--resume"]
    refused = CliRunner().invoke(app, other)
    assert "sampled was 2, now 1" in str(refused.exception)
    assert (out / PARTIAL).read_bytes() == kept

    done = mmrl_process([*command, "--out", str(out), "--resume"])
    assert done.communicate(timeout=300)[1] == "" and done.returncode == 0
    whole = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "whole")])
    assert whole.exit_code == 0, whole.exception
    for file in ("predictions.jsonl", "results.json", "rejected.jsonl"):
        mine, theirs = (folder / file for folder in (out, tmp_path / "whole"))
        assert mine.exists() == theirs.exists()
        assert not mine.exists() or mine.read_bytes() == theirs.read_bytes()
    assert not (out / PARTIAL).exists()


@pytest.mark.slow
def test_only_what_is_left_is_asked(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Python call as well, interrupted in the midst of the second chunk."""
    from mmrl.evaluation import evaluate as module

    asked: list[int] = []
    real = module._evaluate_chunk

    def counted(policy, engine, scorer, key, source, samples, *rest):  # type: ignore[no-untyped-def]
        asked.append(len(samples))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(policy, engine, scorer, key, source, samples, *rest)

    monkeypatch.setattr(module, "_evaluate_chunk", counted)
    given = {
        "data": command[5],
        "task": "grounding",
        "config": {"rollout": {"max_new_tokens": 8}, "threads": 1},
    }
    with pytest.raises(KeyboardInterrupt):
        mmrl.evaluate(command[1], out=tmp_path / "out", **given)
    found = mmrl.evaluate(command[1], out=tmp_path / "out", resume=True, **given)
    assert asked == [16, 64, 64, 64, 10] and len(found.predictions) == SAMPLES
    assert read_jsonl(tmp_path / "out" / "predictions.jsonl") == json.loads(
        json.dumps(found.predictions)
    )
    with pytest.raises(ConfigError, match="name another folder"):
        mmrl.evaluate(command[1], out=tmp_path / "out", **given)


_TASK = """
from pathlib import Path
from mmrl import Sample, Score, Task

class Parity(Task):
    part_names = ("accuracy",)

    def load(self, path):
        for line in open(path):
            yield Sample(line.strip(), "parity", "numbers", line.strip(), int(line) % 2)

    def messages(self, sample, template):
        return [{"role": "user", "content": f"Is {sample.question} odd?"}]

    def score(self, sample, text, ctx):
        if Path(__file__).with_name("down").exists() and sample.id == "20":
            raise ConnectionError("the judge is down")
        return Score.combine({"accuracy": 0.25}, {"accuracy": 1.0}, parsed=True)

    def gold(self, sample, ctx):
        return "yes"

    def wrong(self, sample, ctx):
        return "no"
"""


@pytest.mark.slow
def test_a_judge_that_failed_is_asked_again_and_other_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parity.py").write_text(_TASK)
    (tmp_path / "down").touch()
    (tmp_path / "numbers.txt").write_text("".join(f"{n}\n" for n in range(24)))
    out = ["--task", f"{tmp_path}/parity.py:Parity", "--data", f"{tmp_path}/numbers.txt"]
    out = ["eval", tiny_folder(), *out, "--out", f"{tmp_path}/out"]
    out += ["rollout.max_new_tokens=4", "model.device=cpu", "threads=1"]

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mmrl.evaluation.evaluate.evaluation_of", stopped)
        cut = CliRunner().invoke(app, out)
    assert "16 of 24" in cut.stderr, (cut.exception, cut.output)
    (tmp_path / "down").unlink()
    units = [json.loads(line) for line in (tmp_path / "out" / PARTIAL).read_text().splitlines()]
    assert [unit["unit"] for unit in units[1:]] == [[0, 0, 15]], "that of sample 20 is not judged"

    (tmp_path / "parity.py").write_text(_TASK.replace("0.25", "0.75"))
    refused = CliRunner().invoke(app, [*out, "--resume"])
    assert "tasks.0.2 was" in str(refused.exception)
    (tmp_path / "parity.py").write_text(_TASK)
    done = CliRunner().invoke(app, [*out, "--resume", "rollout.batch_tokens=512"])
    assert done.exit_code == 0, done.exception
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["greedy"]["reward"]["mean"] == 0.25 and results["failures"] == {"greedy": {}}
