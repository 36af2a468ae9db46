"""AdamW's state between DeepSpeed's flat partitions and the form of torch.optim.AdamW, whole and by parameter.

ZeRO keeps the moments of all parameters of a group in one flat partition per process (ZeRO-3: per sub-group), with one step
counter. mmrl's optimizer steps every parameter of a group at every update, or none (the model while a critic warms up), so that
the counters of a group agree. A counter of 0 beside moments of 0 stands for no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["canonical_state", "forget_steps", "restore_state"]

_MOMENTS = ("exp_avg", "exp_avg_sq")


def _is_zero3(zero: Any) -> bool:
    return hasattr(zero, "fp32_partitioned_groups_flat")


def _partitions(zero: Any) -> list[tuple[torch.Tensor, int]]:
    """This process's flat fp32 partitions, which are the keys of the optimizer's state, and the group each belongs to."""
    if _is_zero3(zero):
        return [
            (flat, zero.sub_group_to_group_id[n])
            for n, flat in enumerate(zero.fp32_partitioned_groups_flat)
        ]
    return [(flat, n) for n, flat in enumerate(zero.single_partition_of_fp32_groups)]


def _link(zero: Any) -> None:
    """ZeRO-2: tell each parameter which part of the moments is its own.

    DeepSpeed does so after the first step of the first group alone, when the second group has no moments yet.
    """
    zero._hp_optimizer_states_linked = False
    zero._lazy_init_hp_params_optimizer_state()


def canonical_state(
    zero: Any,
    parameters: Sequence[torch.nn.Parameter],
    groups: Sequence[int],
    keep: Callable[[int], bool],
) -> dict[int, dict[str, Any]]:
    """The "state" of AdamW.state_dict() for those of `parameters` whose number `keep` chooses, in order, on the CPU. Collective.

    `zero` is DeepSpeed's optimizer, `groups` the number of its parameter group for each parameter. Before the first step it is
    empty, as AdamW's is.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    found = zero.optimizer.state
    steps: dict[int, float] = {}
    for flat, group in _partitions(zero):
        if found.get(flat):
            step = float(found[flat]["step"])
            assert steps.setdefault(group, step) == step, steps
    if steps and not _is_zero3(zero):
        _link(zero)
    state: dict[int, dict[str, Any]] = {}
    for number, (parameter, group) in enumerate(zip(parameters, groups, strict=True)):
        if not steps.get(group):
            continue
        entry: dict[str, Any] = {"step": torch.tensor(steps[group], dtype=torch.float32)}
        for name in _MOMENTS:
            whole = safe_get_full_optimizer_state(parameter, name)
            if keep(number):
                entry[name] = whole.detach().to("cpu", copy=True)
        if keep(number):
            state[number] = entry
    return state


def forget_steps(zero: Any, groups: Sequence[int]) -> None:
    """Make as if the parameters of these groups had never been stepped. Their moments are 0: so were all their gradients."""
    for flat, group in _partitions(zero):
        if group in groups and (entry := zero.optimizer.state.get(flat)):
            entry["step"].zero_()


def restore_state(
    zero: Any,
    parameters: Sequence[torch.nn.Parameter],
    groups: Sequence[int],
    state: dict[int, dict[str, Any]],
) -> None:
    """Put a canonical "state" into DeepSpeed's partitions, before the first step. See `canonical_state`."""
    if not state:
        return
    steps: dict[int, set[float]] = {}
    for number, group in enumerate(groups):
        steps.setdefault(group, set()).add(float(state[number]["step"]) if number in state else 0.0)
    if any(len(counts) != 1 for counts in steps.values()):
        raise ValueError(
            "expected the same number of steps for all parameters of a group, found "
            f"{'; '.join(', '.join(f'{s:g}' for s in sorted(counts)) for counts in steps.values())}"
        )
    for flat, group in _partitions(zero):
        moments = {name: torch.zeros_like(flat) for name in _MOMENTS}
        zero.optimizer.state[flat] = {
            "step": torch.tensor(min(steps[group]), dtype=torch.float32),
            **moments,
        }
    if _is_zero3(zero):
        _fill_shards(zero, parameters, state)
    else:
        _fill_partitions(zero, parameters, state)


def _fill_partitions(
    zero: Any, parameters: Sequence[torch.nn.Parameter], state: dict[int, dict[str, Any]]
) -> None:
    """ZeRO-2: each parameter knows which part of it lies in this process's partition."""
    from deepspeed.utils import safe_set_full_optimizer_state

    _link(zero)
    for number, entry in state.items():
        for name in _MOMENTS:
            safe_set_full_optimizer_state(parameters[number], entry[name].float(), name)


def _fill_shards(
    zero: Any, parameters: Sequence[torch.nn.Parameter], state: dict[int, dict[str, Any]]
) -> None:
    """ZeRO-3: shards are equal, the last ones padded; the full setter of DeepSpeed fails where the size does not divide."""
    from deepspeed.utils import safe_set_local_optimizer_state

    rank = torch.distributed.get_rank()
    for number, entry in state.items():
        parameter = parameters[number]
        for name in _MOMENTS:
            size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
            mine = entry[name].flatten()[rank * size : (rank + 1) * size].float()
            shard = torch.zeros(size)
            shard[: mine.numel()] = mine
            safe_set_local_optimizer_state(parameter, shard, name)
