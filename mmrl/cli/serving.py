"""What `mmrl serve` does around the library: settings of the checkpoint, choice of the engine, the line that says it is ready."""

from __future__ import annotations

import importlib.util
from dataclasses import fields, replace
from pathlib import Path

import typer

from mmrl.cli.embodied import is_vla
from mmrl.cli.evaluation import settings_of
from mmrl.config import RunConfig
from mmrl.errors import ConfigError, did_you_mean, install_command, need_package
from mmrl.operations.listening import bind, check_key, is_loopback
from mmrl.serve.limits import Limits
from mmrl.serve.options import ServeOptions

__all__ = ["ServeOptions", "serve_command"]

ENGINES = ("auto", "own", "vllm")


def serve_command(
    checkpoint: str,
    config: Path | None,
    overrides: list[str],
    options: ServeOptions,
    trust_code: bool = False,
) -> None:
    """Serve a checkpoint with the settings it was trained with until a signal ends it."""
    if is_vla(checkpoint):
        raise ConfigError(
            f"'{checkpoint}' acts (it has a vla.json): expected a checkpoint that answers in text; mmrl "
            f"policy-server {checkpoint} serves it to robots and simulators, and suites play it (mmrl eval CHECKPOINT --suite NAME)"
        )
    if options.media_root is not None and not options.media_root.is_dir():
        raise ConfigError(
            f"expected --media-root to be a folder, found {options.media_root}; make it, or leave the option out"
        )
    if not options.no_key:
        check_key(
            options.host,
            options.api_key,
            "use it, and let it read what --media-root and --allow-remote-media allow",
            ", or let everyone in with --no-key",
        )
    engine = _chosen(options)
    # the training run's cache belongs to its data: what clients send is kept in memory
    settings = settings_of(
        checkpoint, config, ["data.cache.dir=null", "data.workers=0", *overrides], trust_code
    )
    if engine == "vllm":
        if options.allow_remote_media and not options.media_hosts:
            raise ConfigError(
                "expected --allow-media-hosts with --allow-remote-media and --engine vllm, found none: vLLM fetches "
                "from private addresses, too; name the hosts, or take --engine own"
            )
        from mmrl.serve.vllm import run_vllm

        run_vllm(settings, options)
    else:
        _serve_own(settings, options)


def _chosen(options: ServeOptions) -> str:
    """'own' or 'vllm'. Raises ConfigError for an unknown name, and for vllm where it is missing or cannot do what is asked."""
    engine = options.engine
    if engine not in ENGINES:
        raise ConfigError(
            f"expected --engine of {', '.join(ENGINES)}, found '{engine}'.{did_you_mean(engine, ENGINES)}"
        )
    if engine == "own":
        return engine
    lacking = _beyond_vllm(options)
    if engine == "vllm":
        if lacking:
            raise ConfigError(lacking)
        mend = f"{install_command('vllm')}, or take --engine own"
        need_package("vllm", "--engine vllm", mend=mend)
        return engine
    import torch

    there = importlib.util.find_spec("vllm") is not None and torch.cuda.is_available()
    return "vllm" if there and not lacking else "own"


def _beyond_vllm(options: ServeOptions) -> str:
    """What is asked for that vLLM's own server does not hold to, as the message of an error; '' for nothing."""
    if not is_loopback(options.host):
        return (
            f"expected --host of this machine (127.0.0.1) with --engine vllm, found {options.host}: vLLM's server asks for the "
            "key at its /v1 only (its /invocations answers everyone the same) and has none of mmrl's bounds; take --engine own, "
            "or let a proxy here ask for the key, bound requests and pass on /v1 alone"
        )
    given = replace(options.limits, workers=Limits.workers)
    names = [f.name for f in fields(Limits) if getattr(given, f.name) != f.default]
    if options.text_bytes is not None:
        names.append("text_bytes")
    if not names:
        return ""
    return (
        f"expected no limits on requests with --engine vllm, found some given ({', '.join(names)}): vLLM's server has its own; "
        "take --engine own, or leave them out"
    )


def _serve_own(settings: RunConfig, options: ServeOptions) -> None:
    from mmrl.policy.loading import load_policy
    from mmrl.serve.app import Service, serve
    from mmrl.serve.engine import ServingEngine
    from mmrl.serve.media import MediaRules
    from mmrl.serve.pool import Readers, warm_up
    from mmrl.serve.preparing import Recipe
    from mmrl.serve.protocol import Defaults

    sock = bind(options.host, options.port)
    warm_up()  # it imports while the model is loaded
    policy = load_policy(settings.model, settings.data, trainable=False)
    r = settings.rollout
    engine = ServingEngine(
        policy, batch_tokens=r.batch_tokens, max_tokens=options.max_tokens or r.max_new_tokens
    )
    defaults = Defaults(
        options.name or settings.model.path, r.temperature, r.top_p, r.top_k, policy.template.system
    )
    rules = MediaRules(options.media_root, options.allow_remote_media, options.media_hosts)
    most = settings.model.max_prompt_tokens
    limits = replace(
        options.limits, text_bytes=16 * most if options.text_bytes is None else options.text_bytes
    )
    readers = Readers(
        Recipe(
            policy.processor,
            policy.base.config,
            policy.template,
            settings.data,
            most,
            defaults,
            rules,
            limits,
        ),
        limits,
    )
    service = Service(engine, readers, defaults, limits, rules, options.api_key or None)
    port = sock.getsockname()[1]
    host = f"[{options.host}]" if ":" in options.host else options.host

    def ready() -> None:
        typer.echo(
            f"serving {defaults.model} at http://{host}:{port}/v1 (own engine on {policy.device}, at most "
            f"{engine.context} tokens, answers of {engine.max_tokens} unless asked otherwise)"
        )

    serve(service, sock, grace_s=options.grace_s, ready=ready)
    typer.echo("stopped")
