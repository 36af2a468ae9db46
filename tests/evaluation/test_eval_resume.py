"""An evaluation that is cut off keeps what it has judged, and --resume gives the numbers of one that was never cut off."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import mmrl
from mmrl.cli.main import app
from mmrl.errors import ConfigError
from mmrl.evaluation.places import evaluation_folder
from mmrl.evaluation.progress import (
    PARTIAL,
    Progress,
    checkpoint_mark,
    evaluating,
    samples_mark,
)
from mmrl.operations.lock import RunLock
from mmrl.tasks.scenes import make_scenes
from mmrl.types import Sample
from tests.kits.engine_kit import read_jsonl, tiny_folder

ASKED = {"model": "m", "video": {"fps": 2.0}, "data": [{"path": "a"}]}
SAMPLE = Sample("1", "grounding", "a", "where?", [1, 2, 3, 4])


def begun(folder: Path) -> Path:
    """An evaluation in `folder` that judged 16 of 40 samples."""
    Progress(folder, ASKED, 40).keep((0, 0, 15), [{"row": 1}], 16)
    return folder


# what is kept


def test_whole_units_are_kept_and_a_torn_line_is_not(tmp_path: Path) -> None:
    begun(tmp_path)
    with (tmp_path / PARTIAL).open("a") as file:
        file.write('{"unit": [0, 16, 31], "count": 16, "ke')  # killed while it wrote
    progress = Progress(tmp_path, ASKED, 40, resume=True)
    assert progress.kept((0, 0, 15)) == [{"row": 1}] and progress.kept((0, 16, 31)) is None
    progress.keep((0, 16, 31), [{"row": 2}], 16)
    progress.keep((0, 0, 15), [{"row": 3}], 16)  # a clip was added to its rows
    again = Progress(tmp_path, ASKED, 40, resume=True)
    assert again.kept((0, 16, 31)) == [{"row": 2}] and again.kept((0, 0, 15)) == [{"row": 3}]
    again.remove()
    assert not list(tmp_path.iterdir())


def test_another_question_is_refused_and_says_what_differs(tmp_path: Path) -> None:
    begun(tmp_path)
    with pytest.raises(ConfigError, match=r"video\.fps was 2\.0, now 1\.0") as error:
        Progress(tmp_path, {**ASKED, "video": {"fps": 1.0}}, 40, resume=True)
    assert "data.0.path" not in str(error.value) and "--resume" in str(error.value)
    assert Progress(tmp_path, ASKED, 40, resume=True).kept((0, 0, 15))  # and nothing is lost by it


@pytest.mark.parametrize("content", ["", "no json\n", '{"asked": {}}\n{"unit": 1}\n', "[1]\n"])
def test_a_file_that_we_did_not_write_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / PARTIAL).write_text(content)
    with pytest.raises(ConfigError, match="evaluate again"):
        Progress(tmp_path, ASKED, 40, resume=True)


def test_marks_tell_weights_and_samples_apart(tmp_path: Path) -> None:
    assert checkpoint_mark("Qwen/Qwen2.5-VL-3B-Instruct") == ""
    (tmp_path / "model.safetensors").write_bytes(b"one")
    one = checkpoint_mark(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"three")
    assert checkpoint_mark(str(tmp_path)) != one
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "manifest.json").write_text("{}")
    sealed = checkpoint_mark(str(tmp_path))
    os.utime(tmp_path / "model.safetensors", (1, 1))  # a copy: the manifest says what is in it
    assert checkpoint_mark(str(tmp_path)) == sealed

    assert samples_mark([SAMPLE]) == samples_mark([replace(SAMPLE)])
    others = [replace(SAMPLE, question="who?"), replace(SAMPLE, answer=[1, 2, 3, 5])]
    assert len({samples_mark([SAMPLE]), *(samples_mark([s]) for s in others)}) == 3
    objects = [replace(SAMPLE, params={"scene": object()}) for _ in range(2)]
    assert samples_mark(objects[:1]) == samples_mark(objects[1:])  # wherever they lie in memory


# where it goes on


def test_resume_finds_the_newest_that_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="found none; leave --resume out"):
        evaluation_folder("model", "val", resume=True)
    first, second, third = (evaluation_folder("model", "val") for _ in range(3))
    begun(first), begun(second)
    (third / "results.json").write_text("{}")
    assert evaluation_folder("model", "val", resume=True) == second
    for folder in (first, second):
        (folder / PARTIAL).unlink()
    with pytest.raises(ConfigError, match=r"a complete one in .*val-3"):
        evaluation_folder("model", "val", resume=True)


def test_out_takes_no_second_evaluation(tmp_path: Path) -> None:
    begun(tmp_path / "suites" / "refcoco_val")
    with pytest.raises(ConfigError, match="go on with it by --resume"):
        evaluation_folder("model", "val", tmp_path / "suites")
    assert evaluation_folder("m", "val", tmp_path / "suites", resume=True) == tmp_path / "suites"
    for file in ("results.json", "suites.json"):
        (tmp_path / file).mkdir()
        with pytest.raises(ConfigError, match=r"found .* with one; name another, or remove it"):
            evaluation_folder("model", "val", tmp_path)
        (tmp_path / file).rmdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert evaluation_folder("model", "val", tmp_path) == tmp_path


def test_what_is_left_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "val"
    with pytest.raises(KeyboardInterrupt), evaluating(folder):
        Progress(folder, ASKED, 40)
        raise KeyboardInterrupt  # before anything was judged
    assert not folder.exists() and capsys.readouterr().err == ""
    with pytest.raises(KeyboardInterrupt), evaluating(folder):
        begun(folder)
        raise KeyboardInterrupt
    assert "16 of 40; the same command with --resume" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="val"), evaluating(folder):
        RunLock(folder).acquire()  # a second evaluation of the same
    with evaluating(folder):
        (folder / "results.json").write_text("{}")
    assert [path.name for path in folder.iterdir()] == ["results.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["val"]  # and no lock


def test_a_suite_that_could_not_run_keeps_the_others(tmp_path: Path) -> None:
    with evaluating(tmp_path / "out"):
        for name in ("a", "b"):
            begun(tmp_path / "out" / name)
        (tmp_path / "out" / "a" / "results.json").write_text("{}")
    assert sorted(p.parent.name for p in (tmp_path / "out").glob(f"*/{PARTIAL}")) == ["a", "b"]


# the real thing: another process, killed


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("resume")
    data = make_scenes(folder / "val", 90, seed=3)
    model = tiny_folder()
    return [
        *("eval", str(model), "--task", "grounding", "--data", str(data), "--samples", "2"),
        *("rollout.max_new_tokens=8", "model.device=cpu", "threads=1"),
    ]


def mmrl_process(arguments: list[str]) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "mmrl.cli.main", *arguments]
    return subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def cut(arguments: list[str], partial: Path, sign: int) -> str:
    """Run it until two chunks are judged, send it `sign`, and give what it said to standard error."""
    process = mmrl_process(arguments)
    until = time.monotonic() + 300
    while not partial.exists() or partial.read_bytes().count(b"\n") < 3:
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
        assert " of 90; the same command with --resume goes on there" in said
    assert not (out / "results.json").exists()

    refused = CliRunner().invoke(app, [*command, "--out", str(out)])
    assert refused.exit_code and "--resume" in str(refused.exception)
    other = [*command, "--samples", "1", "--out", str(out), "--resume"]
    refused = CliRunner().invoke(app, other)
    assert "samples_per_prompt was 2, now 1" in str(refused.exception)
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
    assert asked == [16, 64, 64, 10] and len(found.predictions) == 90
    assert read_jsonl(tmp_path / "out" / "predictions.jsonl") == json.loads(
        json.dumps(found.predictions)
    )
    with pytest.raises(ConfigError, match="name another"):
        mmrl.evaluate(command[1], out=tmp_path / "out", **given)
