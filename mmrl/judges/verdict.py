"""What a judge said: a verdict, a comparison, their form in a store, and what of a server's document they are read from."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.judges.rubrics import Unread

__all__ = [
    "SHOWN",
    "Comparison",
    "Verdict",
    "check_whole",
    "counted",
    "from_row",
    "reply_of",
    "to_row",
    "together",
    "top_of",
    "usage_of",
]

SHOWN = 2000
"""Characters kept of a reply: its end."""


@dataclass(frozen=True)
class Verdict:
    """What a judge said. `value` in [0, 1], None without one, and then `reason` says why.

    `text`: the end of its reply. `calls`: requests sent for it; `tokens`: of prompt and reply, as the server counts them; `cost` in
    the currency of the prices; `kept`: it was known from before, and nothing was sent now (calls, tokens and cost are those it
    had).
    `spread`: largest less smallest of several votes.
    """

    value: float | None
    reason: str | None = None
    text: str = ""
    calls: int = 0
    tokens: tuple[int, int] = (0, 0)
    cost: float = 0.0
    seconds: float = 0.0
    kept: bool = False
    spread: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """The share of the first answer in [0, 1] (0.5: neither is better), None where a verdict is missing; `agreed`: whether both
    orders named the same one, None where only one was asked."""

    value: float | None
    agreed: bool | None
    verdicts: tuple[Verdict, ...]


def counted(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """What verdicts add to the metrics of a completion or a rollout: how many were asked for, failed and were known from before,
    with requests, tokens and cost."""
    numbers = {
        "judge_asked": len(verdicts),
        "judge_failed": sum(v.value is None for v in verdicts),
        "judge_kept": sum(v.kept for v in verdicts),
        "judge_calls": sum(v.calls for v in verdicts),
        "judge_tokens": sum(sum(v.tokens) for v in verdicts),
        "judge_cost": math.fsum(v.cost for v in verdicts),
    }
    return {name: float(value) for name, value in numbers.items()}


def _choice(document: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = document.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise Unread("judge_junk", f"no choices in {json.dumps(document)[:120]}")
    return choices[0]


def reply_of(document: Mapping[str, Any]) -> str:
    message = _choice(document).get("message")
    text = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(text, str):
        raise Unread("judge_junk", f"expected a message with a text, found {message!r:.120}")
    return text


def check_whole(document: Mapping[str, Any]) -> None:
    """Raises Unread for a reply that was cut off: its end may be what it quotes."""
    reason = _choice(document).get("finish_reason")
    if reason not in (None, "stop", "eos", "end_turn"):
        raise Unread(
            "judge_junk", f"the reply was cut off (finish_reason {reason!r:.40}); raise max_tokens"
        )


def top_of(document: Mapping[str, Any]) -> Sequence[Any]:
    try:
        top = _choice(document)["logprobs"]["content"][0]["top_logprobs"]
    except (KeyError, IndexError, TypeError):
        top = None
    if not isinstance(top, list):
        raise Unread("judge_no_logprobs", "the server gives no top_logprobs; use read json")
    return top


def usage_of(document: Mapping[str, Any]) -> tuple[int, int]:
    usage = document.get("usage")
    found = [
        usage.get(name) if isinstance(usage, Mapping) else 0
        for name in ("prompt_tokens", "completion_tokens")
    ]
    prompt, reply = (n if type(n) is int and 0 <= n < 1 << 40 else 0 for n in found)
    return prompt, reply


def together(votes: Sequence[Verdict]) -> Verdict:
    """One verdict of several votes: the mean of those that have a value; none of them has: the first one's reason."""
    values = [v.value for v in votes if v.value is not None]
    reasons = [v.reason for v in votes if v.reason is not None]
    return Verdict(
        math.fsum(values) / len(values) if values else None,
        None if values else reasons[0],
        "\n---\n".join(v.text for v in votes)[-SHOWN:],
        sum(v.calls for v in votes),
        (sum(v.tokens[0] for v in votes), sum(v.tokens[1] for v in votes)),
        math.fsum(v.cost for v in votes),
        max(v.seconds for v in votes),
        all(v.kept for v in votes),
        max(values) - min(values) if values else 0.0,
    )


def to_row(verdict: Verdict) -> dict[str, Any]:
    row = dataclasses.asdict(verdict)
    del row["kept"]
    return row


def from_row(row: Mapping[str, Any]) -> Verdict | None:
    """The verdict of a line of a store; None for what is none (the folder may be anybody's)."""
    try:
        value = None if row["value"] is None else float(row["value"])
        if value is not None and not 0.0 <= value <= 1.0:
            return None
        return Verdict(
            value,
            None if row["reason"] is None else str(row["reason"]),
            str(row["text"]),
            int(row["calls"]),
            (int(row["tokens"][0]), int(row["tokens"][1])),
            float(row["cost"]),
            float(row["seconds"]),
            True,
        )
    except (KeyError, TypeError, ValueError, IndexError):
        return None
