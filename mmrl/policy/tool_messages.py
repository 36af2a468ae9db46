"""Tools in chats whose template has no place for them, such as Qwen2.5-VL's, or asks for calls in signs of its own, such as
Mistral's: in the words that Qwen's own templates use.

    with_tools([{"role": "user", "content": "?"}], tools)       # a system message that describes them
    without_tool_role({"role": "tool", "content": "4"})         # a user's message: <tool_response> 4 </tool_response>

The text is that of the chat template of Qwen3-VL-Instruct (and Qwen2.5-Instruct), which the models of the family are trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.task import CallSpelling

__all__ = ["CALL_TAG", "PROBE", "call_spelling", "with_tools", "without_tool_role"]

PROBE: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
"""A tool that shows whether a template writes tools."""
CALL_TAG = "<tool_call>"
"""What stands around a call in every spelling that is read."""
_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures "
    "within <tools></tools> XML tags:\n<tools>"
)
_BEHIND = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> "
    'XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


def call_spelling(chat_template: Any) -> CallSpelling:
    """How a chat template (transformers': a text, several by name, or None) asks for calls of tools; JSON where it does not ask."""
    texts = chat_template.values() if isinstance(chat_template, Mapping) else [chat_template or ""]
    whole = "".join(texts)
    return "function" if "<function=" in whole else "arg_key" if "<arg_key>" in whole else "json"


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """`messages` with the tools described at the end of their system message, which is made where there is none."""
    described = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in tools)
    said = f"{_BEFORE}{described}{_BEHIND}"
    chat = [dict(m) for m in messages]
    if not chat or chat[0]["role"] != "system":
        return [{"role": "system", "content": said}, *chat]
    system = chat[0]["content"]
    if isinstance(system, str):
        chat[0]["content"] = f"{system}\n\n{said}"
    else:
        chat[0]["content"] = [*system, {"type": "text", "text": f"\n\n{said}"}]
    return chat


def without_tool_role(message: Mapping[str, Any]) -> dict[str, Any]:
    """What a tool answered, as the user's message; other messages as they are."""
    if message["role"] != "tool":
        return dict(message)
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    begin, end = (
        {"type": "text", "text": text} for text in ("<tool_response>\n", "\n</tool_response>")
    )
    return {"role": "user", "content": [begin, *parts, end]}
