"""lerobot's own policy server and robot client, in an environment of their own, against ours: do both sides speak the same?

    python -m scripts.check_lerobot                        # ten minutes and 8 GB of packages; needs a package index
    python -m scripts.check_lerobot --env DIR --record     # keeps the environment; writes assets/results/lerobot.json
    python -m scripts.check_lerobot --env DIR --fixture    # writes the exchange that the tests read

The environment has lerobot 0.4.4 (with its pins of torch, transformers and numpy) and nothing of mmrl. Compared are (a) what our
messages hold, with what lerobot's classes make of them; (b) chunks that our client gets from lerobot's PolicyServer around an ACT
with drawn weights, with those that lerobot computes from the same observations in process; (c) chunks that lerobot's RobotClient
gets from `mmrl policy-server` for tiny policies of each kind, with those of the same checkpoint in process; (d) the actions that
its control loop, with the thread of its receiver, makes a robot do. Exit status 1 where something differs.
"""

from __future__ import annotations

import base64
import json
import tempfile
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
from scripts.check_openpi import KINDS, tiny_policy

__all__ = ["FIXTURE", "MOTORS"]

FIXTURE = ROOT / "tests" / "robotics" / "lerobot_exchange.json"
MOTORS = 8
_LEROBOT = "lerobot[grpcio-dep,transformers-dep]==0.4.4"
_PACKAGES = ("lerobot", "torch", "transformers", "numpy", "grpcio", "protobuf")
_SEED = 11
_LOOP = 12  # actions of the control loop: the first four of a chunk, then three of each
_PROGRAM = '''
import base64, json, pickle, sys, threading, time
from dataclasses import dataclass, field

import numpy as np
import torch

from lerobot.async_inference import helpers, policy_server, robot_client
from lerobot.async_inference.configs import PolicyServerConfig, RobotClientConfig
from lerobot.robots import Robot, RobotConfig
from lerobot.transport import services_pb2
from lerobot.transport.utils import send_bytes_in_chunks

torch.set_num_threads(1)
MOTORS = [f"joint_{n}.pos" for n in range(8)]


@RobotConfig.register_subclass("check_arm")
@dataclass
class CheckArmConfig(RobotConfig):
    source: str = ""


class CheckArm(Robot):
    """Sees the state of step n once it has made n actions; keeps the actions."""

    config_class, name = CheckArmConfig, "check_arm"

    def __init__(self, config):
        self.id, self.done = "check", []
        self.seen = dict(np.load(config.source)) if config.source else {}

    @property
    def observation_features(self):
        return {**{name: float for name in MOTORS}, "front": (224, 224, 3), "image2": (224, 224, 3)}

    @property
    def action_features(self):
        return {f"a{n}": float for n in range(7)}

    is_connected = is_calibrated = True

    def connect(self, calibrate=True): pass
    def calibrate(self): pass
    def configure(self): pass
    def disconnect(self): pass

    def raw(self, n):
        state = self.seen["state"][n].tolist()
        pictures = {"front": self.seen["image"][n], "image2": self.seen["wrist_image"][n]}
        return {**dict(zip(MOTORS, state)), **pictures}

    def get_observation(self):
        return self.raw(len(self.done) % len(self.seen["state"]))

    def send_action(self, action):
        self.done.append([action[f"a{n}"] for n in range(7)])
        return action


def client(port, source, **options):
    config = RobotClientConfig(
        policy_type="act", pretrained_name_or_path="any", robot=CheckArmConfig(source=source), actions_per_chunk=3,
        server_address=f"127.0.0.1:{port}", aggregate_fn_name="latest_only", chunk_size_threshold=0.0, fps=50,
    )
    for name, value in options.items():
        setattr(config, name, value)
    return robot_client.RobotClient(config)


def timed(raw, step, task):
    return helpers.TimedObservation(
        timestamp=0.5 * step, timestep=step, observation={**raw, "task": task}, must_go=True
    )


def act(folder):
    """An ACT with drawn weights, saved as lerobot's training does, statistics included."""
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTPolicy
    from lerobot.policies.factory import make_pre_post_processors

    torch.manual_seed(0)
    picture = PolicyFeature(FeatureType.VISUAL, (3, 64, 64))
    config = ACTConfig(
        input_features={
            "observation.images.image": picture, "observation.images.image2": picture,
            "observation.state": PolicyFeature(FeatureType.STATE, (8,)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (7,))},
        device="cpu", pretrained_backbone_weights=None, chunk_size=6, n_action_steps=6, dim_model=64, n_heads=4,
        dim_feedforward=64, n_encoder_layers=1, n_vae_encoder_layers=1, latent_dim=8,
    )
    rng = np.random.default_rng(7)
    def drawn(*shape):
        low = torch.from_numpy(rng.standard_normal(shape)).float()
        return {"mean": low, "std": torch.ones(shape), "min": low - 1, "max": low + 1}
    stats = {"observation.state": drawn(8), "action": drawn(7)}
    stats |= {name: drawn(3, 1, 1) for name in ("observation.images.image", "observation.images.image2")}
    ACTPolicy(config).save_pretrained(folder)
    for one in make_pre_post_processors(config, dataset_stats=stats):
        one.save_pretrained(folder)


def coded(data):
    return base64.b64encode(data).decode()


what, rest = sys.argv[1], sys.argv[2:]
if what == "act":
    act(rest[0])
elif what == "serve":
    import grpc
    from concurrent import futures
    from lerobot.transport import services_pb2_grpc

    # what policy_server.serve does, around a configuration that is not read from sys.argv
    service = policy_server.PolicyServer(PolicyServerConfig(host="127.0.0.1", port=int(rest[0])))
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    services_pb2_grpc.add_AsyncInferenceServicer_to_server(service, server)
    server.add_insecure_port(f"127.0.0.1:{rest[0]}")
    server.start()
    server.wait_for_termination()
elif what == "expect":  # the server's own functions, no network
    folder, source, target = rest
    service, given = policy_server.PolicyServer(PolicyServerConfig()), dict(np.load(source))
    names = [f"state_{n}" for n in range(8)]
    features = {
        "observation.state": {"dtype": "float32", "shape": (8,), "names": names},
        **{f"observation.images.{n}": {"dtype": "image", "shape": (224, 224, 3), "names": []} for n in ("image", "image2")},
    }
    asked = helpers.RemotePolicyConfig("act", folder, features, 5, "cpu")
    class Context:
        def peer(self): return "here"
    service.SendPolicyInstructions(services_pb2.PolicySetup(data=pickle.dumps(asked)), Context())
    found = {}
    for n in range(len(given["state"])):
        raw = {
            **dict(zip(names, given["state"][n].astype(np.float32).tolist())), "image": given["image"][n],
            "image2": given["wrist_image"][n], "task": str(given["prompt"][n]),
        }
        chunk = service._predict_action_chunk(helpers.TimedObservation(0.0, n, raw, True))
        found[str(n)] = torch.stack([one.get_action() for one in chunk]).numpy()
    np.savez(target, **found)
elif what == "ask":
    port, source, target = rest
    asking, found, tasks = client(port, source), {}, np.load(source)["prompt"]
    assert asking.start(), "not let in"
    for n in range(len(tasks)):
        assert asking.send_observation(timed(asking.robot.raw(n), n, str(tasks[n])))
        timed_actions = pickle.loads(asking.stub.GetActions(services_pb2.Empty()).data)
        assert all(type(one) is helpers.TimedAction and one.get_action().dtype == torch.float32 for one in timed_actions)
        found[f"{n}"] = torch.stack([one.get_action() for one in timed_actions]).numpy()
        found[f"{n} step"] = np.array([one.get_timestep() for one in timed_actions])
        found[f"{n} time"] = np.array([one.get_timestamp() for one in timed_actions])
    asking.stop()
    np.savez(target, **found)
elif what == "loop":
    port, source, target, count = rest
    moving = client(port, source, actions_per_chunk=4)
    assert moving.start(), "not let in"
    receiver = threading.Thread(target=moving.receive_actions, daemon=True)
    receiver.start()
    task = str(np.load(source)["prompt"][0])
    control = threading.Thread(target=moving.control_loop, args=(task,), daemon=True)
    control.start()
    ends = time.monotonic() + 120
    while len(moving.robot.done) < int(count) and time.monotonic() < ends:
        time.sleep(0.02)
    moving.shutdown_event.set()
    control.join(30)
    np.savez(target, done=np.array(moving.robot.done, np.float32)[: int(count)])
elif what == "write":  # every message of the protocol, as lerobot's own code writes it
    rng = np.random.default_rng(4)
    arm = client(1, "")
    raw = {
        **{name: float(value) for name, value in zip(MOTORS, rng.standard_normal(8))},
        "front": rng.integers(0, 256, (9, 8, 3), np.uint8), "image2": rng.integers(0, 256, (8, 9, 3), np.uint8)[::-1],
        "gripper": np.float32(0.25), "depth": torch.arange(6.0).reshape(2, 3)[1], "flag": np.bool_(True),
    }
    observation = pickle.dumps(timed(raw, 3, "pick up the black bowl – 拿起"))
    service = policy_server.PolicyServer(PolicyServerConfig(fps=10))
    chunk = torch.from_numpy(rng.standard_normal((1, 4, 7))).float()[:, :3].squeeze(0)
    actions = service._time_action_chunk(1.5, list(chunk), 3)
    large = list(send_bytes_in_chunks(bytes(5 << 20), services_pb2.Observation))
    print(json.dumps({
        "config": coded(pickle.dumps(arm.policy_config)), "observation": coded(observation),
        "actions": coded(pickle.dumps(actions)),
        "chunk": coded(next(send_bytes_in_chunks(observation, services_pb2.Observation)).SerializeToString()),
        "states": [[one.transfer_state, len(one.data)] for one in large],
        "setup": coded(services_pb2.PolicySetup(data=b"a").SerializeToString()),
        "answer": coded(services_pb2.Actions(data=b"b").SerializeToString()),
        "wanted": {
            "motors": [raw[name] for name in MOTORS], "front": raw["front"].tolist(), "image2": raw["image2"].tolist(),
            "depth": raw["depth"].tolist(), "actions": chunk.tolist(),
        },
    }))
elif what == "read":  # what ours wrote, by Python's own reader
    said = json.loads(open(rest[0]).read())
    config, observation, actions = (pickle.loads(base64.b64decode(said[n])) for n in ("config", "observation", "actions"))
    assert type(config) is helpers.RemotePolicyConfig and type(observation) is helpers.TimedObservation
    assert all(type(one) is helpers.TimedAction for one in actions)
    frame = helpers.make_lerobot_observation(observation.get_observation(), config.lerobot_features)
    print(json.dumps({
        "config": [config.policy_type, config.pretrained_name_or_path, config.actions_per_chunk, config.device, config.rename_map],
        "when": [observation.get_timestamp(), observation.get_timestep(), observation.must_go],
        "task": observation.get_observation()["task"],
        "frame": {name: [str(value.dtype), value.tolist()] for name, value in frame.items()},
        "actions": [
            [one.get_timestamp(), one.get_timestep(), str(one.get_action().dtype), one.get_action().tolist()] for one in actions
        ],
    }))
'''


def _written(theirs: Beside) -> dict[str, Any]:
    """What lerobot's code makes of messages of ours, beside what they hold."""
    from mmrl.robotics import lerobot_messages as m

    rng = np.random.default_rng(5)
    pictures = {name: rng.integers(0, 256, (4, 5, 3), np.uint8) for name in ("image", "image2")}
    motors = [f"state_{n}" for n in range(3)]
    state = rng.standard_normal(3).astype(np.float32).tolist()
    chunk = rng.standard_normal((4, 7)).astype(np.float32)
    features = m.features(motors, {name: one.shape for name, one in pictures.items()})
    config = m.RemotePolicyConfig("act", "a/b", features, 5, "cpu", {"x": "y"})
    task = "pick up – 拿起"
    seen = {**dict(zip(motors, state, strict=True)), **pictures, "task": task}
    actions = [m.TimedAction(1.5 + n, n, one) for n, one in enumerate(chunk)]
    said = {
        "config": m.write_config(config),
        "observation": m.write_observation(m.TimedObservation(1.5, 7, seen, True)),
        "actions": m.write_actions(actions),
    }
    file = theirs.folder / "ours.json"
    file.write_text(json.dumps({k: base64.b64encode(v).decode() for k, v in said.items()}))
    found = json.loads(theirs.run("read", str(file)).splitlines()[-1])
    frame = {m.STATE: ["float32", state]}
    frame |= {m.IMAGES + name: ["uint8", one.tolist()] for name, one in pictures.items()}
    wanted = {
        "config": ["act", "a/b", 5, "cpu", {"x": "y"}],
        "when": [1.5, 7, True],
        "task": task,
        "frame": frame,
        "actions": [[1.5 + n, n, "torch.float32", one.tolist()] for n, one in enumerate(chunk)],
    }
    return {name: found[name] == wanted[name] for name in wanted}


def _asked(theirs: Beside, asked: dict[str, np.ndarray]) -> dict[str, Any]:
    """What our client has of lerobot's server."""
    from mmrl.errors import ConfigError
    from mmrl.robotics.lerobot_client import LerobotPolicy

    folder, source, target = (theirs.folder / name for name in ("act", "asked.npz", "expected.npz"))
    np.savez(source, **asked)  # type: ignore[arg-type]
    theirs.run("act", str(folder))
    theirs.run("expect", str(folder), str(source), str(target))
    port, seen, named = free_port(), shown(asked), {}
    where = f"lerobot://127.0.0.1:{port}"
    address = f"{where}?type=act&path={folder}&chunk=5"
    log = theirs.folder / "theirs.log"
    with running(theirs.command("serve", str(port)), port, log, env=clean(), cwd=theirs.folder):
        with LerobotPolicy(address) as policy:
            found = policy.act(seen, [(0,)] * len(seen), greedy=True)
            facts = policy.facts
        with np.load(target) as wanted:
            equal = sum(
                equal_bits(policy.actions(one), wanted[str(n)].astype(np.float64))
                for n, one in enumerate(found)
            )
        for name, other in (
            ("unknown type", f"{where}?type=none&path=x"),
            ("state of another robot", f"{address}&state=7"),
            ("camera it has not", f"{address}&cameras=base:front"),
        ):
            try:
                LerobotPolicy(other).close()
                named[name] = "nothing"
            except ConfigError as error:
                named[name] = str(error).partition(": ")[2].replace(str(folder), "DIR")
    return {
        "chunk": [facts.chunk, facts.action_dim],
        "equal_chunks": equal,
        "errors": {name: words.splitlines()[:2] for name, words in named.items()},
    }


def _in_process(policy: Any, seen: Any, number: int) -> np.ndarray:
    chunk = policy.actions(policy.act([seen], [(_SEED, number)], greedy=True)[0])
    return np.asarray(chunk, np.float64).astype(np.float32)


def _served(kind: str, theirs: Beside, asked: dict[str, np.ndarray]) -> tuple[int, int]:
    """How many chunks of `mmrl policy-server` are, for lerobot's client, those of the policy in process; and how many of the
    actions that its control loop does (0 where noise depends on how often it asked)."""
    policy = tiny_policy(kind, theirs.folder / kind / "made")
    saved, port = theirs.folder / kind / "saved", free_port()
    policy.save(saved)
    source, target = theirs.folder / "asked.npz", theirs.folder / f"{kind}.npz"
    np.savez(source, **asked)  # type: ignore[arg-type]
    options = ("--protocol", "lerobot", "--camera", "base=front", "--fps", "10")
    equal, same, seen = 0, 0, shown(asked)
    with serving(saved, port, _SEED, theirs.folder / f"{kind}.log", *options):
        theirs.run("ask", str(port), str(source), str(target))
        with np.load(target) as found:
            for n, one in enumerate(seen):
                # the client asked for three steps; the time of an observation is half its number
                equal += (
                    equal_bits(found[f"{n}"], _in_process(policy, one, n)[:3])
                    and found[f"{n} step"].tolist() == [n, n + 1, n + 2]
                    and found[f"{n} time"].tolist() == [0.5 * n + step / 10 for step in range(3)]
                )
        if kind in _WITHOUT_NOISE:
            theirs.run("loop", str(port), str(source), str(target), str(_LOOP))
            with np.load(target) as found:
                wanted = _looped(
                    policy, [replace(o, instruction=seen[0].instruction) for o in seen]
                )
                pairs = zip(found["done"], wanted, strict=True)
                same = sum(equal_bits(one, other) for one, other in pairs)
    return equal, same


_WITHOUT_NOISE = ("oft", "qwen")


def _looped(policy: Any, seen: list[Any]) -> list[np.ndarray]:
    """The actions of a robot that asks when it has none left: of each chunk but the first, the first step is the one just done."""
    done: list[np.ndarray] = []
    while len(done) < _LOOP:
        chunk = _in_process(policy, seen[len(done) % len(seen)], 0)
        done += list(chunk if not done else chunk[1:])
    return done[:_LOOP]


def check(place: Path, count: int, fixture: bool) -> dict[str, Any]:
    """What was compared, with the numbers of equal ones."""
    import torch

    torch.set_num_threads(1)
    environment(place, [_LEROBOT])
    with tempfile.TemporaryDirectory() as made:
        theirs, asked = Beside(place, Path(made), _PROGRAM), observations(count)
        if fixture:
            said = json.loads(theirs.run("write").splitlines()[-1])
            about = {"by": "lerobot", "packages": packages(place, _PACKAGES)}
            FIXTURE.write_text(json.dumps({**about, **said}, indent=1) + "\n", encoding="utf-8")
        written = _written(theirs)
        server = _asked(theirs, asked)
        served = {kind: _served(kind, theirs, asked) for kind in KINDS}
        return {
            "ours_read_by_lerobot": written,
            "asked": count,
            "lerobot_server": server,
            "equal_chunks": {kind: equal for kind, (equal, _) in served.items()},
            "loop_actions": _LOOP,
            "loop_actions_equal": {kind: served[kind][1] for kind in _WITHOUT_NOISE},
            "packages": packages(place, _PACKAGES),
        }


def _differences(found: dict[str, Any]) -> list[str]:
    """What is not as it should be, by name."""
    asked, server = found["asked"], found["lerobot_server"]
    wrong = [name for name, equal in found["ours_read_by_lerobot"].items() if not equal]
    wrong += [kind for kind, equal in found["equal_chunks"].items() if equal != asked]
    wrong += [
        f"{kind}'s loop"
        for kind, equal in found["loop_actions_equal"].items()
        if equal != found["loop_actions"]
    ]
    wrong += [] if server["equal_chunks"] == asked else ["lerobot's server"]
    return wrong + [name for name, words in server["errors"].items() if words == ["nothing"]]


def main() -> None:
    """Command line."""
    o = options(__doc__, "lerobot", "exchange that the tests read")
    with tempfile.TemporaryDirectory() as made:
        found = check((o.env or Path(made) / "env").absolute(), o.count, o.fixture)
    tell("lerobot", found, _differences(found), o.record, "grpcio", "protobuf")


if __name__ == "__main__":
    main()
