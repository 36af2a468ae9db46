"""What makes a run the run it is: the settings that a resumed run must share with its checkpoint.

train.steps may grow. With a constant learning rate, and nothing else that is laid out over the length of the run, the longer run
equals one that was configured so from the start, bit for bit. A cosine or linear schedule, a curriculum, demonstrations up to a
share of the run, and rewards that follow its progress are laid out over the new length from the resumed step on: the steps before
were made under the old one, and no run configured from the start is equal to that. `extension_notes` says so with the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.config import (
    CriticConfig,
    EntropyConfig,
    ReplayConfig,
    RouterReplayConfig,
    RunConfig,
    TurnsConfig,
)
from mmrl.config.model import TreeConfig
from mmrl.config.renamed import flat_with_new_names
from mmrl.errors import ConfigError
from mmrl.training.optim import learning_rate

__all__ = ["changes", "check_identity", "extension_notes", "run_identity"]

_MAY_CHANGE = (
    "name",
    "dir",
    "threads",
    "eval",
    "alarms",
    "reward.workers",
    "reward.concurrency",
    "reward.verdicts",
    "reward.timeout_s",
    "reward.max_failure_share",
    "rollout.batch_tokens",
    "model.fused_layers",
    "train.save_every",
    "train.checkpoint",
    "train.keep_last",
    "train.log_rollouts",
    "train.log_reflection",
    "train.tensorboard",
    "train.trackio",
    "train.wandb",
    "train.tracking",
    "data.on_error",
    "data.prompt_cache_gib",
    "data.cache",
    "data.workers",
    "data.media_timeout_s",
    "data.eval",
    "model.device",
    "model.attn",
    "schedule.timeline",
    "env.workers",
    "env.start_s",
    "env.reset_s",
    "env.step_s",
    "env.respawns",
    "env.restart_after_resets",
    "env.memory_gib",
    "env.retries",
    "eval_states",
    "demos",
    "engine",
    "operations",
)

_LENGTH = "train.steps"
_BEFORE = {
    "algorithm.filter.key": "reward",
    "algorithm.mask_rollouts": [],
    "optim.states": "fp32",
    "data.image.orientation": "displayed",
    "train.balance_batch": False,
    "schedule.correction_level": "token",
    "schedule.partial_rollouts": False,
    "rollout.merge_adapter": False,
    "model.lora.experts": False,
    **{
        f"{section}.{name}": value
        for section, kind in (
            ("algorithm.entropy", EntropyConfig),
            ("algorithm.critic", CriticConfig),
            ("algorithm.replay", ReplayConfig),
            ("algorithm.router_replay", RouterReplayConfig),
            ("algorithm.turns", TurnsConfig),
            ("rollout.tree", TreeConfig),
        )
        for name, value in kind().model_dump(mode="json").items()
    },
}
"""What held in runs on prompts whose checkpoint is older than the key; null where nothing is said."""
_RENAMED = {
    ("algorithm.advantage_scale", "ema"): "ema_within",
    ("algorithm.difficulty", "dgrpo"): "softmax",
}
"""What checkpoints as old as that called otherwise."""


def run_identity(tree: Any, where: str = "") -> dict[str, Any]:
    """Dotted key -> value of everything in a configuration that would make a resumed run another run."""
    if where in _MAY_CHANGE:
        return {}
    if isinstance(tree, dict):
        return {
            k: v
            for name, part in tree.items()
            for k, v in run_identity(part, f"{where}.{name}".strip(".")).items()
        }
    return {where: tree}


def check_identity(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raises ConfigError where the identity of a checkpoint is not that of the run that would resume it; train.steps may grow."""
    old = {k: v for k, v in flat_with_new_names(old, run_identity).items() if not _may_change(k)}
    if "env.suite" in new:  # episodes have their own filter, and this section at its defaults
        old = {**{k: v for k, v in new.items() if k.startswith("algorithm.filter.")}, **old}
    if "algorithm.filter.key" not in old:
        old = {k: _RENAMED.get((k, str(v)), v) for k, v in old.items()}
    old = {**{k: v for k, v in _BEFORE.items() if k in new}, **old}
    if changed := changes(old, new, may_grow=(_LENGTH,)):
        raise ConfigError(
            "cannot resume: it would no longer be the same run. Changed since the checkpoint: "
            f"{'; '.join(changed)}. Restore them, or start a new run (name=...)"
        )


def changes(old: Mapping[str, Any], new: Mapping[str, Any], may_grow: Sequence[str]) -> list[str]:
    """What differs between two identities, key by key, in words; a number of steps of `may_grow` may have become larger."""
    return [
        f"{k} was {old.get(k)!r}, now {new.get(k)!r}"
        for k in sorted({*old, *new})
        if old.get(k) != new.get(k) and not (k in may_grow and _longer(old.get(k), new.get(k)))
    ]


def _may_change(key: str) -> bool:
    """Of checkpoints that were written when it might not."""
    return any(key == free or key.startswith(f"{free}.") for free in _MAY_CHANGE)


def _longer(old: Any, new: Any) -> bool:
    return isinstance(old, int) and isinstance(new, int) and new > old


def extension_notes(config: RunConfig, steps_before: int, step: int) -> list[str]:
    """What to say of a run of `config` that goes on after `step` and was to end after `steps_before` steps; [] where it is not
    longer than it was."""
    now, a, o = config.train.steps, config.algorithm, config.optim
    if now <= steps_before:
        return []
    notes, per_step = (
        [f"the run is extended from {steps_before} to {now} steps"],
        a.epochs * a.minibatches,
    )
    fixed = o.schedule == "constant"
    if not fixed:
        was, rate = (
            learning_rate(o, step * per_step, total * per_step) for total in (steps_before, now)
        )
        notes.append(
            f"optim.schedule {o.schedule} is laid out over {now} steps from here on: the learning rate of step "
            f"{step + 1} is {rate:.3g}, it was to be {was:.3g}"
        )
    others = [
        name
        for name, there in (
            ("data.curriculum", bool(config.data.curriculum)),
            ("algorithm.offline.until", bool(a.offline.per_group and a.offline.until < 1)),
            (
                "rewards that follow the run's progress (mode: dynamic)",
                any("dynamic" in str(s.params) for s in config.data.train),
            ),
        )
        if there
    ]
    if others:
        notes.append(
            f"shares of the run are those of {now} steps from here on: {', '.join(others)}"
        )
    if others or not fixed:
        notes.append(
            "so it is not the run that would have been configured for that length from the start"
        )
    return notes
