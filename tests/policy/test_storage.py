"""Copies that only sample hold their weights in the type of the forward: half of the bytes, the same numbers."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from mmrl.config import LoraSettings, ModelConfig, RunConfig
from mmrl.distributed.engines import build_actor, build_saved, build_train_engine
from mmrl.distributed.world import World
from mmrl.policy.batch_invariance import DecodeLinear, decoding
from mmrl.policy.loading import load_policy
from mmrl.policy.pack import Batch, PackItem, pack
from mmrl.policy.policy import Policy
from mmrl.policy.storage import Stored
from mmrl.policy.tiny import TinySpec, build_tiny
from mmrl.rollout import PrefillOnceEngine, Request, SamplingSettings
from mmrl.training.optim import build_optimizer
from tests.kits.engine_kit import (
    ARCHITECTURES,
    ENVIRONMENT,
    Album,
    fresh_policy,
    picture,
    sample_with,
    tiny_folder,
)

pytestmark = pytest.mark.slow

TASK = Album()


def prompts(p: Policy) -> list[Any]:
    shown = [[picture((112, 84))], [], [picture((56, 56)), picture((37, 211))]]
    return [p.encoder(sample_with(s, "Where is it?", n), TASK) for n, s in enumerate(shown)]


def greedy(p: Policy) -> list[Any]:
    """Tokens and log-probs of greedy completions: each token is the most probable one, whatever the noise."""
    asked = [Request(prompt, 1, (7, n)) for n, prompt in enumerate(prompts(p))]
    settings = SamplingSettings(max_new_tokens=12, top_k=1)
    turns = [t for group in PrefillOnceEngine(p).generate(asked, settings) for t in group]
    return [(tuple(t.token_ids), tuple(t.logprobs), t.policy_version) for t in turns]


def some_batch(p: Policy) -> Batch:
    return pack([PackItem(prompt, ((5, 6, 7), (80,), (9, 11))) for prompt in prompts(p)])


def nbytes(p: Policy) -> int:
    """Of all tensors, counted by their storages."""
    stored = [q.untyped_storage() for q in p.model.parameters()]
    return sum({s.data_ptr(): s.nbytes() for s in stored}.values())


def types(p: Policy) -> set[torch.dtype]:
    return {q.dtype for q in p.model.parameters()}


@pytest.mark.parametrize("freeze", [[], ["vision", "projector"]], ids=["all", "language"])
@pytest.mark.parametrize("arch", [*ARCHITECTURES, "qwen3_vl_moe", "qwen3_5", "glm4v"])
def test_products_are_stored_as_autocast_casts_them_and_nothing_changes(
    arch: str, freeze: list[str]
) -> None:
    trained = fresh_policy(arch, dtype="bf16", freeze=freeze)
    trained.version = 4
    copy = trained.full_replica(stored="products")
    loaded = load_policy(
        ModelConfig(path=tiny_folder(arch), device="cpu", dtype="bf16", freeze=freeze),
        stored="products",
    )
    expected = greedy(trained)
    assert len({ids for ids, _, _ in expected}) > 1, "completions that react to what is shown"
    for other in (copy, loaded):
        other.version = 4
        assert greedy(other) == expected, "tokens, log-probs and versions, bit for bit"
        with torch.no_grad():
            batch = some_batch(trained)
            assert torch.equal(other.logp(batch).logp_N, trained.logp(batch).logp_N)
        assert nbytes(other) < nbytes(trained)
        assert [n for n, _ in other.trainable()] == [n for n, _ in trained.trainable()]
    same = {torch.float32} if not freeze else {torch.float32, torch.bfloat16}
    assert types(trained) == same, "masters stay"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_all_weights_are_those_that_fsdp_gathers(arch: str) -> None:
    """Tokens of the copy are the most probable ones of the model that FSDP2 trains, and log-probs the same, bit for bit; half of
    the bytes. What is saved keeps the masters."""
    config = RunConfig.model_validate({"engine": {"train": "fsdp2", "rollout": "own"}})
    world, trained = World(torch.device("cpu")), fresh_policy(arch, dtype="bf16")
    before = {n: q.detach().clone() for n, q in trained.named_parameters()}
    batch, whole = some_batch(trained), nbytes(trained)
    with torch.no_grad():
        autocast = trained.logp(batch).logp_N
    actor = build_actor(config, world, trained)
    saved = build_saved(config, world, trained, actor)
    optimizer = build_optimizer(trained.trainable(), config.optim)
    engine = build_train_engine(config, world, trained, optimizer)
    assert nbytes(actor) * 2 == whole == nbytes(saved) and types(actor) == {torch.bfloat16}
    # weights that no copy has seen yet
    with torch.no_grad():
        for _, shard in trained.trainable():
            shard.mul_(1.01)
    for replica in (actor, saved):
        engine.gather_into(replica)
    assert all(torch.equal(q, before[n] * 1.01) for n, q in saved.named_parameters())
    with torch.no_grad():
        (logp_N,) = engine.run(lambda: (trained.logp(batch).logp_N,))
        assert torch.equal(actor.logp(batch).logp_N, logp_N) and not torch.equal(logp_N, autocast)
        for prompt, (ids, _, _) in zip(prompts(trained), greedy(actor), strict=True):
            logits_NV = engine.run(functools.partial(_logits, trained, prompt, ids))[0]
            assert tuple(logits_NV.argmax(-1).tolist()) == ids


def _logits(p: Policy, prompt: Any, ids: tuple[int, ...]) -> tuple[torch.Tensor]:
    """What each token of a completion is drawn from (N, V), as `logp` computes it."""
    batch = pack([PackItem(prompt, (ids,))])
    with p.autocast(keep=False):
        return (p.adjust(p.logits(p.hidden(batch)[batch.source_N]), 1.0),)


_MEASURE = """
import json, os, sys
from pathlib import Path
from mmrl.config import ModelConfig
from mmrl.policy.loading import load_policy

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

trained = load_policy(ModelConfig(path=sys.argv[1], device="cpu", dtype="bf16"))
kept = [trained.full_replica()]  # what is allocated once
found = {}
for kind in ("masters", "products", "all"):
    before = resident()
    kept.append(trained.full_replica(stored=kind))
    stored = {s.data_ptr(): s.nbytes() for q in kept[-1].model.parameters() for s in [q.untyped_storage()]}
    found[kind] = (resident() - before, sum(stored.values()))
print(json.dumps(found))
"""


def test_a_copy_takes_the_memory_that_it_says(tmp_path: Path) -> None:
    """As Linux counts it: half of the masters' for all weights, a little more for products alone. In a process of its own, in which
    every tensor is mapped by itself: else a copy fills what others have freed before."""
    model, processor = build_tiny(TinySpec(hidden=768, layers=6, vision_hidden=32, vision_heads=1))
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    measured = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path)],
        env={**ENVIRONMENT, "MALLOC_MMAP_THRESHOLD_": "65536"},  # fixed, and lower than any matrix
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert measured.returncode == 0, measured.stderr
    found = json.loads(measured.stdout)
    for stored, (grown, said) in found.items():
        assert grown == pytest.approx(said, rel=0.05), stored
    grown = {stored: found[stored][0] for stored in found}
    assert grown["masters"] > 100 << 20, "large enough to be told from noise"
    assert grown["all"] == pytest.approx(grown["masters"] / 2, rel=0.05)
    assert grown["all"] < grown["products"] < 0.55 * grown["masters"]


def test_a_copy_in_bf16_is_the_model_that_transformers_loads_in_bf16() -> None:
    folder = tiny_folder("qwen2_5_vl")
    copy = fresh_policy(dtype="bf16").full_replica(stored="all")
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16)
    expected = dict(theirs.named_parameters())
    found = dict(copy.model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(q.dtype == torch.bfloat16 and torch.equal(q, expected[n]) for n, q in found.items())


@pytest.mark.parametrize("stored", ["products", "all"])
def test_without_autocast_and_with_an_adapter_copies_are_stored_as_what_they_copy(
    stored: Stored,
) -> None:
    for p in (fresh_policy(), fresh_policy(dtype="bf16", lora=LoraSettings(r=4))):
        copy = p.full_replica(torch.device("cpu"), stored)
        theirs = {n: (q.dtype, q.shape) for n, q in p.named_parameters()}
        assert {n: (q.dtype, q.shape) for n, q in copy.named_parameters()} == theirs
        config = RunConfig.model_validate({"engine": {"train": "fsdp2", "rollout": "own"}})
        world = World(torch.device("cpu"))
        actor = build_actor(config, world, p)
        assert build_saved(config, world, p, actor) is actor, "it can be saved"


def test_with_sharded_checkpoints_no_copy_is_kept_to_be_saved() -> None:
    """Every process saves its share of what trains."""
    run = {
        "engine": {"train": "fsdp2", "rollout": "own"},
        "train": {"checkpoint": "sharded"},
    }
    world, trained = World(torch.device("cpu")), fresh_policy(dtype="bf16")
    config = RunConfig.model_validate(run)
    actor = build_actor(config, world, trained)
    assert types(actor) == {torch.bfloat16}
    assert build_saved(config, world, trained, actor) is actor


def test_a_frozen_tower_is_shared_as_it_is_and_reads_its_cached_features() -> None:
    trained = fresh_policy(dtype="bf16", freeze=["vision", "projector"])
    for stored in ("products", "all"):
        copy = trained.full_replica(stored=stored)
        ours, theirs = trained.tower(), copy.tower()
        assert ours is not None and theirs is not None and ours.fingerprint == theirs.fingerprint
        assert copy.base.model.visual.patch_embed is trained.base.model.visual.patch_embed


def test_a_large_layer_in_bf16_decodes_on_a_cpu() -> None:
    """Of fp32 it multiplies few rows by oneDNN, which takes no rows of another type than its weight."""
    layer = DecodeLinear(2048, 256, bias=False, dtype=torch.bfloat16)
    rows = torch.randn(3, 2048, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = torch.nn.functional.linear(rows, layer.weight)
        with decoding():
            assert torch.equal(layer(rows), expected)
