"""Hands a checkpoint to vLLM's own OpenAI-compatible server, with the prompts and limits it was trained with.

What vLLM cannot take over: it samples and decodes frames with its own code, holds a whole clip to the pixel limits of one picture
(data.max_pixels, where set), and does not ban media tokens. For the numbers of `mmrl eval` on clips, take --engine own.
"""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any

import torch

from mmrl.config import RunConfig, VLLMConfig
from mmrl.policy.encode import picture_options
from mmrl.policy.families import family_of
from mmrl.policy.loading import load_processor, template_for
from mmrl.rollout.build import dtype_of
from mmrl.serve.options import ServeOptions

__all__ = ["run_vllm", "system_template", "vllm_command"]

_ANSWER_ROOM = 4096  # tokens that suites may ask for beyond the longest prompt


def system_template(chat_template: str, system: str) -> str:
    """A chat template that begins conversations without a system message with `system`, as the run's prompts did."""
    if not system:
        return chat_template
    message = (
        "[{'role': 'system', 'content': [{'type': 'text', 'text': " + json.dumps(system) + "}]}]"
    )
    return (
        "{%- if messages[0]['role'] != 'system' -%}{%- set messages = "
        + message
        + " + messages -%}{%- endif -%}\n"
        + chat_template
    )


def vllm_command(
    settings: RunConfig, options: ServeOptions, processor: Any, hf_config: Any
) -> list[str]:
    """The program and its arguments. The module is called rather than the `vllm` script, which CPU wheels lack; the chat template
    is given as a text, for nobody would remove a file of it."""
    m, d, r = settings.model, settings.data, settings.rollout
    max_tokens = options.max_tokens or r.max_new_tokens
    context = int(getattr(hf_config, "text_config", hf_config).max_position_embeddings)
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        m.path,
        "--host",
        options.host,
        "--port",
        str(options.port),
        "--served-model-name",
        options.name or m.path,
        "--max-model-len",
        str(min(context, m.max_prompt_tokens + max(_ANSWER_ROOM, max_tokens))),
        "--dtype",
        dtype_of(settings),
        "--limit-mm-per-prompt",
        json.dumps({"image": 64, "video": 8}),
        "--chat-template",
        system_template(
            processor.chat_template, template_for(hf_config.model_type, settings.model).system
        ),
        "--chat-template-content-format",
        "openai",
        "--generation-config",
        "vllm",
        "--override-generation-config",
        json.dumps(
            {
                "temperature": r.temperature,
                "top_p": r.top_p,
                "top_k": r.top_k or -1,
                "max_new_tokens": max_tokens,
            }
        ),
        # its own default ends running requests at once
        "--shutdown-timeout",
        str(math.ceil(options.grace_s)),
        "--media-io-kwargs",
        json.dumps({"video": _frames(d.video)}),
    ]
    if bounds := picture_options(processor, d.min_pixels, d.max_pixels):
        command += ["--mm-processor-kwargs", json.dumps(bounds)]
    if text := family_of(hf_config).vllm_text:
        command += ["--hf-overrides", json.dumps({"text_config": dict(text)})]
    command += _engine_options(settings.engine.vllm)
    if options.media_root is not None:
        command += ["--allowed-local-media-path", str(options.media_root.resolve())]
    # vLLM fetches from everywhere unless told from where; no host has this name (RFC 2606)
    command += ["--allowed-media-domains", *(options.media_hosts or ("none.invalid",))]
    return command


def _engine_options(vllm: VLLMConfig) -> list[str]:
    """What engine.vllm says of the machine, where somebody said it: its defaults leave room for a training process beside it."""
    said, options = vllm.model_fields_set, []
    on_gpu = torch.cuda.is_available()
    if on_gpu and "memory" in said:
        options += ["--gpu-memory-utilization", f"{vllm.memory:g}"]
    if not on_gpu and "kv_cache_gib" in said:
        options += ["--kv-cache-memory-bytes", str(int(vllm.kv_cache_gib * 2**30))]
    if vllm.tensor_parallel > 1:
        options += ["--tensor-parallel-size", str(vllm.tensor_parallel)]
    return options


def _frames(video: Any) -> dict[str, float]:
    if video.kind == "uniform":
        return {"num_frames": video.num_frames}
    return {"num_frames": video.max_frames, "fps": video.fps}


def run_vllm(settings: RunConfig, options: ServeOptions) -> None:
    """Become vLLM's server; does not return. The key goes through the environment, where other users cannot read it."""
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(settings.model.path, trust_remote_code=False)
    processor = load_processor(settings.model.path)
    command = vllm_command(settings, options, processor, hf_config)
    sys.stdout.flush()
    keys = {"VLLM_API_KEY": options.api_key} if options.api_key else {}
    os.execve(command[0], command, {**os.environ, "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0", **keys})
