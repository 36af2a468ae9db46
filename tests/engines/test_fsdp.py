"""FSDP2 in real processes (gloo on 127.0.0.1) makes the run of one process: losses, gradient norms, weights, also when resumed."""
from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from mmrl.config import load_config
from mmrl.engines import build_actor
from mmrl.engines.local import LocalEngine
from mmrl.optim import build_optimizer
from mmrl.trainer import Trainer
from mmrl.world import World
from tests.clip_kit import clip
from tests.engine_kit import config_file, fresh_policy, merge, picture, read_jsonl, small_run, tiny_folder
from tests.test_distributed import compare, launch

pytestmark = pytest.mark.slow


def medley(folder: Path) -> str:
    """12 questions, half of them without media, the others about clips, pictures or both."""
    folder.mkdir(parents=True, exist_ok=True)
    media: tuple[dict[str, list[str]], ...] = (
        {}, {"images": [picture((112, 84))]}, {}, {"videos": [clip(folder)]}, {},
        {"videos": [clip(folder, 6, (56, 56), 1)], "images": [picture((56, 56)), picture((84, 112), 1)]})
    questions = ("Where is the red circle?", "yes or no", "Describe the image, then the largest shape.", "How many?")
    rows = [{"id": f"m{i}", "question": questions[i % 4], "images": [], "videos": [], **media[i % 6]} for i in range(12)]
    path = folder / "medley.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def mixed_run(tmp_path: Path, **sections: Any) -> dict[str, Any]:
    """3 steps of 4 prompts, small micro-batches: their number differs between processes."""
    video = {"kind": "uniform", "num_frames": 4, "min_pixels": 28 * 28, "max_pixels": 84 * 56}
    path = medley(tmp_path / "data")
    tree = small_run(tmp_path / "runs", path, path, data={"video": video}, optim={"lr": 0.001}, algorithm={"kl": {"coef": 0.05}},
                     train={"steps": 3, "prompts_per_step": 4, "token_budget": 80, "log_rollouts": 99, "keep_last": 9},
                     eval={"limit": 4})
    return merge(tree, sections)


def text_only_shares(run: Path) -> int:
    """(step, process) pairs whose prompts had neither pictures nor clips, while the other process had some."""
    kinds: dict[tuple[int, int], bool] = {}
    for step in (1, 2, 3):
        for row in read_jsonl(run / "rollouts" / f"step_{step:06d}.jsonl"):
            place = (step, row["key"][1] % 2)
            kinds[place] = kinds.get(place, False) or bool(row["sample"]["images"] or row["sample"]["videos"])
    return sum(not seen and kinds[step, 1 - rank] for (step, rank), seen in kinds.items() if (step, 1 - rank) in kinds)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of full.yaml and lora.yaml with their runs in two processes, and what tests/engines/fsdp_worker.py found."""
    folder = tmp_path_factory.mktemp("fsdp")
    tree = mixed_run(folder)
    full = config_file(folder / "full.yaml", tree)
    lora = config_file(folder / "lora.yaml", merge(tree, {
        "name": "lora", "algorithm": {"epochs": 2, "minibatches": 2}, "data": {"cache": {"dir": str(folder / "cache")}},
        "model": {"path": tiny_folder("qwen3_vl"), "lora": {"r": 4, "alpha": 8}, "freeze": ["vision"],
                  "gradient_checkpointing": True}}))
    jobs = [(full, ["name=two", "engine.train=fsdp2"]), (lora, ["name=lora-two", "engine.train=fsdp2"])]
    out = launch("torchrun", json.dumps(jobs), tiny_folder(), program=("tests.engines.fsdp_worker",))
    found = next(line for line in out.splitlines() if line.startswith("found "))
    return folder, json.loads(found.removeprefix("found "))


def test_full_training_equals_one_process_and_is_continued_by_one(launched: tuple[Path, dict[str, Any]]) -> None:
    """Tower and projector learn too; the KL term's reference is sharded as well."""
    folder, _ = launched
    config = str(folder / "full.yaml")
    one = Trainer(load_config(config))
    one.fit()
    assert text_only_shares(one.folder.path), "the data do not test what they should"
    run = folder / "runs" / "two"
    compare(one, run)
    for step in (2, 3):
        shutil.rmtree(run / "checkpoints" / f"step_{step:06d}")
    Trainer(load_config(config, ["name=two", "engine.train=single"]), resume=True).fit()
    compare(one, run)


def test_lora_with_a_frozen_tower_and_cached_features(launched: tuple[Path, dict[str, Any]]) -> None:
    """Adapters in two passes of two minibatches; the reference is the model without them."""
    folder, _ = launched
    one = Trainer(load_config(str(folder / "lora.yaml")))
    one.fit()
    compare(one, folder / "runs" / "lora-two")
    assert (folder / "runs" / "lora-two" / "checkpoints" / "step_000003" / "adapter").is_dir()


def test_two_processes_sum_gradients_and_fail_together(launched: tuple[Path, dict[str, Any]]) -> None:
    _, found = launched
    assert 0.4 < found["share"] < 0.6 and found["whole"] and found["given back"] == [True, True]
    assert all(error < 1e-5 for error in found["sums"].values()), found["sums"]
    first, second, *others = found["norms"]
    assert others == [first, second] and first > 0
    assert found["main holds the state"] == [True, False] and found["steps"] == [2.0]
    assert all(said.startswith("norm ") for said in found["non-finite"]) and len(found["non-finite"]) == 2, found["non-finite"]


def test_one_process_may_be_sharded(tmp_path: Path) -> None:
    """It takes over the checkpoint of a single process's first step."""
    config = config_file(tmp_path / "c.yaml", mixed_run(tmp_path, model={"gradient_checkpointing": True}))
    one = Trainer(load_config(config))
    one.fit()
    shutil.copytree(one.folder.path, tmp_path / "runs" / "two", symlinks=True)
    for step in (2, 3):
        shutil.rmtree(tmp_path / "runs" / "two" / "checkpoints" / f"step_{step:06d}")
    sharded = Trainer(load_config(config, ["name=two", "engine.train=fsdp2"]), resume=True)
    try:
        assert all(isinstance(p, DTensor) for _, p in sharded.policy.trainable())
        sharded.fit()
    finally:
        sharded.world.close()
    compare(one, sharded.folder.path)


def test_with_another_sampler_the_copy_is_only_kept_to_be_saved() -> None:
    config = load_config(None, ["engine.train=fsdp2", "engine.rollout=vllm"])
    policy = fresh_policy()
    world = World(torch.device("cpu"))
    kept = build_actor(config, world, policy)
    mine = dict(policy.model.named_parameters())
    for name, tensor in kept.model.named_parameters():
        assert torch.equal(tensor, mine[name]) and tensor.data_ptr() != mine[name].data_ptr(), name
    tied = policy.base.lm_head.weight is policy.base.model.language_model.embed_tokens.weight
    assert (kept.base.lm_head.weight is kept.base.model.language_model.embed_tokens.weight) == tied
    hollow = policy.whole_copy(torch.device("meta"))
    LocalEngine(config.optim, world, policy, build_optimizer(policy.trainable(), config.optim)).fill(hollow.model)
    assert all(p.is_meta for p in hollow.model.parameters())
