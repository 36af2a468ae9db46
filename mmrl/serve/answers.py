"""Events of the engine -> OpenAI's JSON: one `chat.completion`, or `chat.completion.chunk`s."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from mmrl.serve.decode import Piece, TokenLogp
from mmrl.serve.protocol import Asked

__all__ = ["Answer"]


class Answer:
    """Collects the pieces of one request and shows them."""

    def __init__(self, asked: Asked, model: str) -> None:
        n = asked.sampling.n
        self._asked, self._model = asked, model
        self._id, self._created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        self._texts = [""] * n
        self._token_logprobs: list[list[TokenLogp]] = [[] for _ in range(n)]
        self._reasons: list[str | None] = [None] * n
        self._tokens = [0] * n
        self._begun = [False] * n
        self.prompt_tokens = 0

    @property
    def completion_tokens(self) -> int:
        """Tokens written so far, over all choices."""
        return sum(self._tokens)

    def add(self, piece: Piece) -> bool:
        """Take a piece; True when it was the last one of the last choice."""
        self._texts[piece.choice] += piece.text
        self._token_logprobs[piece.choice] += piece.logprobs
        self._tokens[piece.choice] = piece.tokens
        self._reasons[piece.choice] = piece.reason
        return all(reason is not None for reason in self._reasons)

    def usage(self) -> dict[str, int]:
        """Token counts; the prompt counts once however many choices it has."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    def completion(self) -> dict[str, Any]:
        """The whole answer."""
        return {
            **self._head("chat.completion"),
            "usage": self.usage(),
            "choices": [
                {
                    "index": i,
                    "message": {"role": "assistant", "content": text, "refusal": None},
                    "finish_reason": self._reasons[i],
                    "logprobs": self._logprobs(self._token_logprobs[i]),
                }
                for i, text in enumerate(self._texts)
            ],
        }

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """What `piece` adds. The first chunk of a choice names the role."""
        delta: dict[str, Any] = {"content": piece.text}
        if not self._begun[piece.choice]:
            self._begun[piece.choice] = True
            delta = {"role": "assistant", **delta}
        choice = {
            "index": piece.choice,
            "delta": delta,
            "finish_reason": piece.reason,
            "logprobs": self._logprobs(piece.logprobs),
        }
        usage: dict[str, Any] = {"usage": None} if self._asked.include_usage else {}
        return {**self._head("chat.completion.chunk"), "choices": [choice], **usage}

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk after the last one, for stream_options.include_usage."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": self.usage()}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _logprobs(self, logprobs: Sequence[TokenLogp]) -> dict[str, Any] | None:
        if not self._asked.sampling.logprobs:
            return None
        return {
            "refusal": None,
            "content": [
                {**_token(lp.token, lp.logp), "top_logprobs": [_token(*top) for top in lp.top]}
                for lp in logprobs
            ],
        }


def _token(text: str, logp: float) -> dict[str, Any]:
    """-inf is no JSON: OpenAI writes -9999 for what cannot be sampled."""
    return {"token": text, "logprob": max(logp, -9999.0), "bytes": list(text.encode("utf-8"))}
