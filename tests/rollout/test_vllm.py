"""Real vLLM beside the trainer: the same tensors, positions and log-probs, for every kind of prompt and every kind of weights.

Tests with an engine of their own stand first: closing one ends the process groups of every other.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.config import RunConfig
from mmrl.diagnostics.memory_parameters import parameter_bytes
from mmrl.diagnostics.memory_wake import wake_parts
from mmrl.distributed.world import World
from mmrl.errors import ConfigError, RolloutError, WeightSyncError
from mmrl.policy.loading import load_policy
from mmrl.policy.tiny import TinySpec, build_tiny
from mmrl.rollout import PrefillOnceEngine, Request
from mmrl.rollout.vllm_backend import VLLMBackend, VLLMSettings
from mmrl.rollout.vllm_inputs import WireSampling, media_hash, wire_prompt
from mmrl.rollout.weights import SyncPlan
from mmrl.types import StopReason
from tests.diagnostics.test_memory import allocated_peak
from tests.kits.clip_kit import TASK, policy_of
from tests.kits.engine_kit import ARCHITECTURES, tiny_folder
from tests.rollout.vllm_kit import (
    asked_of,
    backend_of,
    engine_on,
    ids,
    moved,
    same_logps,
    sampled_logps,
    samples_of,
    settings_of,
    trainer_logps,
    training_of,
)

pytestmark = pytest.mark.slow
FROZEN = ("vision", "projector")
_LORA = {"lora": {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}}


@pytest.fixture(scope="module")
def backend() -> Iterator[VLLMBackend]:
    """One vLLM for the tests of this file, beside modules that a search of all names stumbles over; each test publishes its own
    weights."""
    for name in ("trimesh", "llvmlite.binding.ffi"):
        importlib.import_module(name)
    made = backend_of()
    yield made
    made.close()


def losing(lost: str) -> Any:
    """SyncPlan.weights that leaves tensors out after the first time."""
    honest = SyncPlan.weights

    def weights(self: SyncPlan, source: Any, *, everything: bool) -> Any:
        for name, tensor in honest(self, source, everything=everything):
            if everything or not name.startswith(lost):
                yield name, tensor

    return weights


@pytest.mark.parametrize("arch", [*(a for a in ARCHITECTURES if a != "qwen2_5_vl"), "glm4v"])
def test_logps_of_the_other_architectures_equal_the_trainers(arch: str, tmp_path: Path) -> None:
    """Also after a step: a new model's biases are zero, so that one that vLLM does not have changes nothing before."""
    made = backend_of(arch)
    try:
        for freeze in ((), FROZEN):  # pixels, then cached features with their deepstack
            policy = policy_of(arch, freeze=freeze)
            with engine_on(made, policy, tmp_path) as (engine, training):
                same_logps(engine, policy, tmp_path)
                moved(training, policy)
                engine.publish(training)
                same_logps(engine, policy, tmp_path)
    finally:
        made.close()


# before the engine that tests share is there: the end of one ends the process groups of all
@pytest.mark.parametrize("lora", [None, {"r": 4}], ids=["trained", "adapted"])
def test_the_memory_that_wakes_is_what_vllm_takes_and_what_a_sync_adds(
    lora: dict[str, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The phase "wake" of `mmrl memory` beside vLLM's own count of its weights and beside torch's allocations during a sync."""
    folder = tmp_path / "wide"
    build_tiny(TinySpec(arch="qwen2_5_vl", hidden=512, layers=2), str(folder))
    run = RunConfig.model_validate({"model": {"path": str(folder), "device": "cpu", "lora": lora}})
    policy = load_policy(run.model)
    p = parameter_bytes(run, policy.base.config, "cpu")
    made = backend_of(folder=str(folder))
    reload = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")
    declared: list[int] = []

    def count(model: Any) -> None:
        for name, module in model.named_modules():
            # the embedding's own weight; it is another tensor where a CPU packs it
            if not name.endswith("lm_head"):
                kept = reload.get_layerwise_info(module).restore_metadata[0].values()
                declared.append(sum(meta.numel() * meta.element_size() for meta in kept))

    try:
        made.llm.apply_model(count)
        training = training_of(policy, World(torch.device("cpu")), tmp_path)
        plan = SyncPlan(policy)
        made.load(plan.weights(training, everything=True))
        measured = allocated_peak(lambda: made.load(plan.weights(training, everything=True)))
    finally:
        made.close()
    monkeypatch.setattr("mmrl.rollout.digest.PIECE_ON_GPU", 1 << 16)  # of a digest on a CPU
    found = wake_parts(run, p, 4, float(2**40), sharded=False)
    assert found["vLLM weights"] == pytest.approx(sum(declared), rel=0.02)
    assert found["weights on their way"] == pytest.approx(measured, rel=0.02)


class TestInBf16:
    """On one engine, closed at the end of the class."""

    @pytest.fixture(scope="class")
    def made(self) -> Iterator[VLLMBackend]:
        made = VLLMBackend(VLLMSettings(tiny_folder(), "bfloat16", 1024, kv_cache_gib=0.125))
        yield made
        made.close()

    def test_a_tensor_stale_by_one_bit_is_named(
        self, made: VLLMBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        policy = policy_of(dtype="bf16")
        weights = dict(policy.model.named_parameters())
        with engine_on(made, policy, tmp_path) as (engine, training):
            moved(training, policy)
            engine.publish(training)
            for lost, block in (
                (
                    "model.language_model.layers.1.input_layernorm.weight",
                    r"layers\.1\.input_layernorm",
                ),
                ("model.language_model.layers.0.self_attn.k_proj.bias", r"layers\.0\.self_attn"),
                ("model.visual.merger.mlp.2.bias", r"visual\.merger\.mlp\.2"),
            ):
                with torch.no_grad():
                    weights[lost][0] = weights[lost][0].bfloat16() * (1 + 2**-7)
                with monkeypatch.context() as patch:
                    patch.setattr(SyncPlan, "weights", losing(lost))
                    engine.settings = engine.settings.model_copy(update={"compare_weights": False})
                    row = engine.publish(training)
                    assert row["train/sync/gap"] < engine.tolerance, "log-probs do not show it"
                    engine.settings = engine.settings.model_copy(update={"compare_weights": True})
                    with pytest.raises(
                        WeightSyncError,
                        match=rf"expected the same bits \(torch\.bfloat16\).*1 of .*\({block}\)",
                    ):
                        engine.publish(training)
                engine.publish(training)

    def test_a_frozen_towers_features_are_made_as_in_training(
        self, made: VLLMBackend, tmp_path: Path
    ) -> None:
        policy = policy_of(dtype="bf16", freeze=FROZEN)
        with engine_on(made, policy, tmp_path) as (engine, _):
            asked = asked_of(policy, tmp_path)
            groups = engine.generate(asked, settings_of())
            gap = (trainer_logps(policy, asked, groups) - sampled_logps(groups)).abs()
            assert (
                engine.last_gap is not None
                and engine.last_gap.mean < engine.tolerance
                and gap.mean() < engine.tolerance
            )
            sent = [m.tensor for r in asked for m in wire_prompt(policy, r.prompt).media]
            assert sent and all(t is not None and t.dtype == torch.bfloat16 for t in sent)


@pytest.mark.parametrize("freeze", [(), FROZEN], ids=["pixels", "features"])
def test_logps_equal_the_trainers(
    backend: VLLMBackend, freeze: tuple[str, ...], tmp_path: Path
) -> None:
    policy = policy_of(freeze=freeze)
    with engine_on(backend, policy, tmp_path) as (engine, _):
        for temperature in (0.7, 1.0, 1.3):
            same_logps(engine, policy, tmp_path, temperature)
        assert engine.last_gap is not None and engine.last_gap.max < 1e-5
        assert len(engine._probes) == 3 and {
            v.kind for p, _ in engine._probes for v in p.visuals
        } == {"image", "video"}


def test_media_are_known_to_vllm_by_our_hash_and_decoded_once(
    backend: VLLMBackend, tmp_path: Path
) -> None:
    policy = policy_of()
    with engine_on(backend, policy, tmp_path) as (engine, _):
        asked = asked_of(policy, tmp_path)
        built = policy.encoder.visuals.stats.built
        backend.forget()
        engine.generate(asked, settings_of())
        assert policy.encoder.visuals.stats.built == built > 0, (
            "nothing is decoded or processed a second time"
        )
        core: Any = backend._engine.engine_core
        seen = set(core.engine_core.scheduler.encoder_cache_manager.cached)
        assert seen == {media_hash(v.identity, None) for r in asked for v in r.prompt.visuals}
        mirrored = dataclasses.replace(asked[0].prompt.visuals[0])
        changed = policy.encoder.visuals.changed(mirrored, "mirror")
        assert media_hash(changed.identity, None) not in seen, (
            "another view of a picture is another input"
        )
        assert media_hash(mirrored.identity, "tower") not in seen, (
            "and so are a tower's features of it"
        )


def test_requests_that_cannot_be_answered_leave_the_engine_usable(
    backend: VLLMBackend, tmp_path: Path
) -> None:
    policy = policy_of()
    with engine_on(backend, policy, tmp_path):
        prompt = wire_prompt(policy, policy.encoder(samples_of(tmp_path)[3], TASK))
        asked = WireSampling(1, 1, 1.0, 2, (), ())
        with pytest.raises(ConfigError, match=r"within engine.vllm.max_model_len = 1024"):
            backend.generate([(prompt, dataclasses.replace(asked, max_tokens=1000))])
        with pytest.raises(RolloutError, match="vLLM failed while it answered 2 prompts"):
            backend.generate(
                [(prompt, asked), (prompt, dataclasses.replace(asked, banned_ids=(10**6,)))]
            )
        assert len(backend.generate([(prompt, asked)])[0][0][0]) == 2, (
            "what was asked for beside a wrong request is dropped"
        )


def test_sampling_follows_the_request(backend: VLLMBackend, tmp_path: Path) -> None:
    policy = policy_of()
    with engine_on(backend, policy, tmp_path) as (engine, _):
        asked = asked_of(policy, tmp_path, 4)
        together = engine.generate(asked, settings_of())
        assert len({c.token_ids for group in together for c in group}) > 15
        assert ids(engine.generate(asked, settings_of())) == ids(together), "the same seeds"
        assert ids(engine.generate(asked[::-1], settings_of())) == ids(together)[::-1], (
            "in another order"
        )
        for n, request in enumerate(asked[:3]):
            assert ids(engine.generate([request], settings_of())) == [ids(together)[n]], "alone"
        fewer = engine.generate([Request(r.prompt, 2, r.key) for r in asked], settings_of())
        assert ids(fewer) == [group[:2] for group in ids(together)], (
            "completion g has its own noise, whatever the group size"
        )
        other = engine.generate([Request(asked[0].prompt, 4, (8, 0))], settings_of())
        assert set(ids(other)[0]).isdisjoint(ids(together)[0]), "another key"
        greedy = asked_of(policy, tmp_path, 1, greedy=True)
        mixed = engine.generate([asked[0], *greedy], settings_of())
        assert ids(mixed[:1]) == [ids(together)[0]], "beside greedy ones"
        assert ids(mixed[1:]) == ids(PrefillOnceEngine(policy).generate(greedy, settings_of())), (
            "greedy as the built-in engine"
        )
        assert engine.generate([], settings_of()) == []


def test_answers_end_where_they_should(backend: VLLMBackend, tmp_path: Path) -> None:
    policy = policy_of()
    end, pad = policy.eos_ids
    banned = policy.banned.tolist()
    asked = asked_of(policy, tmp_path, 6)
    common = PrefillOnceEngine(policy).generate(asked, settings_of(24))
    counts: dict[int, int] = {}
    for token in (t for group in common for c in group for t in c.token_ids):
        counts[token] = counts.get(token, 0) + 1
    # so that some answers end early
    policy.eos_ids = (end, pad, *sorted(counts, key=lambda t: -counts[t])[:12])
    with torch.no_grad():  # media tokens become the most likely ones
        policy.base.lm_head.weight[banned] *= 30
    with engine_on(backend, policy, tmp_path) as (engine, _):
        groups = engine.generate(asked, settings_of(24))
        flat = [c for group in groups for c in group]
        assert {c.stop for c in flat} == {StopReason.EOS, StopReason.LENGTH} and len(
            {len(c.token_ids) for c in flat}
        ) > 4
        for c in flat:
            ended = c.token_ids[-1] in policy.eos_ids
            assert (c.stop is StopReason.EOS) == ended and not set(c.token_ids[:-1]) & set(
                policy.eos_ids
            )
            assert ended or len(c.token_ids) == 24
            written = c.token_ids[:-1] if ended else c.token_ids
            assert c.text == policy.processor.tokenizer.decode(
                list(written), skip_special_tokens=False
            )
            assert not set(c.token_ids) & set(banned) and len(c.logprobs) == len(c.token_ids)
        assert (trainer_logps(policy, asked, groups) - sampled_logps(groups)).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["full", "frozen", "lora"])
def test_a_step_of_training_reaches_vllm(
    backend: VLLMBackend, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"full": {}, "frozen": {"freeze": FROZEN}, "lora": _LORA}[kind]
    policy = policy_of(**options)
    sent: list[str] = []
    load = backend.load
    with engine_on(backend, policy, tmp_path) as (engine, training):
        before = same_logps(engine, policy, tmp_path)
        live = {
            n: p.detach().clone() for n, p in policy.model.named_parameters() if not p.requires_grad
        }

        def spy(weights: Any) -> Any:
            return load((sent.append(name), (name, tensor))[1] for name, tensor in weights)

        monkeypatch.setattr(backend, "load", spy)
        moved(training, policy)
        row = engine.publish(training)
        assert row["train/sync/gap_max"] < 1e-5 and row["time/sync"] > 0
        after = same_logps(engine, policy, tmp_path)
        moves = max(
            abs(a - b)
            for x, y in zip(before, after, strict=True)
            for c, d in zip(x, y, strict=True)
            for a, b in zip(c.logprobs, d.logprobs, strict=False)
        )
        assert moves > 1e-3, "the step must be seen for this test"
        assert all(
            torch.equal(p, live[n]) for n, p in policy.model.named_parameters() if n in live
        ), "merging leaves them alone"
        vision = [n for n in sent if n.startswith("model.visual.")]
        assert bool(vision) == (kind == "full"), "a frozen tower is sent once only"
        assert ("lm_head.weight" in sent) == (kind != "lora") and not any(
            "lora" in n or "base_layer" in n for n in sent
        )
        assert kind != "lora" or all("self_attn" in n or "mlp" in n for n in sent)


def test_a_sync_that_loses_something_is_noticed(
    backend: VLLMBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for lost in ("lm_head", "model.language_model.layers.1.mlp", "model.visual.patch_embed"):
        policy = policy_of()
        with (
            engine_on(backend, policy, tmp_path) as (engine, training),
            monkeypatch.context() as patch,
        ):
            patch.setattr(SyncPlan, "weights", losing(lost))
            moved(training, policy)
            engine.settings = engine.settings.model_copy(update={"compare_weights": False})
            with pytest.raises(
                WeightSyncError,
                match=r"does not compute with the trainer's weights after a sync.*limit",
            ):
                engine.publish(training)
            engine.settings = engine.settings.model_copy(update={"compare_weights": True})
            engine._sent = True
            block = lost.removeprefix("model.").removeprefix("language_model.")
            with pytest.raises(
                WeightSyncError,
                match=rf"does not hold the trainer's weights after a sync.*1 of .*\({block}",
            ):
                engine.publish(training)


def test_a_sync_that_fails_goes_to_its_end_and_the_next_one_is_whole(
    backend: VLLMBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = SyncPlan.weights
    seen: list[str] = []

    def wrong(self: SyncPlan, source: Any, *, everything: bool) -> Any:
        for name, tensor in honest(self, source, everything=everything):
            seen.append(name)
            # behind the first of the tensors that vLLM fuses: it must not count towards the next sync
            yield (
                name,
                tensor[:, :3] if name.endswith("layers.1.self_attn.k_proj.weight") else tensor,
            )

    policy = policy_of()
    with engine_on(backend, policy, tmp_path) as (engine, training):
        with monkeypatch.context() as patch:
            patch.setattr(SyncPlan, "weights", wrong)
            moved(training, policy)
            with pytest.raises(RolloutError, match="vLLM did not take over the weights"):
                engine.publish(training)
        assert set(seen) == engine.plan.expected, (
            "the other processes take part in gathering each of them"
        )
        moved(training, policy)
        engine.publish(training)
        same_logps(engine, policy, tmp_path)


def test_what_falls_asleep_wakes_weights_first_and_gets_all_of_them(
    backend: VLLMBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own sleep and wake-up, which on a CPU keep the memory: what a GPU loses is overwritten in their place. What torch
    keeps for later is given back right before each part wakes."""
    policy = policy_of(**_LORA)
    core: Any = backend._engine.engine_core
    executor = core.engine_core.model_executor
    worker = executor.driver_worker.worker
    seen: list[tuple[str, Any]] = []
    emptied: list[int] = []  # when, by the number of things seen

    def lose(level: int) -> None:
        seen.append(("sleep", level))
        with torch.no_grad():
            for p in worker.model_runner.model.parameters():
                p.fill_(float("nan"))

    def wake(tags: list[str]) -> None:
        seen.append(("wake", tags))

    honest = SyncPlan.weights

    def weights(self: SyncPlan, source: Any, *, everything: bool) -> Any:
        for name, tensor in honest(self, source, everything=everything):
            seen.append(("tensor", set(executor.sleeping_tags)))
            yield name, tensor

    with engine_on(backend, policy, tmp_path) as (engine, training):
        before = same_logps(engine, policy, tmp_path)
        monkeypatch.setattr(worker, "sleep", lose)
        monkeypatch.setattr(worker, "wake_up", wake)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(seen)))
        monkeypatch.setattr(backend, "on_gpu", True)
        monkeypatch.setattr(SyncPlan, "weights", weights)
        engine.sleep()
        engine.sleep()
        with pytest.raises(RolloutError, match="drops them when it falls asleep"):
            engine.generate(asked_of(policy, tmp_path), settings_of())
        engine.publish(training)
        assert seen[:2] == [("sleep", 2), ("wake", ["weights"])]
        assert seen[-1] == ("wake", ["kv_cache"]) and len(seen) > len(engine.plan.expected) > 20
        assert all(what == ("tensor", {"kv_cache"}) for what in seen[2:-1]), "no room for both"
        assert emptied == [1, len(seen) - 1], "before weights and before keys and values"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert ids(same_logps(engine, policy, tmp_path)) == ids(before)
        del seen[:]
        engine.publish(training)
        assert 0 < len(seen) < len(engine.plan.expected), "awake, it gets what changed"
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        with pytest.raises(ConfigError, match=r"without expandable_segments:True .*sleep: false"):
            backend._check_allocator()


def test_pictures_are_encoded_again_when_the_tower_learns(
    backend: VLLMBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of()
    with engine_on(backend, policy, tmp_path) as (engine, training):
        engine.generate(asked_of(policy, tmp_path), settings_of())
        moved(training, policy)
        monkeypatch.setattr(backend, "forget", lambda: backend.llm.reset_prefix_cache())
        reset = "vllm.v1.worker.gpu_model_runner.GPUModelRunner.reset_encoder_cache"
        monkeypatch.setattr(reset, lambda self: None)
        # features of the old tower, were they kept
        with pytest.raises(WeightSyncError, match="does not compute with"):
            engine.publish(training)
        monkeypatch.undo()
        engine.publish(training)
        same_logps(engine, policy, tmp_path)
