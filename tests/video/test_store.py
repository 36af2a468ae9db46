"""The tensor store within one process: what is kept comes back, bit for bit, as a map of the file; everything else is an error
that says so."""

from __future__ import annotations

import logging
import os
import pickle
import resource
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from mmrl.errors import CacheError, ConfigError, MMRLError
from mmrl.video import tensor_file
from mmrl.video.store import TensorStore, content_digest, make_key
from scripts._torture_trust_state import file_size_limit
from tests.video.store_kit import KEY, OTHER, at_rest, builder, numbers, path_of

DTYPES = [getattr(torch, name) for name in tensor_file._NAMES.values()]


@pytest.fixture
def store(tmp_path: Path) -> TensorStore:
    return TensorStore(tmp_path / "cache")


def raw(tensor: torch.Tensor) -> bytes:
    return (
        b""
        if tensor.numel() == 0
        else tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    )


@st.composite
def tensor_sets(draw: Any) -> dict[str, torch.Tensor]:
    made = {}
    for name in draw(
        st.lists(
            st.text(min_size=1, max_size=6).filter(
                lambda n: n != "__metadata__" and n.isprintable()
            ),
            min_size=1,
            max_size=4,
            unique=True,
        )
    ):
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 4), max_size=3))
        count = int(torch.tensor(shape).prod()) if shape else 1
        data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
        data = bytes(b & 1 for b in data) if dtype is torch.bool else data
        made[name] = (
            torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
            if count
            else torch.empty(shape, dtype=dtype)
        )
    return made


@settings(max_examples=60, deadline=None)
@given(
    tensor_sets(),
    st.dictionaries(
        st.text(max_size=4),
        st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text()
        | st.none()
        | st.booleans()
        | st.lists(st.integers()),
    ),
)
def test_every_dtype_and_shape_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, tensors: Any, meta: Any
) -> None:
    store = TensorStore(tmp_path_factory.mktemp("cache"), verify="always")
    written, read = store.put(KEY, tensors, meta), store.get(KEY)
    assert read is not None and read.cached
    libraries = load_file(path_of(store))
    for entry in (written, read):
        assert set(entry.tensors) == set(tensors) and dict(entry.meta) == meta and entry.key == KEY
        assert entry.nbytes == path_of(store).stat().st_size and entry.digest == written.digest
        for name, tensor in tensors.items():
            for got in (entry.tensors[name], libraries[name]):
                assert (
                    got.dtype == tensor.dtype
                    and got.shape == tensor.shape
                    and raw(got) == raw(tensor)
                )


def test_views_gradients_and_conjugates_are_kept_by_value(store: TensorStore) -> None:
    base = torch.arange(24.0).view(4, 6)
    wave = torch.tensor([1 + 2j, 3 - 1j])
    entry = store.put(
        KEY,
        {
            "t": base.t(),
            "step": base[:, ::2],
            "leaf": base.clone().requires_grad_(),
            "conj": wave.conj(),
        },
    )
    assert torch.equal(entry.tensors["t"], base.t()) and torch.equal(
        entry.tensors["step"], base[:, ::2]
    )
    assert not entry.tensors["leaf"].requires_grad and torch.equal(
        entry.tensors["conj"], torch.tensor([1 - 2j, 3 + 1j])
    )


def test_tensors_are_maps_of_the_file_and_never_write_to_it(store: TensorStore) -> None:
    store.put(KEY, numbers(1 << 20))
    entry = store.get(KEY)
    assert entry is not None
    address = entry.tensors["x"].data_ptr()
    lines = [
        x.split()
        for x in Path("/proc/self/maps").read_text().splitlines()
        if x.endswith(f"{KEY}.safetensors")
    ]
    spans = [[int(part, 16) for part in x[0].split("-")] for x in lines]
    assert any(low <= address < high for low, high in spans)
    before = path_of(store).read_bytes()
    entry.tensors["x"].zero_()
    assert path_of(store).read_bytes() == before
    again = store.get(KEY)
    assert again is not None and torch.equal(again.tensors["x"], numbers(1 << 20)["x"])
    with pytest.raises(TypeError):
        entry.tensors["y"] = entry.tensors["x"]  # type: ignore[index]
    with pytest.raises(TypeError):
        entry.meta["kind"] = "x"  # type: ignore[index]


def test_equal_contents_make_equal_files(store: TensorStore, tmp_path: Path) -> None:
    one = store.put(
        KEY, {"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.int64)}, {"x": 1, "y": 2}
    )
    first = path_of(store).read_bytes()
    two = TensorStore(tmp_path / "b").put(
        KEY, {"b": torch.zeros(2, dtype=torch.int64), "a": torch.ones(3)}, {"y": 2, "x": 1}
    )
    assert (
        first == (tmp_path / "b/tensors-v1/ab" / f"{KEY}.safetensors").read_bytes()
        and one.digest == two.digest
    )
    assert store.put(KEY, {"a": torch.ones(3)}).digest != one.digest


@pytest.mark.parametrize(
    "key",
    [
        "",
        "ab",
        "../../etc/passwd",
        "AB" * 20,
        "g" * 40,
        "ab" * 100,
        f"{KEY}\n",
        5,
        None,
        f"../{KEY}",
    ],
)
def test_only_hexadecimal_keys_are_taken(store: TensorStore, key: Any) -> None:
    for call in (
        store.get,
        lambda k: store.put(k, numbers()),
        lambda k: store.get_or_build(k, builder()),
    ):
        with pytest.raises(ConfigError, match="hexadecimal"):
            call(key)


@pytest.mark.parametrize(
    ("tensors", "meta", "says"),
    [
        ({}, {}, "at least one tensor"),
        ({"": torch.ones(1)}, {}, "a name of a tensor"),
        ({"__metadata__": torch.ones(1)}, {}, "a name of a tensor"),
        ({"x": [1, 2]}, {}, "found list"),
        ({"x": torch.eye(2).to_sparse()}, {}, "sparse"),
        ({"x": torch.ones(1, dtype=torch.complex128)}, {}, "complex128"),
        ({"x": torch.ones(1)}, {"when": {1, 2}}, "type set"),
        ({"x": torch.ones(1)}, {"n": float("nan")}, "finite"),
        ({"x": torch.ones(1)}, {3: 4}, "text keys"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    store: TensorStore, tensors: Any, meta: Any, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        store.put(KEY, tensors, meta)
    assert store.get(KEY) is None and at_rest(store)


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'always'"):
        TensorStore(tmp_path, verify="alway")  # type: ignore[arg-type]
    for limit in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="limit_bytes"):
            TensorStore(tmp_path, limit_bytes=limit)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("x")
    with pytest.raises(CacheError, match="folder this user may write to"):
        TensorStore(tmp_path / "file")
    assert issubclass(CacheError, MMRLError) and issubclass(CacheError, OSError)


def test_a_store_travels_between_processes_an_entry_does_not(store: TensorStore) -> None:
    entry = store.put(KEY, numbers())
    other = pickle.loads(pickle.dumps(store))
    assert other.root == store.root and torch.equal(other.get(KEY).tensors["x"], numbers()["x"])
    with pytest.raises(TypeError, match=r"send entry\.key"):
        pickle.dumps(entry)


def test_a_closed_entry_says_so_and_its_tensors_live_on(store: TensorStore) -> None:
    with store.put(KEY, numbers()) as entry:
        kept = entry.tensors["x"]
    entry.close()
    with pytest.raises(CacheError, match="was closed"):
        _ = entry.tensors
    assert torch.equal(kept, numbers()["x"]) and KEY in repr(entry)


def test_one_builds_and_the_others_wait(store: TensorStore) -> None:
    calls: list[int] = []
    start = threading.Barrier(6)
    got = []

    def ask() -> None:
        start.wait()
        got.append(
            store.get_or_build(
                KEY, lambda: (threading.Event().wait(0.2), builder(calls=calls)())[1]
            )
        )

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert (
        len(calls) == 1
        and len(got) == 6
        and all(torch.equal(e.tensors["x"], numbers()["x"]) for e in got)
    )
    assert (
        store.counts["builds"] == 1
        and store.counts["waited"] == 5
        and store.counts["misses"] == 6
        and at_rest(store)
    )


def test_whoever_waits_too_long_builds_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stuck, patient = TensorStore(tmp_path), TensorStore(tmp_path, wait_s=0.1)
    inside, leave = threading.Event(), threading.Event()
    thread = threading.Thread(
        target=lambda: stuck.get_or_build(
            KEY, lambda: (inside.set(), leave.wait(20), builder()())[2]
        )
    )
    thread.start()
    assert inside.wait(20)
    entry = patient.get_or_build(KEY, builder())
    leave.set()
    thread.join(20)
    assert (
        torch.equal(entry.tensors["x"], numbers()["x"])
        and "building it here" in caplog.text
        and at_rest(stuck)
    )


def test_a_failed_build_keeps_nothing_and_blocks_nobody(store: TensorStore) -> None:
    for error in (ValueError("broken clip"), OSError(5, "disk"), KeyboardInterrupt()):

        def fail(error: BaseException = error) -> Any:
            raise error

        with pytest.raises(type(error)):
            store.get_or_build(KEY, fail)
        assert store.get(KEY) is None and at_rest(store)
    assert store.get_or_build(KEY, builder()).cached and store.counts["builds"] == 1


def test_a_build_may_need_another_entry_but_not_itself(store: TensorStore) -> None:
    def features() -> Any:
        return {"y": store.get_or_build(OTHER, builder()).tensors["x"].float()}, {
            "kind": "features"
        }

    assert store.get_or_build(KEY, features).tensors["y"].dtype == torch.float32
    with pytest.raises(CacheError, match="asks for itself"):
        store.get_or_build("ee" * 20, lambda: store.get_or_build("ee" * 20, builder()))  # type: ignore[arg-type, return-value]
    assert store.get_or_build("ee" * 20, builder()).cached and at_rest(store)


def test_a_source_edited_during_the_build_is_noticed(store: TensorStore, tmp_path: Path) -> None:
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(b"one")
    digest = content_digest(clip)
    key = make_key(content=digest)

    def build() -> Any:
        clip.write_bytes(b"two")
        return builder()()

    with pytest.raises(CacheError, match="unchanged while it was read"):
        store.get_or_build(key, build, sources={str(clip): digest})
    assert store.get(key) is None
    assert store.get_or_build(
        make_key(content=content_digest(clip)), builder(), sources={str(clip): content_digest(clip)}
    ).cached


def test_a_full_disk_costs_the_cache_not_the_training(
    store: TensorStore, caplog: pytest.LogCaptureFixture
) -> None:
    with file_size_limit(1 << 16):
        with pytest.raises(
            CacheError, match=r"expected room for 1,000,\d+ bytes in .*free space, set limit_bytes"
        ):
            store.put(KEY, numbers(10**6))
        for key in (KEY, OTHER):
            entry = store.get_or_build(key, builder(10**6))
            assert (
                not entry.cached
                and torch.equal(entry.tensors["x"], numbers(10**6)["x"])
                and entry.meta["kind"] == "pixels"
            )
        assert store.get_or_build("ee" * 20, builder(100)).cached  # small ones still fit
    assert store.counts["uncached"] == 2 and at_rest(store)
    assert [r.levelno for r in caplog.records].count(
        logging.WARNING
    ) == 1 and "uncached" in caplog.text
    cached = store.get_or_build(KEY, builder(10**6))
    assert (
        cached.cached
        and cached.digest
        == TensorStore(store.root).put(KEY, numbers(10**6), {"kind": "pixels"}).digest
    )


def test_what_stands_in_the_way_costs_the_cache_not_the_training(store: TensorStore) -> None:
    (store.folder / "ab").write_text("a file where a folder belongs")
    entry = store.get_or_build(KEY, builder())
    assert not entry.cached and torch.equal(entry.tensors["x"], numbers()["x"])
    path_of(store, OTHER).mkdir(parents=True)  # a folder where an entry belongs
    entry = store.get_or_build(OTHER, builder())
    assert not entry.cached and store.get(OTHER) is None
    assert [wrong for _, wrong in store.verify().damaged] == ["it cannot be read: Is a directory"]


def test_a_folder_deleted_under_way_is_made_again(store: TensorStore) -> None:
    held = store.get_or_build(KEY, builder())
    shutil.rmtree(store.root)
    assert torch.equal(held.tensors["x"], numbers()["x"])
    assert (
        store.get(KEY) is None
        and store.get_or_build(KEY, builder()).cached
        and store.get(KEY) is not None
    )
    shutil.rmtree(store.root)
    assert store.put(OTHER, numbers()).cached and store.stats().entries == 1


def test_beyond_the_limit_of_open_files_entries_are_mapped_without_one(
    store: TensorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = len(tensor_file._open_maps)
    monkeypatch.setattr(tensor_file, "map_limit", lambda: alive + 2)
    before = len(os.listdir("/proc/self/fd"))
    entries = [store.put(f"{i:040x}", numbers(seed=i)) for i in range(6)]
    assert len(os.listdir("/proc/self/fd")) == before + 2
    # the first two are in use, the others may be evicted and stay valid
    assert store.prune(max_bytes=0)[0] == 4
    assert all(torch.equal(e.tensors["x"], numbers(seed=i)["x"]) for i, e in enumerate(entries))
    entries.clear()
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_free_descriptor_is_said(store: TensorStore) -> None:
    store.put(KEY, numbers())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
        with pytest.raises(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(CacheError, match="ulimit -n"):
            store.get(KEY)
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert store.get(KEY) is not None


def test_forked_children_count_for_themselves(store: TensorStore) -> None:
    store.put(KEY, numbers())
    store.get(KEY)
    pid = os.fork()
    if pid == 0:
        fresh = store.counts["hits"] == 0
        store.get(KEY)
        store.flush(wait_s=5.0)
        os._exit(0 if fresh else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    stats = store.stats()
    assert stats.counts["hits"] == 1 and stats.totals["hits"] == 2
