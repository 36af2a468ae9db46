"""What `mmrl policy-server` does around the library: a VLA checkpoint behind openpi's or lerobot's protocol, the line that says it
is ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mmrl.cli.embodied import is_vla, quiet
from mmrl.errors import ConfigError, did_you_mean
from mmrl.operations.listening import bind, check_key, is_loopback

if TYPE_CHECKING:
    from mmrl.robotics.acting import ActingPolicy
    from mmrl.robotics.policy_service import ServedPolicy

__all__ = ["policy_server_command"]


PROTOCOLS = ("openpi", "lerobot")


def policy_server_command(
    checkpoint: str,
    config: Path | None,
    overrides: list[str],
    *,
    protocol: str,
    host: str,
    port: int,
    api_key: str | None,
    no_key: bool,
    cameras: Sequence[str],
    fps: float,
    max_message_mib: int,
    max_clients: int,
    idle_s: float,
    trust_code: bool = False,
    **served: Any,
) -> None:
    """Serve a policy that acts to clients of a protocol until a signal ends it. served: name, seed, temperature and prompt of
    ServedPolicy. Raises ConfigError."""
    if protocol not in PROTOCOLS:
        raise ConfigError(
            f"expected --protocol {' or '.join(PROTOCOLS)}, found {protocol!r}.{did_you_mean(protocol, PROTOCOLS)}"
        )
    if Path(checkpoint).is_dir() and not is_vla(checkpoint):
        raise ConfigError(
            f"expected a VLA checkpoint (a folder with vla.json), found '{checkpoint}', which answers in text: mmrl serve "
            f"{checkpoint} serves it"
        )
    _check_reach(protocol, host, api_key, no_key, cameras)
    from mmrl.robotics.policy_service import PolicyLimits

    limits = PolicyLimits(message_bytes=max_message_mib << 20, clients=max_clients, idle_s=idle_s)
    served = {**served, "name": served["name"] or checkpoint, "limits": limits}
    load = partial(_loaded, checkpoint, config, overrides, trust_code)
    if protocol == "openpi":
        _serve_openpi(load, host, port, {**served, "key": api_key or ""})
    else:
        _serve_lerobot(load, host, port, {**served, "cameras": _named(cameras), "fps": fps})
    typer.echo("stopped")


def _check_reach(
    protocol: str, host: str, api_key: str | None, no_key: bool, cameras: Sequence[str]
) -> None:
    """Raises ConfigError for a server that others reach without a key, and for options that the protocol has no use for."""
    if protocol == "openpi":
        if cameras:
            raise ConfigError(
                "expected --camera with --protocol lerobot, whose robots name their cameras, found it with openpi"
            )
        if not no_key:
            check_key(host, api_key, "use the policy", ", or let everyone in with --no-key")
        return
    if api_key:
        raise ConfigError(
            "expected no key with --protocol lerobot, whose clients cannot send one, found one; drop --api-key and unset "
            "MMRL_API_KEY"
        )
    if not no_key and not is_loopback(host):
        raise ConfigError(
            f"expected --host 127.0.0.1 with --protocol lerobot, whose clients send no key, found {host}: whoever reaches it "
            "could use the policy; lead its port there through SSH, or let everyone in with --no-key"
        )


def _named(cameras: Sequence[str]) -> dict[str, str]:
    """The robot's names of cameras, given as OURS=THEIRS. Raises ConfigError."""
    pairs = [one.partition("=") for one in cameras]
    if wrong := next((one for one in pairs if not all(one)), None):
        raise ConfigError(f"expected --camera OURS=THEIRS, found {''.join(wrong)!r}")
    return {ours: theirs for ours, _, theirs in pairs}


def _loaded(
    checkpoint: str, config: Path | None, overrides: list[str], trust_code: bool
) -> ActingPolicy:
    from mmrl.robotics.config import ActionConfig, VLAConfig
    from mmrl.robotics.load import load_vla
    from mmrl.robotics.suite_runs import base_settings

    base = base_settings(checkpoint, config, overrides, trust_code=trust_code, say=typer.echo)
    quiet(base)
    # the policy's own settings, as mmrl eval takes them
    settings = base.model_copy(update={"action": ActionConfig(), "vla": VLAConfig()})
    return load_vla(settings, trainable=False)


def _ready(scheme: str, host: str, port: int, service: ServedPolicy) -> None:
    shown, codec = f"[{host}]" if ":" in host else host, service.policy.codec
    typer.echo(
        f"policy server at {scheme}://{shown}:{port} ({service.name}: chunks of {codec.steps} x {codec.dim}, "
        f"cameras {', '.join(service.policy.settings.cameras)})"
    )


def _serve_openpi(
    load: Callable[[], ActingPolicy], host: str, port: int, served: dict[str, Any]
) -> None:
    from mmrl.robotics.openpi_messages import need_packages
    from mmrl.robotics.openpi_server import PolicyServer, PolicyService

    need_packages("mmrl policy-server")
    sock = bind(host, port)  # before the policy is loaded, which takes long
    service = PolicyService(load(), **served)
    ready = partial(_ready, "ws", host, sock.getsockname()[1], service)
    PolicyServer(service, sock, ready).run()


def _serve_lerobot(
    load: Callable[[], ActingPolicy], host: str, port: int, served: dict[str, Any]
) -> None:
    from mmrl.robotics.lerobot_server import RobotServer, RobotService

    limits = served["limits"]
    server = RobotServer(host, port, limits.clients, limits.idle_s)
    service = RobotService(load(), **served)
    server.run(service, partial(_ready, "lerobot", host, server.port, service))
