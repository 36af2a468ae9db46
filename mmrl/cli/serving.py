"""What `mmrl serve` does around the library: settings of the checkpoint, choice of the engine, the line that says it is ready."""
from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import typer

from mmrl.cli.embodied import is_vla
from mmrl.cli.evaluation import settings_of
from mmrl.config import RunConfig
from mmrl.errors import ConfigError, did_you_mean, install_command

__all__ = ["ServeOptions", "serve_command"]

ENGINES = ("auto", "own", "vllm")


@dataclass(frozen=True)
class ServeOptions:
    """The command's options; see `mmrl serve --help`."""

    host: str = "127.0.0.1"
    port: int = 8000
    engine: str = "auto"
    max_tokens: int | None = None
    name: str | None = None
    media_root: Path | None = None
    allow_remote_media: bool = False
    max_body_mib: int = 256
    api_key: str | None = None
    grace_s: float = 30.0


def serve_command(checkpoint: str, config: Path | None, overrides: list[str], options: ServeOptions,
                  trust_code: bool = False) -> None:
    """Serve a checkpoint with the settings it was trained with until a signal ends it."""
    if is_vla(checkpoint):
        raise ConfigError(f"'{checkpoint}' acts (it has a vla.json): expected a checkpoint that answers in text; simulated suites "
                          "play it (mmrl eval CHECKPOINT --suite NAME)")
    if options.media_root is not None and not options.media_root.is_dir():
        raise ConfigError(f"expected --media-root to be a folder, found {options.media_root}; make it, or leave the option out")
    engine = _chosen(options.engine)
    # the training run's cache belongs to its data: what clients send is kept in memory
    settings = settings_of(checkpoint, config, ["data.cache.dir=null", "data.workers=0", *overrides], trust_code)
    if engine == "vllm":
        from mmrl.serve.vllm import run_vllm

        run_vllm(settings, options)
    else:
        _serve_own(settings, options)


def _chosen(engine: str) -> str:
    """'own' or 'vllm'. Raises ConfigError for an unknown name, or vllm where it is not installed."""
    if engine not in ENGINES:
        raise ConfigError(f"expected --engine of {', '.join(ENGINES)}, found '{engine}'.{did_you_mean(engine, ENGINES)}")
    installed = importlib.util.find_spec("vllm") is not None
    if engine == "vllm" and not installed:
        raise ConfigError(f"--engine vllm needs the package vllm, found none: {install_command('vllm')}, or take --engine own")
    if engine == "auto":
        import torch

        return "vllm" if installed and torch.cuda.is_available() else "own"
    return engine


def _serve_own(settings: RunConfig, options: ServeOptions) -> None:
    from mmrl.policy.loading import load_policy
    from mmrl.serve.app import Door, bind, serve
    from mmrl.serve.engine import ServingEngine
    from mmrl.serve.media import MediaRules
    from mmrl.serve.protocol import Defaults

    sock = bind(options.host, options.port)
    policy = load_policy(settings.model, settings.data, trainable=False)
    r = settings.rollout
    engine = ServingEngine(policy, batch_tokens=r.batch_tokens, max_tokens=options.max_tokens or r.max_new_tokens)
    defaults = Defaults(options.name or settings.model.path, r.temperature, r.top_p, r.top_k, policy.template.system)
    rules = MediaRules(options.media_root, options.allow_remote_media, max_bytes=options.max_body_mib << 20)
    door = Door(engine, defaults, rules, options.api_key or None, options.max_body_mib << 20)
    port = sock.getsockname()[1]
    host = f"[{options.host}]" if ":" in options.host else options.host

    def ready() -> None:
        typer.echo(f"serving {defaults.model} at http://{host}:{port}/v1 (own engine on {policy.device}, at most "
                   f"{engine.context} tokens, answers of {engine.max_tokens} unless asked otherwise)")

    serve(door, sock, grace_s=options.grace_s, ready=ready)
    typer.echo("stopped")
