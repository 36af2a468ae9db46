"""What holds for every request before a route sees it: who asks (Host, key, other sites), how, how long, and the answer's headers.

A page of another site cannot read answers (no CORS), and a name that was made to point at this machine (DNS rebinding) is refused
by its Host header.
"""

from __future__ import annotations

import hmac
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from mmrl.operations.listening import is_loopback

__all__ = ["COOKIE", "Guard"]

COOKIE = "mmrl_view"
_MOST_QUERY = 16_384
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; img-src 'self' data: blob:; "
        "media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


def _name_of(header: str) -> str:
    """The host of a Host header: 'localhost:8050' -> 'localhost', '[::1]:8050' -> '[::1]'."""
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0]


class Guard:
    """ASGI middleware. `names`: further Host names that are answered; None: any, for a server that has a key or was told so."""

    def __init__(
        self, app: Any, names: frozenset[str] | None = frozenset(), key: str | None = None
    ):
        self._app, self._names, self._key = app, names, key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        refused = self._refusal(scope, headers)

        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start":
                have = {k for k, _ in message["headers"]}
                more = [
                    (k.encode(), v.encode()) for k, v in _HEADERS.items() if k.encode() not in have
                ]
                if b"cache-control" not in have:
                    more.append((b"cache-control", b"no-store"))
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        if refused is None:
            await self._app(scope, receive, answer)
            return
        status, words, extra = refused
        body = (words + "\n").encode()
        kind = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", b"%d" % len(body)),
        ]
        await answer({"type": "http.response.start", "status": status, "headers": [*kind, *extra]})
        await answer(
            {"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body}
        )

    def _refusal(
        self, scope: Any, headers: dict[str, str]
    ) -> tuple[int, str, list[tuple[bytes, bytes]]] | None:
        """(status, words, headers) of a request that no route sees."""
        host = _name_of(headers.get("host", ""))
        if not (is_loopback(host) or self._names is None or host.lower() in self._names):
            return (
                403,
                "expected the viewer's own name as Host; open the address that mmrl view printed",
                [],
            )
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "expected GET: the viewer changes nothing", [(b"allow", b"GET, HEAD")]
        if len(scope["query_string"]) > _MOST_QUERY:
            return 414, f"expected an address of at most {_MOST_QUERY:,} bytes", []
        site = headers.get("sec-fetch-site", "none")
        if scope["path"] != "/" and site not in ("same-origin", "none"):
            return 403, "expected a request of the viewer's own page, found one of another site", []
        return self._without_key(scope, headers) if self._key is not None else None

    def _without_key(
        self, scope: Any, headers: dict[str, str]
    ) -> tuple[int, str, list[tuple[bytes, bytes]]] | None:
        """The key comes once in the address of the page, from then on in a cookie that scripts cannot read."""
        assert self._key is not None
        try:
            kept = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            kept = None
        if kept is not None and _same(kept.value, self._key):
            return None
        if _same(headers.get("authorization", "").removeprefix("Bearer ").strip(), self._key):
            return None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("key", [""])[0]
        if scope["path"] == "/" and _same(given, self._key):
            cookie = f"{COOKIE}={self._key}; Path=/; HttpOnly; SameSite=Strict"
            return 303, "", [(b"location", b"/"), (b"set-cookie", cookie.encode("latin-1"))]
        return (
            401,
            "expected the viewer's key; open the address that mmrl view printed, which holds it",
            [],
        )


def _same(given: str, key: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), key.encode())
