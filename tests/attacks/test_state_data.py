"""What a run has learned from is what it goes on with: rows, their params, and the bytes of pictures and clips."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmrl.config import load_config
from mmrl.data.sources import load_sources, prompt_stream
from mmrl.errors import DataError, MismatchError
from mmrl.training.media_record import MediaRecord
from mmrl.training.trainer import Trainer
from mmrl.video.file_identity import digest_of_content
from scripts.torture_resume import differences
from tests.kits.engine_kit import ALBUM, album_data, config_file, picture, small_run

STEPS = 2


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps of three prompts each, on four pictures of its own, with one more that is only in the held-out data."""
    folder = tmp_path_factory.mktemp("media")
    own = []
    for number in range(5):
        own.append(str(folder / f"{number}.png"))
        shutil.copy(picture((56, 56), number), own[-1])
        os.utime(own[-1], (1_600_000_000, 1_600_000_000))
    data, held = (
        album_data(folder / "data", [[p] for p in own[:4]]),
        album_data(folder / "data", [[own[4]]], "held"),
    )
    tree = small_run(
        folder / "runs", data, held, name="calm", train={"steps": STEPS, "keep_last": 9}
    )
    trainer = Trainer(load_config(config_file(folder / "calm.yaml", tree)))
    trainer.fit()
    return trainer.folder.path


def cut(calm: Path, name: str) -> Any:
    """A trainer that would resume a copy of the run, killed after its first step."""
    run = calm.with_name(name)
    shutil.copytree(calm, run, symlinks=True)
    shutil.rmtree(run / "checkpoints" / f"step_{STEPS:06d}")
    return Trainer(load_config(calm.parents[1] / "calm.yaml", [f"name={name}"]), resume=True)


def read_before(calm: Path) -> dict[str, tuple[str, Any]]:
    return json.loads((calm / "checkpoints" / "step_000001" / "trainer" / "media.json").read_text())


def replaced(path: str) -> bytes:
    """Put another picture of the same size and time in its place; returns what was there."""
    before, facts = Path(path).read_bytes(), os.stat(path)
    with Image.open(path) as shown:
        Image.new("RGB", shown.size, (200, 10, 10)).save(path)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    return before


@pytest.mark.slow
def test_pictures_replaced_under_a_run_are_noticed_when_it_is_resumed(calm: Path) -> None:
    known = read_before(calm)
    trained = [path for path in known if not path.endswith("4.png")]
    assert 0 < len(trained) <= 3 and any(p.endswith("4.png") for p in known), (
        "those that were read, the held-out one too"
    )
    for number, path in enumerate((trained[0], str(calm.parents[1] / "4.png"))):
        before = replaced(path)
        assert digest_of_content(path) != known[path][0]
        with pytest.raises(
            DataError,
            match=rf"1 of {len(known)}: {path} \(other bytes\); restore the files or start a new run",
        ):
            cut(calm, f"replaced{number}").fit()
        Path(path).write_bytes(before)
    aside = Path(trained[0]).rename(calm.parent / "aside.png")
    with pytest.raises(DataError, match=rf"{trained[0]} \(it is gone, or cannot be read\)"):
        cut(calm, "gone").fit()
    aside.rename(trained[0])
    # the same bytes, written again: other times, another inode, and no objection
    trainer = cut(calm, "restored")
    trainer.fit()
    assert all(differences(calm, trainer.folder.path).values())


def test_a_picture_that_was_not_read_yet_may_change(calm: Path) -> None:
    folder, known = calm.parents[1], read_before(calm)
    unread = [str(folder / f"{n}.png") for n in range(4) if str(folder / f"{n}.png") not in known]
    assert unread
    before = replaced(unread[0])
    cut(calm, "unread").fit()
    Path(unread[0]).write_bytes(before)


def test_a_picture_changed_while_the_run_goes_on_ends_it(calm: Path, tmp_path: Path) -> None:
    record, file = MediaRecord(), tmp_path / "a.png"
    shutil.copy(picture((56, 56), 1), file)
    record.note(str(file), digest_of_content(file))
    record.note(str(file), digest_of_content(file))
    replaced(str(file))
    with pytest.raises(
        MismatchError, match="found other bytes: the file was changed during the run"
    ):
        record.note(str(file), digest_of_content(file))


def test_files_are_read_again_only_where_they_were_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stamp decides whether to look, the bytes decide what is said."""
    import mmrl.video.file_identity as identity

    paths = []
    for number in range(6):
        paths.append(str(tmp_path / f"{number}.png"))
        shutil.copy(picture((56, 56), number), paths[-1])
    monkeypatch.setattr(identity, "_SETTLED_NS", -(10**18))  # they count as written long ago
    record, later = MediaRecord(), MediaRecord()
    for path in paths:
        record.note(path, digest_of_content(path))
    (tmp_path / "media.json").write_text(record.files()["media.json"])
    later.read(tmp_path / "media.json")
    read: list[str] = []
    whole = identity._read_file
    monkeypatch.setattr(identity, "_read_file", lambda path: (read.append(path), whole(path))[1])
    assert later.changes(paths) == "" and read == []
    os.utime(paths[2])  # touched: looked at, and found to be the same
    assert later.changes(paths) == "" and read == [paths[2]]
    replaced(paths[3])  # of the same size and time; the kernel's own time of the change tells
    assert later.changes(paths) == f"1 of 6: {paths[3]} (other bytes)" and read[-1] == paths[3]
    assert later.changes(paths[:3]) == "", "what the data do not name is not compared"


def test_params_task_and_source_of_rows_are_part_of_the_data(tmp_path: Path) -> None:
    """And a checkpoint of a version that did not look at them is still continued."""
    import dataclasses

    config = load_config(
        config_file(
            tmp_path / "c.yaml",
            small_run(tmp_path, album_data(tmp_path, [[picture((56, 56), 1)]] * 3)),
        )
    )
    (source,) = load_sources(config.data.train)
    assert config.data.train[0].task == ALBUM
    state = prompt_stream(config, [source]).state_dict()
    for change in (
        {"params": {"threshold": 0.5}},
        {"task": "other"},
        {"source": "other"},
        {"answer": 3},
        {"question": "\ud800?"},
    ):
        row = dataclasses.replace(source.samples[1], **change)
        other = dataclasses.replace(source, samples=(source.samples[0], row, source.samples[2]))
        with pytest.raises(DataError, match="the data changed since the checkpoint was written"):
            prompt_stream(config, [other]).load_state_dict(state)
    older = {**state, "data": [mmrl_before(source)]}
    prompt_stream(config, [source]).load_state_dict(older)
    row = dataclasses.replace(source.samples[1], answer=3)
    other = dataclasses.replace(source, samples=(source.samples[0], row, source.samples[2]))
    with pytest.raises(DataError, match="the data changed"):
        prompt_stream(config, [other]).load_state_dict(older)


def mmrl_before(source: Any) -> str:
    """What release 0.1.0's first checkpoints hold, computed here as it was then."""
    import hashlib

    digest = hashlib.blake2b(digest_size=8)
    for sample in source.samples:
        digest.update(
            repr((sample.id, sample.question, sample.answer, sample.images)).encode("utf-8")
        )
    return f"{len(source.samples)} samples, {digest.hexdigest()}"
