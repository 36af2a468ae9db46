"""The size bound: the least recently used go first, what is in use never; counts and sizes are what they say."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.errors import CacheError, ConfigError
from mmrl.video import store as store_module
from mmrl.video.store import TensorStore
from tests.video.store_kit import KEY, OTHER, at_rest, builder, flip, numbers, path_of, used

DAY = 86400.0


def key(i: int) -> str:
    return f"{i * 7919:040x}"


def filled(tmp_path: Path, count: int, **options: Any) -> TensorStore:
    """Entries 0 (used longest ago) ... count - 1, of 1000 bytes each and a header."""
    store = TensorStore(tmp_path / "cache", **options)
    for i in range(count):
        store.put(key(i), numbers(1000, i), {"kind": "pixels" if i % 2 else "features"}).close()
        used(path_of(store, key(i)), (count - i) * DAY)
    return store


def size_of_one(tmp_path: Path) -> int:
    return TensorStore(tmp_path / "one").put(KEY, numbers(), {"kind": "pixels"}).nbytes


def present(store: TensorStore, count: int) -> list[int]:
    return [i for i in range(count) if path_of(store, key(i)).exists()]


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    one = size_of_one(tmp_path)
    store = filled(tmp_path, 10, limit_bytes=10 * one + 10)
    assert present(store, 10) == list(range(10))
    assert store.get(key(0)) is not None  # used now
    store.put(key(10), numbers())
    left = present(store, 11)
    assert 0 in left and 10 in left and 1 not in left and left == sorted(left)
    assert left[1:] == list(range(left[1], 11)), "those used longest ago are gone, no others"
    assert sum(path_of(store, key(i)).stat().st_size for i in left) <= 10 * one + 10
    assert store.counts["evicted"] == 11 - len(left) and at_rest(store)


def test_reading_marks_at_most_once_a_minute(tmp_path: Path) -> None:
    store = filled(tmp_path, 1)
    path = path_of(store, key(0))
    written = path.stat().st_mtime_ns
    store.get(key(0))
    marked = path.stat().st_atime_ns
    assert time.time_ns() - marked < 30e9
    used(path, 30.0)
    marked = path.stat().st_atime
    store.get(key(0))
    assert (
        path.stat().st_atime == pytest.approx(marked, abs=1) and path.stat().st_mtime_ns == written
    )


def test_what_is_in_use_is_never_evicted(tmp_path: Path) -> None:
    one = size_of_one(tmp_path)
    store = filled(tmp_path, 4, limit_bytes=4 * one + 10)
    entry, other = store.get(key(0)), store.get(key(1))
    assert entry is not None and other is not None
    tensor = other.tensors["x"]
    other.close()
    del other  # the tensor alone keeps the file in use
    used(path_of(store, key(0)), 100 * DAY)
    used(path_of(store, key(1)), 99 * DAY)
    for i in range(4, 9):
        store.put(key(i), numbers(1000, i)).close()
    assert {0, 1} <= set(present(store, 9)) and torch.equal(tensor, numbers(1000, 1)["x"])
    assert store.prune(max_bytes=0)[1] == 2 * one
    del tensor
    entry.close()
    assert store.prune(max_bytes=0) == (2, 0)


def test_a_cache_full_of_entries_in_use_caches_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = size_of_one(tmp_path)
    store = TensorStore(tmp_path / "cache", limit_bytes=3 * one + 10)
    held = [store.put(key(i), numbers(1000, i), {"kind": "pixels"}) for i in range(3)]
    with pytest.raises(
        CacheError, match="what lies there is in use; raise limit_bytes or close entries"
    ):
        store.put(key(3), numbers())
    entry = store.get_or_build(key(3), builder())
    assert not entry.cached and store.counts["uncached"] == 1 and present(store, 4) == [0, 1, 2]
    held.clear()
    monkeypatch.setattr(store._space, "_refused_until", 0.0)
    assert store.get_or_build(key(3), builder()).cached
    with pytest.raises(CacheError, match="within the cache's bound"):
        store.put(key(4), numbers(10_000))


def test_the_bound_holds_for_several_writers_and_after_a_wrong_count(tmp_path: Path) -> None:
    one = size_of_one(tmp_path)
    first = TensorStore(tmp_path / "cache", limit_bytes=20 * one)
    second = TensorStore(tmp_path / "cache", limit_bytes=20 * one)
    unbound = TensorStore(tmp_path / "cache")
    for i in range(15):
        unbound.put(key(i), numbers(1000, i))
    threads = [
        threading.Thread(
            target=lambda s=s, o=o: [s.put(key(o + i), numbers(1000, i)).close() for i in range(40)]
        )
        for s, o in ((first, 100), (second, 200))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert first.stats().nbytes <= 20 * one and first.stats().entries >= 17
    for wrong in ("rubbish", "", "00000000000999999999\n", "-5"):
        (first.folder / "size.txt").write_text(wrong)
        for i in range(25):
            first.put(key(300 + i), numbers(1000, i))
        assert 17 <= first.stats().entries <= 20, wrong
    assert at_rest(first)


def test_what_another_writer_has_not_named_yet_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has made room, and writes slowly; the other measures the folder meanwhile."""
    one = size_of_one(tmp_path)
    slow, other = (TensorStore(tmp_path / "cache", limit_bytes=20 * one) for _ in range(2))
    writes, go_on = threading.Event(), threading.Event()
    write = store_module.write

    def wait_and_write(fd: int, packed: Any) -> None:
        if packed.key == key(0):
            writes.set()
            assert go_on.wait(60)
        write(fd, packed)

    monkeypatch.setattr(store_module, "write", wait_and_write)
    written: list[str] = []
    thread = threading.Thread(target=lambda: written.append(slow.put(key(0), numbers(1000, 0)).key))
    thread.start()
    assert writes.wait(60)
    for i in range(1, 21):
        other.put(key(i), numbers(1000, i)).close()
    go_on.set()
    thread.join(60)
    assert written == [key(0)]
    stats = other.stats()
    assert stats.nbytes <= 20 * one and stats.entries >= 17
    assert at_rest(other)


def test_prune_by_age_and_by_size(tmp_path: Path) -> None:
    store = filled(tmp_path, 10)  # entry i was used 10 - i days ago
    one = path_of(store, key(9)).stat().st_size
    assert store.prune() == (0, store.stats().nbytes) and store.prune(unused_for_s=30 * DAY)[0] == 0
    assert store.prune(unused_for_s=6.5 * DAY)[0] == 4 and present(store, 10) == [4, 5, 6, 7, 8, 9]
    assert store.prune(max_bytes=3 * one + 200) == (3, store.stats().nbytes) and present(
        store, 10
    ) == [7, 8, 9]
    for bad in ({"max_bytes": -1}, {"unused_for_s": -0.5}, {"unused_for_s": float("nan")}):
        with pytest.raises(ConfigError, match="at least 0"):
            store.prune(**bad)  # type: ignore[arg-type]


def test_verify_and_stats_do_not_change_what_goes_first(tmp_path: Path) -> None:
    store = filled(tmp_path, 5)
    before = [path_of(store, key(i)).stat().st_atime_ns for i in range(5)]
    store.verify(), store.stats(), list(store.entries())
    assert [path_of(store, key(i)).stat().st_atime_ns for i in range(5)] == before


def test_stats_and_entries_tell_what_lies_there(tmp_path: Path) -> None:
    store = filled(tmp_path, 5)
    store.put(KEY, numbers(10))
    store.put(OTHER, numbers(10), {"kind": "pixels"})
    flip(path_of(store, OTHER), 9)
    stats = store.stats()
    sizes = {e.key: e.nbytes for e in store.entries()}
    assert stats.entries == 7 and stats.nbytes == sum(
        p.stat().st_size for p in store.folder.glob("??/*.safetensors")
    )
    assert {k: n for k, (n, _) in stats.kinds.items()} == {
        "pixels": 2,
        "features": 3,
        "other": 1,
        "damaged": 1,
    }
    assert stats.kinds["pixels"][1] == sizes[key(1)] + sizes[key(3)]
    stored = {e.key: e for e in store.entries()}
    assert (
        len(stored) == 6
        and stored[key(0)].meta == {"kind": "features"}
        and stored[KEY].kind == "other"
    )
    assert time.time() - stored[key(0)].used_at == pytest.approx(5 * DAY, abs=60)


def test_counts_are_kept_over_processes(tmp_path: Path) -> None:
    store = TensorStore(tmp_path)
    for _ in range(3):
        store.get_or_build(KEY, builder())
    assert dict(store.stats().totals) == {
        **dict.fromkeys(store.stats().totals, 0),
        "hits": 2,
        "misses": 1,
        "builds": 1,
    }
    later = TensorStore(tmp_path)
    later.get(KEY), later.get(OTHER)
    stats = later.stats()
    assert stats.counts["hits"] == 1 and stats.totals["hits"] == 3 and stats.totals["misses"] == 2
    assert later.stats().totals == stats.totals, "asking again adds nothing"
    (later.folder / "counts.json").write_text("[1, 2")
    later.get(KEY)
    assert later.stats().totals["hits"] == 1


def test_what_dead_processes_left_is_removed_and_what_the_living_use_is_not(tmp_path: Path) -> None:
    from mmrl.video.locks import create_shared, exclusive

    store = TensorStore(tmp_path)
    (store.folder / "tmp/123-0-abc.tmp").write_bytes(b"half an entry")
    (store.folder / "locks" / KEY).touch()
    (store.folder / "files/tmp").mkdir()
    (store.folder / "files/tmp/9-9-9.tmp").touch()
    fd, writing = create_shared(store.folder / "tmp")
    with exclusive(store.folder / "locks" / OTHER, wait_s=1) as held:
        TensorStore(tmp_path)
        assert held and writing.exists() and (store.folder / "locks" / OTHER).exists()
        assert (
            len(list((store.folder / "tmp").iterdir())) == 1
            and not (store.folder / "locks" / KEY).exists()
        )
    os.close(fd)
    store.prune()
    assert at_rest(store)


def test_a_file_removed_or_replaced_between_opening_and_locking_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmrl.video import locks

    store, real, races = TensorStore(tmp_path), locks._lock, list[str]()

    def late(fd: int, kind: int) -> bool:
        if races:
            os.unlink(path_of(store))
            if races.pop() == "replaced":
                store.put(KEY, numbers(seed=2)).close()
        return real(fd, kind)

    monkeypatch.setattr(locks, "_lock", late)
    store.put(KEY, numbers()).close()
    races.append("removed")
    assert store.get(KEY) is None
    store.put(KEY, numbers()).close()
    races.append("replaced")
    entry = store.get(KEY)
    assert entry is not None and torch.equal(entry.tensors["x"], numbers(seed=2)["x"])
