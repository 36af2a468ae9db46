"""What the tests of the tensor store share: small tensors, damage, and processes that use a store."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from mmrl.video.store import TensorStore

KEY, OTHER = "ab" * 20, "cd" * 20


def numbers(n: int = 1000, seed: int = 0) -> dict[str, torch.Tensor]:
    return {
        "x": torch.randint(
            0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
    }


def builder(n: int = 1000, seed: int = 0, calls: list[int] | None = None) -> Any:
    def build() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        if calls is not None:
            calls.append(seed)
        return numbers(n, seed), {"kind": "pixels"}

    return build


def path_of(store: TensorStore, key: str = KEY) -> Path:
    return store.folder / key[:2] / f"{key}.safetensors"


def flip(path: Path, at: int, bit: int = 0, *, silent: bool = False) -> None:
    """Change one bit in place; `silent` puts the file's times back."""
    facts = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
    later = 0 if silent else 1_000_000
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns + later))


def used(path: Path, seconds_ago: float) -> None:
    """Pretend the entry was last used so long ago."""
    facts = path.stat()
    os.utime(path, ns=(time.time_ns() - int(seconds_ago * 1e9), facts.st_mtime_ns))


def at_rest(store: TensorStore) -> bool:
    """No temporary and no lock file is left."""
    return not [
        p for name in ("tmp", "locks", "files/tmp") for p in (store.folder / name).glob("*")
    ]


def build_slowly(root: str, key: str, log: str, seconds: float, forever: bool = False) -> None:
    """Process: ask for `key`; building writes a line, then takes `seconds` (or never ends)."""

    def build() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(3600 if forever else seconds)
        return numbers(), {"kind": "pixels"}

    entry = TensorStore(root).get_or_build(key, build)
    with open(log + ".got", "a", encoding="utf-8") as file:
        file.write(
            json.dumps([os.getpid(), bool(torch.equal(entry.tensors["x"], numbers()["x"]))]) + "\n"
        )


def hold(root: str, key: str, log: str) -> None:
    """Process: map the entry and keep it until killed."""
    entry = TensorStore(root).get(key)
    assert entry is not None
    Path(log).write_text("held", encoding="utf-8")
    time.sleep(3600)
