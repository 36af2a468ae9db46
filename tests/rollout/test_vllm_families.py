"""Real vLLM beside the trainer for families other than Qwen-VL: mixtures of experts, and pictures cut into tiles.

An engine takes half a minute to start and serves one architecture: each family has one test, which asks its engine everything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.config import VideoConfig, VLLMConfig
from mmrl.coords import CoordFrame
from mmrl.diagnostics.families import check_family
from mmrl.distributed.engines import TrainEngine
from mmrl.distributed.world import World
from mmrl.errors import ConfigError, WeightSyncError
from mmrl.policy.families import family_named
from mmrl.policy.policy import Policy
from mmrl.rollout import PrefillOnceEngine, Request, SamplingSettings
from mmrl.rollout.vllm_backend import VLLMBackend, VLLMSettings
from mmrl.rollout.vllm_engine import VLLMEngine
from mmrl.rollout.vllm_inputs import WireSampling, wire_prompt
from mmrl.rollout.weights import SyncPlan
from tests.kits.clip_kit import ALL, policy_of
from tests.kits.engine_kit import tiny_folder
from tests.rollout.vllm_kit import (
    VLLM,
    asked_of,
    backend_of,
    engine_on,
    ids,
    moved,
    same_logps,
    settings_of,
    training_of,
)

pytestmark = pytest.mark.slow
MIXTURES = ("qwen3_vl_moe", "glm4v_moe")
FROZEN = ("vision", "projector")
TILES = ("internvl", "smolvlm", "idefics3", "llava_onevision")


@contextmanager
def engine_of(arch: str) -> Iterator[VLLMBackend]:
    """One vLLM, closed at the end."""
    made = backend_of(arch)
    try:
        yield made
    finally:
        made.close()


def trained(arch: str, **options: Any) -> Policy:
    """A tiny policy of a family."""
    frame = family_named(arch).frame or CoordFrame.REL1
    video = VideoConfig(kind="all") if arch in TILES else ALL  # frames of tiles have one size
    return policy_of(arch, video=video, frame=frame, **options)


def same_numbers(engine: VLLMEngine, training: TrainEngine, policy: Policy, folder: Path) -> None:
    """Log-probs and greedy tokens are the trainer's, and are so after a step that changes them."""
    before = same_logps(engine, policy, folder)
    greedy = asked_of(policy, folder, 1, greedy=True)
    own = PrefillOnceEngine(policy).generate(greedy, settings_of(12))
    assert ids(engine.generate(greedy, settings_of(12))) == ids(own)
    moved(training, policy)
    engine.publish(training)
    after = same_logps(engine, policy, folder)
    assert ids(before) != ids(after), "the step must be seen for this test"


@pytest.mark.parametrize("arch", TILES)
def test_tiles_reach_vllm_as_pixels_and_as_features(arch: str, tmp_path: Path) -> None:
    """Prompts of a batch have pictures of one tile and of several, clips where the family reads them, and none."""
    with engine_of(arch) as made:
        for freeze, form in (((), "pixels"), (FROZEN, "features")):
            policy = trained(arch, freeze=freeze)
            with engine_on(made, policy, tmp_path) as (engine, training):
                media = [
                    m
                    for r in asked_of(policy, tmp_path)
                    for m in wire_prompt(policy, r.prompt).media
                ]
                assert {m.form for m in media} == {form}
                assert len({m.grid_thw[0] for m in media}) > 1, "tiles of several numbers"
                same_numbers(engine, training, policy, tmp_path)


def stale(lost: str, old: torch.Tensor) -> Any:
    """SyncPlan.weights that goes on sending one tensor as it was."""
    honest = SyncPlan.weights

    def weights(self: SyncPlan, source: Any, *, everything: bool) -> Any:
        for name, tensor in honest(self, source, everything=everything):
            yield name, old if name == lost else tensor

    return weights


@pytest.mark.parametrize("arch", MIXTURES)
def test_each_expert_and_router_follows_the_trainer(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each expert's matrices, and of a router, the digests find the one that is not synchronised, and so do log-probs alone."""
    with engine_of(arch) as made:
        adapter = {"r": 4, "experts": True}
        options: tuple[dict[str, Any], ...] = ({"freeze": FROZEN}, {"lora": adapter})
        for each in options:  # an adapter of experts has a part for each of their parameters
            policy = trained(arch, **each)
            with engine_on(made, policy, tmp_path) as (engine, training):
                same_numbers(engine, training, policy, tmp_path)
        policy = trained(arch)
        for name, buffer in policy.model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                # chooses others than zeros would, and each of them sometimes
                buffer.copy_(torch.tensor([0.1, -0.1, 0.0, 0.1]))
        with engine_on(made, policy, tmp_path) as (engine, training):
            same_numbers(engine, training, policy, tmp_path)
            # views of the live weights
            mixture = {
                name: tensor
                for name, tensor in engine.plan.weights(training, everything=True)
                if ".layers.1.mlp." in name
            }
            assert len([n for n in mixture if ".experts." in n]) == 3 * 4
            for lost, live in mixture.items():
                old = live.clone()
                live.neg_()
                with monkeypatch.context() as patch:
                    patch.setattr(SyncPlan, "weights", stale(lost, old))
                    missed(engine, training)
                live.copy_(old)
            engine.publish(training)
            same_logps(engine, policy, tmp_path)


def missed(engine: VLLMEngine, training: TrainEngine) -> None:
    """A sync that lost a tensor of the second layer's mixture is refused for its digest, and without digests for its log-probs."""
    with pytest.raises(WeightSyncError, match=r"does not hold .* 1 of .*\(layers\.1\.mlp\)"):
        engine.publish(training)
    engine.settings = engine.settings.model_copy(update={"compare_weights": False})
    with pytest.raises(WeightSyncError, match="does not compute with the trainer's weights"):
        engine.publish(training)
    engine.settings = engine.settings.model_copy(update={"compare_weights": True})


class _Reading(VLLMBackend):
    """vLLM with the weights that its own loader finds in the model's folder: nothing is sent."""

    def _options(self) -> dict[str, Any]:
        return super()._options() | {"load_format": "auto"}


def test_vllm_reads_a_saved_mixture_by_itself(tmp_path: Path) -> None:
    """vLLM's own loader refuses Qwen3-VL-MoE as transformers saves it; a policy's folder gives the policy's greedy answers."""
    policy = trained("qwen3_vl_moe")
    moved(training_of(policy, World(torch.device("cpu")), tmp_path), policy)
    policy.save(tmp_path / "saved")
    settings = VLLMSettings(
        str(tmp_path / "saved"), max_model_len=1024, kv_cache_gib=0.125, compare_weights=False
    )
    made = _Reading(settings)
    try:
        world = World(torch.device("cpu"))
        engine = VLLMEngine(VLLMConfig(**VLLM), policy, policy, world, made, [])
        greedy = asked_of(policy, tmp_path, 1, greedy=True)
        own = PrefillOnceEngine(policy).generate(greedy, settings_of(12))
        assert ids(engine.generate(greedy, settings_of(12))) == ids(own)
        assert len({each for (each,) in ids(own)}) > 3, "answers depend on their prompts"
    finally:
        made.close()


def test_the_check_of_a_family_asks_a_real_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that reports the log-probs of a temperature of its own passes digests, probes and greedy tokens, and is found out."""
    told = VLLMEngine._sampling

    def hotter(self: VLLMEngine, request: Request, settings: SamplingSettings) -> WireSampling:
        found = told(self, request, settings)
        return found if request.greedy else dataclasses.replace(found, temperature=1.01)

    monkeypatch.setattr(VLLMEngine, "_sampling", hotter)
    (cell,) = check_family("internvl", ["vllm"])
    assert cell.verdict == "failed" and cell.found.startswith("log-probs: expected at most 1e-05")


def test_another_ratio_of_llava_onevision_is_refused(tmp_path: Path) -> None:
    """vLLM scales a picture's tiles down to nine tiles' tokens, whatever the configuration says."""
    import json
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("llava_onevision"), folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["vision_aspect_ratio"] = "anyres_max_4"
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"anyres_max_9 for granted, .*has anyres_max_4; use"):
        backend_of(folder=str(folder))
