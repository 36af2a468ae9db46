"""Another project's own code in an environment of its own, beside ours: what the scripts check_openpi and check_lerobot share.

environment(place, ["openpi-client"])
theirs = Beside(place, folder, PROGRAM)
with serving(checkpoint, port, seed, folder / "server.log"):
    theirs.run("ask", str(port))
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts._bench import ROOT, parse, print_table, write_results

if TYPE_CHECKING:
    from mmrl.robotics.contract import Observation

__all__ = [
    "Beside",
    "clean",
    "environment",
    "equal_bits",
    "free_port",
    "observations",
    "options",
    "packages",
    "running",
    "serving",
    "shown",
    "tell",
]


def options(
    text: str | None, name: str, fixture: str, folders: Mapping[str, str] | None = None
) -> argparse.Namespace:
    """What was asked on the command line of such a script. `fixture`: what the option of that name writes; `folders`: further
    options that take a folder, with what they are for."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--env", type=Path, help="folder of the environment, made if it is not there"
    )
    for option, words in (folders or {}).items():
        parser.add_argument(option, type=Path, help=words)
    parser.add_argument("--count", type=int, default=6, help="observations for each policy")
    parser.add_argument("--fixture", action="store_true", help=f"write the {fixture}")
    parser.add_argument("--record", action="store_true", help=f"write assets/results/{name}.json")
    return parse(parser, least=("count",))


def tell(
    name: str, found: Mapping[str, Any], wrong: Sequence[str], record: bool, *libraries: str
) -> None:
    """Print what a check found, and record it where asked. Raises SystemExit where something differs."""
    print_table(
        ("policy", "asked", f"chunks equal for {name}'s client"),
        [(kind, found["asked"], equal) for kind, equal in found["equal_chunks"].items()],
    )
    print(json.dumps({k: v for k, v in found.items() if k != "equal_chunks"}, indent=1))
    if record:
        print(f"recorded in {write_results(name, found, *libraries)}")
    if wrong:
        raise SystemExit(f"different: {', '.join(wrong)}")


def clean() -> dict[str, str]:
    """The environment variables of a process that must find nothing of ours."""
    gone = ("PYTHONPATH", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in gone}


def environment(place: Path, requirements: Sequence[str]) -> None:
    """Make the environment, unless it is there."""
    if (place / "made").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
    install = [str(place / "bin" / "python"), "-m", "pip", "install", "-q"]
    subprocess.run([*install, *requirements], env=clean(), check=True)
    (place / "made").touch()


def packages(place: Path, wanted: Sequence[str]) -> dict[str, str]:
    """The versions there of those that matter."""
    listed = subprocess.run(
        [str(place / "bin" / "python"), "-m", "pip", "list", "--format=json"],
        env=clean(),
        capture_output=True,
        text=True,
        check=True,
    )
    found = {one["name"].lower(): one["version"] for one in json.loads(listed.stdout)}
    return {name: found[name] for name in sorted(set(wanted) & set(found))}


class Beside:
    """A program that runs there, in `folder`."""

    def __init__(self, place: Path, folder: Path, program: str) -> None:
        self.folder, self._program = folder, folder / "theirs.py"
        self._program.write_text(program, encoding="utf-8")
        self._python = str(place / "bin" / "python")

    def command(self, *arguments: str) -> list[str]:
        """The command that runs it."""
        return [self._python, str(self._program), *arguments]

    def run(self, *arguments: str) -> str:
        """What it prints. Raises SystemExit where it fails."""
        done = subprocess.run(
            self.command(*arguments), env=clean(), cwd=self.folder, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(
                f"the other project's program failed at {arguments[0]}:\n{done.stderr[-3000:]}"
            )
        return done.stdout


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def running(command: Sequence[str], port: int, log: Path, **options: Any) -> Iterator[None]:
    """A server, from when its port answers on."""
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, **options)
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if process.poll() is not None:
                    raise SystemExit(f"{command[1]} ended:\n{log.read_text()[-3000:]}") from None
                time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def serving(
    checkpoint: Path, port: int, seed: int, log: Path, *options: str, key: str = ""
) -> Iterator[None]:
    """`mmrl policy-server` of a checkpoint."""
    command = [sys.executable, "-m", "mmrl.cli.main", "policy-server", str(checkpoint)]
    command += ["--seed", str(seed), "--port", str(port), *options, "threads=1"]
    ours = {**os.environ, "MMRL_API_KEY": key, "OMP_NUM_THREADS": "1"}
    with running(command, port, log, env=ours, cwd=ROOT):
        yield


def observations(count: int) -> dict[str, np.ndarray]:
    """What a robot of LIBERO sees: pictures (count, 224, 224, 3), states (count, 8), instructions."""
    rng = np.random.default_rng(2)
    return {
        "image": rng.integers(0, 256, (count, 224, 224, 3), np.uint8),
        "wrist_image": rng.integers(0, 256, (count, 224, 224, 3), np.uint8),
        "state": rng.standard_normal((count, 8)),
        "prompt": np.array([f"put object {n} on the plate" for n in range(count)]),
    }


def equal_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Equal in type, shape and bits."""
    return (
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    )


def shown(asked: Mapping[str, np.ndarray]) -> list[Observation]:
    """`observations` as our policies see them."""
    from mmrl.robotics.contract import Observation

    return [
        Observation({"base": base, "wrist": wrist}, state.astype(np.float32), str(prompt))
        for base, wrist, state, prompt in zip(*asked.values(), strict=True)
    ]
