"""The manifest of a checkpoint: what it says of files, against xxhash itself, and every fault that it names."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import xxhash

from mmrl.errors import CheckpointError
from mmrl.policy.manifest import MANIFEST, check_loadable, has_manifest, problems, write_manifest

FILES = {
    "model.safetensors": b"w" * 5000,
    "config.json": b"{}",
    "trainer/state.json": b'{"step": 7, "manifest": 1}',
    "eval/results.json": b"[]",
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints" / "step_000007"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    write_manifest(folder, 7)
    return folder


def seal(folder: Path, content: Any) -> None:
    """Write a manifest as another program could that knows the seal."""

    def line(value: Any) -> str:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    digest = xxhash.xxh3_128_hexdigest(line(content).encode())
    (folder / MANIFEST).write_text(line({**content, "seal": digest}) + "\n")


def test_it_has_the_size_and_digest_of_every_file(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    content = {
        "large.bin": os.urandom(9 << 20),
        "small.txt": b"x",
        "trainer/state.json": b"{}",
        "empty.json": b"",
    }
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    write_manifest(tmp_path, 12)
    text = (tmp_path / MANIFEST).read_text()
    told = json.loads(text)
    assert told["files"] == {n: [len(d), xxhash.xxh3_128_hexdigest(d)] for n, d in content.items()}
    assert (told["format"], told["algorithm"], told["name"], told["step"]) == (
        1,
        "xxh3_128",
        "step_000012",
        12,
    )
    del told["seal"]
    seal(tmp_path, told)
    assert (tmp_path / MANIFEST).read_text() == text, "one canonical line"
    assert problems(tmp_path) == [] == problems(tmp_path, step=12)


@pytest.mark.parametrize("step", [5, 6, 8, 70])
def test_a_manifest_of_another_step_is_named(saved: Path, step: int) -> None:
    assert problems(saved, step=step) == [
        f"{MANIFEST}: expected that of step_{step:06d}, found that of step_000007"
    ]
    assert problems(saved.rename(saved.with_name(f"step_{step:06d}"))) == problems(
        saved.with_name(f"step_{step:06d}"), step=step
    )


def test_a_copy_under_any_other_name_is_whole(saved: Path) -> None:
    assert problems(saved.rename(saved.with_name("mine"))) == []
    with pytest.raises(TypeError):
        problems(saved, 7)  # type: ignore[misc]


def test_processes_share_the_files_and_find_every_fault_once(saved: Path) -> None:
    for name in FILES:
        if not name.startswith("trainer"):
            (saved / name).write_bytes(FILES[name] + b"!")
    (saved / "added.py").write_text("print()")
    (saved / "notes.md").write_text("of a person")
    whole = problems(saved)
    assert [fault.partition(":")[0] for fault in whole] == [
        "added.py",
        "model.safetensors",
        "config.json",
        "eval/results.json",
    ]
    assert whole[0] == "added.py: expected no such file, found one that was added", (
        "it would be loaded; notes.md would not"
    )
    assert whole[1] == "model.safetensors: expected 5,000 bytes, found 5,001"
    for count in (2, 3, 7):
        parts = [problems(saved, share=(number, count)) for number in range(count)]
        assert sorted(itertools.chain(*parts)) == sorted(whole) and parts[0][0] == whole[0]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"files": None}, "AttributeError|TypeError"),
        ({"files": {"a": 3}}, "TypeError"),
        ({"files": {"a": [1]}}, "TypeError"),
        ({"files": [["a", 1, "x"]]}, "TypeError|AttributeError"),
        ({"files": {"a\0b": [1, "x"]}}, "ValueError"),
        ({}, "KeyError"),
        ({"name": 3, "files": {}}, "expected that of"),
        ({"format": 2, "files": {}, "name": "x"}, "expected format 1, found 2"),
    ],
)
def test_sealed_by_somebody_else_and_not_as_expected(
    saved: Path, change: dict[str, Any], kind: str
) -> None:
    seal(saved, {"format": 1, "name": "step_000007", **change})
    (fault, *_) = problems(saved)
    assert fault.startswith(f"{MANIFEST}: expected ") and any(
        k in fault for k in kind.split("|")
    ), fault


@pytest.mark.parametrize("name", ["/etc/passwd", "../step_000008/config.json", "trainer/../../x"])
def test_names_outside_the_folder_are_refused_before_they_are_opened(
    saved: Path, name: str
) -> None:
    seal(saved, {"format": 1, "name": "step_000007", "files": {name: [1, "x"]}})
    assert f"{MANIFEST}: expected files of this folder, found {name!r}" in problems(saved)


def test_a_file_that_is_gone_or_no_file(saved: Path) -> None:
    (saved / "config.json").unlink()
    (saved / "model.safetensors").unlink()
    os.mkfifo(saved / "model.safetensors")
    assert problems(saved) == [
        "model.safetensors: expected a file, found something else",
        "config.json: cannot be read (No such file or directory)",
    ]


@pytest.mark.parametrize(
    "text", ["{", "[]", "null", '{"a": 1}', "\xff", "[" * 100_000, '{"seal": "x"}']
)
def test_a_manifest_that_is_not_as_it_was_written(saved: Path, text: str) -> None:
    (saved / MANIFEST).write_text(text, encoding="latin-1")
    assert problems(saved) == [f"{MANIFEST}: expected it as it was written, found other bytes"]


def test_a_manifest_that_was_removed(saved: Path, tmp_path: Path) -> None:
    (saved / MANIFEST).unlink()
    assert has_manifest(saved) and problems(saved) == [
        f"{MANIFEST}: expected it next to the state that names it, found none"
    ]
    with pytest.raises(CheckpointError, match="expected it next to the state"):
        check_loadable(saved)
    for damaged in ("{", "[]", "\xff", "[" * 100_000):
        (saved / "trainer" / "state.json").write_text(damaged, encoding="latin-1")
        assert has_manifest(saved), "what cannot be read may have promised one"
    (saved / "trainer" / "state.json").unlink()
    (saved / "trainer" / "state.json").mkdir()
    assert has_manifest(saved)
    (saved / "trainer" / "state.json").rmdir()
    assert not has_manifest(saved) and problems(saved) == [], (
        "a version without manifests, or no checkpoint of mmrl"
    )
    (saved / "trainer" / "state.json").write_text('{"step": 7}')
    assert not has_manifest(saved)
    told: list[str] = []
    check_loadable(saved, told.append)
    assert len(told) == 1 and "damage to its files cannot be noticed" in told[0]
    assert problems(tmp_path / "gone") == [f"{tmp_path / 'gone'} is gone"]


def test_loading_names_three_faults_and_the_checkpoints_beside(saved: Path) -> None:
    for other in ("step_000003", "step_000005", "step_12", "best", "step_000009.partial"):
        (saved.parent / other).mkdir()
    check_loadable(saved)
    (saved / "config.json").write_text("[]")
    check_loadable(saved)  # found whole by this process, and not read again
    os.utime(saved / MANIFEST)
    copied = saved.rename(saved.with_name("step_000007x")).rename(saved)
    write_manifest(copied, 7)
    for name in FILES:
        (saved / name).write_bytes(b"damaged")
    with pytest.raises(CheckpointError) as found:
        check_loadable(saved)
    said = str(found.value)
    assert "found 4 faults: " in said and said.count("; ") == 3, "three of them, and what to do"
    assert "take another one (step_000003, step_000005), or copy it again" in said
    for name in FILES:
        if name != "config.json":
            (saved / name).write_bytes(FILES[name])
    with pytest.raises(CheckpointError, match=r"found 1 fault: config\.json"):
        check_loadable(saved)


def test_a_folder_that_is_no_checkpoint_passes(tmp_path: Path) -> None:
    check_loadable("Qwen/Qwen2.5-VL-3B-Instruct")
    check_loadable(tmp_path)
