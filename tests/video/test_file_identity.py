"""Keys name exact values, digests name exact bytes; an edited file of the same name, size and time is another file."""

from __future__ import annotations

import enum
import hashlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.errors import CacheError, ConfigError, MediaError
from mmrl.video import file_identity
from mmrl.video.store import TensorStore, content_digest, make_key

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def strict(value: Any) -> Any:
    """The value with its types, to compare with."""
    if isinstance(value, dict):
        return "dict", tuple(sorted((k, strict(v)) for k, v in value.items()))
    if isinstance(value, list | tuple):
        return "list", tuple(strict(v) for v in value)
    return type(value).__name__, repr(value)


@settings(max_examples=100, deadline=None)
@given(VALUES, VALUES)
def test_keys_are_equal_exactly_when_values_and_types_are(one: Any, other: Any) -> None:
    assert (make_key(a=one) == make_key(a=other)) == (strict(one) == strict(other))
    assert make_key(a=one, b=other) == make_key(b=other, a=one)
    assert (make_key(a=one, b=other) == make_key(a=other, b=one)) == (strict(one) == strict(other))


def test_keys_are_strict_about_types_and_stable() -> None:
    kinds = [
        make_key(a=v)
        for v in (1, 1.0, True, "1", None, [1], {"1": 1}, "true", 0, False, -0.0, 0.0, "")
    ]
    assert len(set(kinds)) == len(kinds)
    assert make_key(a=(1, 2)) == make_key(a=[1, 2]) and make_key(a={"x": 1, "y": 2}) == make_key(
        a={"y": 2, "x": 1}
    )
    text = '{"fps":2.0,"video":"\\u00e9"}'
    assert (
        make_key(video="é", fps=2.0)
        == hashlib.blake2b(text.encode(), digest_size=20, person=b"mmrl-key-1").hexdigest()
    )
    assert make_key(a=1) != make_key(b=1) and len(make_key(a=1)) == 40


class Size(enum.IntEnum):
    SMALL = 1


@pytest.mark.parametrize(
    "value",
    [
        np.float32(1),
        np.int64(1),
        np.float64(1),
        Size.SMALL,
        Path("x"),
        {1, 2},
        b"x",
        float("nan"),
        float("-inf"),
        {1: 2},
        [1, [np.int64(3)]],
        {"a": {"b": Path("x")}},
        object(),
        1j,
    ],
)
def test_values_without_one_exact_text_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"key\.a"):
        make_key(a=value)
    with pytest.raises(ConfigError, match="at least one field"):
        make_key()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths whose bytes were read; nothing is remembered from earlier tests."""
    seen: list[str] = []
    real = file_identity._read_file
    monkeypatch.setattr(file_identity, "_read_file", lambda path: seen.append(path) or real(path))  # type: ignore[func-returns-value]
    monkeypatch.setattr(file_identity, "_remembered", {})
    return seen


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as old at once."""
    monkeypatch.setattr(file_identity, "_SETTLED_NS", 0)
    monkeypatch.setattr(file_identity.time, "time_ns", lambda: 1 << 62)


def test_the_digest_names_the_bytes_not_the_name(tmp_path: Path) -> None:
    for name, content in (("a.mp4", b"one"), ("b.mp4", b"one"), ("c.mp4", b"two"), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
    a, b, c, empty = (content_digest(tmp_path / n) for n in ("a.mp4", "b.mp4", "c.mp4", "empty"))
    assert a == b and len({a, c, empty}) == 3 and len(a) == 40
    assert a == hashlib.blake2b(b"one", digest_size=20, person=b"mmrl-file-1").hexdigest()
    (tmp_path / "link").symlink_to(tmp_path / "a.mp4")
    assert content_digest(str(tmp_path / "link")) == a


def test_long_files_are_read_in_pieces(tmp_path: Path) -> None:
    content = os.urandom(9_000_001)
    (tmp_path / "long").write_bytes(content)
    assert (
        content_digest(tmp_path / "long")
        == hashlib.blake2b(content, digest_size=20, person=b"mmrl-file-1").hexdigest()
    )


def test_a_digest_is_remembered_in_the_process_and_in_the_store(
    tmp_path: Path, reads: list[str], settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip, store = tmp_path / "clip.mp4", TensorStore(tmp_path / "cache")
    clip.write_bytes(b"frames")
    first = store.content_digest(clip)
    assert (
        store.content_digest(clip) == content_digest(clip, store) == content_digest(clip) == first
        and len(reads) == 1
    )
    monkeypatch.setattr(file_identity, "_remembered", {})  # as in another process
    assert content_digest(clip, TensorStore(tmp_path / "cache")) == first and len(reads) == 1
    monkeypatch.setattr(file_identity, "_remembered", {})
    assert content_digest(clip) == first and len(reads) == 2, (
        "without a store nothing is remembered between runs"
    )
    [note] = (store.folder / "files").glob("??/*.json")
    tree = json.loads(note.read_text())
    for damage in (
        "",
        "{",
        "[" * 100_000,
        "[]",
        '{"path": 1}',
        json.dumps({**tree, "digest": "zz"}),
        json.dumps({**tree, "path": "/other"}),
        json.dumps({**tree, "stamp": [1, 2, 3, 4]}),
        json.dumps({**tree, "digest": 5}),
    ):
        note.write_text(damage)
        monkeypatch.setattr(file_identity, "_remembered", {})
        before = len(reads)
        assert store.content_digest(clip) == first and len(reads) == before + 1, damage
        assert json.loads(note.read_text()) == tree


@pytest.mark.parametrize(
    "how", ["in place", "replaced", "in place, time put back", "replaced, time put back"]
)
def test_an_edited_file_of_the_same_name_has_another_digest(
    tmp_path: Path, settled: None, how: str
) -> None:
    clip, store = tmp_path / "clip.mp4", TensorStore(tmp_path / "cache")
    clip.write_bytes(b"version 1")
    before, facts = store.content_digest(clip), clip.stat()
    time.sleep(0.02)  # file systems count time in steps of some milliseconds
    target = tmp_path / "new" if how.startswith("replaced") else clip
    with target.open("r+b" if target.exists() else "wb") as file:
        file.write(b"version 2")
    if how.endswith("put back"):
        os.utime(target, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    if target is not clip:
        os.replace(target, clip)
    assert store.content_digest(clip) != before
    assert (
        store.content_digest(clip)
        == hashlib.blake2b(b"version 2", digest_size=20, person=b"mmrl-file-1").hexdigest()
    )


def test_a_file_that_was_just_written_is_not_remembered(tmp_path: Path, reads: list[str]) -> None:
    clip = tmp_path / "clip.mp4"
    for version in range(20):  # same size, within one tick of the file system's clock
        clip.write_bytes(b"version %02d" % version)
        assert (
            content_digest(clip)
            == hashlib.blake2b(
                b"version %02d" % version, digest_size=20, person=b"mmrl-file-1"
            ).hexdigest()
        )
    content_digest(clip)
    assert len(reads) == 21


def test_a_folder_of_frames_is_named_by_names_and_contents(
    tmp_path: Path, settled: None, reads: list[str]
) -> None:
    def folder(name: str, frames: dict[str, bytes]) -> str:
        for frame, content in frames.items():
            (tmp_path / name / frame).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / frame).write_bytes(content)
        return content_digest(tmp_path / name)

    base = folder("a", {"1.png": b"x", "2.png": b"y"})
    assert folder("b", {"2.png": b"y", "1.png": b"x"}) == base
    others = [
        folder("c", {"1.png": b"y", "2.png": b"x"}),
        folder("d", {"1.png": b"x", "3.png": b"y"}),
        folder("e", {"1.png": b"x"}),
        folder("f", {"1.png": b"x", "2.png": b"y", "3.png": b""}),
        folder("g", {"1.pngx": b"", "2.png": b"y"}),
        folder("h", {"sub/1.png": b"x", "2.png": b"y"}),
    ]
    assert len({base, *others}) == 7
    before = len(reads)
    assert content_digest(tmp_path / "a") == base and len(reads) == before
    time.sleep(0.02)
    (tmp_path / "a/2.png").write_bytes(b"z")
    assert content_digest(tmp_path / "a") != base
    (tmp_path / "a/2.png").write_bytes(b"y")
    assert content_digest(tmp_path / "a/") == base
    (tmp_path / "file").write_bytes(b"x")
    assert content_digest(tmp_path / "file") != content_digest(tmp_path / "e")


def test_what_has_no_content_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/1.png").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    for name, kind in (
        ("none.mp4", "missing"),
        ("empty", "empty"),
        ("pipe", "unsupported"),
        ("broken", "missing"),
        ("file/below", "missing"),
    ):
        with pytest.raises(MediaError, match="expected a file") as caught:
            content_digest(tmp_path / name)
        assert caught.value.kind == kind and str(tmp_path) in caught.value.path
    with pytest.raises(MediaError) as caught:
        content_digest("/dev/null")
    assert caught.value.kind == "unsupported"


def test_a_file_that_keeps_changing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip, real = tmp_path / "clip.mp4", file_identity._read_file
    clip.write_bytes(b"x")

    def slow(path: str) -> str:
        with open(path, "ab") as file:  # somebody still writes it
            file.write(b"more")
        return real(path)

    monkeypatch.setattr(file_identity, "_read_file", slow)
    with pytest.raises(CacheError, match="changes while it is read; wait until it is complete"):
        content_digest(clip)


def test_many_threads_may_ask_at_once(tmp_path: Path, settled: None) -> None:
    store = TensorStore(tmp_path / "cache")
    (tmp_path / "clip").write_bytes(b"frames")
    got: list[str] = []
    threads = [
        threading.Thread(
            target=lambda: got.extend(store.content_digest(tmp_path / "clip") for _ in range(50))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert (
        len(got) == 200 and len(set(got)) == 1 and not list((store.folder / "files/tmp").glob("*"))
    )
