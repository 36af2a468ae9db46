"""A policy behind lerobot's policy server (its async inference), in our simulators.

    with LerobotPolicy("lerobot://gpu-box:8080?type=smolvla&path=lerobot/smolvla_libero&device=cuda") as policy:
        outputs = policy.act(observations, keys, greedy=True)

    mmrl eval --policy-server "lerobot://gpu-box:8080?type=smolvla&path=lerobot/smolvla_libero" --suite libero_spatial --protocol
    lerobot

The server (python -m lerobot.async_inference.policy_server) loads the policy that a client names: `type`, lerobot's name of its
class, and `path`, a folder there or a name on the hub. The other settings of an address may be left out:

- device: where the server computes (cpu)
- chunk: steps of each chunk that are asked for (all that the policy predicts)
- cameras: ours, with the names that the policy has for them (base:image,wrist:image2, as in lerobot's LIBERO)
- state: numbers of the proprioception (8: end effector position 3, axis-angle 3, fingers 2)

Every observation is sent with must_go, which lerobot's server never leaves out, and with a step number of its own, which its
actions must bear: a chunk for somebody else's observation is refused. The server does not say how long a chunk is: the policy is
asked once with black pictures, before any simulator starts. It scales pictures to the size that the policy was made for, and
draws its own noise: no two evaluations are bit for bit the same. When its policy fails it answers nothing, and only its log says
why.

The connection is neither encrypted nor protected by a key, since lerobot's servers take none; proxies of the environment are not
used.

Legend: B observations, K action steps of a chunk, A action dimensions, H x W picture.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from mmrl.errors import ConfigError, did_you_mean
from mmrl.robotics.lerobot_messages import (
    LIBERO_CAMERAS,
    RemotePolicyConfig,
    Stub,
    TimedObservation,
    chunks,
    empty,
    features,
    message_class,
    need_packages,
    read_actions,
    write_config,
    write_observation,
)
from mmrl.robotics.policy_client import LARGEST, ServerPolicy, plain, plain_lines, split_address
from mmrl.robotics.policy_messages import MessageError
from mmrl.robotics.remote import PolicyError, PolicyFacts

__all__ = ["LerobotPolicy"]

_FORM = "lerobot://HOST:PORT?type=TYPE&path=NAME"
_PORT = 8080
_SIDE = 224  # pixels of the pictures that are tried first; the server scales them
_MOST_STATE = 1000
_SETTINGS = ("type", "path", "device", "chunk", "cameras", "state")
_CAMERA = re.compile(r"[\w.-]{1,80}:[\w.-]{1,80}")


def _settings(query: str) -> dict[str, str]:
    """The settings of an address. Raises ConfigError."""
    try:
        pairs = parse_qsl(query, strict_parsing=True) if query else []
    except ValueError as error:
        raise ConfigError(
            f"expected settings as NAME=VALUE&NAME=VALUE in {_FORM}, found {query!r}"
        ) from error
    found = dict(pairs)
    for name in found:
        if name not in _SETTINGS:
            raise ConfigError(
                f"expected settings {', '.join(_SETTINGS)} in {_FORM}, found {name!r}.{did_you_mean(name, _SETTINGS)}"
            )
    if lacking := [name for name in ("type", "path") if not found.get(name)]:
        raise ConfigError(
            f"expected {' and '.join(lacking)} in {_FORM}, found none: lerobot's server loads the policy that its client "
            "names, such as type=smolvla&path=lerobot/smolvla_libero"
        )
    return found


def _whole(found: Mapping[str, str], name: str, default: int, most: int) -> int:
    said = found.get(name, str(default))
    if not said.isdecimal() or not 1 <= int(said[:9]) <= most:
        raise ConfigError(
            f"expected {name} in {_FORM} as a whole number from 1 to {most}, found {said!r}"
        )
    return int(said)


def _cameras(found: Mapping[str, str]) -> dict[str, str]:
    """The policy's name of each of our cameras."""
    if "cameras" not in found:
        return dict(LIBERO_CAMERAS)
    words = found["cameras"].split(",")
    if not all(map(_CAMERA.fullmatch, words)):
        raise ConfigError(
            f"expected cameras in {_FORM} as OURS:THEIRS,OURS:THEIRS, found {found['cameras']!r}; the default is "
            "base:image,wrist:image2"
        )
    named = dict(word.split(":") for word in words)
    if len(named) < len(words) or len(set(named.values())) < len(words):
        raise ConfigError(f"expected each camera once in {_FORM}, found {found['cameras']!r}")
    return named


class LerobotPolicy(ServerPolicy):
    """A policy at `address`, lerobot://HOST:PORT?type=TYPE&path=NAME. The server must be reached within connect_s seconds;
    loading the policy, and each answer, have act_s.

    Raises ConfigError when there is no such server, or one that cannot load the policy or answer the observations, PolicyError
    when it fails later."""

    def __init__(self, address: str, *, connect_s: float = 60.0, act_s: float = 600.0) -> None:
        need_packages("policy servers")
        parts, host, port = split_address(address, {"lerobot": _PORT}, _FORM, query=True)
        if parts.path not in ("", "/"):
            raise ConfigError(f"expected {_FORM}, found the path {parts.path!r} after the port")
        super().__init__(address, act_s)
        found = _settings(parts.query)
        self._cameras, self._steps = _cameras(found), 0
        size = _whole(found, "state", 8, _MOST_STATE)
        self._motors = [f"state_{n}" for n in range(size)]
        wanted = RemotePolicyConfig(
            found["type"],
            found["path"],
            {},
            _whole(found, "chunk", 10_000, 10_000),
            found.get("device", "cpu"),
        )
        try:
            self._stub = self._opened(host, port)
            self._connect(wanted, connect_s)
            self._is(self._tried(wanted, f"{host}:{port}"))
        except PolicyError as error:
            raise ConfigError(str(error)) from error.__cause__
        except BaseException:
            self.close()
            raise

    def _opened(self, host: str, port: int) -> Stub:
        import grpc

        options = [
            ("grpc.enable_http_proxy", 0),
            ("grpc.enable_retries", 0),
            ("grpc.max_receive_message_length", LARGEST),
            ("grpc.max_send_message_length", -1),
            ("grpc.service_config_disable_resolution", 1),
            (
                "grpc.use_local_subchannel_pool",
                1,
            ),  # a server of ours knows clients by their connection
        ]
        # dns:///: a host called unix is no socket's file
        target = f"dns:///[{host}]:{port}" if ":" in host else f"dns:///{host}:{port}"
        channel = self._stack.enter_context(grpc.insecure_channel(target, options))
        return Stub(channel)

    def _connect(self, wanted: RemotePolicyConfig, limit_s: float) -> None:
        """Be let in, again and again while nobody listens, and have the policy loaded."""
        self._call("Ready", "a server of lerobot's protocol", empty(), limit_s, wait_for_ready=True)
        pictures = {name: (_SIDE, _SIDE, 3) for name in self._cameras.values()}
        config = RemotePolicyConfig(
            **{**vars(wanted), "lerobot_features": features(self._motors, pictures)}
        )
        setup = message_class("PolicySetup")(data=write_config(config))
        what = f"the policy {wanted.policy_type} {wanted.pretrained_name_or_path} to be loaded"
        self._call("SendPolicyInstructions", what, setup, self.act_s)

    def _tried(self, wanted: RemotePolicyConfig, name: str) -> PolicyFacts:
        """The facts, of which the server says none: asked with black pictures once."""
        black = np.zeros((_SIDE, _SIDE, 3), np.uint8)
        seen = {camera: black for camera in self._cameras}
        state = np.zeros(len(self._motors), np.float32)
        chunk = self._chunk(self._exchange({**seen, "proprio": state}, "do nothing"), first=True)
        steps, dim = chunk.shape
        details = {
            "noise": "the server's own",
            "type": wanted.policy_type,
            "path": wanted.pretrained_name_or_path,
            "device": wanted.device,
            "cameras": dict(self._cameras),
        }
        return PolicyFacts(
            name, steps, dim, tuple(self._cameras), proprio_dim=len(state), details=details
        )

    @property
    def advice(self) -> str:
        """See RemotePolicy."""
        return (
            f"{self._who}: no --protocol was given: its policy sees pictures as the suite has them, and all "
            f"{self.facts.chunk} steps of a chunk are played. lerobot's LIBERO policies are evaluated with --protocol "
            "lerobot, and with chunk= in the address as many steps as the policy's n_action_steps"
        )

    # acting

    def _ask(
        self,
        inputs: Sequence[Mapping[str, np.ndarray]],
        instructions: Sequence[str],
        keys: Sequence[tuple[int, ...]],
        greedy: bool,
        temperature: float,
    ) -> np.ndarray:
        """See RemotePolicy: one observation after the other, as the protocol has it."""
        asked = zip(inputs, instructions, strict=True)
        return np.stack([self._chunk(self._exchange(*one)) for one in asked])

    def _exchange(self, one: Mapping[str, np.ndarray], instruction: str) -> np.ndarray:
        """The actions (K, A) of an observation, as they came."""
        self._unbroken()
        seen: dict[str, Any] = dict(zip(self._motors, one["proprio"].tolist(), strict=True))
        seen |= {name: one[camera] for camera, name in self._cameras.items()}
        seen["task"] = instruction
        step, ends = self._steps, time.monotonic() + self.act_s
        self._steps += 1
        said = write_observation(TimedObservation(time.time(), step, seen, must_go=True))
        self._call("SendObservations", "actions", chunks(said), self.act_s)
        left = max(0.001, ends - time.monotonic())
        answer = self._call("GetActions", "actions", empty(), left).data
        if not answer:
            self._fail(
                "expected actions, found none: its policy failed, as its log then says, or another client uses it"
            )
        try:
            actions = read_actions(answer)
        except MessageError as error:
            self._fail(f"actions: {error}", error)
        if [a.timestep for a in actions] != list(range(step, step + len(actions))):
            self._fail(
                f"expected actions from step {step} on, found others (from {actions[0].timestep}): another client uses it, "
                "and lerobot's server has one at a time"
            )
        return np.stack([a.action for a in actions])

    def _call(self, name: str, wanted: str, said: Any, limit_s: float, **options: Any) -> Any:
        """What the server answers within limit_s seconds."""
        import grpc

        try:
            return getattr(self._stub, name)(said, timeout=limit_s, **options)
        except grpc.RpcError as error:
            code, words = error.code(), error.details() or ""
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                self._fail(
                    f"expected {wanted} within {round(limit_s, 2):g} s, found none ({plain(words, 200)})",
                    error,
                )
            if code is grpc.StatusCode.UNAVAILABLE:
                self._fail(
                    f"expected {wanted}, found a broken connection ({plain(words, 200)})", error
                )
            if code is grpc.StatusCode.UNIMPLEMENTED:
                self._fail(f"expected {wanted}, found a server of another protocol", error)
            self._fail(
                f"expected {wanted}, found its error:\n{code.name}: {plain_lines(words)}", error
            )
