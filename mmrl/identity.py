"""What makes a run the run it is: the settings that a resumed run must share with its checkpoint."""
from __future__ import annotations

from typing import Any

from mmrl.config import EntropyConfig
from mmrl.errors import ConfigError

__all__ = ["check_identity", "run_identity"]

_MAY_CHANGE = ("name", "dir", "threads", "eval", "alarms", "reward.workers", "reward.timeout_s", "reward.max_failure_share",
               "rollout.batch_tokens", "train.save_every", "train.keep_last", "train.log_rollouts", "train.log_reflection",
               "train.tensorboard", "train.wandb", "data.prompt_cache_gib", "data.cache", "data.workers",
               "data.media_timeout_s", "data.eval", "model.device", "schedule.timeline",
               "env.workers", "env.start_s", "env.reset_s", "env.step_s", "env.respawns", "env.restart_after_resets",
               "env.memory_gib", "env.retries", "eval_states", "demos", "engine", "operations")

_BEFORE = {"algorithm.filter.key": "reward",
           **{f"algorithm.entropy.{name}": value for name, value in EntropyConfig().model_dump(mode="json").items()}}
"""What held in runs on prompts whose checkpoint is older than the key; null where nothing is said."""
_RENAMED = {("algorithm.advantage_scale", "ema"): "ema_within", ("algorithm.difficulty", "dgrpo"): "softmax"}
"""What checkpoints as old as that called otherwise."""


def run_identity(tree: Any, where: str = "") -> dict[str, Any]:
    """Dotted key -> value of everything in a configuration that would make a resumed run another run."""
    if where in _MAY_CHANGE:
        return {}
    if isinstance(tree, dict):
        return {k: v for name, part in tree.items() for k, v in run_identity(part, f"{where}.{name}".strip(".")).items()}
    return {where: tree}


def check_identity(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raises ConfigError where the identity of a checkpoint is not that of the run that would resume it."""
    if "env.suite" in new:  # episodes have their own filter, and this section at its defaults
        old = {**{k: v for k, v in new.items() if k.startswith("algorithm.filter.")}, **old}
    if "algorithm.filter.key" not in old:
        old = {k: _RENAMED.get((k, str(v)), v) for k, v in old.items()}
    old = {**{k: v for k, v in _BEFORE.items() if k in new}, **old}
    changed = [f"{k} was {old.get(k)!r}, now {new.get(k)!r}" for k in sorted({*old, *new}) if old.get(k) != new.get(k)]
    if changed:
        raise ConfigError("cannot resume: it would no longer be the same run. Changed since the checkpoint: "
                          f"{'; '.join(changed)}. Restore them, or start a new run (name=...)")
