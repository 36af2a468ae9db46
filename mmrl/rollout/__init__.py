"""Rollout: one prefill per prompt, the KV cache expanded to the group, batched decoding."""
from mmrl.rollout.engine import PrefillOnceEngine, Request, RolloutEngine, SamplingSettings

__all__ = ["PrefillOnceEngine", "Request", "RolloutEngine", "SamplingSettings"]
