"""Messages of lerobot's policy servers and clients: the gRPC service, and what the bytes in its messages mean.

    stub = Stub(channel)
    stub.SendObservations(chunks(write_observation(TimedObservation(0.0, 0, {"joint.pos": 0.5, "task": "pick up the cup"},
    True)))) actions = read_actions(stub.GetActions(empty()).data)                     # a list of TimedAction

lerobot (src/lerobot/transport/services.proto, async_inference/helpers.py) has a service transport.AsyncInference of four calls:
Ready and SendPolicyInstructions (a policy to load) once, then an observation by SendObservations, in a stream of chunks, and
GetActions. The bytes within are pickles, which mmrl.robotics.lerobot_pickles reads and writes without lerobot and without running
them; here fields are checked. An observation is what lerobot's robots return: a number by motor, a picture uint8 (H, W, 3) by
camera, and a text "task".

Legend: A action dimensions, H x W picture.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from mmrl.errors import need_package
from mmrl.robotics.lerobot_pickles import Record, Tensor, read, write
from mmrl.robotics.policy_messages import SHOWN, MessageError

__all__ = [
    "IMAGES",
    "LIBERO_CAMERAS",
    "METHODS",
    "SERVICE",
    "STATE",
    "RemotePolicyConfig",
    "Stub",
    "TimedAction",
    "TimedObservation",
    "chunks",
    "empty",
    "features",
    "joined",
    "message_class",
    "need_packages",
    "read_actions",
    "read_config",
    "read_observation",
    "write_actions",
    "write_config",
    "write_observation",
]

SERVICE = "transport.AsyncInference"
METHODS: Mapping[str, tuple[str, str]] = {
    "Ready": ("Empty", "Empty"),
    "SendPolicyInstructions": ("PolicySetup", "Empty"),
    "SendObservations": ("Observation", "Empty"),
    "GetActions": ("Empty", "Actions"),
}
"""Messages that go in and out, by call; SendObservations takes a stream of them."""
IMAGES, STATE = "observation.images.", "observation.state"
"""How lerobot's data sets name a camera's pictures, and the state."""
LIBERO_CAMERAS: Mapping[str, str] = {"base": "image", "wrist": "image2"}
"""Our cameras by lerobot's names in LIBERO (envs/libero.py)."""
_CHUNK = (
    2 << 20
)  # bytes of an observation in one message; lerobot's, which allows a message twice that
_BEGIN, _MIDDLE, _END = 1, 2, 3
_LATEST = 2**53
_MOST_ACTIONS = 10_000


def need_packages(purpose: str) -> None:
    """Raises MissingExtraError without grpcio."""
    need_package("grpc", purpose, "lerobot")


# the service


@functools.cache
def _messages() -> dict[str, Any]:
    """Classes of the messages by name. They live in a pool of their own: lerobot may be loaded in the same process."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="mmrl/async_inference.proto", package="transport", syntax="proto3"
    )
    state = file.enum_type.add(name="TransferState")
    for number, name in enumerate(("UNKNOWN", "BEGIN", "MIDDLE", "END")):
        state.value.add(name=f"TRANSFER_{name}", number=number)
    file.message_type.add(name="Empty")
    for name in ("Actions", "PolicySetup"):
        file.message_type.add(name=name).field.add(
            name="data", number=1, type=kinds.TYPE_BYTES, label=kinds.LABEL_OPTIONAL
        )
    observation = file.message_type.add(name="Observation").field
    observation.add(
        name="transfer_state",
        number=1,
        type=kinds.TYPE_ENUM,
        type_name=".transport.TransferState",
        label=kinds.LABEL_OPTIONAL,
    )
    observation.add(name="data", number=2, type=kinds.TYPE_BYTES, label=kinds.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        one.name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"transport.{one.name}")
        )
        for one in file.message_type
    }


def message_class(name: str) -> Any:
    """The class of a message: Empty, Actions, PolicySetup or Observation."""
    return _messages()[name]


def empty() -> Any:
    """The message that says nothing."""
    return message_class("Empty")()


class Stub:
    """The calls of a server behind a channel of grpc, by their names in `METHODS`; each takes a message (SendObservations: an
    iterator of them) and grpc's timeout and wait_for_ready, and raises grpc.RpcError."""

    def __init__(self, channel: Any) -> None:
        self.Ready = _caller(channel, "Ready")
        self.SendPolicyInstructions = _caller(channel, "SendPolicyInstructions")
        self.SendObservations = _caller(channel, "SendObservations")
        self.GetActions = _caller(channel, "GetActions")


def _caller(channel: Any, name: str) -> Callable[..., Any]:
    asked, answered = map(message_class, METHODS[name])
    kind = channel.stream_unary if name == "SendObservations" else channel.unary_unary
    made: Callable[..., Any] = kind(
        f"/{SERVICE}/{name}",
        request_serializer=asked.SerializeToString,
        response_deserializer=answered.FromString,
    )
    return made


def chunks(data: bytes) -> Iterator[Any]:
    """The messages that carry an observation's bytes."""
    kind = message_class("Observation")
    for start in range(0, len(data), _CHUNK):
        last = start + _CHUNK >= len(data)
        state = _END if last else _MIDDLE if start else _BEGIN
        yield kind(transfer_state=state, data=data[start : start + _CHUNK])


def joined(messages: Iterable[Any], most: int) -> bytes:
    """The bytes that such messages carry. Raises MessageError for more than `most`, and for a stream without an end."""
    parts: list[bytes] = []
    size = 0
    for one in messages:
        if one.transfer_state not in (_BEGIN, _MIDDLE, _END):
            raise MessageError(
                f"expected transfer_state 1, 2 or 3, found {one.transfer_state}; lerobot's client sends these"
            )
        if one.transfer_state == _BEGIN:
            parts, size = [], 0
        parts.append(one.data)
        size += len(one.data)
        if size > most:
            raise MessageError(
                f"expected an observation of at most {most:,} bytes, found more; send smaller pictures"
            )
        if one.transfer_state == _END:
            return b"".join(parts)
    raise MessageError("expected an observation's last chunk (transfer_state 3), found none")


# what the bytes mean


@dataclass(frozen=True)
class TimedObservation:
    """An observation: when it was made (seconds since 1970), after how many actions, and whether it must be answered."""

    timestamp: float
    timestep: int
    observation: Mapping[str, Any]
    must_go: bool = False


@dataclass(frozen=True)
class TimedAction:
    """An action (A,) and when it is due: at which time, in place of which step."""

    timestamp: float
    timestep: int
    action: np.ndarray


@dataclass(frozen=True)
class RemotePolicyConfig:
    """Which policy the client wants: a class of lerobot's, its weights' name, and how the client names what it sees (see
    `features`). rename_map: other names of the policy for these."""

    policy_type: str
    pretrained_name_or_path: str
    lerobot_features: Mapping[str, Any]
    actions_per_chunk: int
    device: str = "cpu"
    rename_map: Mapping[str, str] = field(default_factory=dict)


def features(motors: Sequence[str], pictures: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """What lerobot_features say of a robot: its motors, and the shapes (H, W, 3) of its cameras' pictures by name."""
    names = ["height", "width", "channels"]
    state = {"dtype": "float32", "shape": (len(motors),), "names": list(motors)}
    cameras = {
        IMAGES + name: {"dtype": "image", "shape": tuple(shape), "names": names}
        for name, shape in pictures.items()
    }
    return {STATE: state, **cameras}


def _record(value: Any, name: str, kinds: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """The fields of a record, those of `kinds` with the types there. Raises MessageError."""
    if not isinstance(value, Record) or value.name != name:
        found = value.name if isinstance(value, Record) else type(value).__name__
        raise MessageError(f"expected a {name} of lerobot's protocol, found {found}")
    fields = {key: value.fields.get(key) for key in kinds}
    for key, one in fields.items():
        if type(one) not in kinds[key]:
            wanted = " or ".join(kind.__name__ for kind in kinds[key])
            raise MessageError(
                f"expected {name}.{key} as {wanted}, found {type(one).__name__}; is the other side one of lerobot "
                "from release 0.4 on?"
            )
    return fields


def _timed(fields: dict[str, Any], name: str) -> dict[str, Any]:
    if not 0 <= fields["timestep"] < _LATEST or not abs(fields["timestamp"]) < _LATEST:
        raise MessageError(
            f"expected {name} with a timestep from 0 on and a finite timestamp, found others"
        )
    return {**fields, "timestamp": float(fields["timestamp"])}


_WHEN: Mapping[str, tuple[type, ...]] = {"timestamp": (float, int), "timestep": (int,)}


def read_observation(data: bytes) -> TimedObservation:
    """What a client's pickle says. Raises MessageError."""
    name = "TimedObservation"
    fields = _record(read(data), name, {**_WHEN, "observation": (dict,), "must_go": (bool,)})
    return TimedObservation(**_timed(fields, name))


def read_actions(data: bytes) -> list[TimedAction]:
    """What a server's pickle says: at least one action, all of one size. Raises MessageError."""
    found = read(data)
    if type(found) is not list or not 0 < len(found) <= _MOST_ACTIONS:
        words = f"{len(found):,} of them" if type(found) is list else type(found).__name__
        raise MessageError(f"expected a list of 1 to {_MOST_ACTIONS:,} actions, found {words}")
    actions = []
    for one in found:
        fields = _timed(
            _record(one, "TimedAction", {**_WHEN, "action": (np.ndarray,)}), "TimedAction"
        )
        action = fields["action"]
        if action.ndim != 1 or not action.size or action.dtype.kind not in "fiu":
            raise MessageError(
                f"expected an action as a row of numbers, found {action.dtype} {action.shape}"
            )
        actions.append(TimedAction(**fields))
    if len(sizes := {one.action.shape for one in actions}) > 1:
        raise MessageError(f"expected actions of one size, found {sorted(sizes)!r:.{SHOWN}}")
    return actions


def read_config(data: bytes) -> RemotePolicyConfig:
    """What a client's pickle asks for. Raises MessageError."""
    name = "RemotePolicyConfig"
    fields = _record(
        read(data),
        name,
        {
            "policy_type": (str,),
            "pretrained_name_or_path": (str,),
            "lerobot_features": (dict,),
            "actions_per_chunk": (int,),
            "device": (str,),
            "rename_map": (dict,),
        },
    )
    if fields["actions_per_chunk"] < 1:
        raise MessageError(
            f"expected {name}.actions_per_chunk of at least 1, found {fields['actions_per_chunk']}"
        )
    if not all(type(one) is str for one in fields["rename_map"].values()):
        raise MessageError(f"expected {name}.rename_map of texts, found others")
    return RemotePolicyConfig(**fields)


def write_observation(said: TimedObservation) -> bytes:
    """As lerobot's client writes it."""
    return write(Record("TimedObservation", dict(vars(said))))


def write_actions(said: Sequence[TimedAction]) -> bytes:
    """As lerobot's server writes them: float32 tensors."""
    return write(
        [Record("TimedAction", {**vars(one), "action": Tensor(one.action)}) for one in said]
    )


def write_config(said: RemotePolicyConfig) -> bytes:
    """As lerobot's client writes it."""
    return write(Record("RemotePolicyConfig", asdict(said)))
