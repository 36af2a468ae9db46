"""Our policies behind lerobot's protocol: robots with lerobot's client (its async inference) ask them as they ask its server.

    mmrl policy-server runs/robot/checkpoints/best --protocol lerobot --camera base=front --camera wrist=gripper --port 8080

    python -m lerobot.async_inference.robot_client --server_address=127.0.0.1:8080 --policy_type=act \\
        --pretrained_name_or_path=any --actions_per_chunk=50 --task="pick up the cup" --robot.type=so101_follower ...

The policy is the one that the server was started with, whatever policy_type and pretrained_name_or_path a client names: nothing
is loaded for it. Its instructions tell the names of its motors, whose numbers are the state in this order, and of its cameras
(`RobotService.robot` matches them to the policy's), and how many steps of a chunk it wants. Units and the order of the motors
must be those of the training.

Of a client's observations the newest waits until GetActions, which answers it, or nothing after `WAIT_S`. As with lerobot's
server, one that is not marked must_go is left out where its step was answered before; unlike it, one whose joints have moved
little is not, since its measure (a norm of 1) is made for degrees. Actions are float32 tensors with the observation's step and
time and those that follow (`fps`). The noise of a client's n-th answer has the key (seed, n). What is wrong with an observation
is said to whoever sent it.

A client is its connection, which begins with Ready: several may ask at once, each is answered its own observations, and none
takes another's place until all are taken (then that of one that asks nothing any more). lerobot's client sends no key, so that
beyond this machine nothing but the network keeps others out. Messages are read as mmrl.robotics.lerobot_messages says;
`PolicyLimits` bounds the rest.

Legend: C control steps of a chunk, A action dimensions, H x W picture.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NoReturn

from mmrl.errors import ConfigError, MMRLError
from mmrl.robotics.contract import Observation
from mmrl.robotics.lerobot_messages import (
    IMAGES,
    LIBERO_CAMERAS,
    METHODS,
    SERVICE,
    STATE,
    RemotePolicyConfig,
    TimedAction,
    TimedObservation,
    empty,
    joined,
    message_class,
    need_packages,
    read_config,
    read_observation,
    write_actions,
)
from mmrl.robotics.policy_messages import MessageError
from mmrl.robotics.policy_service import ServedPolicy

__all__ = ["WAIT_S", "Robot", "RobotServer", "RobotService"]

WAIT_S = 2.0
"""Seconds that GetActions waits for an observation, as lerobot's server does."""
_log = logging.getLogger("mmrl.robotics.lerobot_server")
_MESSAGE = 4 << 20  # bytes of one message; lerobot's client sends half of it
_STREAMS = 4  # calls of a connection at once: lerobot's client makes two
_QUIET_S = (
    60.0  # without a call, after which a client that finds all places taken may take this one
)
_PAUSE_S = 0.2  # before who is no client is told so
_ANSWERED = 1000  # steps of a client that are remembered
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOWN = 300


@dataclass(frozen=True)
class Robot:
    """What a client's instructions say: the names of its cameras by ours, of its motors, and how many steps of a chunk it
    wants."""

    cameras: Mapping[str, str]
    motors: tuple[str, ...]
    steps: int


@dataclass
class RobotService(ServedPolicy):
    """A policy that lerobot's clients ask. cameras: what robots call the policy's cameras, where that is something else; fps:
    control steps per second, of which the times of actions are made.

    The methods raise MMRLError for what they cannot answer.
    """

    cameras: Mapping[str, str] = field(default_factory=dict)
    fps: float = 30.0

    def __post_init__(self) -> None:
        known = self.policy.settings.cameras
        if other := [name for name in self.cameras if name not in known]:
            raise ConfigError(
                f"expected cameras of the policy ({', '.join(known)}), found {other[0]!r}; write --camera OURS=THEIRS"
            )

    def robot(self, said: RemotePolicyConfig) -> Robot:
        """What a client's instructions come to. A camera of the policy is the one that `cameras` names, else one of its own name,
        else that of lerobot's LIBERO (image for base, image2 for wrist)."""
        seen = {
            said.rename_map.get(name, name).removeprefix(IMAGES): name.removeprefix(IMAGES)
            for name in said.lerobot_features
            if name.startswith(IMAGES)
        }
        cameras = {}
        for camera in self.policy.settings.cameras:
            asked = (self.cameras.get(camera, camera), LIBERO_CAMERAS.get(camera, camera))
            found = next((name for name in asked if name in seen), None)
            if found is None or (camera in self.cameras and found != asked[0]):
                raise MessageError(
                    f"expected a camera {asked[0]}, which the policy sees, found {', '.join(seen) or 'none'!s:.{_SHOWN}}; "
                    f"start the server with --camera {camera}=NAME, or call the robot's camera so"
                )
            cameras[camera] = seen[found]
        return Robot(cameras, self._motors(said), said.actions_per_chunk)

    def _motors(self, said: RemotePolicyConfig) -> tuple[str, ...]:
        if not self.takes_state:
            return ()
        state = said.lerobot_features.get(STATE)
        names = state.get("names") if isinstance(state, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise MessageError(f"expected the names of the robot's motors in {STATE}, found none")
        if len(names) != (size := self.policy.settings.proprio_dim):
            raise MessageError(
                f"expected a robot of {size} motors, found {len(names)} ({', '.join(names)!s:.{_SHOWN}}); the policy was made "
                "for another robot"
            )
        return tuple(names)

    def read(self, robot: Robot, said: TimedObservation) -> Observation:
        """What the policy sees of an observation."""

        def found(name: str) -> tuple[str, Any]:
            if name not in said.observation:
                names = ", ".join(sorted(said.observation))
                raise MessageError(f"expected {name} in the observation, found {names!s:.{_SHOWN}}")
            return name, said.observation[name]

        pictures = {camera: found(name) for camera, name in robot.cameras.items()}
        # lerobot's client sends an empty task where it was given none
        prompt = ("task", said.observation.get("task") or None)
        return self.observation(pictures, [found(name) for name in robot.motors], prompt)

    def answer(self, robot: Robot, said: TimedObservation, seen: Observation, number: int) -> bytes:
        """The actions of an observation, a client's `number`-th from 0 on."""
        chunk_CA = self.chunk(seen, *self.own_way(number))[: robot.steps]
        return write_actions(
            [
                TimedAction(said.timestamp + step / self.fps, said.timestep + step, action)
                for step, action in enumerate(chunk_CA)
            ]
        )


class _Refused(Exception):
    """A call that is answered by a status of grpc (its name) and words."""

    def __init__(self, code: str, words: str) -> None:
        super().__init__(words)
        self.code, self.words = code, words


class _Client:
    """One connection, and the observation that waits on it. `robot`: set by its instructions."""

    def __init__(self) -> None:
        self.robot: Robot | None = None
        self.used = time.monotonic()
        self._waiting: tuple[TimedObservation, Observation] | None = None
        self._changed = threading.Condition()
        self._answered: deque[int] = deque(maxlen=_ANSWERED)
        self._count = 0

    def put(self, said: TimedObservation, seen: Observation) -> None:
        """Have an observation answered next, in place of one that waits."""
        with self._changed:
            if said.must_go or said.timestep not in self._answered:
                self._waiting = said, seen
                self._changed.notify()

    def take(self, goes_on: Callable[[], bool]) -> tuple[TimedObservation, Observation] | None:
        """The observation that waits, or comes within `WAIT_S` while `goes_on`."""
        ends = time.monotonic() + WAIT_S
        with self._changed:
            while self._waiting is None and goes_on():
                if not self._changed.wait(min(0.1, ends - time.monotonic())) and (
                    time.monotonic() >= ends
                ):
                    break
            found = self._waiting if goes_on() else None
            if found is not None:
                self._waiting = None
            return found

    def number(self) -> int:
        """Of the next answer, from 0 on."""
        with self._changed:
            self._count += 1
            return self._count - 1

    def answered(self, step: int) -> None:
        """An observation of this step had its answer."""
        with self._changed:
            self._answered.append(step)


class RobotServer:
    """Serves `service` at host:port until `stop`, or a signal where it runs in the main thread: an answer under way is still
    sent, clients that wait are told that there is none. A second signal ends the process at once. `port` is the one that was
    bound; clients wait until `run`, which calls `ready` when it answers. Raises ConfigError for an address that is taken,
    MissingExtraError."""

    def __init__(self, host: str, port: int, clients: int, idle_s: float) -> None:
        need_packages("policy servers")
        import grpc

        calls = 2 * clients + _STREAMS
        self._worker = ThreadPoolExecutor(1, "policy")
        self._server = grpc.server(
            ThreadPoolExecutor(calls, "call"),
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", _MESSAGE),
                ("grpc.max_concurrent_streams", _STREAMS),
                ("grpc.max_connection_idle_ms", min(int(1000 * idle_s), 2**31 - 1)),
                # lerobot's client compresses nothing: nothing is unpacked
                ("grpc.compression_enabled_algorithms_bitset", 1),
            ],
            maximum_concurrent_rpcs=calls,
        )
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port: int = self._server.add_insecure_port(where)
        except RuntimeError as error:
            raise ConfigError(
                f"expected a free address for --host {host} --port {port}, found none ({error}); choose another port, 0 for any"
            ) from error
        self._clients: dict[str, _Client] = {}
        self._most, self._idle_s = clients, idle_s
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def run(self, service: RobotService, ready: Callable[[], None] = lambda: None) -> None:
        """Serve."""
        import grpc

        self._service = service
        handlers = {}
        for name, (asked, answered) in METHODS.items():
            made = (
                grpc.stream_unary_rpc_method_handler
                if name == "SendObservations"
                else grpc.unary_unary_rpc_method_handler
            )
            handlers[name] = made(
                self._guarded(getattr(self, f"_{name}")),
                request_deserializer=message_class(asked).FromString,
                response_serializer=message_class(answered).SerializeToString,
            )
        generic = grpc.method_handlers_generic_handler(SERVICE, handlers)
        self._server.add_generic_rpc_handlers((generic,))
        with self._signals():
            self._server.start()
            ready()
            while not self._ended.wait(1.0):  # a signal may have come to another thread
                pass
            self._worker.shutdown(wait=False, cancel_futures=True)
            self._server.stop(grace=service.limits.idle_s).wait()
            self._worker.shutdown()

    def stop(self) -> None:
        """End `run`, from another thread."""
        self._ended.set()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in _SIGNALS}

        def stopping(*_: Any) -> None:
            for number in _SIGNALS:  # no thread can be ended, the process can
                signal.signal(number, signal.SIG_DFL)
            self.stop()

        for number in _SIGNALS:
            signal.signal(number, stopping)
        try:
            yield
        finally:
            for number, handler in before.items():
                if handler is not None:  # one of C's cannot be put back
                    signal.signal(number, handler)

    def _guarded(self, call: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """A call that says in words what is wrong, and of the machine nothing."""
        import grpc

        def guarded(request: Any, context: Any) -> Any:
            try:
                return call(request, context)
            except _Refused as error:
                code, words = error.code, error.words
            except MessageError as error:
                code, words = "INVALID_ARGUMENT", str(error)
            except MMRLError as error:
                code, words = "INTERNAL", str(error)
            except grpc.RpcError:  # the client is gone, or took too long
                code, words = "CANCELLED", "expected a call that goes on, found its end"
            except Exception as error:
                _log.exception("the policy failed")
                code = "INTERNAL"
                words = f"the policy failed ({type(error).__name__}); the server's log says more"
            context.abort(grpc.StatusCode[code], words)

        return guarded

    # the calls, by their names in the protocol

    def _Ready(self, request: Any, context: Any) -> Any:
        """A client begins, or begins anew."""
        with self._lock:
            peer = context.peer()
            self._forget(self._idle_s)
            if self._full(peer):
                self._forget(_QUIET_S)
            if self._full(peer):
                raise _Refused(
                    "RESOURCE_EXHAUSTED",
                    f"expected at most {self._most} clients at once, found more; come again later",
                )
            self._clients[peer] = _Client()
        return empty()

    def _full(self, peer: str) -> bool:
        return peer not in self._clients and len(self._clients) >= self._most

    def _forget(self, quiet_s: float) -> None:
        """Give up clients that have asked nothing for so long: grpc does not tell that a connection ended."""
        now = time.monotonic()
        for peer in [p for p, one in self._clients.items() if now - one.used > quiet_s]:
            del self._clients[peer]

    def _SendPolicyInstructions(self, request: Any, context: Any) -> Any:
        """A client says what its robot is like."""
        client = self._client(context)
        client.robot = self._service.robot(read_config(request.data))
        return empty()

    def _SendObservations(self, request: Any, context: Any) -> Any:
        """A client's observation, in chunks."""
        client = self._client(context)
        robot = self._robot(client)
        limits = self._service.limits
        timer = threading.Timer(limits.send_s, context.cancel)
        timer.daemon = True
        timer.start()
        try:
            data = joined(request, limits.message_bytes)
        finally:
            timer.cancel()
        said = read_observation(data)
        client.put(said, self._service.read(robot, said))
        return empty()

    def _GetActions(self, request: Any, context: Any) -> Any:
        """The answer to a client's newest observation, or none."""
        try:
            client = self._client(context)
            robot = self._robot(client)
        except _Refused:
            # lerobot's client asks again at once, for ever: after a new start of the server, too
            self._ended.wait(_PAUSE_S)
            raise
        found = client.take(lambda: context.is_active() and not self._ended.is_set())
        client.used = time.monotonic()
        kind = message_class("Actions")
        if found is None:
            if self._ended.is_set():
                self._stopping()
            return kind()
        try:
            asked = self._worker.submit(self._service.answer, robot, *found, client.number())
        except RuntimeError:  # it has ended
            self._stopping()
        try:
            answer = asked.result()
        except CancelledError:
            self._stopping()
        client.answered(found[0].timestep)
        client.used = time.monotonic()
        return kind(data=answer)

    def _stopping(self) -> NoReturn:
        raise _Refused("UNAVAILABLE", "expected a server that goes on, found one that stops")

    def _client(self, context: Any) -> _Client:
        """Whose call it is. Raises _Refused."""
        if self._ended.is_set():
            self._stopping()
        with self._lock:
            client = self._clients.get(context.peer())
        if client is None:
            raise _Refused(
                "FAILED_PRECONDITION",
                "expected Ready first on this connection, found another call; start the client anew",
            )
        client.used = time.monotonic()
        return client

    def _robot(self, client: _Client) -> Robot:
        if client.robot is None:
            raise _Refused(
                "FAILED_PRECONDITION",
                "expected SendPolicyInstructions first, found another call; start the client anew",
            )
        return client.robot
