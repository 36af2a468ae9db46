"""openpi's own client and server, in an environment of their own, against ours: do both sides of the protocol agree bit for bit?

    python -m scripts.check_openpi                        # three minutes and 150 MB of packages; needs a package index
    python -m scripts.check_openpi --openpi CHECKOUT --record    # also asks openpi's server; writes assets/results/openpi.json

The environment has openpi-client (which pins numpy below 2) and nothing of mmrl. Compared are (a) the bytes of a message that its
packer and ours write, and its resize_with_pad and ours on pictures; (b) chunks that its client gets from `mmrl policy-server` for
tiny policies of each kind, with those of the same checkpoint in process; (c) what our client gets from openpi's server, which is in
no package: it is loaded from a checkout of Physical-Intelligence/openpi (recorded with commit 15a9616), behind a policy without a
model, and is not run without one. That policy also fails once, and once takes longer than a client that pings would wait. Exit
status 1 where something differs.
"""

from __future__ import annotations

import inspect
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from scripts._bench import ROOT
from scripts._beside import (
    Beside,
    clean,
    environment,
    equal_bits,
    free_port,
    observations,
    options,
    packages,
    running,
    serving,
    shown,
    tell,
)

__all__ = ["FIXTURE", "KINDS", "message", "tiny_policy"]

FIXTURE = ROOT / "tests" / "robotics" / "openpi_packed.json"
KINDS = ("pi0", "pi05", "smolvla", "oft", "qwen")
_SEED = 11
_PACKAGES = ("openpi-client", "msgpack", "numpy", "websockets", "pillow")
_SLOW_S = 45.0  # pings of websockets: every 20 s, given up after 20 more
_PICTURES = ((256, 256), (480, 640), (640, 480), (224, 224), (100, 37), (37, 100))
_PROGRAM = """
import importlib.util
import json
import sys
import time

import numpy as np
from openpi_client import image_tools, msgpack_numpy, websocket_client_policy

{message}


def answer(state):
    return np.outer(np.arange(1, 11), np.concatenate([state[:6], state[-1:]])).astype(np.float32)


class Policy:
    def infer(self, asked):
        if asked["prompt"] == "fail":
            raise KeyError("observation/no_such_name")
        if asked["prompt"] == "wait":
            time.sleep({slow})
        kinds = {{k: str(getattr(v, "dtype", "str")) for k, v in asked.items()}}
        return {{"actions": answer(np.asarray(asked["observation/state"])), "kinds": json.dumps(kinds)}}


what, rest = sys.argv[1], sys.argv[2:]
if what == "pack":
    print(msgpack_numpy.packb(message()).hex())
elif what == "resize":
    given = np.load(rest[0])
    np.savez(rest[1], **{{k: image_tools.resize_with_pad(v, 224, 224) for k, v in given.items()}})
elif what == "ask":
    port, source, target = rest
    client = websocket_client_policy.WebsocketClientPolicy("127.0.0.1", int(port), api_key="of the check")
    given, found = np.load(source), {{}}
    for n in range(len(given["state"])):
        found[str(n)] = client.infer({{
            "observation/image": given["image"][n],
            "observation/wrist_image": given["wrist_image"][n],
            "observation/state": given["state"][n],
            "prompt": str(given["prompt"][n]),
        }})["actions"]
    np.savez(target, **found)
elif what == "serve":
    source, port = rest
    spec = importlib.util.spec_from_file_location("server", source)
    server = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(server)
    server.WebsocketPolicyServer(Policy(), "127.0.0.1", int(port), {{"of": "openpi"}}).serve_forever()
"""


def message() -> Any:
    """A message with every kind of value that openpi's clients and policies send. Also run beside openpi-client: numpy alone."""
    rng = np.random.default_rng(4)
    return {
        "observation/image": rng.integers(0, 256, (5, 4, 3), np.uint8),
        "observation/wrist_image": rng.integers(0, 256, (4, 5, 3), np.uint8)[::-1, ::-1],
        "observation/state": rng.standard_normal(8),
        "actions": rng.standard_normal((3, 7)).astype(np.float32),
        "half": rng.standard_normal(3).astype(np.float16),
        "mask": np.array([True, False]),
        "steps": np.array(7),
        "none": np.zeros((0, 3), np.int64),
        "large": np.array([2**63 - 1], np.uint64),
        "flag": np.bool_(True),
        "count": np.int32(-3),
        "gain": np.float32(0.1),
        "images": {"cam_high": rng.integers(0, 256, (3, 2, 2), np.uint8)},
        "prompt": "pick up the black bowl – 拿起",
        "server_timing": {"infer_ms": 12.5},
        "plain": [1, -1.5, None, False, "x"],
    }


def program() -> str:
    """What runs beside openpi-client."""
    source = inspect.getsource(message).replace(" -> Any:", ":")
    return _PROGRAM.format(message=source, slow=_SLOW_S)


def tiny_policy(kind: str, folder: Path) -> Any:
    """An untrained policy of a LIBERO robot, made in `folder`: cameras base and wrist, a state of 8, chunks of 4 actions of 7."""
    from mmrl.policy.tiny import TinySpec, build_tiny
    from mmrl.robotics.config import load_embodied
    from mmrl.robotics.contract import ActionSpace
    from mmrl.robotics.load import load_vla
    from mmrl.robotics.tiny_oft import build_tiny_oft
    from mmrl.robotics.tiny_pi0 import build_tiny_pi0
    from mmrl.robotics.tiny_smolvla import build_tiny_smolvla

    if kind == "qwen":
        build_tiny(TinySpec(arch="qwen2_5_vl", hidden=64, layers=2, heads=2, kv=1), folder)
    elif kind == "oft":
        build_tiny_oft(folder, proprio=8)
    elif kind == "smolvla":
        build_tiny_smolvla(folder, chunk=4, action_dim=7)
    else:
        build_tiny_pi0(folder, chunk=4, action_dim=7, pi05=kind == "pi05")
    own = ["action.chunk=4", "action.repeat=1", "vla.proprio=true", "vla.cameras=[base,wrist]"]
    env = ["env.tasks=[reach]", "env.cameras=[base,wrist]"]
    config = load_embodied(None, [f"model.path={folder}", "model.device=cpu", *env, *own])
    space = ActionSpace((-1.0,) * 7, (1.0,) * 7, ("x", "y", "z", "a", "b", "c", "gripper"), 6)
    return load_vla(config, space=space, proprio=([-2.0] * 8, [2.0] * 8), trainable=False)


def _pictures(theirs: Beside) -> int:
    """On how many of _PICTURES both resize_with_pad agree."""
    from mmrl.robotics.protocols import resize_with_pad

    rng = np.random.default_rng(1)
    made = {str(n): rng.integers(0, 256, (*s, 3), np.uint8) for n, s in enumerate(_PICTURES)}
    source, target = theirs.folder / "pictures.npz", theirs.folder / "resized.npz"
    np.savez(source, **made)  # type: ignore[arg-type]
    theirs.run("resize", str(source), str(target))
    with np.load(target) as found:
        return sum(equal_bits(found[n], resize_with_pad(p, 224)) for n, p in made.items())


def _served(kind: str, theirs: Beside, asked: dict[str, np.ndarray]) -> int:
    """How many chunks of `mmrl policy-server` are, for openpi's client, those of the policy in process."""
    policy = tiny_policy(kind, theirs.folder / kind / "made")
    saved, port = theirs.folder / kind / "saved", free_port()
    policy.save(saved)
    source, target = theirs.folder / "asked.npz", theirs.folder / f"{kind}.npz"
    np.savez(source, **asked)  # type: ignore[arg-type]
    with serving(saved, port, _SEED, theirs.folder / f"{kind}.log", key="of the check"):
        theirs.run("ask", str(port), str(source), str(target))
    equal = 0
    with np.load(target) as found:
        for n, seen in enumerate(shown(asked)):
            wanted = policy.actions(policy.act([seen], [(_SEED, n)], greedy=True)[0])
            equal += equal_bits(found[str(n)], np.asarray(wanted, np.float64))
    return equal


def _asked(theirs: Beside, checkout: Path, asked: dict[str, np.ndarray]) -> dict[str, Any]:
    """What our client has of openpi's server."""
    from mmrl.robotics.openpi_client import OpenPIPolicy
    from mmrl.robotics.remote import PolicyError

    source = checkout / "src" / "openpi" / "serving" / "websocket_policy_server.py"
    if not source.is_file():
        raise SystemExit(f"expected {source} in the checkout of --openpi, found none")
    port = free_port()
    seen = shown(asked)
    command = theirs.command("serve", str(source), str(port))
    log = theirs.folder / "theirs.log"
    served = running(command, port, log, env=clean(), cwd=theirs.folder)
    with served, OpenPIPolicy(f"ws://127.0.0.1:{port}") as policy:
        facts = policy.facts
        found = policy.act(seen, [(0,)] * len(seen), greedy=True)
        equal = 0
        for one, output in zip(seen, found, strict=True):
            state = np.concatenate([one.proprio[:6], one.proprio[-1:]])
            wanted = np.outer(np.arange(1, 11), state).astype(np.float32)
            equal += equal_bits(policy.actions(output), wanted.astype(np.float64))
        began = time.monotonic()
        policy.act([replace(seen[0], instruction="wait")], [(0,)], greedy=True)
        waited = time.monotonic() - began
        try:
            policy.act([replace(seen[0], instruction="fail")], [(0,)], greedy=True)
            named = False
        except PolicyError as error:
            named = "observation/no_such_name" in str(error)
    return {
        "chunk": [facts.chunk, facts.action_dim],
        "metadata": dict(facts.details["metadata"]),
        "equal_chunks": equal,
        "answer_after_s": round(waited, 1),
        "error_named": named,
    }


def check(place: Path, checkout: Path | None, count: int, fixture: bool) -> dict[str, Any]:
    """What was compared, with the numbers of equal ones."""
    import torch

    from mmrl.robotics.openpi_messages import pack

    torch.set_num_threads(1)
    # openpi-client imports typing_extensions without asking for it
    environment(place, ["openpi-client", "typing_extensions"])
    with tempfile.TemporaryDirectory() as made:
        theirs, asked = Beside(place, Path(made), program()), observations(count)
        packed = theirs.run("pack").strip()
        if fixture:
            said = {"by": "openpi-client", "packages": packages(place, _PACKAGES), "packed": packed}
            FIXTURE.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
        return {
            "packed_bytes": len(packed) // 2,
            "packed_equal": bytes.fromhex(packed) == pack(message()),
            "pictures": len(_PICTURES),
            "pictures_equal": _pictures(theirs),
            "asked": count,
            "equal_chunks": {kind: _served(kind, theirs, asked) for kind in KINDS},
            "openpi_server": "not run" if checkout is None else _asked(theirs, checkout, asked),
            "packages": packages(place, _PACKAGES),
        }


def _differences(found: dict[str, Any]) -> list[str]:
    """What is not as it should be, by name."""
    wrong = [] if found["packed_equal"] else ["packed bytes"]
    wrong += [] if found["pictures_equal"] == found["pictures"] else ["pictures"]
    wrong += [kind for kind, equal in found["equal_chunks"].items() if equal != found["asked"]]
    theirs = found["openpi_server"]
    if theirs != "not run" and not (
        theirs["equal_chunks"] == found["asked"] and theirs["error_named"]
    ):
        wrong.append("openpi's server")
    return wrong


def main() -> None:
    """Command line."""
    o = options(
        __doc__,
        "openpi",
        "packed message that the tests read",
        {"--openpi": "checkout of Physical-Intelligence/openpi"},
    )
    checkout = None if o.openpi is None else o.openpi.absolute()
    with tempfile.TemporaryDirectory() as made:
        place = (o.env or Path(made) / "env").absolute()
        found = check(place, checkout, o.count, o.fixture)
    tell("openpi", found, _differences(found), o.record, "websockets", "msgpack")


if __name__ == "__main__":
    main()
