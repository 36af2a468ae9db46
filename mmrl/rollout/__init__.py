"""Rollout: one prefill per prompt, the KV cache expanded to the group, batched decoding; or vLLM (engine.rollout)."""

from mmrl.rollout.build import build_rollout_engine
from mmrl.rollout.engine import PrefillOnceEngine, Request, RolloutEngine, SamplingSettings

__all__ = [
    "PrefillOnceEngine",
    "Request",
    "RolloutEngine",
    "SamplingSettings",
    "build_rollout_engine",
]
