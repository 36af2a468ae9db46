"""Keys that have another name now, read under the old one for one release.

    tree, said = with_new_names({"algorithm": {"aggregate": "token_mean"}})      # {"algorithm": {"loss_aggregation": ...}}
    tree, said = with_new_names({"rl": {"kind": "ppo", "gamma": 0.9}})      # {"rl": {}, "algorithm": {"advantage": "gae", ...}}

`said` says what was read as what. Robot runs had keys of their own before there was one algorithm section for answers and
episodes. Files that such runs wrote name every key, also those of `algorithm` that meant nothing to them: those stand at the
values in _SILENT, and the old key counts. Part of mmrl.config.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from mmrl.config.algorithm import GAE, AlgorithmConfig, CriticConfig

__all__ = ["flat_with_new_names", "warn_of_old_names", "with_new_algorithm_names", "with_new_names"]

_ALGORITHM = {
    "aggregate": "loss_aggregation",
    "aggregation": "reward_aggregation",
    "importance": "importance_sampling_level",
}
"""Key of the section algorithm -> its name now."""
_CRITIC = {
    "level": "level",
    "gamma": "gamma",
    "gae_lambda": "gae_lambda",
    "value_coef": "value_coef",
    "value_clip": "value_clip",
    "huber_delta": "huber_delta",
    "value_lr": "lr",
    "critic_warmup": "warmup",
    "bootstrap": "bootstrap",
}
_NAMES = {
    "kind": "advantage",
    "length_norm": "loss_aggregation",
    "entropy_coef": "entropy.coef",
    "filter_low": "filter.low",
    "filter_high": "filter.high",
    **{old: f"critic.{new}" for old, new in _CRITIC.items()},
}
"""Key of the section rl -> key of the section algorithm."""
_VALUES: dict[str, dict[Any, str]] = {
    "kind": {"grpo": "grpo", "ppo": "gae"},
    "level": {"chunk": "turn"},
    "length_norm": {"trajectory": "sequence_mean", "token": "token_mean"},
}
_SILENT = {
    "advantage": "grpo",
    "loss_aggregation": "token_mean",
    "entropy.coef": 0.0,
    "filter.key": "accuracy",
    "filter.low": None,
    "filter.high": None,
    "advantage_scale": "std",
    "dynamic_sampling": True,
    **{f"critic.{new}": CriticConfig.model_fields[new].default for new in _CRITIC.values()},
}
"""What a key of algorithm was in every robot run before the old keys went."""


def flat_with_new_names(
    leaves: Mapping[str, Any], flatten: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """{'optim.lr': 1e-6, ...} with the keys of rl and algorithm under the names of today; `flatten` makes such leaves of the
    sections that were read anew. Raises what `with_new_names` raises."""
    known = {
        key: value for key, value in leaves.items() if key.partition(".")[0] in ("rl", "algorithm")
    }
    tree: dict[str, Any] = {"rollout": {"group_size": leaves.get("rollout.group_size", 8)}}
    for key, value in known.items():
        *parents, leaf = key.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value
    tree, said = with_new_names(tree)
    if not said:
        return dict(leaves)
    rest = {key: value for key, value in leaves.items() if key not in known}
    return rest | flatten({name: tree[name] for name in ("rl", "algorithm") if tree.get(name)})


def warn_of_old_names(said: list[str]) -> None:
    """Warn of old keys, where `said` names any."""
    if said:
        warnings.warn(
            "these keys have another name, and the old ones go with the next release: "
            + "; ".join(said),
            FutureWarning,
            stacklevel=3,
        )


def with_new_algorithm_names(tree: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """`with_new_names` for keys that moved inside the section algorithm: they mean the same in any part of a configuration, so
    that a file and the overrides over it can each be read by its own names."""
    section = tree.get("algorithm")
    old = [key for key in _ALGORITHM if isinstance(section, Mapping) and key in section]
    if not old:
        return tree, []
    algorithm, said = dict(tree["algorithm"]), []
    for key in old:
        new, value = _ALGORITHM[key], algorithm.pop(key)
        if algorithm.setdefault(new, value) != value:
            raise ValueError(_twice(f"algorithm.{key} {_text(value)}", new, value, algorithm[new]))
        said.append(f"algorithm.{key} {_text(value)} is algorithm.{new} {_text(value)}")
    return {**tree, "algorithm": algorithm}, said


def with_new_names(tree: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A configuration as a nested mapping with the new keys, and 'rl.gamma 0.9 is algorithm.critic.gamma 0.9' for each old one; the
    mapping itself and [] where there is none. Raises ValueError where old and new key contradict each other."""
    tree, said = with_new_algorithm_names(tree)
    rl = tree.get("rl")
    old = {key: rl[key] for key in _NAMES if key in rl} if isinstance(rl, dict) else {}
    if not isinstance(rl, dict) or not old:
        return tree, said
    algorithm = tree.get("algorithm") or {}
    if isinstance(algorithm, AlgorithmConfig):
        algorithm = algorithm.given()
    algorithm = copy.deepcopy(algorithm)
    for key, value in old.items():
        new = _VALUES.get(key, {}).get(value, value)
        if key in ("filter_low", "filter_high"):
            new = _exclusive(key, value, _group_size(tree))
        _put(algorithm, _NAMES[key], new, f"rl.{key} {value}")
        said.append(f"rl.{key} {_text(value)} is algorithm.{_NAMES[key]} {_text(new)}")
    if old.get("kind") == "ppo":
        for name, value in GAE.items():
            _put(algorithm, name, value, "rl.kind ppo")
    if "filter_low" in old or "filter_high" in old:
        _choose_key(algorithm, rl.get("reward", "success"), said)
    kept = {key: value for key, value in rl.items() if key not in _NAMES}
    return {**tree, "rl": kept, "algorithm": algorithm}, said


def _put(section: dict[str, Any], name: str, value: Any, origin: str) -> None:
    """Set a dotted key that is not there, or silent."""
    *parents, leaf = name.split(".")
    for part in parents:
        section = section.setdefault(part, {})
    found = section.get(leaf, value)
    if found != value and not (name in _SILENT and found == _SILENT[name]):
        raise ValueError(_twice(origin, name, value, found))
    section[leaf] = value


def _twice(origin: str, name: str, value: Any, given: Any) -> str:
    return (
        f"{origin} is called algorithm.{name} {_text(value)} now, and algorithm.{name} {_text(given)} is given as well: "
        "keep one of them"
    )


def _group_size(tree: dict[str, Any]) -> int:
    rollout = tree.get("rollout")
    found = (
        rollout.get("group_size", 8)
        if isinstance(rollout, dict)
        else getattr(rollout, "group_size", 8)
    )
    return found if isinstance(found, int) else 8


def _exclusive(key: str, bound: Any, group_size: int) -> Any:
    """The old bounds on the success rate were included, algorithm.filter's are not: one that a group of at most `group_size`
    episodes can meet exactly is moved outwards by less than any two rates differ. Those of SimpleVLA-RL, 0.1 and 0.9, cannot be met
    by its groups of 8 and stay as they are. 0 and 1 bound nothing."""
    if not isinstance(bound, (int, float)) or bound == (0 if key == "filter_low" else 1):
        return None if isinstance(bound, (int, float)) else bound
    met = any(abs(bound * n - round(bound * n)) < 1e-9 for n in range(2, group_size + 1))
    return bound + (0.0 if not met else -1e-6 if key == "filter_low" else 1e-6)


def _choose_key(algorithm: dict[str, Any], reward: Any, said: list[str]) -> None:
    """The old bounds were on success, whatever was paid."""
    bounds = algorithm["filter"].get("low"), algorithm["filter"].get("high")
    if bounds == (None, None):
        return
    if reward != "success" and None in bounds:
        raise ValueError(
            f"rl.filter_low or rl.filter_high alone kept groups that differ in rl.reward {reward} only, and bounded "
            "their success rate; algorithm.filter judges both by one key: set algorithm.filter.key success with low "
            "and high, or key reward"
        )
    _put(algorithm, "filter.key", "success", "a bound on the success rate")
    said.append("the bounds are on algorithm.filter.key success")


def _text(value: Any) -> str:
    return "null" if value is None else str(value)
