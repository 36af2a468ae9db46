"""Strangers at a Ray cluster: one that mmrl started lets in nobody without its token; one of yours asks for what you set there."""

from __future__ import annotations

import http.client
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import pytest

from mmrl.config import RayConfig
from mmrl.distributed.cluster.access import private_folder
from mmrl.distributed.cluster.placement import Demand
from mmrl.distributed.cluster.session import Cluster
from mmrl.errors import ConfigError
from tests.kits.engine_kit import ENVIRONMENT, REPO
from tests.kits.ray_kit import nodes

pytestmark = pytest.mark.slow

TASK = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
print(ray.get(ray.remote(num_cpus=0)(lambda path: open(path, "w").write("in")).remote(sys.argv[2]), timeout=60))
"""
JOB = """
import sys
from ray.job_submission import JobSubmissionClient
JobSubmissionClient(sys.argv[1]).submit_job(entrypoint="touch " + sys.argv[2])
"""
CALLS = (
    "NodeInfoGcsService/GetAllNodeInfo",
    "InternalKVGcsService/InternalKVPut",
    "JobInfoGcsService/AddJob",
    "ActorInfoGcsService/CreateActor",
    "NodeManagerService/RequestWorkerLease",
    "ObjectManagerService/Pull",
    "CoreWorkerService/PushTask",
    "CoreWorkerService/KillActor",
)
"""What runs code, reads or writes at one of Ray's services, or ends somebody's actor."""


class Resting:
    """An actor, which has a port of its own."""

    def rest(self) -> int:
        return os.getpid()


def stranger(code: str, address: str, mark: Path, **variables: str) -> subprocess.Popen[str]:
    """A process of somebody who knows the address, with another home and nothing of ours in the environment but `variables`;
    `mark` is the file that is there once it got in."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-c", code, address, str(mark)],
        env={**kept, "HOME": str(mark.parent), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextmanager
def own_cluster() -> Iterator[tuple[Cluster, str]]:
    """A cluster that mmrl started, and its address."""
    with Cluster(RayConfig(cpus=1), [Demand("rewards", 1, 1.0)]) as cluster:
        yield cluster, cluster.ray.get_runtime_context().gcs_address


def token_of(address: str) -> Path:
    """Where the cluster's own processes are told to find its token."""
    for process in psutil.Process().children(recursive=True):
        if process.name() == "raylet":
            return Path(process.environ()["RAY_AUTH_TOKEN_PATH"])
    raise AssertionError(f"expected a raylet of the cluster at {address}, found none")


def listening() -> set[tuple[str, int]]:
    """Where this process and the cluster's listen."""
    me = psutil.Process()
    return {
        (c.laddr.ip if "." in c.laddr.ip and c.laddr.ip != "0.0.0.0" else "127.0.0.1", c.laddr.port)
        for process in (me, *me.children(recursive=True))
        for c in process.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    }


def called(host: str, port: int, method: str, token: str = "") -> str:
    """The status of a bare gRPC call with an empty message."""
    headers = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        ask = channel.unary_unary(
            f"/ray.rpc.{method}", request_serializer=bytes, response_deserializer=bytes
        )
        try:
            ask(b"", timeout=10, metadata=headers)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def posted(host: str, port: int, path: str) -> int:
    """The status of a POST; 0 where no HTTP is spoken."""
    body = b'{"entrypoint": "true"}'
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"http://{host}:{port}{path}", body), timeout=10
        ) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, http.client.HTTPException) as error:
        assert "timed out" not in str(error), f"nothing known of {host}:{port}: {error}"
        return 0


def test_a_stranger_who_knows_the_address_runs_no_task_and_submits_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's own token is every cluster's of a user, and RAY_AUTH_MODE=disabled took it away."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    with own_cluster() as (_, address):
        path = token_of(address)
        assert len(path.read_text()) == 64 and stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        [*sockets] = path.parent.glob("*/*/sockets/raylet")
        assert sockets, "a socket in a folder of others' is one that they may replace"
        assert os.environ["RAY_AUTH_MODE"] == "disabled" and os.environ["RAY_AUTH_TOKEN"]
        refused = [
            stranger(TASK, address, tmp_path / "none"),
            stranger(TASK, address, tmp_path / "off", RAY_AUTH_MODE="disabled"),
            stranger(
                TASK, address, tmp_path / "wrong", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64
            ),
            stranger(JOB, address, tmp_path / "job"),
        ]
        for process in refused:
            said, _ = process.communicate(timeout=240)
            assert process.returncode != 0, said
        assert not [p for p in tmp_path.iterdir() if p.is_file()], "somebody got in"
        friend = stranger(
            TASK,
            address,
            tmp_path / "friend",
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN_PATH=str(path),
        )
        said, _ = friend.communicate(timeout=240)
        assert friend.returncode == 0, said
        assert (tmp_path / "friend").read_text() == "in", "the attack works where it is let in"
    assert not path.parent.exists()


def test_no_port_of_the_cluster_takes_a_call_without_the_token() -> None:
    # what earlier tests of this process have left open; a silent one says nothing of Ray
    others = listening()
    with own_cluster() as (cluster, address):
        actor = cluster.start("rewards", 0, Resting)
        cluster.ray.get(actor.rest.remote())
        token, statuses = token_of(address).read_text(), dict[str, set[str]]()
        for host, port in listening() - others:
            for method in CALLS:
                statuses.setdefault(method, set()).add(called(host, port, method))
            # the metrics of Ray's monitor, which answers everyone, takes no POST
            for path in ("/api/jobs/", "/get_or_create_runtime_env"):
                assert posted(host, port, path) in (0, 401, 404, 405), (host, port, path)
        for method, found in statuses.items():
            assert "UNAUTHENTICATED" in found, f"expected a port that has {method}"
            assert found <= {"UNAUTHENTICATED", "UNIMPLEMENTED", "UNAVAILABLE"}, (method, found)
        host, _, port = address.rpartition(":")
        assert called(host, int(port), CALLS[0], token) == "OK"
        assert called(host, int(port), CALLS[0], token[::-1]) == "UNAUTHENTICATED"
        assert cluster.ray.get(actor.rest.remote()), "and nobody was ended"


def test_the_token_of_a_cluster_is_no_other_ones(tmp_path: Path) -> None:
    """This process kept the first token that it had, and RAY_AUTH_MODE=token with it."""
    tokens = []
    for _ in range(2):
        with own_cluster() as (cluster, address):
            tokens.append(token_of(address).read_text())
            actor = cluster.start("rewards", 0, Resting)
            assert cluster.ray.get(actor.rest.remote())
        assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"} & set(os.environ)
    assert tokens[0] != tokens[1]
    with nodes(1) as yours:  # without a token: whoever reaches it runs code, as SECURITY.md says
        with Cluster(yours.config(), [Demand("rewards", 1, 1.0)]) as cluster:
            actor = cluster.start("rewards", 0, Resting)
            assert cluster.ray.get(actor.rest.remote())
        guest = stranger(TASK, yours.address, tmp_path / "guest")
        said, _ = guest.communicate(timeout=240)
        assert guest.returncode == 0 and (tmp_path / "guest").exists(), said


def test_a_cluster_of_yours_asks_for_your_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "1" * 64)
    with own_cluster():
        """What comes before does not count."""
    with nodes(1) as yours:
        with Cluster(yours.config(), [Demand("rewards", 1, 1.0)]) as cluster:
            actor = cluster.start("rewards", 0, Resting)
            assert cluster.ray.get(actor.rest.remote())
        without = (
            "import sys\nfrom mmrl.config import RayConfig\n"
            "from mmrl.distributed.cluster.session import Cluster\n"
            "with Cluster(RayConfig(address=sys.argv[1]), []): pass"
        )
        said, _ = stranger(without, yours.address, tmp_path / "none").communicate(timeout=240)
    assert ConfigError.__name__ in said and "RAY_AUTH_MODE=token" in said, said
    # a cluster without a token, from the process that had one: it refused what the cluster asks of its driver, and every actor was
    # taken for one that nobody holds
    monkeypatch.undo()
    with nodes(1) as yours, Cluster(yours.config(), [Demand("rewards", 1, 1.0)]) as cluster:
        actor = cluster.start("rewards", 0, Resting)
        assert cluster.ray.get(actor.rest.remote())


def test_the_folder_leaves_room_for_the_paths_of_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path of a socket has at most 107 bytes; Ray started none below a long TMPDIR."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("x" * 60)))
    folder, lock = private_folder()
    try:
        session = "session_2026-11-28_17-58-19_687726_4194304"
        assert len(str(folder / "r" / session / "sockets" / "plasma_store")) <= 107
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        os.close(lock)
        shutil.rmtree(folder)


_HOLDS = """
import sys, time
from mmrl.distributed.cluster.access import private_folder
folder, lock = private_folder()
(folder / "token").write_text("secret")
print(folder, flush=True)
time.sleep(600)
"""


def test_what_killed_runs_left_is_removed_at_the_next_start_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("RAY_TMPDIR", str(place))
    environment = {**ENVIRONMENT, "RAY_TMPDIR": str(place)}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", _HOLDS],
            cwd=REPO,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        killed, alive = [
            Path(run.stdout.readline().strip()) for run in runs if run.stdout is not None
        ]
        runs[0].kill()
        runs[0].wait(60)
        other = place / "ray-notours1"
        other.mkdir()
        (place / "elsewhere").mkdir()
        (place / "elsewhere" / "lock").touch()
        (place / "ray-linkedto").symlink_to(place / "elsewhere")
        assert killed.is_dir()
        mine, lock = private_folder()
        assert not killed.exists()
        assert mine.is_dir() and (alive / "token").exists() and other.is_dir()
        assert (place / "elsewhere" / "lock").exists()
        assert private_folder()[0] != mine and mine.is_dir(), "its own stays, too"
        os.close(lock)
    finally:
        for run in runs:
            run.kill()
            run.wait(60)
        shutil.rmtree(place)
