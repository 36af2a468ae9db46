"""TensorBoard, Trackio and Weights & Biases on request: curves, settings, and held-out answers with their pictures.

    mmrl train grounding train.wandb=true train.tracking.project=boxes 'train.tracking.tags=[qwen, lr1e-6]'

metrics.jsonl and eval/ are always written and remain the source of every number. A resumed run goes on in the same run of
Weights & Biases, whose id RUN/trackers.json holds; steps that a killed run had told of and did again stand there twice, so that
curves are drawn over the metric `step` and show the later value. Trackio keeps its runs in a database of this machine, or of the
Space that TRACKIO_SPACE_ID names. It finds a run that is resumed by its name: where another run has taken the name since, the
resumed one begins anew there.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from mmrl.config import RunConfig
from mmrl.errors import ConfigError, MissingExtraError, install_command
from mmrl.files import optional, printable
from mmrl.report.samples import COLUMNS, cells_of, drawn, shown_samples
from mmrl.training.runlog import write_json

__all__ = ["Trackers", "import_trackers"]

_MODULES = {"tensorboard": "torch.utils.tensorboard", "trackio": "trackio", "wandb": "wandb"}
"""Key below `train` (and the extra of the same name) -> the module that it needs."""
_IDS = "trackers.json"
_REWARD = COLUMNS.index("reward")


def import_trackers(config: RunConfig) -> dict[str, Any]:
    """The modules of the loggers that the configuration asks for. Raises MissingExtraError with the import's own error: the
    package may be there and one of its own dependencies missing or of another version."""
    found = {}
    for key, module in _MODULES.items():
        if not getattr(config.train, key):
            continue
        try:
            found[key] = importlib.import_module(module)
        # a dependency of the wrong version raises what it likes (protobuf: TypeError)
        except Exception as error:
            raise MissingExtraError(
                f"train.{key} needs {module}, whose import fails with {type(error).__name__}: {error}; "
                f"{install_command(key)}, or set train.{key}: false"
            ) from error
    return found


Sample = tuple[Sequence[str | float], Image.Image | None]
"""Cells of mmrl.report.samples.COLUMNS, and the picture."""


class _Tracker(Protocol):
    name: str

    def scalars(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def samples(self, step: int, rows: Sequence[Sample]) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class _TensorBoard:
    name = "TensorBoard"

    def __init__(self, module: Any, config: RunConfig, folder: Path) -> None:
        self._writer = module.SummaryWriter(str(folder / "tensorboard"))
        settings = json.dumps(config.model_dump(mode="json"), indent=1)
        self._writer.add_text("config", f"```json\n{settings}\n```")
        if config.train.tracking.tags:
            self._writer.add_text("tags", ", ".join(config.train.tracking.tags))

    def scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        table = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        for number, (cells, picture) in enumerate(rows):
            table.append(f"| {' | '.join(map(_markdown, cells))} |")
            if picture is not None:
                self._writer.add_image(
                    f"samples/{number:02d}", np.asarray(picture), step, dataformats="HWC"
                )
        self._writer.add_text("samples", "\n".join(table), step)

    def close(self, *, failed: bool) -> None:
        self._writer.close()


def _markdown(cell: str | float) -> str:
    text = f"{cell:.4g}" if isinstance(cell, float) else cell
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>").replace("`", "'")


class _WandB:
    name = "Weights & Biases"

    def __init__(self, module: Any, config: RunConfig, folder: Path, run_id: str | None) -> None:
        self._wandb, t = module, config.train.tracking
        # No API key, no network, no right to the project: errors of its own class. A tag or name it does not take: ValueError.
        try:
            self._run = module.init(
                project=t.project or os.environ.get("WANDB_PROJECT") or "mmrl",
                entity=t.entity,
                group=t.group,
                tags=t.tags or None,
                name=config.name,
                id=run_id,
                resume="allow",
                dir=str(folder),
                config=config.model_dump(mode="json"),
            )
        except (module.Error, ValueError) as error:
            raise ConfigError(
                f"train.wandb: Weights & Biases did not start the run: {error}; run `wandb login`, set "
                "WANDB_MODE=offline, or train.wandb: false"
            ) from error
        # Its own step only grows: what a resumed run does again would be dropped with a warning.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    @property
    def run_id(self) -> str:
        return str(self._run.id)

    def scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({**numbers, "step": step})

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        image = self._wandb.Image
        data = [[*cells, None if picture is None else image(picture)] for cells, picture in rows]
        table = self._wandb.Table(columns=[*COLUMNS, "picture"], data=data)
        # Beside the table, a panel of pictures with a slider over steps.
        panel = [
            image(picture, caption=f"{cells[0]}/{cells[1]}: reward {cells[_REWARD]:.3g}")
            for cells, picture in rows
            if picture is not None
        ]
        self._run.log({"samples": table, "step": step} | ({"pictures": panel} if panel else {}))

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _Trackio:
    name = "Trackio"

    def __init__(self, module: Any, config: RunConfig, run_id: str | None) -> None:
        self._trackio, t = module, config.train.tracking
        settings = config.model_dump(mode="json")
        # a project's name that it does not take: ValueError; a Space out of reach: whatever it likes
        try:
            _check_writable(os.environ.get("TRACKIO_DIR"))
            start = functools.partial(
                module.init,
                project=t.project or os.environ.get("TRACKIO_PROJECT") or "mmrl",
                name=config.name,
                group=t.group,
                config={**settings, "tags": list(t.tags)} if t.tags else settings,
                embed=False,
            )
            self._run = start(resume="allow" if run_id else "never")
            if run_id and str(self._run.id) != run_id:
                # the newest of its name is another folder's
                self._run.finish()
                self._run = start(resume="never")
        except Exception as error:
            raise ConfigError(
                f"train.trackio: Trackio did not start the run: {type(error).__name__}: {error}; mend train.tracking.project, "
                "TRACKIO_DIR or TRACKIO_SPACE_ID, or set train.trackio: false"
            ) from error

    @property
    def run_id(self) -> str:
        return str(self._run.id)

    def scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        image = self._trackio.Image
        data = [[*cells, None if picture is None else image(picture)] for cells, picture in rows]
        table = self._trackio.Table(columns=[*COLUMNS, "picture"], data=data)
        self._run.log({"samples": table}, step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish()


def _check_writable(folder: str | None) -> None:
    """Trackio itself only warns, at every row, that it has lost it."""
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


class Trackers:
    """The optional loggers of a run. A logger that cannot write costs its own log, with a warning, not the run.

    Args:
        config: with train.tensorboard, train.trackio, train.wandb and train.tracking.
        folder: of the run.
        enabled: in the main process alone.
        resumed: whether the run goes on from a checkpoint, and so in its run of Trackio and of Weights & Biases.
    """

    def __init__(
        self, config: RunConfig, folder: Path, *, enabled: bool = True, resumed: bool = False
    ) -> None:
        self.folder, self.count = folder, config.train.tracking.samples
        self.open: list[_Tracker] = []
        modules = import_trackers(config) if enabled else {}
        if "tensorboard" in modules:
            with optional("the log for TensorBoard"):
                self.open.append(_TensorBoard(modules["tensorboard"], config, folder))
        ids = {}
        if "trackio" in modules:
            known = _known_id(folder, "trackio") if resumed else None
            trackio = _Trackio(modules["trackio"], config, known)
            self.open.append(trackio)
            ids["trackio"] = trackio.run_id
        if "wandb" in modules:
            known = _known_id(folder, "wandb") if resumed else None
            wandb = _WandB(modules["wandb"], config, folder, known)
            self.open.append(wandb)
            ids["wandb"] = wandb.run_id
        if ids:
            with optional("the ids of the run of its trackers"):
                write_json(folder / _IDS, ids)

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Send every number of a step's row."""
        numbers = {
            printable(k): float(v)
            for k, v in row.items()
            if k != "step" and isinstance(v, (int, float))
        }
        self._send(lambda tracker: tracker.scalars(step, numbers))

    def evaluated(self, step: int, predictions: Sequence[Mapping[str, Any]]) -> None:
        """Send the first held-out answers with their pictures (train.tracking.samples)."""
        if not self.open or not self.count or not predictions:
            return
        videos = self.folder / "eval" / f"step_{step:06d}" / "videos"
        rows: list[Sample] = []

        def send(tracker: _Tracker) -> None:
            if not rows:
                rows.extend(
                    (cells_of(row), drawn(row, self.folder, videos))
                    for row in shown_samples(predictions, self.count)
                )
            tracker.samples(step, rows)

        self._send(send)

    def close(self, *, failed: bool = False) -> None:
        """Flush and end; `failed`: by an error."""
        self._send(lambda tracker: tracker.close(failed=failed))

    def _send(self, action: Callable[[_Tracker], None]) -> None:
        """`action` with each logger; one whose library fails, in whatever way, is dropped: it must not cost the run."""
        for tracker in list(self.open):
            try:
                with optional(f"the log for {tracker.name}"):
                    action(tracker)
            except Exception as error:
                self.open.remove(tracker)
                print(
                    f"warning: {tracker.name} failed with {type(error).__name__}: {error}; the run goes on without it",
                    file=sys.stderr,
                    flush=True,
                )


def _known_id(folder: Path, tracker: str) -> str | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((folder / _IDS).read_text(encoding="utf-8"))[tracker]
        return found if isinstance(found, str) else None
    return None
