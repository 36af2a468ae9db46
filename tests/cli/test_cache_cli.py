"""`mmrl cache stats | verify | prune`: what is printed, the JSON for scripts, and the exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mmrl.cli import main as cli
from mmrl.video.store import TensorStore, make_key


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Four entries, used 1, 2, 3 and 4 days ago; the first two are features."""
    store = TensorStore(tmp_path / "cache")
    for i in range(4):
        key = make_key(number=i)
        store.get_or_build(
            key,
            lambda i=i: (
                {"x": torch.full((4096,), i)},
                {"kind": "features" if i < 2 else "pixels"},
            ),
        ).close()
        when = time.time_ns() - (i + 1) * 86400 * 10**9
        os.utime(file_of(tmp_path / "cache", i), ns=(when, when))
    store.flush(wait_s=5)
    return tmp_path / "cache"


def file_of(cache: Path, number: int) -> Path:
    key = make_key(number=number)
    return cache / "tensors-v1" / key[:2] / f"{key}.safetensors"


def damage(cache: Path, number: int) -> None:
    path = file_of(cache, number)
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["mmrl", "cache", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out = capsys.readouterr()
    return int(ended.value.code or 0), out.out, out.err


def test_stats(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(monkeypatch, capsys, "stats", cache)
    lines = {
        line.split("│")[1].strip(): [c.strip() for c in line.split("│")[2:-1]]
        for line in out.splitlines()
        if "│" in line
    }
    assert (
        status == 0
        and lines["features"][0] == lines["pixels"][0] == "2"
        and lines["(all)"][0] == "4"
    )
    assert (
        lines["pixels"][1] == "64.5 KiB"
        and "least recently used entry: 4.0 days ago" in out
        and "0.0% of 4 requests" in out
    )
    status, out, _ = run(monkeypatch, capsys, "stats", cache, "--json")
    tree = json.loads(out)
    size = sum(file_of(cache, i).stat().st_size for i in range(4))
    assert (
        status == 0
        and tree["entries"] == 4
        and tree["bytes"] == size
        and tree["counts"]["builds"] == 4
    )
    assert tree["kinds"]["pixels"] == {"entries": 2, "bytes": size // 2}
    assert time.time() - tree["least_recent_use"] == pytest.approx(4 * 86400, abs=60)


def test_stats_of_an_empty_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    TensorStore(tmp_path)
    status, out, _ = run(monkeypatch, capsys, "stats", tmp_path)
    assert status == 0 and "(all)" in out and "requests" not in out
    assert (
        json.loads(run(monkeypatch, capsys, "stats", tmp_path, "--json")[1])["least_recent_use"]
        is None
    )


def test_verify(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, capsys, "verify", cache)[0] == 0
    damage(cache, 1)
    status, out, _ = run(monkeypatch, capsys, "verify", cache)
    assert (
        status == 1
        and make_key(number=1) in out
        and "the checksum differs" in out
        and "1 damaged, 0 removed" in out
    )
    assert "remove them with --delete" in out and file_of(cache, 1).exists()
    status, out, _ = run(monkeypatch, capsys, "verify", cache, "--json")
    assert status == 1 and json.loads(out)["damaged"] == [
        {"key": make_key(number=1), "why": "the checksum differs"}
    ]
    status, out, _ = run(monkeypatch, capsys, "verify", cache, "--delete")
    assert status == 0 and "1 damaged, 1 removed" in out and not file_of(cache, 1).exists()
    status, out, _ = run(monkeypatch, capsys, "verify", cache, "--json")
    assert status == 0 and json.loads(out)["entries"] == 3


def test_prune(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(monkeypatch, capsys, "prune", cache, "--unused-days", 3.5)
    assert status == 0 and out.startswith("1 entries removed") and not file_of(cache, 3).exists()
    one = file_of(cache, 0).stat().st_size
    held = TensorStore(cache).get(make_key(number=0))
    status, out, _ = run(
        monkeypatch, capsys, "prune", cache, "--max-gib", 2.5 * one / 2**30, "--json"
    )
    assert status == 0 and json.loads(out) == {
        "removed": 1,
        "bytes_left": 2 * one,
        "kept_in_use": False,
    }
    assert file_of(cache, 1).exists() and not file_of(cache, 2).exists()
    status, out, _ = run(monkeypatch, capsys, "prune", cache, "--max-gib", 0)
    assert (
        status == 1
        and "those entries are in use" in out
        and file_of(cache, 0).exists()
        and held is not None
    )
    held.close()
    assert (
        run(monkeypatch, capsys, "prune", cache, "--max-gib", 0)[0] == 0
        and not file_of(cache, 0).exists()
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["stats", "{}/none"], "expected a tensor cache, found no folder 'tensors-v1'"),
        (["verify", "{}"], "expected a tensor cache"),
        (["prune", "{}", "--max-gib", "1"], "expected a tensor cache"),
        (["prune", "{}/cache"], "expected --max-gib or --unused-days"),
        (["prune", "{}/cache", "--max-gib", "inf"], "expected a finite number"),
        (["prune", "{}/cache", "--unused-days", "inf"], "expected a finite number"),
    ],
)
def test_mistakes_end_with_status_2_and_touch_nothing(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    says: str,
) -> None:
    before = sorted(cache.parent.rglob("*"))
    status, _, err = run(monkeypatch, capsys, *(w.format(cache.parent) for w in words))
    assert status == 2 and says in err and sorted(cache.parent.rglob("*")) == before


def test_the_engine_does_not_load_the_cache_until_it_is_asked_for() -> None:
    code = "import sys, mmrl.cli.main, mmrl.cli.cache; sys.exit(any(m.split('.')[0] in ('video', 'torch') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
