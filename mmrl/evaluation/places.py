"""Where `mmrl eval` writes when no folder is named.

    runs/demo/eval/grounding-val@step_000040/    of runs/demo/checkpoints/best, which was saved at step 40
    runs/eval/Qwen_Qwen2.5-VL-3B-Instruct/refcoco_val/    of a model that no run of this machine made

Never into the checkpoint: it is removed with its run's older ones (train.keep_last), and what it holds is what its manifest says.
Never over other results: a second evaluation of the same name gets a number, and a folder that --out names must have none.
--resume goes on with the newest one that was cut off and asked for the same.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmrl.errors import ConfigError
from mmrl.evaluation.progress import PARTIAL, Asked, Progress

__all__ = ["Place", "data_name", "evaluation_place", "suites_name"]

_LONGEST = 80
_MOST_NAMED = 3  # suites in a folder's name; of more their number


def _plain(text: str) -> str:
    """A word that can stand in a folder's name."""
    return re.sub(r"[^\w.+-]+", "_", text).strip("._")[:_LONGEST] or "evaluation"


def data_name(task: str, data: Sequence[Path]) -> str:
    """Of an evaluation of `task` (a name, package/name or file.py:Name) on data files."""
    return _plain("-".join([task.rpartition(":")[2], "+".join(path.stem for path in data)]))


def suites_name(suites: Sequence[str]) -> str:
    """Of an evaluation on named suites."""
    few = len(suites) <= _MOST_NAMED
    return _plain("+".join(suites) if few else f"{len(suites)}_suites")


@dataclass(frozen=True)
class Place:
    """Where an evaluation goes. `folder`: of a new one, made when it begins, with a number where the name is taken unless it was
    named by --out; `cut_off`: those that were cut off, the newest first, of which it goes on with one."""

    folder: Path
    named: bool
    cut_off: tuple[Path, ...] = ()
    again: str = "the same command with --resume"

    def begin(self, asked: Mapping[str, Asked]) -> Progress:
        """The evaluation of what is asked for, begun or taken over. Raises ConfigError where none that was cut off is the same."""
        if self.cut_off:
            return Progress.resumed(self.cut_off, asked, self.again)
        return Progress(self.folder if self.named else self._made(), asked, self.again)

    def _made(self) -> Path:
        for folder in itertools.chain([self.folder], _numbered(self.folder)):
            try:
                folder.mkdir(parents=True)  # from now on it is ours, whoever else evaluates
            except FileExistsError:
                continue
            return folder
        raise AssertionError("numbers do not end")


def _numbered(folder: Path) -> Iterator[Path]:
    return (folder.with_name(f"{folder.name}-{i}") for i in itertools.count(2))


def evaluation_place(
    checkpoint: str,
    name: str,
    out: Path | None = None,
    *,
    resume: bool = False,
    again: str = "the same command with --resume",
) -> Place:
    """`out`, else a folder for the evaluation `name` of a checkpoint (a folder, the name of a model or of a program): of its run,
    where it still lies in one that can be written to, else below runs/eval. Nothing is made yet.

    Raises ConfigError for the checkpoint itself, for `out` with another evaluation, and where there is none to resume.
    """
    if out is None:
        wanted = _default(checkpoint, name)
        found = _cut_off([wanted, *_others(wanted)]) if resume else ()
        return Place(wanted, False, found, again)
    if Path(checkpoint).is_dir() and out.resolve() == Path(checkpoint).resolve():
        raise ConfigError(
            f"expected another folder than the checkpoint, whose files a resume compares, for the evaluation, found {out}; name "
            f"another one, as {out / 'eval'}"
        )
    if resume:
        return Place(out, True, _cut_off([out]), again)
    if (out / PARTIAL).exists():
        raise ConfigError(
            f"expected a folder without an evaluation, found {out} with one that was cut off; {again} goes on with it, or name "
            "another folder"
        )
    if _complete(out):
        raise ConfigError(
            f"expected a folder without an evaluation, found {out} with one; name another folder, or remove it"
        )
    return Place(out, True, (), again)


def _default(checkpoint: str, name: str) -> Path:
    # checkpoints/best links to the step that it was saved at
    local = Path(checkpoint).resolve()
    run = local.parent.parent
    if local.is_dir() and (run / "run.json").is_file() and os.access(run, os.W_OK):
        return run / "eval" / f"{name}@{_plain(local.name)}"
    model = local.name if local.is_dir() else checkpoint
    return Path("runs") / "eval" / _plain(model) / name


def _others(wanted: Path) -> list[Path]:
    """The folders there of the same name with a number."""
    number = re.compile(re.escape(wanted.name) + r"-\d+")
    there = wanted.parent.iterdir() if wanted.parent.is_dir() else ()
    return [path for path in there if number.fullmatch(path.name)]


def _complete(folder: Path) -> bool:
    return any((folder / file).exists() for file in ("results.json", "suites.json"))


def _cut_off(folders: Sequence[Path]) -> tuple[Path, ...]:
    """Those of `folders` with an evaluation that was cut off, the newest first. Raises ConfigError where there is none."""
    found = [folder for folder in folders if (folder / PARTIAL).is_file()]
    if not found:
        done = next(filter(_complete, folders), None)
        raise ConfigError(
            f"expected an evaluation to resume in {folders[0]}, found "
            + ("none" if done is None else f"that the one in {done} is complete")
            + "; leave resuming out to begin a new one"
        )
    return tuple(sorted(found, key=lambda f: (f / PARTIAL).stat().st_mtime_ns, reverse=True))
