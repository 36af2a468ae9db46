"""T-GRPO and its relatives in whole steps: who gets a second group of rollouts, on what, and what it does to rewards."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.config import load_config
from mmrl.errors import ConfigError
from mmrl.schedule import accuracies, contrast_bonuses, training_parts, training_rewards
from mmrl.trainer import Trainer
from mmrl.types import Group
from mmrl.views import changed_prompt, shuffled_order
from tests.engine_kit import ALBUM, config_file, fresh_policy, picture, read_jsonl, sample_with, small_run
from tests.policy.test_visuals import TASK, clip, policy_of, sample

VIDEO = {"kind": "all", "min_pixels": 28 * 28, "max_pixels": 28 * 28 * 6}


def mixed_file(folder: Path) -> str:
    """Two questions about clips, one about a picture, one about nothing, one about a clip of a single frame."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = [
        {"videos": [clip(folder)], "images": []}, {"videos": [clip(folder, 6, (56, 56), 1)], "images": [picture((56, 56))]},
        {"videos": [], "images": [picture((112, 84))]}, {"videos": [], "images": []}, {"videos": [clip(folder, 1)], "images": []}]
    path = folder / "mixed.jsonl"
    path.write_text("".join(json.dumps({"id": f"m{i}", "source": "clips" if r["videos"] else "others", "question": "yes?", **r}) + "\n"
                            for i, r in enumerate(rows)), encoding="utf-8")
    return str(path)


def trainer(folder: Path, **sections: Any) -> Trainer:
    tree = small_run(folder / "runs", mixed_file(folder / "data"), **sections)
    tree["data"]["video"] = VIDEO
    return Trainer(load_config(config_file(folder / "c.yaml", tree)))


def run(folder: Path, contrast: dict[str, Any], **sections: Any) -> tuple[Trainer, list[Group]]:
    made = trainer(folder, algorithm={"contrast": contrast, "dynamic_sampling": False},
                   train={"steps": 1, "prompts_per_step": 10}, rollout={"group_size": 4, "max_new_tokens": 6}, **sections)
    made.fit()
    return made, made.schedule.tally.groups


@pytest.mark.parametrize(("kind", "touched"), [("shuffle", {"m0", "m1"}), ("mirror", {"m0", "m1", "m2", "m4"}),
                                               ("mask", {"m0", "m1", "m2", "m4"}), ("question_only", {"m0", "m1", "m2", "m4"})])
def test_only_inputs_the_view_changes_get_a_second_group(tmp_path: Path, kind: str, touched: set[str]) -> None:
    made, groups = run(tmp_path, {"kind": kind, "skip": False})
    assert len(groups) == 10 and {g.sample.id for g in groups} == {"m0", "m1", "m2", "m3", "m4"}
    for group in groups:
        assert bool(group.view) == (group.sample.id in touched), group.sample.id
        assert len(group.contrast) == (2 if group.view else 0) and len(group.trajectories) == 4
        assert all(t.score is not None for t in group.contrast)
        bonus = contrast_bonuses(group, made.config)
        rewards = training_rewards(group, made.config)
        assert rewards == pytest.approx(np.add(group.rewards_G, bonus).tolist())
        p, changed = (float(np.mean(accuracies(x))) if x else 0.0 for x in (group.trajectories, group.contrast))
        granted = bool(group.view) and p >= 0.8 * changed
        assert bonus == [0.3 if granted and a > 0.1 else 0.0 for a in accuracies(group.trajectories)]
        parts, weights = training_parts(group, made.config)
        assert [sum(w[k] * x[k] for k in x) for x, w in zip(parts, weights, strict=True)] == pytest.approx(rewards)
    row = read_jsonl(made.folder.path / "metrics.jsonl")[-1]
    assert row["train/all/contrast/rolled_out"] == 1.0 if "train/all/contrast/rolled_out" in row else True
    names = [name for name in row if name.endswith("contrast/gap")]
    assert names and all(row[name] is not None for name in names if "others" not in name)


def test_changed_rollouts_are_logged_apart_and_score_the_same_again(tmp_path: Path) -> None:
    from mmrl.rescore import rescore

    made, groups = run(tmp_path, {"kind": "shuffle", "skip": False})
    (log,) = (made.folder.path / "rollouts").glob("step_*.jsonl")
    rows = read_jsonl(log)
    shown = {tuple(r["key"]) for r in rows}
    changed = [r for r in rows if r.get("contrast")]
    expected = {g.key: g for g in groups if g.key in shown}
    assert sum(len(g.contrast) for g in expected.values()) == len(changed) and all(r["view"] == "shuffle" for r in changed)
    assert all(bool(r.get("view")) == bool(expected[tuple(r["key"])].view) for r in rows)
    assert not any(r.changed for r in rescore(log).rows)


def test_changed_rollouts_repeat_and_differ_from_the_plain_ones(tmp_path: Path) -> None:
    texts = []
    for folder in ("a", "b"):
        _, groups = run(tmp_path / folder, {"kind": "shuffle", "skip": False, "group_size": 3})
        texts.append([[t.turns[0].token_ids for t in g.contrast] for g in groups])
        assert {len(g.contrast) for g in groups if g.view} == {3}
    assert texts[0] == texts[1]


def test_skipping_leaves_the_update_as_it_is(tmp_path: Path) -> None:
    weights, counts = [], []
    for skip in (True, False):
        made, groups = run(tmp_path / str(skip), {"kind": "shuffle", "skip": skip, "threshold": 0.45})
        counts.append(sum(bool(g.contrast) for g in groups))
        weights.append([p.detach().clone() for _, p in made.policy.trainable()])
    assert counts[0] <= counts[1] == sum(bool(g.view) for g in groups)
    assert max(float((a - b).abs().max()) for a, b in zip(*weights, strict=True)) < 2e-5


def test_views_of_prompts(tmp_path: Path) -> None:
    p = policy_of("qwen3_vl")
    asked = sample((clip(tmp_path),), (picture((56, 56)),))
    prompt = p.encoder(asked, TASK)
    seen = {kind: changed_prompt(p.encoder, asked, TASK, prompt, kind, (1, 2)) for kind in ("shuffle", "mirror", "mask", "question_only")}
    assert len({x.fingerprint for x in seen.values() if x} | {prompt.fingerprint}) == 5
    shuffled = seen["shuffle"]
    assert shuffled is not None and (shuffled.ids_P == prompt.ids_P).all(), "times written beside frames stay in order"
    assert sorted(shuffled.visuals[0].change.order) == list(range(8)) != list(shuffled.visuals[0].change.order)
    assert shuffled.visuals[1] == prompt.visuals[1], "pictures are not touched"
    assert changed_prompt(p.encoder, asked, TASK, prompt, "shuffle", (1, 2)) == shuffled
    alone = seen["question_only"]
    assert alone is not None and not alone.visuals and alone.length < prompt.length and int(alone.kinds_P.sum()) == 0
    text = sample_with([])
    assert changed_prompt(p.encoder, text, TASK, p.encoder(text, TASK), "mask") is None


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_orders_are_never_the_identity_and_keep_pairs_when_asked(count: int) -> None:
    for seed in range(50):
        rng = np.random.default_rng(seed)
        order = shuffled_order(count, rng)
        assert order is not None and sorted(order) == list(range(count)) != list(order)
        pairs = shuffled_order(count, rng, 2)
        if count < 4:
            assert pairs is None
        else:
            assert pairs is not None and sorted(pairs) == list(range(count)) != list(pairs)
            assert all(pairs[i + 1] == pairs[i] + 1 and pairs[i] % 2 == 0 for i in range(0, count // 2 * 2, 2))
    assert shuffled_order(1, np.random.default_rng(0)) is None


@pytest.mark.parametrize("arch", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("frames", [8, 7])
def test_shuffled_pairs_reuse_their_features(arch: str, frames: int, tmp_path: Path) -> None:
    import torch

    p = policy_of(arch, freeze=("vision", "projector"))
    asked = sample((clip(tmp_path, frames),))
    prompt = p.encoder(asked, TASK)
    pairs = changed_prompt(p.encoder, asked, TASK, prompt, "shuffle", (3,), 2)
    assert pairs is not None
    tower, cache = p.tower(), p.encoder.visuals
    cache.features(prompt.visuals, tower)
    (moved,) = cache.features(pairs.visuals, tower)
    assert cache.stats.encoded == 1, "the shuffled clip was never shown to the tower"
    (shown,) = tower("video", cache.pixels(pairs.visuals[0]), [pairs.visuals[0].grid_thw])
    assert torch.allclose(moved.main, shown.main, atol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(moved.deep, shown.deep, strict=True))
    (plain,) = cache.features(prompt.visuals, tower)
    assert not torch.allclose(moved.main, plain.main, atol=1e-3)


def test_settings_that_cannot_be_meant(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bonus 0 with skip true never rolls anything out; set skip: false"):
        trainer(tmp_path, algorithm={"contrast": {"kind": "shuffle", "bonus": 0.0}})
    with pytest.raises(ConfigError, match=r"algorithm\.contrast\.kind"):
        trainer(tmp_path, algorithm={"contrast": {"kind": "shuffel"}})
    assert fresh_policy().encoder.visuals.store is None and ALBUM
