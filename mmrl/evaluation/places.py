"""Where `mmrl eval` writes when no folder is named.

    runs/demo/eval/grounding-val@step_000040/    of runs/demo/checkpoints/best, which was saved at step 40
    runs/eval/Qwen_Qwen2.5-VL-3B-Instruct/refcoco_val/    of a model that no run of this machine made

Never into the checkpoint: it is removed with its run's older ones (train.keep_last), and what it holds is what its manifest says.
Never over other results: a second evaluation of the same name gets a number, and a folder that --out names must have none.
--resume goes on in the newest one that was cut off.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

from mmrl.errors import ConfigError
from mmrl.evaluation.progress import cut_off

__all__ = ["data_name", "evaluation_folder", "suites_name"]

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


def evaluation_folder(
    checkpoint: str, name: str, out: Path | None = None, *, resume: bool = False
) -> Path:
    """`out`, else a folder made for the evaluation `name` of a checkpoint (a folder, the name of a model or of a program): of its
    run, where it still lies in one that can be written to, else below runs/eval. With `resume` the one that was cut off there.

    Raises ConfigError for the checkpoint itself, for `out` with another evaluation, and where there is none to resume.
    """
    if out is not None:
        if Path(checkpoint).is_dir() and out.resolve() == Path(checkpoint).resolve():
            raise ConfigError(
                f"expected --out to be another folder than the checkpoint, whose files a resume compares, found {out}; name "
                f"another one, as {out / 'eval'}"
            )
        if resume:
            return _newest_cut_off([out])
        if cut_off(out) or any((out / file).exists() for file in ("results.json", "suites.json")):
            raise ConfigError(
                f"expected --out to be a folder without an evaluation, found {out} with one"
                + (
                    "; go on with it by --resume, or name another"
                    if cut_off(out)
                    else "; name another, or remove it"
                )
            )
        return out
    # checkpoints/best links to the step that it was saved at
    local = Path(checkpoint).resolve()
    run = local.parent.parent
    if local.is_dir() and (run / "run.json").is_file() and os.access(run, os.W_OK):
        wanted = run / "eval" / f"{name}@{_plain(local.name)}"
    else:
        model = local.name if local.is_dir() else checkpoint
        wanted = Path("runs") / "eval" / _plain(model) / name
    numbered = (wanted.with_name(f"{wanted.name}-{i}") for i in itertools.count(2))
    folders = itertools.chain([wanted], numbered)
    if resume:
        return _newest_cut_off([wanted, *itertools.takewhile(Path.is_dir, numbered)])
    for folder in folders:
        try:
            folder.mkdir(parents=True)  # from now on it is ours, whoever else evaluates
        except FileExistsError:
            continue
        return folder
    raise AssertionError("numbers do not end")


def _newest_cut_off(folders: Sequence[Path]) -> Path:
    """The last of these with an evaluation that was cut off. Raises ConfigError."""
    found = [folder for folder in folders if cut_off(folder)]
    if not found:
        there = next(
            (
                f
                for f in reversed(folders)
                if (f / "results.json").exists() or (f / "suites.json").exists()
            ),
            None,
        )
        raise ConfigError(
            f"expected an evaluation that was cut off in {folders[0]} for --resume, found "
            + ("none" if there is None else f"a complete one in {there}")
            + "; leave --resume out"
        )
    return found[-1]
