"""Checkpoints that every process writes a share of, in the background (train.checkpoint sharded).

    saver = ShardedSaver(checkpoints, world)
    saver.begin(step, policy, engine, state, settings, extra, best=True)     # collective: copies to host memory, then returns
    saver.finish()                                                       # waits for it; raises what went wrong

    .partial-step_000050/model-00001-of-00002.safetensors          of process 0, and so on, with an index as transformers has it
                         trainer/optimizer-00001-of-00002.pt
                         .written-0.json                           process 0 is done: bytes and digests of its files

Weights are gathered tensor by tensor, as for a rollout engine, and each is kept by the process with the fewest bytes so far: any
engine and any number of processes reads them again. Nothing collective runs in the background: processes tell each other by files
that they are done, and the main process then writes the manifest and gives the folder its name. Killed before that, a run goes on
from the checkpoint before.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mmrl.distributed.engines.base import TrainEngine
from mmrl.distributed.world import World
from mmrl.errors import CheckpointError
from mmrl.policy.finite import check_saved
from mmrl.policy.manifest import file_digest
from mmrl.policy.policy import CRITIC_FOLDER, Policy
from mmrl.policy.released import as_released
from mmrl.policy.value_head import VALUE_HEAD_FILE
from mmrl.training.checkpoint import Checkpoints, sync

__all__ = ["ShardedSaver"]

_PATIENCE_S = 7200.0
"""For the other processes' shares: as long as a collective (mmrl/distributed/world.py)."""
_LEAVING_S = 60.0
"""The same where the run fails, and some of them may be gone."""
_POLL_S = 0.05


class ShardedSaver:
    """Saves the checkpoints of a run, one at a time. `step` is that of the last one, `seconds` how long it took until it had its
    name."""

    def __init__(self, checkpoints: Checkpoints, world: World) -> None:
        self.checkpoints, self.world = checkpoints, world
        self.step, self.seconds = 0, 0.0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._began, self._deadline = 0.0, float("inf")

    def begin(
        self,
        step: int,
        policy: Policy,
        engine: TrainEngine,
        state: dict[str, Any],
        settings: dict[str, Any],
        extra: Mapping[str, str],
        *,
        best: bool,
    ) -> None:
        """Copy what this process keeps and write it in the background; `state`, `settings` and `extra`, the main process's, as in
        Checkpoints.save. Collective; the one before must be finished. Raises CheckpointError and NonFiniteError everywhere."""
        assert self._thread is None, "finish() comes first"
        self.world.barrier()
        self._began = time.perf_counter()
        rank, size = self.world.rank, self.world.size
        with engine.collective_section():
            weights = _share(engine, rank, size)
            optimizer = engine.optimizer_state(lambda number: number % size == rank)
        assert optimizer is not None
        heads = {
            name: {
                n.removeprefix(f"{name}."): weights.pop(n)
                for n in [*weights]
                if n.startswith(f"{name}.")
            }
            for name in policy.heads
        }
        with self.world.raise_on_all_ranks():
            named = [*weights.items(), *((k, v) for h in heads.values() for k, v in h.items())]
            check_saved(named, optimizer, step, self.checkpoints.kept())
            # as save_pretrained writes them
            weights = as_released(policy.family, policy.model, weights)
        file = _file(rank, size)
        index = self.world.gather(
            [(file, sorted(weights), sum(t.nbytes for t in weights.values()))]
        )
        failed = ""
        if self.world.is_main:
            try:
                with self.checkpoints.writing(step) as partial:
                    _describe(policy, partial, heads, index)
                    self.checkpoints.write_state(partial, state, settings, extra)
            except CheckpointError as error:
                failed = str(error)
        if failed := self.world.gather([failed])[0]:
            raise CheckpointError(failed)
        self.step, self._error, self._deadline = step, None, time.monotonic() + _PATIENCE_S
        self._thread = threading.Thread(
            target=self._run, args=(step, file, weights, optimizer, best), name="checkpoint"
        )
        self._thread.start()

    def finish(self, *, wait: bool = True, failing: bool = False) -> bool:
        """Whether a checkpoint was being written and has now its name (with `wait`, as soon as it has).

        Raises its CheckpointError, in the main process; not where `failing`, in a run that ends with another error.
        """
        if self._thread is None or (self._thread.is_alive() and not wait):
            return False
        if failing:
            self._deadline = min(self._deadline, time.monotonic() + _LEAVING_S)
        self._thread.join()
        self._thread = None
        if self._error is None or failing or not self.world.is_main:
            return self._error is None
        if isinstance(self._error, CheckpointError):
            raise self._error
        raise self.checkpoints.unwritable(self.step, self._error) from self._error

    def _run(
        self,
        step: int,
        file: str,
        weights: dict[str, torch.Tensor],
        optimizer: dict[str, Any],
        best: bool,
    ) -> None:
        """In the background."""
        try:
            partial = self.checkpoints.path(step).with_name(f".partial-step_{step:06d}")
            self._write(partial, file, weights, optimizer)
            if self.world.is_main:
                with self.checkpoints.writing(step, begin=False):
                    self.checkpoints.complete(step, partial, self._written(partial))
                self.checkpoints.forget_old(step)
                if best:
                    self.checkpoints.mark_best(step)
            self.seconds = time.perf_counter() - self._began
        except Exception as error:  # said by `finish`
            self._error = error

    def _write(
        self,
        partial: Path,
        file: str,
        weights: dict[str, torch.Tensor],
        optimizer: dict[str, Any],
    ) -> None:
        """This process's files, on the disk, and then what became of them, for the main process."""
        from safetensors.torch import save_file

        rank, size = self.world.rank, self.world.size
        said: dict[str, Any]
        try:
            moments = f"trainer/{_numbered('optimizer', rank, size)}.pt"
            torch.save(optimizer, partial / moments)
            if weights:
                save_file(weights, str(partial / file), metadata={"format": "pt"})
            names = [file, moments] if weights else [moments]
            for name in names:
                sync(partial / name)
            said = {"files": {name: file_digest(partial / name) for name in names}}
        except Exception as error:
            said = {"error": f"process {rank}: {type(error).__name__}: {error}"}
        marker = partial / f".written-{rank}.json"
        marker.with_suffix(".new").write_text(json.dumps(said), encoding="utf-8")
        os.replace(marker.with_suffix(".new"), marker)

    def _written(self, partial: Path) -> dict[str, tuple[int, str]]:
        """Bytes and digests of the files of all processes, once all have written theirs. Raises CheckpointError."""
        known: dict[str, tuple[int, str]] = {}
        for rank in range(self.world.size):
            marker = partial / f".written-{rank}.json"
            while not marker.exists():
                if time.monotonic() > self._deadline:
                    raise CheckpointError(
                        f"process {rank} of {self.world.size} did not write its share"
                    )
                time.sleep(_POLL_S)
            said = json.loads(marker.read_text(encoding="utf-8"))
            if "error" in said:
                raise CheckpointError(said["error"])
            known |= {name: (found[0], found[1]) for name, found in said["files"].items()}
            marker.unlink()
        return known


def _numbered(name: str, rank: int, size: int) -> str:
    return f"{name}-{rank + 1:05d}-of-{size:05d}"


def _file(rank: int, size: int) -> str:
    return "model.safetensors" if size == 1 else f"{_numbered('model', rank, size)}.safetensors"


def _share(engine: TrainEngine, rank: int, size: int) -> dict[str, torch.Tensor]:
    """Copies, in host memory, of the whole tensors that this process keeps; heads are the main process's. Collective."""
    kept: dict[str, torch.Tensor] = {}
    loads = [0] * size
    for name, tensor in engine.parameters(trainable=False):
        number = loads.index(min(loads))
        if any(name.startswith(f"{head}.") for head in engine.policy.heads):
            number = 0
        loads[number] += tensor.nbytes
        if number == rank:
            kept[name] = tensor.to("cpu", copy=True).contiguous()
    return kept


def _describe(
    policy: Policy,
    partial: Path,
    heads: Mapping[str, dict[str, torch.Tensor]],
    index: list[tuple[str, list[str], int]],
) -> None:
    """All of a Hugging Face folder but the shards: configuration, processor, index; and the critic beside it."""
    from safetensors.torch import save_file

    policy.save_settings(partial)
    for head in heads.values():
        (partial / CRITIC_FOLDER).mkdir()
        save_file(head, str(partial / CRITIC_FOLDER / VALUE_HEAD_FILE))
    if len(index) > 1:
        content = {
            "metadata": {"total_size": sum(size for _, _, size in index)},
            "weight_map": dict(sorted((n, file) for file, names, _ in index for n in names)),
        }
        (partial / "model.safetensors.index.json").write_text(
            json.dumps(content, indent=2) + "\n", encoding="utf-8"
        )
