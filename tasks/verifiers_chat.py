"""Chats of `verifiers`, which are those of OpenAI's API, as a policy's: messages with pictures one way, what it wrote the other.

    messages, pictures = shown([{"role": "user", "content": "?"}])      # transformers' form, uint8 (H, W, 3) each
    said("<tool_call>{...}</tool_call>", 1, tools)                      # an assistant's message with tool_calls, and whether it
                                                                        # could be read

A turn is taken as an OpenAI-compatible server takes it: its text is the content, whatever it holds; calls in the spellings of
mmrl.tasks.tool_calls become tool_calls, and what stands before them the content; a call that is broken stays text.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmrl.rewards.parsing import load_json
from mmrl.tasks.openenv_client import ServerError
from mmrl.tasks.openenv_views import picture_of_text
from mmrl.tasks.tool_calls import BadCall, read_calls
from mmrl.tasks.verifiers_process import WorldError

__all__ = ["said", "shown"]

_MOST_MESSAGES = 512
_MOST_PICTURES = 64


def shown(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """Messages in transformers' form, and the pictures of their {'type': 'image'} items in order. Raises WorldError for what a
    policy cannot be shown: sounds, and pictures by a web address."""
    if len(messages) > _MOST_MESSAGES:
        raise WorldError(f"expected at most {_MOST_MESSAGES} messages, found {len(messages)}")
    pictures: list[np.ndarray] = []
    return [_shown(m, pictures) for m in messages], pictures


def _shown(message: Mapping[str, Any], pictures: list[np.ndarray]) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise WorldError(
            f"expected a message of the system, a user, an assistant or a tool, found {role!r}"
        )
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    found: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": [_part(part, pictures) for part in parts],
    }
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_called(call) for call in calls]
    found |= {k: message[k] for k in ("tool_call_id", "name", "reasoning_content") if k in message}
    return found


def _part(part: Any, pictures: list[np.ndarray]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        return {"type": "text", "text": str(part.get("text", ""))}
    if kind != "image_url":
        raise WorldError(
            f"expected contents of text and pictures, found {str(kind)!r}: other media of an environment are not shown"
        )
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    try:
        picture = picture_of_text(url) if isinstance(url, str) else None
    except ServerError as error:
        raise WorldError(str(error)) from error
    if picture is None:
        raise WorldError(
            f"expected pictures as data:image/...;base64, found {str(url)[:60]!r}: none is fetched from an address"
        )
    if len(pictures) >= _MOST_PICTURES:
        raise WorldError(f"expected at most {_MOST_PICTURES} pictures in a turn, found more")
    pictures.append(picture)
    return {"type": "image"}


def _called(call: Any) -> dict[str, Any]:
    """A call of an example in the prompt; chat templates write arguments that are objects."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise WorldError(f"expected tool calls with a function's name, found {str(call)[:80]!r}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # what is no JSON is shown as it is written
        with contextlib.suppress(ValueError, RecursionError):
            arguments = load_json(arguments)
    told = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **told} if isinstance(call.get("id"), str) else told


def said(
    text: str,
    number: int,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    reasoning: bool = False,
) -> tuple[dict[str, Any], bool]:
    """The message of turn `number` as an assistant's, and whether its calls could be read. tools: those that were offered;
    reasoning: what stands before </think> is its reasoning_content and not its content."""
    message: dict[str, Any] = {"role": "assistant"}
    if reasoning and "</think>" in text:
        thoughts, _, text = text.rpartition("</think>")
        message["reasoning_content"] = thoughts.removeprefix("<think>").strip()
        text = text.lstrip("\n")
    readable = True
    if tools:
        try:
            before, found = read_calls(text, tools)
        except BadCall:
            before, found, readable = text, [], False
        if found:
            text = before.strip()
            message["tool_calls"] = [
                {
                    "id": f"call_{number}_{place}",
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": json.dumps(dict(call.arguments), ensure_ascii=False),
                    },
                }
                for place, call in enumerate(found, 1)
            ]
    if text:
        message["content"] = text
    return message, readable
