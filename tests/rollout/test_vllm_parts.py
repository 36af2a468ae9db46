"""What surrounds vLLM and needs none of it: weights under a checkpoint's names, what goes over the wire, corrections, errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.algorithms.offpolicy import OffPolicy
from mmrl.config import RunConfig, VLLMConfig
from mmrl.errors import ConfigError, MissingExtraError, RolloutError
from mmrl.policy.policy import Policy
from mmrl.rollout import probe
from mmrl.rollout.build import max_model_len
from mmrl.rollout.digest import WeightDigest, differing
from mmrl.rollout.probe import PROBE_TOKENS, choose_prompts, compare
from mmrl.rollout.vllm_inputs import WireSampling, media_hash, sample_seed, wire_prompt
from mmrl.rollout.vllm_wire import (
    chunks,
    content_of,
    dump,
    dump_prompts,
    load,
    load_prompts,
    load_sampling,
)
from mmrl.rollout.weights import SyncPlan
from tests.kits.clip_kit import TASK, clip, loaded, policy_of, sample
from tests.kits.engine_kit import (
    ENVIRONMENT,
    REPO,
    cli,
    config_file,
    fresh_policy,
    picture,
    small_run,
    weights_of,
)


class Live:
    """The weights of a policy as a training engine names them; a sharded engine's are valid until the next."""

    def __init__(self, policy: Policy, sharded: bool = False, lost: str = "") -> None:
        self.policy, self.sharded, self.lost = policy, sharded, lost

    def parameters(self, *, trainable: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for name, p in self.policy.model.named_parameters():
            if name == self.lost or (trainable and not p.requires_grad):
                continue
            buffer = p.detach().clone()
            yield name, buffer
            if self.sharded:
                buffer.fill_(float("nan"))

    def run(self, forward: Any) -> tuple[torch.Tensor, ...]:
        return forward()


LORA = {
    "lora": {"r": 4, "alpha": 8, "vision": True, "target_modules": ["q_proj", "down_proj", "qkv"]}
}


# experts one by one on disk, routers with a buffer; a LoRA adapter by default has a part for each of their parameters
MIXTURE = {"arch": "glm4v_moe"}


@pytest.mark.check_takes(2)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, LORA, {"freeze": ["vision", "projector"]}, MIXTURE, {**MIXTURE, "lora": {"r": 4}}],
    ids=["full", "lora", "frozen", "experts", "experts-lora"],
)
def test_what_is_sent_is_what_a_checkpoint_holds(
    options: dict[str, Any], sharded: bool, tmp_path: Path
) -> None:
    policy = fresh_policy(**options)
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        for name, buffer in policy.model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.tensor([0.5, -1.0, 0.25, 2.0]))
    sent = dict(SyncPlan(policy).weights(Live(policy, sharded), everything=True))
    policy.save(tmp_path / "saved")
    saved = dict(weights_of(tmp_path / "saved"))
    old = {
        n.replace("model.visual.", "visual.").replace("model.language_model.", "model."): t
        for n, t in sent.items()
    }
    # transformers writes the names of a model's first release
    sent = {**sent, **old} if not set(saved) <= set(sent) else sent
    for name, tensor in saved.items():
        assert torch.allclose(sent[name], tensor, atol=1e-6), name
    assert torch.equal(sent["lm_head.weight"], sent["model.language_model.embed_tokens.weight"])


def test_only_changed_blocks_are_sent_again_and_each_of_them_whole() -> None:
    policy = fresh_policy(lora={"r": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]})
    names = [n for n, _ in SyncPlan(policy).weights(Live(policy), everything=False)]
    layer = "model.language_model.layers.0."
    assert {n.removeprefix(layer) for n in names if n.startswith(layer)} == {
        *(f"self_attn.{x}_proj.{k}" for x in "qkv" for k in ("weight", "bias")),
        "self_attn.o_proj.weight",
        *(f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
    }
    assert all(".layers." in n for n in names) and len(names) == len(set(names))
    frozen = fresh_policy(freeze=["vision", "projector"])
    names = [n for n, _ in SyncPlan(frozen).weights(Live(frozen), everything=False)]
    assert "lm_head.weight" in names and not any("visual" in n for n in names)
    plan = SyncPlan(fresh_policy(freeze=["language"]))
    assert plan.vision_changes and not any(
        "language" in block or "lm_head" in block for block in plan._changed
    )


def test_a_weight_that_the_engine_does_not_name_is_an_error() -> None:
    policy = fresh_policy()
    with pytest.raises(
        ConfigError,
        match=r"other weights than the policy has: missing \['model.language_model.norm.weight'\]",
    ):
        list(
            SyncPlan(policy).weights(
                Live(policy, lost="model.language_model.norm.weight"), everything=True
            )
        )


def test_digests_know_bits_and_no_layout() -> None:
    draw = torch.Generator().manual_seed(3)
    q, k, bias = (torch.randn(n, 4, generator=draw) for n in (8, 2, 1))

    def digest(dtype: torch.dtype = torch.float32, **tensors: torch.Tensor) -> dict[str, int]:
        found = WeightDigest(dtype)
        for name, tensor in tensors.items():
            found.add(f"model.language_model.layers.0.self_attn.{name}", tensor)
        return found.result()

    whole = digest(q=q, k=k, bias=bias)
    fused = WeightDigest(torch.float32)
    fused.add(
        "language_model.model.layers.0.self_attn.qkv_proj.weight",
        torch.cat([k, q, torch.zeros(6, 4)]),
    )
    fused.add("language_model.model.layers.0.self_attn.qkv_proj.bias", bias.T)
    assert (
        fused.result() == whole
        and list(whole) == ["layers.0.self_attn"]
        and not differing(whole, fused.result())
    )
    for change in (
        torch.nextafter(bias, bias + 1),
        -bias,
        bias.roll(1) * torch.tensor([1, 1, 1, 1.0000001]),
        torch.zeros(1, 4),
    ):
        assert differing(whole, digest(q=q, k=k, bias=change)) == ["layers.0.self_attn"]
    assert (
        digest(torch.bfloat16, q=q)
        == digest(q=q, dtype=torch.bfloat16)
        == digest(torch.bfloat16, q=q.bfloat16())
    )
    assert (
        digest(torch.bfloat16, q=q)
        == digest(torch.bfloat16, q=q * 1.00001)
        != digest(torch.bfloat16, q=q * 1.01)
    )
    assert not differing({"a": 1, "b": 2**64 - 1}, {"c": 0}), (
        "another release's names for the same weights"
    )
    assert differing({"a": 1, "b": 2}, {"c": 4}) == ["a", "b", "c"] and differing(
        {"a": 1, "b": 2}, {"a": 2, "b": 1}
    ) == ["a", "b"]


def _bare(prompt: Any) -> Any:
    """Without the names that the other side makes itself."""
    return replace(prompt, fingerprint="", media=tuple(replace(m, hash="") for m in prompt.media))


def test_prompts_travel_with_their_tensors_or_by_hash(tmp_path: Path) -> None:
    policy = policy_of()
    prompts = [
        policy.encoder(s, TASK)
        for s in (sample((clip(tmp_path),), (picture((56, 56)),), 0), sample((), (), 1))
    ]
    wires = [wire_prompt(policy, p) for p in prompts]
    tensors: dict[str, torch.Tensor] = {}
    known: dict[str, str] = {}
    document = {"prompts": dump_prompts(wires, tensors, known)}
    found, came = load(dump(document, tensors))
    back, missing = load_prompts(found["prompts"], came, lambda name: None)
    assert [_bare(p) for p in back] == [_bare(p) for p in wires] and not missing
    for one, other in zip(back, wires, strict=True):
        assert torch.equal(one.positions_3P, other.positions_3P)
        assert all(
            torch.equal(a.tensor, b.tensor) for a, b in zip(one.media, other.media, strict=True)
        )
    again = [wire_prompt(policy, p, lambda name: False) for p in prompts]
    bare: dict[str, torch.Tensor] = {}
    found, came = load(dump({"prompts": dump_prompts(again, bare, known)}, bare))
    _, missing = load_prompts(found["prompts"], came, lambda name: None)
    assert (
        missing
        == [m.hash for m in wires[0].media]
        == [media_hash(v.identity, None) for v in prompts[0].visuals]
    )
    kept = {content_of(m.tensor): m.tensor for m in wires[0].media}
    assert load_prompts(found["prompts"], came, kept.get) == (back, []), (
        "the same names, which are those of what came"
    )
    sampling = WireSampling(3, 5, 0.7, 8, (1, 2), (3,))
    assert load_sampling(vars(sampling)) == sampling
    with pytest.raises(RolloutError, match="expected safetensors with a document"):
        load(b"12345678 nothing of the kind")


def test_frozen_towers_give_features_under_another_hash(tmp_path: Path) -> None:
    pixels, features = policy_of("qwen3_vl"), policy_of("qwen3_vl", freeze=("vision", "projector"))
    one, other = (
        wire_prompt(p, p.encoder(sample((), (picture((56, 56)),)), TASK)).media[0]
        for p in (pixels, features)
    )
    assert (one.form, other.form) == ("pixels", "features") and one.hash != other.hash
    visual = features.encoder(sample((), (picture((56, 56)),)), TASK).visuals[0]
    (found,) = features.encoder.visuals.features([visual], features.tower())
    assert (
        other.tensor is not None
        and torch.equal(other.tensor, torch.cat([found.main, *found.deep], -1))
        and found.deep
    )


def test_weights_travel_in_pieces() -> None:
    weights = [(f"w{i}", torch.full((4,), float(i))) for i in range(5)]
    pieces = list(chunks(weights, 40))
    assert [[n for n, _ in group] for group, _ in pieces] == [["w0", "w1"], ["w2", "w3"], ["w4"]]
    assert [last for _, last in pieces] == [False, False, True]
    assert list(chunks([], 40)) == [([], True)]


def test_seeds_belong_to_the_key() -> None:
    seeds = {sample_seed(key) for key in ((1, 2), (2, 1), (12,), (1, 2, 0))}
    assert (
        len(seeds) == 4
        and all(0 <= s < 2**62 for s in seeds)
        and sample_seed((1, 2)) == sample_seed([1, 2])
    )


def test_probes_show_every_kind_of_media(tmp_path: Path) -> None:
    policy = policy_of()
    text, photo, film = (
        sample((), (), 0),
        sample((), (picture((56, 56)),), 1),
        sample((clip(tmp_path),), (), 2),
    )
    chosen = choose_prompts(policy, [loaded(text, text, photo, film)], 2)
    assert {v.kind for p in chosen for v in p.visuals} == {"image", "video"}
    assert len(choose_prompts(policy, [loaded(photo)], 5)) == 1
    missing = sample((), (str(tmp_path / "missing.png"),), 3)
    assert len(choose_prompts(policy, [loaded(missing, text)], 2)) == 1
    with pytest.raises(ConfigError, match="none of the first training prompts can be read"):
        choose_prompts(policy, [loaded(missing)], 2)
    long = sample((), (picture((280, 280)),), 4)
    for order in ((long, photo), (photo, long)):
        assert [p.length for p in choose_prompts(policy, [loaded(*order)], 1)] == [
            policy.encoder(photo, TASK).length
        ]
    gap = compare([[0.0, -1.0]], [[0.5, -1.0]])
    assert (gap.mean, gap.max) == (0.25, 0.5)
    assert not compare([[float("nan")]], [[0.0]]).mean <= 1


def test_long_prompts_are_probed_only_for_media_that_no_other_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of()
    text, photo, films = (
        sample((), (), 0),
        sample((), (picture((56, 56)),), 1),
        [sample((clip(tmp_path),), (), n) for n in (2, 3)],
    )
    monkeypatch.setattr(probe, "_LONG", policy.encoder(films[0], TASK).length - 1)
    chosen = choose_prompts(policy, [loaded(*films, text, photo)], 4)
    assert [[v.kind for v in p.visuals] for p in chosen] == [["image"], ["video"], []]


def test_a_sequence_has_room_for_an_answer_and_for_the_probe() -> None:
    for new, room in ((4, PROBE_TOKENS + 1), (100, 100)):
        config = config_of(rollout={"max_new_tokens": new}, engine={"rollout": "vllm"})
        assert max_model_len(config) == config.model.max_prompt_tokens + room
    assert max_model_len(config_of(engine={"vllm": {"max_model_len": 64}})) == 64


def config_of(**engine: Any) -> RunConfig:
    tree = {"name": "x", "data": {"train": [{"task": "t", "path": "p"}]}, "model": {"path": "m"}}
    return RunConfig.model_validate({**tree, **engine})


def test_tokens_of_another_engine_count_by_how_the_trainer_would_have_drawn_them() -> None:
    ours, theirs = torch.tensor([-1.0, -1.0, -1.0, -1.0]), torch.tensor([-1.1, -3.0, -0.5, -9.0])
    none, own = torch.zeros(4, dtype=torch.bool), torch.tensor([True, True, True, False])
    found = OffPolicy(config_of(engine={"rollout": "vllm"}))
    assert found.corrects(False) and found.corrects_sampler
    old, weight = found.correct(ours, theirs, none, own, own, count=True)
    assert torch.equal(old, torch.tensor([-1.0, -1.0, -1.0, -9.0])), (
        "a demonstration keeps its own log-probs"
    )
    assert torch.allclose(weight, torch.tensor([0.1, 2.0, -0.5, 0.0]).exp().clamp(max=2.0))
    assert found.metrics()["train/sampler/weight"] == pytest.approx(
        float(weight[:3].mean()), rel=1e-6
    )
    masking = OffPolicy(
        config_of(engine={"rollout": "vllm", "vllm": {"correction": "mask", "threshold": 3.0}})
    )
    _, weight = masking.correct(ours, theirs, none, own, own, count=True)
    assert weight[1] == 0 and masking.metrics()["train/sampler/masked"] == pytest.approx(1 / 3)
    off = OffPolicy(config_of(engine={"rollout": "vllm", "vllm": {"correction": "none"}}))
    assert not off.corrects(False) and not OffPolicy(config_of()).corrects(True)
    both = OffPolicy(
        config_of(engine={"rollout": "vllm"}, schedule={"kind": "async", "threshold": 1.5})
    )
    _, weight = both.correct(
        ours, theirs, torch.tensor([False, True, False, False]), own, own, count=False
    )
    assert weight[1] == 1.5, "what older weights wrote has its own bound"


def test_a_missing_vllm_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmrl.rollout.vllm_backend import VLLMBackend, VLLMSettings

    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '.*\[vllm\]'"):
        VLLMBackend(VLLMSettings("nowhere"))


def test_server_and_url_belong_together() -> None:
    assert VLLMConfig(mode="server", url="http://127.0.0.1:1").url
    for wrong in ({"mode": "server"}, {"url": "http://127.0.0.1:1"}):
        with pytest.raises(ValueError, match=r"engine\.vllm\.url"):
            VLLMConfig(**wrong)


@pytest.mark.slow
def test_a_server_that_others_reach_needs_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MMRL_API_KEY", raising=False)
    tree = small_run(tmp_path, "unused.jsonl")
    _, err = cli(
        "rollout-server",
        config_file(tmp_path / "run.yaml", tree),
        "--host",
        "0.0.0.0",
        "--port",
        "0",
        status=2,
    )
    assert "expected a key for a server that listens at 0.0.0.0, found none" in err


@pytest.mark.slow
def test_vllm_keeps_to_the_instructions_that_torch_is_kept_to() -> None:
    """Its CPU kernels are those for AVX2 then; on a processor with AMX the others abort the process at the first product in bf16
    (tests/rollout/test_vllm.py under ATEN_CPU_CAPABILITY=avx2 and ONEDNN_MAX_CPU_ISA=AVX2 does such products)."""
    code = (
        "from mmrl.rollout.vllm_backend import import_vllm; import_vllm(); import sys, torch; from vllm.platforms import "
        "current_platform as p; p.import_kernels(); print(torch.cpu._is_avx512_supported(), 'vllm._C_AVX2' in sys.modules or "
        "any('_C_AVX2' in line for line in open('/proc/self/maps')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**ENVIRONMENT, "ATEN_CPU_CAPABILITY": "avx2"},
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.splitlines()[-1:] == ["False True"], done.stdout + done.stderr[-2000:]
