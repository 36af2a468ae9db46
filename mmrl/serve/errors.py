"""What a client is told when its request cannot be answered, in OpenAI's form: a status, words, the parameter, a code."""

from __future__ import annotations

from typing import Any

from mmrl.errors import MMRLError

__all__ = ["RequestError", "shutting_down"]

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class RequestError(MMRLError, ValueError):
    """A request that cannot be answered; the text says what was expected, what was found and the fix."""

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None
    ) -> None:
        # what it quotes may hold half a character
        super().__init__(message.encode("utf-8", "backslashreplace").decode())
        self.param, self.status, self.code = param, status, code

    def body(self) -> dict[str, Any]:
        """The JSON that OpenAI's clients turn into an exception."""
        kind = _TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


def shutting_down() -> RequestError:
    """What requests are told that a server which ends cannot answer."""
    return RequestError("the server is shutting down; ask again later", status=503)
