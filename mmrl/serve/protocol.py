"""OpenAI's chat completions, read strictly and written: a setting that this server cannot honour is refused, never ignored.

    asked = read_chat({"model": "m", "messages": [...], "temperature": 0}, defaults)

Media are still references here (`Media`); mmrl/serve/media.py turns them into files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmrl.errors import did_you_mean
from mmrl.serve.errors import RequestError
from mmrl.serve.limits import Limits

__all__ = ["Asked", "Defaults", "Media", "Sampling", "read_body", "read_chat"]

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_TOP_K = 1 << 20
SOUND_FORMATS = ("wav", "mp3", "flac", "ogg", "opus", "m4a", "aac", "webm")

_READ = (
    "model",
    "messages",
    "temperature",
    "top_p",
    "top_k",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "seed",
    "stream",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "media_io_kwargs",
)
_NO_INFLUENCE = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
)
# Known settings that this server has not, with the values that mean "off".
_OFF: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "best_of": (1,),
    "ignore_eos": (False,),
    "skip_special_tokens": (False,),
    "echo": (False,),
    "add_generation_prompt": (True,),
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_PARTS = ("text", "image_url", "image", "video_url", "video", "audio_url", "audio", "input_audio")


@dataclass(frozen=True)
class Defaults:
    """What holds where a request names nothing: the checkpoint's own sampling settings, and its system text."""

    model: str
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    system: str = ""


@dataclass(frozen=True)
class Media:
    """One picture ('image'), clip ('video') or sound ('audio') of a request as its address, and where in the request it stands."""

    kind: str
    url: str
    where: str


@dataclass(frozen=True)
class Sampling:
    """How to sample each of `n` answers. A temperature of 0 is greedy (so is one below 1e-4, where a float has no other token
    left); max_tokens None: the server's."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0


@dataclass(frozen=True)
class Asked:
    """A request: chat messages in transformers' form, their media in order, and how to answer."""

    messages: list[dict[str, Any]]
    media: list[Media]
    sampling: Sampling = field(default_factory=Sampling)
    stream: bool = False
    include_usage: bool = False
    frames: Mapping[str, float] = field(default_factory=dict)  # overrides of data.video


def read_body(
    body: bytes | bytearray | memoryview, defaults: Defaults, limits: Limits | None = None
) -> Asked:
    """The request in the bytes of a body. Raises RequestError: whatever is no request is the client's fault, status 400."""
    try:
        text = bytes(body).decode("utf-8")
        document = json.loads(text)
        # as an escape: raw ones are no UTF-8. Half a character has no bytes for a tokenizer
        if _SURROGATE.search(text):
            json.dumps(document, ensure_ascii=False).encode()
        return read_chat(document, defaults, limits)
    except UnicodeEncodeError as error:
        raise RequestError(
            "expected texts of whole characters, found half of a surrogate pair (\\ud800 to \\udfff alone); drop it"
        ) from error
    except (ValueError, RecursionError, MemoryError) as error:
        # ValueError: no JSON, no UTF-8, an integer of 5000 digits
        if isinstance(error, RequestError):
            raise
        raise RequestError(
            f"expected a JSON body, found something else ({type(error).__name__}: {str(error)[:200]})"
        ) from error


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_chat(body: Any, defaults: Defaults, limits: Limits | None = None) -> Asked:
    """The request in a JSON body. Raises RequestError that names the parameter."""
    limits = limits or Limits()
    if not isinstance(body, Mapping):
        raise RequestError(f"expected a JSON object with model and messages, found {_shown(body)}")
    given = {key: value for key, value in body.items() if value is not None}
    _check_known(given)
    if "model" not in given:
        raise RequestError(f"expected model, found none; set it to '{defaults.model}'", "model")
    if given["model"] != defaults.model:
        raise RequestError(
            f"expected model '{defaults.model}', found {_shown(given['model'])}; GET /v1/models lists it",
            "model",
            status=404,
            code="model_not_found",
        )
    media: list[Media] = []
    messages = _messages(given.get("messages"), media)
    if len(media) > limits.media:
        raise RequestError(
            f"expected at most {limits.media} pictures and videos, found {len(media)}; ask in parts, or start the "
            "server with a larger --max-media",
            "messages",
            code="too_large",
        )
    _check_text(messages, limits)
    if defaults.system and not any(m["role"] == "system" for m in messages):
        messages.insert(
            0, {"role": "system", "content": [{"type": "text", "text": defaults.system}]}
        )
    stream = _flag(given, "stream")
    options = given.get("stream_options", {})
    if not isinstance(options, Mapping) or set(options) - {"include_usage", "include_obfuscation"}:
        raise RequestError(
            f'expected stream_options {{"include_usage": true}}, found {_shown(options)}',
            "stream_options",
        )
    if options and not stream:
        raise RequestError(
            "expected stream_options with stream true only, found it without; drop it",
            "stream_options",
        )
    return Asked(
        messages,
        media,
        _sampling(given, defaults, limits),
        stream,
        _flag(options, "include_usage"),
        _frames(given),
    )


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, lists a thousand deep
        text = f"one {type(value).__name__} too large to show"
    return text if len(text) <= 80 else text[:77] + "..."


def _check_known(given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if key in _OFF:
            if not any(
                value == off and isinstance(value, bool) == isinstance(off, bool)
                for off in _OFF[key]
            ):
                raise RequestError(
                    f"expected no {key}, which this server cannot honour, found {_shown(value)}; drop it, or serve "
                    "with --engine vllm",
                    key,
                    code="unsupported_parameter",
                )
        elif key not in _READ and key not in _NO_INFLUENCE:
            raise RequestError(
                f"expected parameters of {', '.join(_READ)}, found {_shown(key)}; drop it, or serve with --engine "
                f"vllm.{did_you_mean(str(key), _READ)}",
                str(key)[:80],
                code="unknown_parameter",
            )


def _flag(given: Mapping[str, Any], key: str) -> bool:
    value = given.get(key, False)
    if not isinstance(value, bool):
        raise RequestError(f"expected {key} true or false, found {_shown(value)}", key)
    return value


def _number(given: Mapping[str, Any], key: str, default: float, low: float, high: float) -> float:
    value = given.get(key, default)
    # compared before it is made a float: 10^400 is a whole number in JSON, and NaN is not between any two
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise RequestError(f"expected {key} from {low:g} to {high:g}, found {_shown(value)}", key)
    return float(value)


def _count(given: Mapping[str, Any], key: str, low: int, high: int) -> int | None:
    value = given.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(
            f"expected {key} as a whole number from {low} to {high}, found {_shown(value)}", key
        )
    return value


def _sampling(given: Mapping[str, Any], defaults: Defaults, limits: Limits) -> Sampling:
    tokens = {
        key: _count(given, key, 1, 1 << 30) for key in ("max_tokens", "max_completion_tokens")
    }
    if len({value for value in tokens.values() if value is not None}) > 1:
        raise RequestError(
            f"expected max_tokens or max_completion_tokens, found both with {tokens['max_tokens']} and "
            f"{tokens['max_completion_tokens']}; drop one",
            "max_tokens",
        )
    top_p = _number(given, "top_p", defaults.top_p, 0, 1)
    if top_p == 0:
        raise RequestError(
            "expected top_p above 0, found 0; write temperature 0 for the most likely tokens",
            "top_p",
        )
    top_k = defaults.top_k if given.get("top_k") is None else _count(given, "top_k", -1, MAX_TOP_K)
    temperature = _number(given, "temperature", defaults.temperature, 0, 10)
    logprobs = _flag(given, "logprobs")
    tops = _count(given, "top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    if tops and not logprobs:
        raise RequestError(
            f"expected top_logprobs with logprobs true only, found {tops} without; set logprobs to true",
            "top_logprobs",
        )
    return Sampling(
        n=_count(given, "n", 1, MAX_CHOICES) or 1,
        temperature=temperature if temperature >= 1e-4 else 0.0,
        top_p=top_p,
        top_k=max(0, top_k or 0),
        max_tokens=tokens["max_tokens"] or tokens["max_completion_tokens"],
        stop=_stops(given.get("stop", []), limits.stop_chars),
        seed=_count(given, "seed", -(1 << 63), (1 << 64) - 1),
        logprobs=logprobs,
        top_logprobs=tops,
    )


def _frames(given: Mapping[str, Any]) -> dict[str, float]:
    """vLLM's media_io_kwargs, as lmms-eval sends it: {"video": {"num_frames": 16}} or {"video": {"fps": 2}}."""
    value = given.get("media_io_kwargs", {})
    video = (
        value.get("video", {})
        if isinstance(value, Mapping) and not set(value) - {"video"}
        else None
    )
    if not isinstance(video, Mapping) or set(video) - {"num_frames", "fps"} or len(video) > 1:
        raise RequestError(
            'expected media_io_kwargs as {"video": {"num_frames": 16}} or {"video": {"fps": 2}}, found '
            f"{_shown(value)}",
            "media_io_kwargs",
        )
    if "fps" in video:
        return {"fps": _number(video, "fps", 1, 1e-3, 1e3)}
    return {"num_frames": n} if (n := _count(video, "num_frames", 1, 1 << 20)) else {}


def _stops(value: Any, most: int) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(s, str) and s for s in stops)
    ):
        raise RequestError(
            f"expected stop as a text or up to {MAX_STOPS} texts, none empty, found {_shown(value)}",
            "stop",
        )
    if (length := sum(map(len, stops))) > most:
        raise RequestError(
            f"expected stop texts of at most {most} characters together, found {length}; shorten them, or start the "
            "server with a larger --max-stop-chars",
            "stop",
            code="too_large",
        )
    return tuple(dict.fromkeys(stops))


def _check_text(messages: Sequence[Mapping[str, Any]], limits: Limits) -> None:
    """Before it is tokenised, which takes seconds per megabyte."""
    length = sum(
        len(item["text"].encode())
        for m in messages
        for item in m["content"]
        if item["type"] == "text"
    )
    if length > limits.text_bytes:
        raise RequestError(
            f"expected at most {limits.text_bytes:,} bytes of text, found {length:,}: more than the longest prompt "
            "can have; shorten it, or start the server with a larger --max-text-kib",
            "messages",
            code="context_length_exceeded",
        )


def _messages(value: Any, media: list[Media]) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise RequestError(
            f"expected messages as a list of at least one message, found {_shown(value)}",
            "messages",
        )
    messages = [_message(message, f"messages[{i}]", media) for i, message in enumerate(value)]
    if messages[-1]["role"] != "user":
        raise RequestError(
            f"expected the last message from role user, found {messages[-1]['role']}; this server does not continue "
            "answers",
            f"messages[{len(messages) - 1}].role",
        )
    if any(m["role"] == "system" for m in messages[1:]):
        raise RequestError(
            "expected a system message in the first place only, found one further down; move it up",
            "messages",
        )
    return messages


def _message(message: Any, where: str, media: list[Media]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"expected {where} as an object with role and content, found {_shown(message)}", where
        )
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(
            f"expected {where}.role of {', '.join(_ROLES)}, found {_shown(role)}", f"{where}.role"
        )
    extra = [
        key
        for key, value in message.items()
        if key not in ("role", "content", "name") and value not in (None, [], "")
    ]
    if extra:
        raise RequestError(
            f"expected {where} with role and content, found {_shown(extra[0])} too; drop it",
            f"{where}.{extra[0]}",
        )
    content = message.get("content")
    if isinstance(content, str):
        return {"role": _ROLES[role], "content": [{"type": "text", "text": content}]}
    if not isinstance(content, list) or not content:
        raise RequestError(
            f"expected {where}.content as a text or a list of parts, found {_shown(content)}",
            f"{where}.content",
        )
    return {
        "role": _ROLES[role],
        "content": [
            _part(part, f"{where}.content[{i}]", role, media) for i, part in enumerate(content)
        ],
    }


def _part(part: Any, where: str, role: str, media: list[Media]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _PARTS:
        found = _shown(part if kind is None else kind)
        raise RequestError(
            f"expected {where}.type of {', '.join(_PARTS)}, found {found}", f"{where}.type"
        )
    _only(part, ("type", kind), where)
    value = part.get(kind)
    if kind == "text":
        if not isinstance(value, str):
            raise RequestError(f"expected {where}.text as a text, found {_shown(value)}", where)
        return {"type": "text", "text": value}
    if role != "user":
        raise RequestError(
            f"expected pictures, videos and sounds in messages from role user, found one from {role}",
            where,
        )
    if kind == "input_audio":
        media.append(Media("audio", _spoken(value, f"{where}.{kind}"), where))
        return {"type": "audio"}
    if isinstance(value, Mapping):
        _only(value, ("url", "detail") if kind == "image_url" else ("url",), f"{where}.{kind}")
        if value.get("detail") not in (None, "auto", "low", "high"):
            raise RequestError(
                f"expected detail of auto, low, high, found {_shown(value['detail'])}",
                f"{where}.{kind}.detail",
            )
        value = value.get("url")
    if not isinstance(value, str) or not value:
        raise RequestError(
            f"expected {where}.{kind}.url as an address such as data:image/png;base64,... , found {_shown(value)}",
            f"{where}.{kind}",
        )
    media.append(Media(kind.removesuffix("_url"), value, where))
    return {"type": media[-1].kind}


def _spoken(value: Any, where: str) -> str:
    """OpenAI's input_audio, {data: base64, format: wav}, as an address."""
    if not isinstance(value, Mapping):
        raise RequestError(
            f"expected {where} as an object with data and format, found {_shown(value)}", where
        )
    _only(value, ("data", "format"), where)
    data, form = value.get("data"), value.get("format")
    if not isinstance(data, str) or not data:
        raise RequestError(
            f"expected {where}.data as the file in base64, found {_shown(data)}", f"{where}.data"
        )
    if not isinstance(form, str) or form not in SOUND_FORMATS:
        raise RequestError(
            f"expected {where}.format of {', '.join(SOUND_FORMATS)}, found {_shown(form)}.{did_you_mean(str(form), SOUND_FORMATS)}",
            f"{where}.format",
        )
    return f"data:audio/{form};base64,{data}"


def _only(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    extra = [key for key, value in given.items() if key not in known and value is not None]
    if extra:
        raise RequestError(
            f"expected {where} with {' and '.join(known)} only, found {_shown(extra[0])}; frames and picture sizes "
            "are the checkpoint's (mmrl serve CHECKPOINT data.video.fps=... changes them)",
            f"{where}.{extra[0]}",
        )
