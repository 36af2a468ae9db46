"""`--model mmrl` for lmms-eval (0.6 or later, found through the entry-point group lmms_eval.models): its OpenAI client, pointed at
`mmrl serve`, that sends clips as files instead of frames, so that frames are those the checkpoint was trained with.

    mmrl serve CHECKPOINT --media-root ~/.cache/huggingface
    python -m lmms_eval --model mmrl --model_args base_url=http://127.0.0.1:8000/v1 --tasks mme

Give `max_frames_num` to choose the number of frames instead. lmms-eval is imported only when it asks.
"""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["manifest"]

_ADDRESS = "http://127.0.0.1:8000/v1"


def manifest() -> Any:
    """What lmms-eval's registry loads."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest("mmrl", chat_class_path=f"{__name__}.Served")


def __getattr__(name: str) -> Any:
    if name == "Served":
        return _served()
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


@functools.cache
def _served() -> type:
    from lmms_eval.models.chat.openai import OpenAICompatible

    class Served(OpenAICompatible):
        """lmms-eval's OpenAI client with the address, name and frames of a served checkpoint."""

        def __init__(
            self,
            *args: Any,
            base_url: str = _ADDRESS,
            api_key: str = "none",
            max_frames_num: int | None = None,
            **kwargs: Any,
        ) -> None:
            frames = {} if max_frames_num is None else {"max_frames_num": max_frames_num}
            super().__init__(
                *args,
                base_url=base_url,
                api_key=api_key,
                **{"pass_video_url": True, **frames, **kwargs},
            )
            if not {"model", "model_version"} & set(kwargs):
                self.model_version = self.client.models.list().data[0].id
            if max_frames_num is None:
                self.client.chat.completions.create = functools.partial(
                    _without_frames, self.client.chat.completions.create
                )

    return Served


def _without_frames(create: Any, **payload: Any) -> Any:
    extra = {
        key: value
        for key, value in payload.pop("extra_body", {}).items()
        if key != "media_io_kwargs"
    }
    return create(**payload, **({"extra_body": extra} if extra else {}))
