"""What `mmrl policy-server` does around the library: a VLA checkpoint behind openpi's websocket protocol, the line that says it is
ready."""

from __future__ import annotations

from pathlib import Path

import typer

from mmrl.cli.embodied import is_vla, quiet
from mmrl.errors import ConfigError
from mmrl.operations.listening import bind, check_key

__all__ = ["policy_server_command"]


def policy_server_command(
    checkpoint: str,
    config: Path | None,
    overrides: list[str],
    *,
    host: str,
    port: int,
    api_key: str | None,
    no_key: bool,
    name: str | None,
    seed: int,
    temperature: float,
    prompt: str,
    max_message_mib: int,
    max_clients: int,
    idle_s: float,
    trust_code: bool = False,
) -> None:
    """Serve a policy that acts to openpi's clients until a signal ends it. Raises ConfigError."""
    if Path(checkpoint).is_dir() and not is_vla(checkpoint):
        raise ConfigError(
            f"expected a VLA checkpoint (a folder with vla.json), found '{checkpoint}', which answers in text: mmrl serve "
            f"{checkpoint} serves it"
        )
    if not no_key:
        check_key(host, api_key, "use the policy", ", or let everyone in with --no-key")
    from mmrl.robotics.config import ActionConfig, VLAConfig
    from mmrl.robotics.load import load_vla
    from mmrl.robotics.openpi_messages import need_packages
    from mmrl.robotics.openpi_server import PolicyLimits, PolicyServer, PolicyService
    from mmrl.robotics.suite_runs import base_settings

    need_packages("mmrl policy-server")
    base = base_settings(checkpoint, config, overrides, trust_code=trust_code, say=typer.echo)
    quiet(base)
    sock = bind(host, port)
    # the policy's own settings, as mmrl eval takes them
    settings = base.model_copy(update={"action": ActionConfig(), "vla": VLAConfig()})
    policy = load_vla(settings, trainable=False)
    limits = PolicyLimits(message_bytes=max_message_mib << 20, clients=max_clients, idle_s=idle_s)
    service = PolicyService(
        policy, name or checkpoint, api_key or "", seed, temperature, prompt, limits
    )
    shown, codec = f"[{host}]" if ":" in host else host, policy.codec

    def ready() -> None:
        typer.echo(
            f"policy server at ws://{shown}:{sock.getsockname()[1]} ({service.name}: chunks of {codec.steps} x {codec.dim}, "
            f"cameras {', '.join(policy.settings.cameras)})"
        )

    PolicyServer(service, sock, ready).run()
    typer.echo("stopped")
