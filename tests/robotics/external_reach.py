"""A policy process for tests: moves the tiny simulator's arm to the disc that the instruction names, seen in the picture alone.

    python tests/robotics/external_reach.py [--fault NAME]

Speaks the messages described in mmrl.robotics.openvla_server with code of its own: standard library and numpy, no mmrl. A fault is
something a policy process may do wrong, in its second answer; hello_* in its hello.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import subprocess
import sys
import time

import numpy as np

COLOURS = {
    "red": (214, 40, 40),
    "green": (52, 168, 83),
    "blue": (44, 92, 214),
    "yellow": (240, 190, 20),
}
ARM = (40, 36, 60)
SPEED, CHUNK = 0.15, 2


def place(picture: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    """Middle of the pixels of a colour, (x, y) on the table [-1, 1] x [-1, 1], y up."""
    rows, columns = np.nonzero(np.abs(picture.astype(int) - colour).max(axis=2) < 40)
    size = picture.shape[0]
    return np.array([(columns.mean() + 0.5) * 2 / size - 1, 1 - (rows.mean() + 0.5) * 2 / size])


def decide(picture: np.ndarray, instruction: str) -> np.ndarray:
    found = re.search("|".join(COLOURS), instruction)
    assert found is not None, instruction
    way = (place(picture, COLOURS[found[0]]) - place(picture, ARM)) / SPEED
    steps = []
    for _ in range(CHUNK):
        step = way / max(1.0, np.abs(way).max())
        steps.append(step)
        way = way - step
    return np.array(steps, np.float32)


def send(header: dict, actions: np.ndarray | None = None) -> None:
    body = b"" if actions is None else actions.tobytes()
    listed = (
        []
        if actions is None
        else [{"name": "actions", "dtype": str(actions.dtype), "shape": actions.shape}]
    )
    text = json.dumps({**header, "arrays": listed}).encode()
    out = struct.pack("<4sIQ", b"MXP1", len(text), len(body)) + text + body
    while out:
        out = out[os.write(1, out) :]


def receive() -> tuple[dict, dict[str, np.ndarray]]:
    stream = sys.stdin.buffer
    magic, header_length, body_length = struct.unpack("<4sIQ", stream.read(16))
    assert magic == b"MXP1", magic
    header, body, at = json.loads(stream.read(header_length)), stream.read(body_length), 0
    arrays = {}
    for entry in header["arrays"]:
        count = int(np.prod(entry["shape"]))
        arrays[entry["name"]] = np.frombuffer(body, entry["dtype"], count, at).reshape(
            entry["shape"]
        )
        at += arrays[entry["name"]].nbytes
    assert at == len(body)
    return header, arrays


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="")
    fault = parser.parse_args().fault
    if fault == "hello_hang":
        time.sleep(600)
    if fault == "hello_garbage":
        print("Loading checkpoint shards: 100%", flush=True)
    if fault == "hello_error":
        send(
            {
                "kind": "error",
                "message": "expected timm 0.9.16, found none: pip install timm==0.9.16",
            }
        )
        sys.exit(2)
    if fault == "child":  # a process of its own, which would outlive it
        print(
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid,
            file=sys.stderr,
            flush=True,
        )
    policy = {
        "chunk": 0 if fault == "hello_chunk" else CHUNK,
        "action_dim": 2,
        "bins": 0,
        "greedy_only": fault == "greedy",
        "cameras": ["base", "wrist"] if fault == "wrist" else ["base"],
        "proprio_dim": 8 if fault == "proprio" else 0,
        "image": None,
    }
    send(
        {
            "kind": "hello",
            "protocol": 2 if fault == "hello_protocol" else 1,
            "name": "reach by colour",
            "policy": policy,
            "versions": {"numpy": np.__version__},
        }
    )
    count = 0
    while True:
        header, arrays = receive()
        if header["kind"] == "close":
            return
        count += 1
        seen = [arrays[f"{i}/base"] for i in range(len(header["instructions"]))]
        actions = np.stack(
            [decide(p, text) for p, text in zip(seen, header["instructions"], strict=True)]
        )
        answer = {"kind": "actions", "number": header["number"]}
        if fault and count == 2:
            if fault == "die":
                print("CUDA out of memory", file=sys.stderr, flush=True)
                os._exit(3)
            elif fault == "hang":
                time.sleep(600)
            elif fault == "shape":
                actions = actions[:, :1]
            elif fault == "double":
                actions = actions.astype(np.float64)
            elif fault == "nan":
                actions[-1, 1, 0] = np.nan
            elif fault == "number":
                answer["number"] = 77
            elif fault == "garbage":
                os.write(1, b"step 2: all is well with the robot\n")
            elif fault == "cut":
                os.write(1, b"MXP1\x10")
                os._exit(0)
            elif fault == "huge":
                os.write(1, struct.pack("<4sIQ", b"MXP1", 10, 1 << 50))
            elif fault == "refuse":
                send(
                    {
                        "kind": "error",
                        "number": header["number"],
                        "message": "ValueError: no such statistics",
                    }
                )
                continue
        send(answer, actions)


if __name__ == "__main__":
    main()
