"""The last check of `mmrl families check`: vLLM's engine, given the family's weights and media as in a run, beside the trainer.
Part of mmrl.diagnostics.families."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from mmrl.config import DataSource, ModelConfig, RunConfig
from mmrl.config.rollout_engine import rollout_engine
from mmrl.data.sources import LoadedSource, load_sources
from mmrl.distributed.engines import TrainEngine, build_train_engine
from mmrl.distributed.world import World
from mmrl.policy.policy import Policy
from mmrl.rollout.build import build_rollout_engine
from mmrl.rollout.engine import PrefillOnceEngine, Request, RolloutEngine, SamplingSettings
from mmrl.rollout.vllm_engine import VLLMEngine
from mmrl.training.optim import build_optimizer

if TYPE_CHECKING:
    from mmrl.diagnostics._family_subject import Subject

__all__ = ["check_vllm"]

_APART_CPU, _APART_GPU = 1e-5, 1e-3
"""Log-probs per token, in nats, fp32: sums in another order; a GPU's kernels round more than a CPU's."""
_TOKENS, _SAMPLES = 12, 3


def check_vllm(s: Subject) -> str:
    """Weights by digest, greedy tokens and log-probs of vLLM against the trainer's, before and after a step: with pixels, and with
    the features of a frozen tower. Raises MissingExtraError without vLLM."""
    free = s.policy()
    sources = _sources(s)
    probes = [free.encoder(sample, x.task) for x in sources for sample in x.samples]
    longest = max(p.length for p in (*probes, *(s.prompt(free, n) for n in s.counts)))
    world, config = World(torch.device("cpu")), _config(s, longest)
    engine = build_rollout_engine(config, free, world, sources)
    assert isinstance(engine, VLLMEngine), rollout_engine(config, "cpu")
    try:
        apart = [_compared(s, free, engine, config, world)]
        frozen = s.policy(freeze=["vision", "projector"])
        fed = VLLMEngine(config.engine.vllm, frozen, frozen, world, engine.backend, sources)
        apart.append(_compared(s, frozen, fed, config, world))
    finally:
        engine.close()
    pixels, features = (f"{x:.1g}" for x in apart)
    return f"the trainer's greedy tokens; log-probs {pixels} apart with pixels, {features} with features, also after a step"


def _config(s: Subject, longest: int) -> RunConfig:
    """A run with vLLM in this process whose prompts have at most `longest` tokens."""
    model = ModelConfig(path=s.path, device="cpu", max_prompt_tokens=longest)
    vllm = {"kv_cache_gib": 0.25, "probe_prompts": 2, "sleep": False}
    return RunConfig.model_validate(
        {
            "model": model,
            "rollout": {"max_new_tokens": 32},
            "engine": {"rollout": "vllm", "vllm": vllm},
        }
    )


def _sources(s: Subject) -> list[LoadedSource]:
    """Training data of two pictures, from which the engine chooses what it compares after each sync."""
    rows = []
    for n, picture in enumerate(s.pictures[:2]):
        picture.save(s.folder / f"{n}.png")
        row = {"id": f"p{n}", "image": f"{n}.png", "question": "the circle", "answer": [1, 1, 9, 9]}
        rows.append(json.dumps(row) + "\n")
    path = s.folder / "probes.jsonl"
    path.write_text("".join(rows), encoding="utf-8")
    return load_sources([DataSource(task="grounding", path=str(path))])


def _compared(
    s: Subject, policy: Policy, engine: VLLMEngine, config: RunConfig, world: World
) -> float:
    """The largest difference of a log-prob between vLLM and `policy`, before and after a step that changes them."""
    optimizer = build_optimizer(policy.trainable(), config.optim)
    training = build_train_engine(config, world, policy, optimizer)
    before, first = _asked(s, policy, engine, training)
    s.step(policy)
    after, second = _asked(s, policy, engine, training)
    assert before != after, "a step changed none of the sampled tokens' log-probs"
    return max(first, second)


def _asked(
    s: Subject, policy: Policy, engine: VLLMEngine, training: TrainEngine
) -> tuple[list[Any], float]:
    """Log-probs of sampled tokens after a sync, and how far they are from the trainer's; greedy tokens are its own engine's."""
    engine.publish(training)
    settings = SamplingSettings(max_new_tokens=_TOKENS)
    prompts = [s.prompt(policy, n) for n in s.counts]
    greedy = [Request(p, 1, greedy=True) for p in prompts]

    def ids(sampler: RolloutEngine) -> list[tuple[int, ...]]:
        return [turn.token_ids for (turn,) in sampler.generate(greedy, settings)]

    ours, theirs = ids(PrefillOnceEngine(policy)), ids(engine)
    assert theirs == ours, f"greedy tokens: expected {ours}, found {theirs}"
    drawn = [Request(p, _SAMPLES, (7, n)) for n, p in enumerate(prompts)]
    groups = engine.generate(drawn, settings)
    found = [x for group in groups for turn in group for x in turn.logprobs]
    with torch.no_grad():
        wanted = policy.evaluate(
            [p for p in prompts for _ in range(_SAMPLES)],
            [turn.token_ids for group in groups for turn in group],
        ).logp_N
    apart = float((torch.tensor(found) - wanted).abs().max())
    most = _APART_GPU if torch.cuda.is_available() else _APART_CPU
    assert apart <= most, f"log-probs: expected at most {most:g} apart, found {apart:.2g}"
    return found, apart
