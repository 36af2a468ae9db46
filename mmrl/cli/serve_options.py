"""`mmrl serve`: its options and what each bounds. Defaults are those of mmrl.serve.limits.Limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from mmrl.serve.limits import Limits, default_workers

__all__ = ["TrustCode", "serve"]

TrustCode = Annotated[
    bool,
    Option(
        "--trust-code",
        help="settings found in the checkpoint or the log may name code, folders "
        "and hosts: only where they are your own (SECURITY.md)",
    ),
]

_L = Limits()
_MIB, _MEGA = 1 << 20, 1_000_000
_BOUNDS = "Limits on requests"  # a part of --help
_MEDIA = "Media"


def serve(
    checkpoint: Annotated[str, typer.Argument(help="model folder or hub name")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="overrides such as train.steps=50 optim.lr=1e-6")
    ] = None,
    host: Annotated[
        str, Option(help="address to listen at; beyond this machine's own a key is needed")
    ] = "127.0.0.1",
    port: Annotated[int, Option(help="port; 0 takes a free one", min=0, max=65535)] = 8000,
    engine: Annotated[
        str,
        Option(
            help="own; vllm: vLLM's server, for this machine alone and without the limits below; auto: vllm where it and a "
            "GPU are there, and it does what is asked"
        ),
    ] = "auto",
    max_tokens: Annotated[
        int | None,
        Option(
            help="length of answers whose request names none; default rollout.max_new_tokens", min=1
        ),
    ] = None,
    name: Annotated[
        str | None, Option("--served-model-name", help="what clients call it; default: CHECKPOINT")
    ] = None,
    config: Annotated[
        Path | None, Option(help="take model, pixel and frame settings from here")
    ] = None,
    api_key: Annotated[
        str | None, Option(envvar="MMRL_API_KEY", help="what clients must send as their key")
    ] = None,
    no_key: Annotated[bool, Option("--no-key", help="let everyone in who reaches --host")] = False,
    grace: Annotated[
        float, Option(help="seconds that running requests have after SIGTERM", min=0)
    ] = 30.0,
    media_root: Annotated[
        Path | None, Option(help="clients may name files below this folder", rich_help_panel=_MEDIA)
    ] = None,
    allow_remote_media: Annotated[
        bool,
        Option(
            "--allow-remote-media",
            rich_help_panel=_MEDIA,
            help=(
                "clients may make this machine fetch http(s) addresses of the public internet, ports 80 and 443"
            ),
        ),
    ] = False,
    allow_media_hosts: Annotated[
        list[str] | None,
        Option(
            rich_help_panel=_MEDIA,
            help=(
                "HOST or HOST:PORT to fetch from wherever it is, also a private address; repeatable"
            ),
        ),
    ] = None,
    fetch_timeout: Annotated[
        float,
        Option(help="seconds to fetch all media of a request", min=0.1, rich_help_panel=_MEDIA),
    ] = _L.fetch_s,
    max_fetches: Annotated[
        int, Option(help="fetched at once", min=1, rich_help_panel=_MEDIA)
    ] = _L.fetches,
    max_body_mib: Annotated[
        int,
        Option(help="largest request, and largest file fetched", min=1, rich_help_panel=_BOUNDS),
    ] = _L.body_bytes // _MIB,
    max_held_mib: Annotated[
        int,
        Option(
            help="all requests, files fetched and pixels that wait, together",
            min=1,
            rich_help_panel=_BOUNDS,
        ),
    ] = _L.held_bytes // _MIB,
    max_text_kib: Annotated[
        int | None,
        Option(
            help="texts of a request; default 16 bytes per model.max_prompt_tokens",
            min=1,
            rich_help_panel=_BOUNDS,
        ),
    ] = None,
    max_stop_chars: Annotated[
        int, Option(help="stop texts of a request together", min=1, rich_help_panel=_BOUNDS)
    ] = _L.stop_chars,
    max_media: Annotated[
        int, Option(help="pictures and clips of a request", min=0, rich_help_panel=_BOUNDS)
    ] = _L.media,
    max_megapixels: Annotated[
        float, Option(help="one picture, or one frame of a clip", min=0.01, rich_help_panel=_BOUNDS)
    ] = _L.pixels / _MEGA,
    max_total_megapixels: Annotated[
        float,
        Option(
            help="pictures and chosen frames of a request together",
            min=0.01,
            rich_help_panel=_BOUNDS,
        ),
    ] = _L.total_pixels / _MEGA,
    max_clip_frames: Annotated[
        int, Option(help="frames that a clip holds", min=1, rich_help_panel=_BOUNDS)
    ] = _L.clip_frames,
    max_connections: Annotated[
        int,
        Option(
            help="connections; those without a request go first", min=1, rich_help_panel=_BOUNDS
        ),
    ] = _L.connections,
    max_waiting: Annotated[
        int, Option(help="requests that wait for their turn", min=1, rich_help_panel=_BOUNDS)
    ] = _L.waiting,
    header_timeout: Annotated[
        float, Option(help="seconds for the head of a request", min=0.1, rich_help_panel=_BOUNDS)
    ] = _L.header_s,
    body_timeout: Annotated[
        float, Option(help="seconds for its body", min=0.1, rich_help_panel=_BOUNDS)
    ] = _L.body_s,
    send_timeout: Annotated[
        float,
        Option(
            help="seconds that a client may take none of its answer, or be behind with it",
            min=0.1,
            rich_help_panel=_BOUNDS,
        ),
    ] = _L.send_s,
    max_unread: Annotated[
        int,
        Option(
            help="pieces and log-probs of an answer that its client may be behind",
            min=1,
            rich_help_panel=_BOUNDS,
        ),
    ] = _L.unread,
    workers: Annotated[
        int | None,
        Option(
            help="processes that read requests: pictures, clips, text; the first takes small "
            "requests only. Default: half of the cores, 2 to 8",
            min=1,
            rich_help_panel=_BOUNDS,
        ),
    ] = None,
    prepare_timeout: Annotated[
        float,
        Option(help="seconds to decode and tokenise a request", min=0.1, rich_help_panel=_BOUNDS),
    ] = _L.prepare_s,
    worker_memory_gib: Annotated[
        float,
        Option(help="memory to decode and tokenise a request", min=0.1, rich_help_panel=_BOUNDS),
    ] = _L.worker_bytes / 2**30,
    trust_code: TrustCode = False,
) -> None:
    """Serve a checkpoint behind an OpenAI-compatible endpoint, for lmms-eval, VLMEvalKit and other clients."""
    from mmrl.cli.serving import ServeOptions, serve_command

    limits = Limits(
        body_bytes=max_body_mib * _MIB,
        held_bytes=max_held_mib * _MIB,
        stop_chars=max_stop_chars,
        media=max_media,
        pixels=int(max_megapixels * _MEGA),
        total_pixels=int(max_total_megapixels * _MEGA),
        clip_frames=max_clip_frames,
        connections=max_connections,
        header_s=header_timeout,
        body_s=body_timeout,
        send_s=send_timeout,
        unread=max_unread,
        waiting=max_waiting,
        workers=workers or default_workers(),
        prepare_s=prepare_timeout,
        worker_bytes=int(worker_memory_gib * 2**30),
        fetch_s=fetch_timeout,
        fetches=max_fetches,
    )
    serve_command(
        checkpoint,
        config,
        overrides or [],
        ServeOptions(
            host,
            port,
            engine,
            max_tokens,
            name,
            media_root,
            allow_remote_media,
            tuple(allow_media_hosts or ()),
            api_key,
            no_key,
            grace,
            limits,
            None if max_text_kib is None else max_text_kib << 10,
        ),
        trust_code,
    )
