"""Two processes of one run share one store of visual tensors: the same tensors, built once, and the run of one process."""
from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mmrl.config import load_config
from mmrl.trainer import Trainer
from tests.clip_kit import mixed_file
from tests.engine_kit import ENVIRONMENT, REPO, config_file, small_run
from tests.test_distributed import compare, free_port
from tests.video.store_kit import at_rest
from video.store import TensorStore

pytestmark = pytest.mark.slow
RANK = "import sys\nfrom tests.test_distributed_cache import run_rank\nrun_rank(*sys.argv[1:])\n"


def train(config: str, *overrides: str) -> tuple[Trainer, dict[str, Any]]:
    """A whole run, and what its visual cache did (stats) and hands out afterwards (SHA-256 of pixels and features by path)."""
    trainer = Trainer(load_config(config, list(overrides)))
    trainer.fit()
    encoder, tower = trainer.policy.encoder, trainer.policy.tower()
    visuals = encoder.visuals
    seen: dict[str, Any] = {"rank": trainer.world.rank, "size": trainer.world.size, "built": visuals.stats.built,
                            "encoded": visuals.stats.encoded, "tensors": {}}
    assert tower is not None
    for sample in trainer.train_sources[0].samples:
        for visual in encoder.references(sample):
            (features,) = visuals.features([visual], tower)
            parts = [visuals.pixels(visual), features.main, *features.deep]
            seen["tensors"][visual.path] = [hashlib.sha256(x.detach().contiguous().numpy().tobytes()).hexdigest() for x in parts]
    return trainer, seen


def run_rank(config: str, out: str, *overrides: str) -> None:
    """One of two processes: train, and write what was seen to OUT/RANK.json."""
    trainer, seen = train(config, *overrides)
    (Path(out) / f"{seen['rank']}.json").write_text(json.dumps(seen), encoding="utf-8")
    trainer.world.close()


def launch(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    """`run_rank` in two processes; what each wrote."""
    script, out = tmp_path / "rank.py", tmp_path / "ranks"
    script.write_text(RANK, encoding="utf-8")
    out.mkdir()
    config, *overrides = arguments
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_addr", "127.0.0.1", "--master_port",
         str(free_port()), str(script), config, str(out), *overrides], cwd=REPO, timeout=600, text=True, check=False,
        env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("*.json"))]


def test_two_processes_share_a_store(tmp_path: Path) -> None:
    config = config_file(tmp_path / "c.yaml", small_run(
        tmp_path / "runs", mixed_file(tmp_path / "data"), model={"freeze": ["vision", "projector"]},
        data={"video": {"kind": "all", "min_pixels": 28 * 28, "max_pixels": 28 * 28 * 6},
              "cache": {"dir": str(tmp_path / "shared")}}, train={"steps": 2, "prompts_per_step": 6}, optim={"lr": 0.001}))
    one, alone = train(config, f"data.cache.dir={tmp_path / 'own'}")
    first, second = launch(tmp_path, config, "name=two")
    assert (first["rank"], second["rank"], first["size"], second["size"]) == (0, 1, 2, 2)
    assert first["tensors"] == second["tensors"] == alone["tensors"] and len(alone["tensors"]) == 5
    compare(one, tmp_path / "runs" / "two")

    store = TensorStore(tmp_path / "shared")
    kinds = {kind: n for kind, (n, _) in store.stats().kinds.items()}
    assert kinds == {"video": 3, "image": 2, "features": 5}
    assert first["built"] + second["built"] == alone["built"] == 5, "pixels: of all processes one builds, the others wait"
    # two that need the features of one clip at the same moment may both compute them; one entry is kept
    assert 5 <= first["encoded"] + second["encoded"] <= 10 and alone["encoded"] == 5
    assert max(first["encoded"], second["encoded"]) <= 5, "no process computes them twice"
    assert not store.verify().damaged and at_rest(store)
