"""A damaged file is never believed: any flipped bit, any cut, any forged header is noticed, removed, counted and rebuilt."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mmrl.video.store import TensorStore
from tests.video.store_kit import KEY, OTHER, at_rest, builder, flip, numbers, path_of


@pytest.fixture
def store(tmp_path: Path) -> TensorStore:
    return TensorStore(tmp_path / "cache", verify="always")


def test_every_single_bit_matters(store: TensorStore) -> None:
    tensors = {
        "p": torch.arange(12, dtype=torch.uint8).view(3, 4),
        "f": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    }
    store.put(KEY, tensors, {"kind": "pixels", "grid": [1, 2, 3]})
    path = path_of(store)
    good = path.read_bytes()
    for at in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[at] ^= 1 << bit
            path.write_bytes(bytes(bad))
            entry = store.get(KEY)
            # nothing at all, or (white space of another kind after the header) the same
            if entry is not None:
                assert (
                    9 <= bad[at] <= 32
                    and good[at] == 32
                    and dict(entry.meta) == {"kind": "pixels", "grid": [1, 2, 3]}
                )
                assert all(torch.equal(entry.tensors[k], v) for k, v in tensors.items())
            else:
                assert not path.exists()
    assert store.counts["damaged"] > 7 * len(good)


def test_every_cut_and_every_addition_is_noticed(store: TensorStore) -> None:
    store.put(KEY, numbers(40), {"kind": "pixels"})
    path = path_of(store)
    good = path.read_bytes()
    for bad in [good[:n] for n in range(len(good))] + [good + b"\0", good * 2]:
        path.write_bytes(bad)
        assert store.get(KEY) is None and not path.exists()


def test_damage_is_rebuilt_and_counted(
    store: TensorStore, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []
    store.get_or_build(KEY, builder(calls=calls))
    flip(path_of(store), path_of(store).stat().st_size - 1)
    entry = store.get_or_build(KEY, builder(calls=calls))
    assert len(calls) == 2 and torch.equal(entry.tensors["x"], numbers()["x"])
    assert (store.counts["builds"], store.counts["rebuilt"], store.counts["damaged"]) == (2, 1, 1)
    assert f"cache entry {KEY} is damaged (the checksum differs)" in caplog.text and at_rest(store)
    assert store.get_or_build(KEY, builder(calls=calls)).cached and len(calls) == 2


@pytest.mark.parametrize("mode", ["first", "always", "never"])
@pytest.mark.parametrize("silent", [False, True])
def test_when_checksums_are_compared(tmp_path: Path, mode: Any, silent: bool) -> None:
    TensorStore(tmp_path).put(KEY, numbers())
    store = TensorStore(tmp_path, verify=mode)
    assert store.get(KEY) is not None
    flip(path_of(store), path_of(store).stat().st_size - 1, silent=silent)
    noticed = store.get(KEY) is None
    assert noticed == (mode == "always" or (mode == "first" and not silent))
    if not noticed:  # another process compares at its first read
        assert TensorStore(tmp_path, verify="first").get(KEY) is None


def test_one_that_is_in_use_stays_valid_when_it_is_replaced(store: TensorStore) -> None:
    held = store.put(KEY, numbers())
    path_of(store).with_suffix(".bad").write_bytes(b"rubbish")
    os.replace(path_of(store).with_suffix(".bad"), path_of(store))
    assert store.get(KEY) is None and torch.equal(held.tensors["x"], numbers()["x"])


def header(
    change: Callable[[dict[str, Any]], Any], data: bytes = b"\0" * 16
) -> Callable[[Path], None]:
    def forge(path: Path) -> None:
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        tree = json.loads(raw[8 : 8 + length])
        changed = change(tree)
        body = json.dumps(tree if changed is None else changed).encode()
        path.write_bytes(len(body).to_bytes(8, "little") + body + data)

    return forge


def inner(**values: Any) -> Callable[[Path], None]:
    def change(tree: dict[str, Any]) -> None:
        tree["__metadata__"]["mmrl"] = json.dumps(
            {**json.loads(tree["__metadata__"]["mmrl"]), **values}
        )

    return header(change)


FORGED: dict[str, Callable[[Path], Any]] = {
    "empty": lambda p: p.write_bytes(b""),
    "text": lambda p: p.write_text("not a tensor file"),
    "huge header": lambda p: p.write_bytes((1 << 62).to_bytes(8, "little") + b"{}"),
    "deep header": lambda p: p.write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000),
    "pickle": lambda p: torch.save({"x": torch.ones(3)}, p),
    "another library's": lambda p: save_file({"x": torch.ones(3)}, p),
    "foreign metadata": lambda p: save_file({"x": torch.ones(3)}, p, metadata={"mmrl": "[]"}),
    "a list": header(lambda t: [1]),
    "no metadata": header(lambda t: t.pop("__metadata__") and None),
    "newer schema": inner(schema=2),
    "schema of another type": inner(schema=True),
    "other key": inner(key=OTHER),
    "meta no mapping": inner(meta=[1]),
    "more fields": inner(more=1),
    "digest missing": header(lambda t: t["__metadata__"].pop("digest") and None),
    "digest a number": header(lambda t: t["__metadata__"].update(digest=5)),
    "unknown dtype": header(lambda t: t["x"].update(dtype="F4")),
    "dtype a list": header(lambda t: t["x"].update(dtype=[])),
    "negative shape": header(lambda t: t["x"].update(shape=[-4, -4])),
    "shape of floats": header(lambda t: t["x"].update(shape=[16.0])),
    "shape too big": header(lambda t: t["x"].update(shape=[17])),
    "enormous shape": header(lambda t: t["x"].update(shape=[2**62, 2**62])),
    "outside": header(lambda t: t["x"].update(data_offsets=[16, 32])),
    "reversed": header(lambda t: t["x"].update(data_offsets=[16, 0])),
    "no offsets": header(lambda t: t["x"].pop("data_offsets") and None),
    "tensor a number": header(lambda t: t.update(x=3)),
    "overlap": header(lambda t: t.update(y=t["x"])),
    "hole": header(lambda t: t["x"].update(data_offsets=[1, 17]), b"\0" * 17),
}


@pytest.mark.parametrize("name", FORGED)
@pytest.mark.parametrize("mode", ["first", "never"])
def test_forged_and_foreign_files_are_removed(tmp_path: Path, name: str, mode: Any) -> None:
    store = TensorStore(tmp_path, verify=mode)
    store.put(KEY, {"x": torch.zeros(16, dtype=torch.uint8)})
    FORGED[name](path_of(store))
    found = store.verify()
    assert (
        [key for key, _ in found.damaged] == [KEY]
        and found.removed == 0
        and path_of(store).exists()
    )
    assert store.get(KEY) is None and not path_of(store).exists() and store.counts["damaged"] == 1


def test_verify_names_the_damaged_and_removes_them_if_asked(store: TensorStore) -> None:
    keys = [f"{i:040x}" for i in range(12)]
    for i, key in enumerate(keys):
        store.put(key, numbers(500, i))
    rng, steps = random.Random(0), []
    bad = sorted(rng.sample(keys, 4))
    for key in bad:
        path = path_of(store, key)
        flip(path, rng.randrange(8, path.stat().st_size), rng.randrange(5), silent=True)
    store.verify(progress=lambda done, total, left_s: steps.append((done, total, left_s)))
    assert (
        len(steps) == 12
        and steps[-1][0] == steps[-1][1]
        and steps[-1][2] == 0.0
        and all(s >= 0 for *_, s in steps)
    )
    found = store.verify(delete=True)
    assert [key for key, _ in found.damaged] == bad and found.removed == 4 and found.entries == 12
    after = store.verify()
    assert (
        after.entries == 8
        and not after.damaged
        and {e.key for e in store.entries()} == set(keys) - set(bad)
    )
