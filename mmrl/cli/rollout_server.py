"""What `mmrl rollout-server` does around the library: vLLM for a run's model, the line that says it is ready."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from mmrl.config import load_config
from mmrl.errors import ConfigError
from mmrl.operations.listening import bind, check_key

__all__ = ["rollout_server_command"]


def rollout_server_command(
    config: Path,
    overrides: list[str],
    host: str,
    port: int,
    api_key: str | None,
    media_gib: float,
    memory: float,
    max_body_gib: float,
) -> None:
    """Serve rollouts to runs whose engine.vllm.url names this address, until a signal ends it. `memory`: share of the GPU.

    Raises ConfigError, for example for an address that others reach without a key.
    """
    check_key(host, api_key, "replace the weights")
    settings = load_config(config, ["engine.rollout=vllm", *overrides])
    from transformers import AutoConfig

    from mmrl.rollout.build import dtype_of, max_model_len
    from mmrl.rollout.vllm_backend import VLLMBackend, VLLMSettings
    from mmrl.rollout.vllm_parallel import Leader, follow, processes
    from mmrl.rollout.vllm_server import LIMITS, RolloutServer, serve

    v = settings.engine.vllm
    sock = bind(host, port)
    try:
        model_config = AutoConfig.from_pretrained(settings.model.path, trust_remote_code=False)
        limit = int(model_config.get_text_config().max_position_embeddings)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"expected model.path to be a folder or hub name of a vision-language model, found '{settings.model.path}': "
            f"{error}"
        ) from error
    made = VLLMSettings(
        settings.model.path,
        dtype_of(settings),
        min(max_model_len(settings), limit),
        memory,
        v.kv_cache_gib,
        sleep=False,
        seed=settings.seed,
        compare_weights=v.compare_weights,
        tensor_parallel=v.tensor_parallel,
    )
    limits = replace(
        LIMITS, body_bytes=int(max_body_gib * 2**30), held_bytes=int(2 * max_body_gib * 2**30)
    )
    arguments = ["rollout-server", str(config), *overrides, "--memory", str(memory), "--port", "0"]
    with processes(arguments, v.tensor_parallel) as rank:
        backend = VLLMBackend(made)
        if rank:
            follow(backend)
            return
        server = RolloutServer(
            Leader(backend) if v.tensor_parallel > 1 else backend,
            api_key=api_key or None,
            media_bytes=int(media_gib * 2**30),
            limits=limits,
        )
        name = f"[{host}]" if ":" in host else host
        serve(
            server,
            sock,
            lambda: typer.echo(
                f"rollout server at http://{name}:{sock.getsockname()[1]} ({settings.model.path}, {made.dtype}): "
                "engine.vllm.mode=server engine.vllm.url=..."
            ),
        )
    typer.echo("stopped")
