"""Attacks on the state of a run: bits flipped in checkpoints, disks that fill up at every write, folders that become read-only.

Each works on runs of a tiny model in a scratch folder. A file system of its own (tmpfs) is mounted where that is allowed, else the
size of files is limited, which fails the same writes.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from scripts._torture_trust import Outcome, attack

__all__ = ["ATTACKS", "file_size_limit", "flip_bit", "leaving", "small_disk", "torn"]

_PAGE = 4096


def flip_bit(file: Path, bit: int) -> None:
    """Flip one bit of a file, in place."""
    with file.open("r+b") as f:
        f.seek(bit // 8)
        byte = f.read(1)[0]
        f.seek(bit // 8)
        f.write(bytes([byte ^ 1 << bit % 8]))


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    """`folder` as a file system of so many MiB, where mounting is allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """The kernel refuses larger files: a real OSError (EFBIG) in whatever writes, Python or Rust."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def leaving(disk: Path, nbytes: int) -> Iterator[None]:
    """Meanwhile the disk has so much room left; where it is not one of its own, no file may grow beyond that size."""
    if not os.path.ismount(disk):
        with file_size_limit(nbytes):
            yield
        return
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        while (room := shutil.disk_usage(disk).free - nbytes) > 0:
            file.write(b"x" * min(room, 1 << 20))
    try:
        yield
    finally:
        filler.unlink()


def torn(run: Path) -> list[str]:
    """Files of a run folder that are not whole: lines and documents that are no JSON, checkpoints other than they were saved."""
    from mmrl.policy.manifest import problems

    found = []
    for file in sorted(run.rglob("*")):
        name = str(file.relative_to(run))
        if "checkpoints" in file.parts or not file.is_file() or file.name.startswith("."):
            continue
        try:
            if file.suffix == ".json":
                json.loads(file.read_text(encoding="utf-8"))
            elif file.suffix == ".jsonl":
                text = file.read_text(encoding="utf-8")
                [json.loads(line) for line in text.splitlines()]
                found += (
                    [f"{name}: the last line has no end"]
                    if text and not text.endswith("\n")
                    else []
                )
        except ValueError as error:
            found.append(f"{name}: {error}")
    for folder in sorted((run / "checkpoints").glob("step_*")):
        found += [
            f"{folder.name}: {fault}" for fault in problems(folder, step=int(folder.name[5:]))
        ]
    return found


def _config(folder: Path, **sections: Any) -> Path:
    """A run of four steps on pictures, with a checkpoint of each; data and model lie beside it."""
    import yaml

    from scripts.torture_resume import prepare

    path = prepare(folder, 4)
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    tree["eval"]["every"], tree["train"]["keep_last"], tree["schedule"] = 1, 9, {"timeline": 1}
    tree["reward"] = {"workers": 0}
    for section, values in sections.items():
        tree.setdefault(section, {}).update(values)
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def _quiet() -> None:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _train(config: Path, *overrides: str, resume: bool = False, on_event: Any = None) -> Any:
    from mmrl.config import load_config
    from mmrl.training.trainer import Trainer

    trainer = Trainer(load_config(config, list(overrides)), resume=resume, on_event=on_event)
    trainer.fit()
    return trainer


@attack(
    "100 random single-bit flips over all files of a checkpoint (50 with files drawn alike, 50 by their size), then a resume",
    "each is noticed and names its file; the run goes on from the checkpoint before and ends as the undisturbed one",
)
def state_bit_flips(options: Any) -> Outcome:
    """Every flip is a start of its own in this process; ten of the runs go on to their end and are compared with the calm one."""
    import torch

    from mmrl.distributed.world import World
    from mmrl.operations.restart import find_start
    from mmrl.training.checkpoint import Checkpoints
    from scripts.torture_resume import differences

    _quiet()
    rng = random.Random(7)
    with tempfile.TemporaryDirectory() as scratch:
        config = _config(Path(scratch))
        calm = _train(config, "name=calm").folder.path
        last = calm / "checkpoints" / "step_000004"
        files = sorted(p.relative_to(last) for p in last.rglob("*") if p.is_file())
        sizes = [(last / f).stat().st_size for f in files]
        drawn = [rng.choice(files) for _ in range(50)] + rng.choices(files, weights=sizes, k=50)
        missed, wrong, world = [], [], World(torch.device("cpu"))
        for number, name in enumerate(drawn):
            bit = rng.randrange(8 * (last / name).stat().st_size)
            whole = number % 10 == 0
            run = calm.with_name(f"flip{number}") if whole else calm
            if whole:
                shutil.copytree(calm, run, symlinks=True)
            flip_bit(run / "checkpoints" / last.name / name, bit)
            if whole:
                trainer = _train(config, f"name={run.name}", resume=True)
                verdicts = differences(calm, run)
                verdicts.pop("alarms.jsonl")  # says what was found
                said = json.loads((run / "run.json").read_text(encoding="utf-8")).get(
                    "damaged_checkpoints", {}
                )
                if (
                    trainer.start_step != 3
                    or name.name not in said.get("4", "")
                    or not all(verdicts.values())
                ):
                    wrong.append(f"{name} bit {bit}: {verdicts}")
                shutil.rmtree(run)
                continue
            start = find_start(Checkpoints(calm / "checkpoints", 9), True, world)
            flip_bit(last / name, bit)
            if start.step != 3 or name.name not in start.damaged.get(4, ""):
                missed.append(f"{name} bit {bit}")
    figures = {
        "flips": len(drawn),
        "files": len(files),
        "bytes": sum(sizes),
        "missed": missed,
        "runs_to_the_end": 10,
        "wrong": wrong,
    }
    return Outcome(
        not missed and not wrong,
        f"{len(drawn)} flips in {len(files)} files ({sum(sizes):,} bytes): {len(missed)} missed; 10 runs went on to "
        f"their end, {10 - len(wrong)} of them bit for bit as the undisturbed one",
        figures,
    )


@attack(
    "a disk that has 0, 1, 2 ... pages left when a step ends: every later write fails in turn",
    "a StorageError or CheckpointError in words, a truthful run.json, nothing torn; with room again the resumed run ends as "
    "the undisturbed one",
)
def state_disk_full(options: Any) -> Outcome:
    """The filler comes after the second step of four, and goes before the resume."""
    from mmrl.errors import MMRLError
    from scripts.torture_resume import differences

    _quiet()
    ends: dict[str, int] = {}
    bad = []
    with tempfile.TemporaryDirectory() as scratch, small_disk(Path(scratch) / "disk", 96) as disk:
        config = _config(Path(scratch) / "work")
        calm = _train(config, f"dir={Path(scratch) / 'calm'}", "name=run").folder.path
        for pages in [*range(26), 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 8192]:
            run, stack = disk / "runs" / "run", ExitStack()
            shutil.rmtree(run, ignore_errors=True)

            def full(kind: str, payload: Any, pages: int = pages, stack: ExitStack = stack) -> None:
                if kind == "step" and payload["step"] == 2:
                    stack.enter_context(leaving(disk, pages * _PAGE))

            ended = "finished"
            try:
                with stack:
                    _train(config, f"dir={disk / 'runs'}", "name=run", on_event=full)
            except MMRLError as error:
                ended = type(error).__name__
            except Exception as error:  # what would be a traceback
                ended = f"traceback: {type(error).__name__}: {error}"
            ends[ended] = ends.get(ended, 0) + 1
            info = json.loads((run / "run.json").read_text(encoding="utf-8"))
            whole = ended == "finished"
            faults = torn(run) + ([ended] if "traceback" in ended else [])
            if info["status"] != ("finished" if whole else "failed") or whole == ("error" in info):
                faults.append(f"run.json: {info['status']}")
            if faults:
                bad.append(f"{pages} pages: {faults}")
            if ended != "finished":
                _train(config, f"dir={disk / 'runs'}", "name=run", resume=True)
            verdicts = {k: v for k, v in differences(calm, run).items() if k != "alarms.jsonl"}
            if not all(verdicts.values()):
                bad.append(f"{pages} pages, resumed: {[k for k, v in verdicts.items() if not v]}")
        mounted = os.path.ismount(disk)
    figures = {"tried": sum(ends.values()), "ends": ends, "own_file_system": mounted, "bad": bad}
    said = ", ".join(f"{count} {name}" for name, count in sorted(ends.items()))
    return Outcome(
        not bad,
        f"{sum(ends.values())} runs ended: {said}; {len(bad)} of them torn, untruthful or other after the "
        "resume",
        figures,
    )


@attack(
    "a disk that becomes read-only after the second step",
    "a StorageError in words, nothing torn; writable again, the run goes on",
)
def state_read_only(options: Any) -> Outcome:
    """Remounted, which root cannot write to either."""
    from mmrl.errors import MMRLError
    from scripts.torture_resume import differences

    _quiet()
    with tempfile.TemporaryDirectory() as scratch, small_disk(Path(scratch) / "disk", 96) as disk:
        if not os.path.ismount(disk):
            return Outcome(False, "not tried: this user may not mount a file system")
        config = _config(Path(scratch) / "work")
        calm = _train(config, f"dir={Path(scratch) / 'calm'}", "name=run").folder.path

        def locks(kind: str, payload: Any) -> None:
            if kind == "step" and payload["step"] == 2:
                subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)

        ended = "finished"
        try:
            _train(config, f"dir={disk / 'runs'}", "name=run", on_event=locks)
        except MMRLError as error:
            ended = f"{type(error).__name__}: {error}"
        except Exception as error:  # what would be a traceback
            ended = f"traceback: {type(error).__name__}: {error}"
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        run = disk / "runs" / "run"
        faults = torn(run)
        _train(config, f"dir={disk / 'runs'}", "name=run", resume=True)
        other = [k for k, v in differences(calm, run).items() if not v and k != "alarms.jsonl"]
    held = not faults and not other and ended.startswith(("StorageError", "CheckpointError"))
    return Outcome(
        held,
        f"{ended.partition(':')[0]}; torn: {len(faults)}; other than the undisturbed run, resumed: {len(other)}",
        {"ended": ended, "torn": faults, "other": other},
    )


ATTACKS = [state_bit_flips, state_disk_full, state_read_only]
