"""AdamW's state between DeepSpeed's flat partitions and the form of torch.optim.AdamW, whole and by parameter.

ZeRO keeps the moments of all parameters of a group in one flat partition per process (ZeRO-3: per sub-group), with one step
counter. mmrl's optimizer steps every parameter at every update, so that the counters of all of them agree.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["canonical_state", "restore_state"]

_MOMENTS = ("exp_avg", "exp_avg_sq")


def _is_zero3(zero: Any) -> bool:
    return hasattr(zero, "fp32_partitioned_groups_flat")


def _partitions(zero: Any) -> list[torch.Tensor]:
    """This process's flat fp32 partitions, which are the keys of the optimizer's state."""
    return list(zero.fp32_partitioned_groups_flat if _is_zero3(zero) else zero.single_partition_of_fp32_groups)


def _link(zero: Any) -> None:
    """ZeRO-2: tell each parameter which part of the moments is its own.

    DeepSpeed does so after the first step of the first group alone, when the second group has no moments yet.
    """
    zero._hp_optimizer_states_linked = False
    zero._lazy_init_hp_params_optimizer_state()


def canonical_state(zero: Any, parameters: Sequence[torch.nn.Parameter], *, keep: bool) -> dict[int, dict[str, Any]] | None:
    """The "state" of AdamW.state_dict() for `parameters` in their order, on the CPU; None unless `keep`. Collective.

    `zero` is DeepSpeed's optimizer. Before the first step it is empty, as AdamW's is.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    found = zero.optimizer.state
    steps = {float(found[flat]["step"]) for flat in _partitions(zero) if found.get(flat)}
    assert len(steps) <= 1, steps
    if steps and not _is_zero3(zero):
        _link(zero)
    state: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(parameters) if steps else ():
        entry: dict[str, Any] = {"step": torch.tensor(next(iter(steps)), dtype=torch.float32)}
        for name in _MOMENTS:
            whole = safe_get_full_optimizer_state(parameter, name)
            if keep:
                entry[name] = whole.detach().to("cpu", copy=True)
        state[number] = entry
    return state if keep else None


def restore_state(zero: Any, parameters: Sequence[torch.nn.Parameter], state: dict[int, dict[str, Any]]) -> None:
    """Put a canonical "state" into DeepSpeed's partitions, before the first step."""
    if not state:
        return
    steps = {float(entry["step"]) for entry in state.values()}
    if len(steps) != 1 or len(state) != len(parameters):
        raise ValueError(f"expected the state of {len(parameters)} parameters after one number of steps, found that of "
                         f"{len(state)} after {', '.join(f'{s:g}' for s in sorted(steps))}")
    for flat in _partitions(zero):
        moments = {name: torch.zeros_like(flat) for name in _MOMENTS}
        zero.optimizer.state[flat] = {"step": torch.tensor(steps.copy().pop(), dtype=torch.float32), **moments}
    if _is_zero3(zero):
        _fill_shards(zero, parameters, state)
    else:
        _fill_partitions(zero, parameters, state)


def _fill_partitions(zero: Any, parameters: Sequence[torch.nn.Parameter], state: dict[int, dict[str, Any]]) -> None:
    """ZeRO-2: each parameter knows which part of it lies in this process's partition."""
    from deepspeed.utils import safe_set_full_optimizer_state

    _link(zero)
    for number, parameter in enumerate(parameters):
        for name in _MOMENTS:
            safe_set_full_optimizer_state(parameter, state[number][name].float(), name)


def _fill_shards(zero: Any, parameters: Sequence[torch.nn.Parameter], state: dict[int, dict[str, Any]]) -> None:
    """ZeRO-3: shards are equal, the last ones padded; the full setter of DeepSpeed fails where the size does not divide."""
    from deepspeed.utils import safe_set_local_optimizer_state

    rank = torch.distributed.get_rank()
    for number, parameter in enumerate(parameters):
        for name in _MOMENTS:
            size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
            mine = state[number][name].flatten()[rank * size:(rank + 1) * size].float()
            shard = torch.zeros(size)
            shard[:mine.numel()] = mine
            safe_set_local_optimizer_state(parameter, shard, name)
