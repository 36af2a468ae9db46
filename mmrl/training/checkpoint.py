"""Atomic checkpoints: a folder appears complete or not at all; kept are the last k and the best.

RUN/checkpoints/step_000050/   model, tokenizer and processor in Hugging Face format (transformers and vLLM load it)
                 .../trainer/  optimizer (one file, or one of each process) and run state, to resume bit for bit;
                               manifest.json, by which damage is noticed
RUN/checkpoints/best           link to the best one by eval.best_metric
RUN/checkpoints/damaged_*      what a resume found not to be as it was saved, put aside for you to look at
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from mmrl.errors import CheckpointError, MMRLError
from mmrl.policy.finite import check_saved
from mmrl.policy.manifest import write_manifest
from mmrl.policy.policy import Policy

__all__ = ["Checkpoints", "sync"]

_NAME = re.compile(r"step_(\d{6,})")
# in state.json: a manifest belongs to it, so that one that was removed is missed
_PROMISE = "manifest"


class Checkpoints:
    """The checkpoints folder of a run."""

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder, self.keep_last = folder, keep_last

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending."""
        if not self.folder.is_dir():
            return []
        found = (
            _NAME.fullmatch(p.name)
            for p in self.folder.iterdir()
            if p.is_dir() and not p.is_symlink()
        )
        return sorted(int(m.group(1)) for m in found if m)

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of `step`."""
        return self.folder / f"step_{step:06d}"

    def save(
        self,
        step: int,
        policy: Policy,
        optimizer: dict[str, Any],
        state: dict[str, Any],
        settings: dict[str, Any] | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> Path:
        """Write the checkpoint of `step`, then remove those no longer kept; `settings` go to trainer/config.yaml, the texts of
        `extra` to trainer/NAME.

        `policy` holds whole weights, `optimizer` is its whole state (TrainEngine.optimizer_state).

        Raises CheckpointError (disk full, no permission), NonFiniteError (NaN or infinity in weights or optimizer) and leaves
        earlier checkpoints untouched.
        """
        check_saved(policy.named_parameters(), optimizer, step, self.kept())
        with self.writing(step) as partial:
            policy.save(partial)
            torch.save(optimizer, partial / "trainer" / "optimizer.pt")
            self.write_state(partial, state, settings, extra)
            self.complete(step, partial)
        self.forget_old(step)
        return self.path(step)

    @contextmanager
    def writing(self, step: int, *, begin: bool = True) -> Iterator[Path]:
        """The folder that is to become the checkpoint of `step`, empty where it is begun; gone where what follows fails.

        Raises CheckpointError then.
        """
        partial = self.folder / f".partial-step_{step:06d}"
        try:
            if begin:
                shutil.rmtree(partial, ignore_errors=True)
                (partial / "trainer").mkdir(parents=True)
            yield partial
        except Exception as error:
            # safetensors reports a full disk by its own exception type, so the cause cannot be told by class
            shutil.rmtree(partial, ignore_errors=True)
            raise self.unwritable(step, error) from error

    def unwritable(self, step: int, error: object) -> CheckpointError:
        """The error to raise when the checkpoint of `step` cannot be written."""
        free = shutil.disk_usage(self.folder).free if self.folder.is_dir() else 0
        return CheckpointError(
            f"cannot write the checkpoint of step {step} to {self.folder} ({free / 2**30:.2f} GiB free): {error}. "
            f"Earlier checkpoints ({self.kept()}) are untouched; free space, then "
            "continue with --resume"
        )

    @staticmethod
    def write_state(
        partial: Path,
        state: dict[str, Any],
        settings: dict[str, Any] | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        """The small files of trainer/, see `save`."""
        (partial / "trainer" / "state.json").write_text(
            json.dumps({**state, _PROMISE: True}), encoding="utf-8"
        )
        for name, text in (extra or {}).items():
            (partial / "trainer" / name).write_text(text, encoding="utf-8")
        if settings is not None:
            (partial / "trainer" / "config.yaml").write_text(
                yaml.safe_dump(settings, sort_keys=False), encoding="utf-8"
            )

    def complete(
        self, step: int, partial: Path, known: Mapping[str, tuple[int, str]] | None = None
    ) -> None:
        """Give the written folder its name. `known`: sizes and digests of files that those who wrote them have brought to the disk.
        Raises OSError."""
        write_manifest(partial, step, known)
        for file in sorted(partial.rglob("*")):
            if known is None or file.relative_to(partial).as_posix() not in known:
                sync(file)
        self._remove(self.path(step))  # a resumed run writes the same step again
        os.replace(partial, self.path(step))
        sync(self.folder)

    def forget_old(self, step: int) -> None:
        """Remove checkpoints no longer kept, now that of `step` is there. Raises CheckpointError."""
        with self._changing(
            f"the checkpoint of step {step} is written, but older ones cannot be removed from"
        ):
            self._prune()

    def mark_best(self, step: int) -> None:
        """Point `best` at the checkpoint of `step`, atomically. Raises CheckpointError."""
        with self._changing(f"the checkpoint of step {step} cannot be marked as the best one in"):
            link = self.folder / f".best-{os.getpid()}"
            link.unlink(missing_ok=True)
            link.symlink_to(self.path(step).name)
            os.replace(link, self.folder / "best")
            self._prune()

    @contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{what} {self.folder}: {error}; make room there, or let this user write there"
            ) from error

    def load_state(
        self, step: int, load_optimizer: Callable[[dict[str, Any]], object]
    ) -> dict[str, Any]:
        """Hand the saved state to `load_optimizer` and return the run state saved with the checkpoint of `step`.

        The tensors are mapped from the file: a process reads only what it keeps of them. Raises CheckpointError.
        """
        folder = self.path(step) / "trainer"
        try:
            load_optimizer(_optimizer_of(folder))
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            return {name: value for name, value in state.items() if name != _PROMISE}
        except (
            OSError,
            EOFError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RuntimeError,
            pickle.UnpicklingError,
        ) as error:
            raise self.unreadable(step, error) from error

    @contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """What fails while the weights of the checkpoint of `step` are read is a CheckpointError; with step 0 it is left alone."""
        try:
            yield
        except MMRLError:
            raise
        except Exception as error:  # safetensors has its own exception type for damaged files
            if not step:
                raise
            raise self.unreadable(step, error) from error

    def unreadable(self, step: int, error: Exception) -> CheckpointError:
        """The error to raise when the checkpoint of `step` cannot be loaded."""
        earlier = ", ".join(str(s) for s in self.steps() if s < step)
        return CheckpointError(
            f"cannot read the checkpoint {self.path(step)}: {type(error).__name__}: {error}; "
            "remove that folder and continue with --resume (earlier complete checkpoints: "
            f"{earlier or 'none'})"
        )

    def set_aside(self, step: int) -> Path:
        """Take its name from the damaged checkpoint of `step`, so that it counts no more; returns where it is now."""
        aside = self.folder / f"damaged_{self.path(step).name}"
        with self._changing(f"the damaged checkpoint of step {step} cannot be put aside in"):
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(self.path(step), aside)
            best = self.folder / "best"
            if best.is_symlink() and os.readlink(best) == self.path(step).name:
                best.unlink()
        return aside

    def kept(self) -> str:
        """Steps of the checkpoints there are, for messages."""
        return ", ".join(map(str, self.steps())) or "none"

    def clean(self) -> None:
        """Remove what a killed process left half-written."""
        if self.folder.is_dir():
            for leftover in self.folder.glob(".partial-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            for link in self.folder.glob(".best-*"):
                link.unlink(missing_ok=True)

    def _prune(self) -> None:
        best = self.folder / "best"
        keep = {self.path(s) for s in self.steps()[-self.keep_last :]}
        if best.is_symlink():
            keep.add(self.folder / os.readlink(best))
        for step in self.steps():
            if self.path(step) not in keep:
                self._remove(self.path(step))

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint; killed half-way it must not count as complete, so it loses its name first."""
        doomed = path.with_name(f".partial-old-{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        if path.exists():
            os.replace(path, doomed)
            shutil.rmtree(doomed)


def _optimizer_of(folder: Path) -> dict[str, Any]:
    """The optimizer's state saved in the folder trainer/, in one file or one of each process that wrote it."""
    files = [folder / "optimizer.pt"]
    if not files[0].exists():
        files = sorted(folder.glob("optimizer-*-of-*.pt")) or files
    parts = [torch.load(f, weights_only=True, map_location="cpu", mmap=True) for f in files]
    state = {number: entries for part in parts for number, entries in part["state"].items()}
    return {**parts[0], "state": dict(sorted(state.items()))}


def sync(path: Path) -> None:
    """Force a file or folder to disk before the rename that makes it count."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
