"""T-GRPO and its relatives in whole steps: who gets a second group of rollouts, on what, and what it does to rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.algorithms.group_rewards import (
    accuracies,
    contrast_bonuses,
    contrast_settings,
    group_outcome,
    training_parts,
    training_rewards,
)
from mmrl.config import ADVANTAGE_SCALES, RunConfig, load_config
from mmrl.errors import ConfigError
from mmrl.rollout.views import VIEWS, changed_prompt, shuffled_order
from mmrl.training.trainer import Trainer
from mmrl.types import Rollout, RolloutGroup, Score, StopReason, Turn
from mmrl.video.decode import read_clip
from mmrl.video.encode import write_video
from mmrl.video.sampling import FrameSampling
from tests.kits.album_task import Album
from tests.kits.clip_kit import TASK, clip, mixed_file, policy_of, sample
from tests.kits.engine_kit import config_file, picture, read_jsonl, sample_with, small_run

VIDEO = {"kind": "all", "min_pixels": 28 * 28, "max_pixels": 28 * 28 * 6}


def trainer(folder: Path, **sections: Any) -> Trainer:
    tree = small_run(folder / "runs", mixed_file(folder / "data"), **sections)
    tree["data"]["video"] = VIDEO
    return Trainer(load_config(config_file(folder / "c.yaml", tree)))


def run(
    folder: Path, contrast: dict[str, Any], **sections: Any
) -> tuple[Trainer, list[RolloutGroup]]:
    made = trainer(
        folder,
        algorithm={"contrast": contrast, "dynamic_sampling": False},
        train={"steps": 1, "prompts_per_step": 10},
        rollout={"group_size": 4, "max_new_tokens": 6},
        **sections,
    )
    made.fit()
    return made, made.rollouts.rollouter.tally.groups


@pytest.mark.check_takes(1)
@pytest.mark.parametrize(
    ("kind", "touched"),
    [
        ("shuffle", {"m0", "m1"}),
        ("mirror", {"m0", "m1", "m2", "m4"}),
        ("mask", {"m0", "m1", "m2", "m4"}),
        ("question_only", {"m0", "m1", "m2", "m4"}),
    ],
)
def test_only_inputs_the_view_changes_get_a_second_group(
    tmp_path: Path, kind: str, touched: set[str]
) -> None:
    made, groups = run(tmp_path, {"kind": kind, "skip": False})
    assert len(groups) == 10 and {g.sample.id for g in groups} == {"m0", "m1", "m2", "m3", "m4"}
    for group in groups:
        assert bool(group.view) == (group.sample.id in touched), group.sample.id
        assert len(group.contrast) == (2 if group.view else 0) and len(group.rollouts) == 4
        assert all(t.score is not None for t in group.contrast)
        bonus = contrast_bonuses(group, made.config)
        rewards = training_rewards(group, made.config)
        assert rewards == pytest.approx(np.add(group.rewards_G, bonus).tolist())
        assert group.probe == bool(group.view), "without skipping every group is measured"
        p, changed = (
            float(np.mean(accuracies(x))) if x else 0.0 for x in (group.rollouts, group.contrast)
        )
        granted = bool(group.view) and p >= 0.8 * changed
        assert bonus == [0.3 if granted and a > 0.1 else 0.0 for a in accuracies(group.rollouts)]
        parts, weights = training_parts(group, made.config)
        assert [
            sum(w[k] * x[k] for k in x) for x, w in zip(parts, weights, strict=True)
        ] == pytest.approx(rewards)
    row = read_jsonl(made.folder.path / "metrics.jsonl")[-1]
    assert row["train/contrast/rolled_out"] == 1.0
    assert row["train/contrast/gap"] == pytest.approx(
        row["train/contrast/plain"] - row["train/contrast/changed"]
    )


@pytest.mark.slow
def test_changed_rollouts_are_logged_apart_and_score_the_same_again(tmp_path: Path) -> None:
    from mmrl.evaluation.rescore import rescore

    made, groups = run(tmp_path, {"kind": "shuffle", "skip": False})
    (log,) = (made.folder.path / "rollouts").glob("step_*.jsonl")
    rows = read_jsonl(log)
    shown = {tuple(r["key"]) for r in rows}
    changed = [r for r in rows if r.get("contrast")]
    expected = {g.key: g for g in groups if g.key in shown}
    assert sum(len(g.contrast) for g in expected.values()) == len(changed) and all(
        r["view"] == "shuffle" for r in changed
    )
    assert all(bool(r.get("view")) == bool(expected[tuple(r["key"])].view) for r in rows)
    assert not any(r.changed for r in rescore(log).rows)


def test_changed_rollouts_repeat_and_differ_from_the_plain_ones(tmp_path: Path) -> None:
    texts = []
    for folder in ("a", "b"):
        _, groups = run(tmp_path / folder, {"kind": "shuffle", "skip": False, "group_size": 3})
        texts.append([[t.turns[0].token_ids for t in g.contrast] for g in groups])
        assert {len(g.contrast) for g in groups if g.view} == {3}
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"dynamic_sampling": True, "max_rounds": 2},
        {"advantage_scale": "batch"},
        {"advantage_scale": "ema"},
        {"reward_aggregation": "gdpo"},
    ],
    ids=str,
)
def test_skipping_leaves_the_update_as_it_is(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    weights, counts = [], []
    for skip in (True, False):
        contrast = {"kind": "shuffle", "skip": skip, "threshold": 0.45, "measure": 0.0}
        made = trainer(
            tmp_path / str(skip),
            algorithm={"dynamic_sampling": False, **algorithm, "contrast": contrast},
            train={"steps": 2, "prompts_per_step": 6},
            rollout={"group_size": 4, "max_new_tokens": 6},
        )
        made.fit()
        groups = made.rollouts.rollouter.tally.groups
        counts.append(sum(bool(g.contrast) for g in groups))
        weights.append([p.detach().clone() for _, p in made.policy.trainable()])
    assert counts[0] <= counts[1] == sum(bool(g.view) for g in groups)
    assert max(float((a - b).abs().max()) for a, b in zip(*weights, strict=True)) < 2e-5


def closed(rewards: list[float], changed: list[float] | None, broken: int = 0) -> RolloutGroup:
    """A group with these accuracies; the last `broken` rewards failed."""

    def trajectory(value: float, failed: bool = False) -> Rollout:
        score = (
            Score.failure("reward_error: x", ("accuracy",))
            if failed
            else Score.combine(
                {"accuracy": value, "format": 1.0}, {"accuracy": 0.9, "format": 0.1}, parsed=True
            )
        )
        return Rollout((Turn((1,), "x", (0.0,), StopReason.EOS),), score)

    own = tuple(trajectory(r, i >= len(rewards) - broken) for i, r in enumerate(rewards))
    contrast = tuple(trajectory(r) for r in changed or [])
    return RolloutGroup(sample(("a.mp4",)), own, key=(1, 0, 0), view="shuffle", contrast=contrast)


def rule(**algorithm: Any) -> RunConfig:
    return RunConfig.model_validate({"algorithm": {"contrast": {"kind": "shuffle"}, **algorithm}})


def test_which_scales_are_shared_by_several_groups() -> None:
    pooled = {
        scale: contrast_settings(rule(advantage_scale=scale)).pooled
        for scale in ADVANTAGE_SCALES["grpo"]
    }
    assert {scale for scale, is_so in pooled.items() if is_so} == {"ema", "batch_rewards"}


def test_a_solved_prompt_is_let_go_with_or_without_contrast() -> None:
    for changed in (None, [0.0, 0.0]):
        outcome = group_outcome(closed([1.0] * 4, changed), rule(), Album())
        assert outcome.rewards == [1.0] * 4 and outcome.high == 1.0, (
            "the bonus says nothing about the prompt"
        )


def test_the_size_of_the_bonus_matters_under_gdpo() -> None:
    found = []
    for bonus in (0.003, 0.3, 3.0):
        config = rule(reward_aggregation="gdpo", contrast={"kind": "shuffle", "bonus": bonus})
        parts, weights = training_parts(closed([1.0, 1.0, 0.0, 0.0], [0.0, 0.0]), config)
        assert [p["contrast"] for p in parts] == [1, 1, 0, 0] and {
            w["contrast"] for w in weights
        } == {bonus}
        found.append([sum(w[k] * p[k] for k in p) for p, w in zip(parts, weights, strict=True)])
        assert found[-1] == pytest.approx(
            training_rewards(closed([1.0, 1.0, 0.0, 0.0], [0.0, 0.0]), config)
        )
    assert found[0] != found[1] != found[2]


def test_rewards_that_failed_count_on_neither_side() -> None:
    whole = contrast_bonuses(closed([1.0, 1.0], [1.0, 1.0]), rule())
    crashed = contrast_bonuses(closed([1.0, 1.0, 0.0, 0.0], [1.0, 1.0], broken=2), rule())
    assert whole == [0.3, 0.3] and crashed == [0.3, 0.3, 0.0, 0.0]


@pytest.mark.parametrize("frames", [8, 7])
def test_clips_of_equal_frames_are_shuffled_too(tmp_path: Path, frames: int) -> None:
    still = np.repeat(
        np.random.default_rng(0).integers(0, 256, (4, 1, 56, 84, 3), dtype=np.uint8), 2, 1
    ).reshape(8, 56, 84, 3)
    write_video(tmp_path / "pairs.mp4", still[:frames], 4, keyframe_every=1)
    p = policy_of("qwen2_5_vl")
    asked = sample((str(tmp_path / "pairs.mp4"),))
    prompt = p.encoder(asked, TASK)
    shuffled = changed_prompt(p.encoder, asked, TASK, prompt, "shuffle", (1,))
    assert shuffled is not None
    pixels, order = p.encoder.visuals.pixels(shuffled.visuals[0]), shuffled.visuals[0].change.order
    frames_TCHW = torch.from_numpy(
        read_clip(
            asked.videos[0],
            FrameSampling(kind="all"),
            size=lambda n, h, w: tuple(reversed(prompt.videos[0].resized_wh)),
        ).rgb_THWC[list(order)]
    ).permute(0, 3, 1, 2)  # type: ignore[arg-type,return-value]
    own = p.processor.video_processor(
        videos=[frames_TCHW], do_resize=False, do_sample_frames=False, return_tensors="pt"
    )
    assert torch.equal(pixels, own["pixel_values_videos"])


def test_views_of_prompts(tmp_path: Path) -> None:
    p = policy_of("qwen3_vl")
    asked = sample((clip(tmp_path),), (picture((56, 56)),))
    prompt = p.encoder(asked, TASK)
    seen = {kind: changed_prompt(p.encoder, asked, TASK, prompt, kind, (1, 2)) for kind in VIEWS}
    assert len({x.fingerprint for x in seen.values() if x} | {prompt.fingerprint}) == 5
    shuffled = seen["shuffle"]
    assert shuffled is not None and (shuffled.ids_P == prompt.ids_P).all(), (
        "times written beside frames stay in order"
    )
    assert (
        sorted(shuffled.visuals[0].change.order)
        == list(range(8))
        != list(shuffled.visuals[0].change.order)
    )
    assert shuffled.visuals[1] == prompt.visuals[1], "pictures are not touched"
    again = changed_prompt(p.encoder, asked, TASK, prompt, "shuffle", (1, 2))
    assert again is not None and again.fingerprint == shuffled.fingerprint
    assert again.visuals == shuffled.visuals
    alone = seen["question_only"]
    assert (
        alone is not None
        and not alone.visuals
        and alone.length < prompt.length
        and int(alone.kinds_P.sum()) == 0
    )
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
            assert all(
                pairs[i + 1] == pairs[i] + 1 and pairs[i] % 2 == 0
                for i in range(0, count // 2 * 2, 2)
            )
    assert shuffled_order(1, np.random.default_rng(0)) is None


@pytest.mark.parametrize("arch", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("frames", [8, 7])
def test_shuffled_pairs_reuse_their_features(arch: str, frames: int, tmp_path: Path) -> None:
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
    with pytest.raises(
        ConfigError,
        match="bonus 0 with skip true and measure 0 never rolls anything out; set skip: false",
    ):
        trainer(tmp_path, algorithm={"contrast": {"kind": "shuffle", "bonus": 0.0, "measure": 0.0}})
    with pytest.raises(ConfigError, match=r"algorithm\.contrast\.kind"):
        trainer(tmp_path, algorithm={"contrast": {"kind": "shuffel"}})
