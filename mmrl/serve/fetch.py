"""Media from http(s) addresses, for --allow-remote-media: only from public addresses of the internet, or from hosts that were named
(--allow-media-hosts).

A name is resolved once; every address it has is checked, and the connection is made to one of those that were, so that a name
cannot mean something else a moment later. TLS is still checked against the name. Each redirect is checked anew. One deadline holds
for all media of a request together, whatever the other side does, and errors do not tell a closed port from an open one.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, urljoin, urlsplit
from weakref import WeakValueDictionary

from mmrl.errors import MissingExtraError, install_command
from mmrl.serve.errors import RequestError
from mmrl.serve.guard import Hold
from mmrl.serve.limits import Limits
from mmrl.serve.media import MediaRules, store
from mmrl.serve.protocol import Media

try:
    import httpcore
except ImportError as error:
    raise MissingExtraError(
        f"mmrl serve needs httpcore ({error}): {install_command('serve')}"
    ) from error

__all__ = ["Fetcher", "is_public"]

_REDIRECTS = 5
_PORTS = {"http": 80, "https": 443}
_HEADERS = [
    (b"accept", b"image/*, video/*, audio/*, application/octet-stream"),
    (b"accept-encoding", b"identity"),
    (b"user-agent", b"mmrl"),
]
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # IPv4 behind it: the last 32 bits (RFC 6052)
_GLOBAL_V6 = ipaddress.ip_network("2000::/3")  # all that is routed (RFC 4291)
_REFUSED = tuple(
    map(
        ipaddress.ip_network,
        (
            "168.63.129.16/32",  # Azure's platform, a public address inside its machines only
            "192.0.0.0/24",
            "192.88.99.0/24",  # special purpose; older releases of Python know them in part
            "2001::/23",
            "2002::/16",
            "2001:db8::/32",
            "3fff::/20",
        ),
    )
)  # protocols, 6to4 (holds any IPv4), documentation


class _Elsewhere(Exception):
    """The address is none that may be fetched from; who asked is not told which."""


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet: not private, shared, loopback, link-local, multicast, reserved or a
    cloud's metadata service, also not by way of an IPv6 form of it."""
    ip: Any = ipaddress.ip_address(address.partition("%")[0])
    if ip.version == 6 and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    elif ip.version == 6 and ip in _NAT64:
        ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    if ip.version == 6 and ip not in _GLOBAL_V6:
        return False
    if any(ip in net for net in _REFUSED if net.version == ip.version):
        return False
    return bool(ip.is_global) and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


class _Checked(httpcore.AsyncNetworkBackend):
    """Connects to checked addresses of a name; TLS, which comes after, still asks for the name."""

    def __init__(self, hosts: Iterable[str], anywhere: bool, resolver: ThreadPoolExecutor) -> None:
        self._hosts, self._anywhere, self._resolver = (
            frozenset(h.lower() for h in hosts),
            anywhere,
            resolver,
        )
        self._inner = httpcore.AnyIOBackend()

    def named(self, host: str, port: int) -> bool:
        """Whether the user trusts this host."""
        host = host.lower()
        return f"{host}:{port}" in self._hosts or (host in self._hosts and port in _PORTS.values())

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Raises _Elsewhere unless every address of the host is public, or the host was named."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._resolver, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        if not self.named(host, port) and not (
            self._anywhere and port in _PORTS.values() and all(map(is_public, addresses))
        ):
            raise _Elsewhere
        for n, address in enumerate(addresses):
            try:
                return await self._inner.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except httpcore.ConnectError:
                if n + 1 == len(addresses):
                    raise
        raise _Elsewhere


class Fetcher:
    """Fetches for all requests of a server, `limits.fetches` at once. Runs in the server's event loop, without threads but those
    that resolve names. Raises MissingExtraError."""

    def __init__(self, rules: MediaRules, limits: Limits) -> None:
        self._limits = limits
        self._resolver = ThreadPoolExecutor(limits.fetches, thread_name_prefix="mmrl-names")
        self._backend = _Checked(rules.hosts, rules.remote, self._resolver)
        self._tls = httpcore.default_ssl_context()
        self._places = asyncio.Semaphore(limits.fetches)
        # by client, while it fetches
        self._places_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def files(
        self, media: Sequence[Media], folder: Path, hold: Hold, client: str = ""
    ) -> list[str]:
        """Paths of the media, fetched one after the other into `folder`. A `client` (an address) has a quarter of the places at
        most: one whose hosts are slow leaves room for others. Raises RequestError."""
        now: list[Media] = []
        if (own := self._places_of.get(client)) is None:
            own = self._places_of[client] = asyncio.Semaphore(max(1, self._limits.fetches // 4))

        async def everything() -> list[str]:
            found = []
            for one in media:
                now[:] = [one]
                async with own, self._places:
                    found.append(await self._file(one, folder, hold))
            return found

        try:
            return await asyncio.wait_for(everything(), self._limits.fetch_s)
        except asyncio.TimeoutError:
            raise RequestError(
                f"expected all media to be fetched within {self._limits.fetch_s:g} s, found that "
                f"{now[0].where} was not; send the bytes",
                now[0].where,
                code="timeout",
            ) from None

    async def _file(self, media: Media, folder: Path, hold: Hold) -> str:
        url = media.url.strip()
        try:
            for _ in range(_REDIRECTS + 1):
                answer = await self._once(self._checked(url), media, hold)
                if isinstance(answer, tuple):
                    return await asyncio.to_thread(store, *answer, media, folder)
                url = urljoin(url, answer)
        except RequestError:  # a ValueError, too
            raise
        except (
            _Elsewhere,
            httpcore.NetworkError,
            httpcore.ProtocolError,
            httpcore.TimeoutException,
            httpcore.UnsupportedProtocol,
            OSError,
            ValueError,
        ):
            pass  # one answer for all: which machines and ports are there is nobody's business
        raise RequestError(
            f"expected {media.where} at a public http(s) address that answers with it, found none at "
            f"{media.url[:200]!r}; check the address, send the bytes, or name the host with --allow-media-hosts",
            media.where,
            code="missing",
        )

    def _checked(self, url: str) -> SplitResult:
        """The parts of an address. Raises _Elsewhere, ValueError."""
        parts = urlsplit(url)
        if (
            parts.scheme not in _PORTS
            or not parts.hostname
            or parts.username is not None
            or parts.password is not None
        ):
            raise _Elsewhere
        return parts

    async def _once(self, parts: SplitResult, media: Media, hold: Hold) -> tuple[bytes, str] | str:
        """(bytes, media type) of the answer, or the address it sends to. Raises RequestError where it is too large."""
        host = (
            (parts.hostname or "").encode("idna")
            if ":" not in (parts.hostname or "")
            else (parts.hostname or "").encode()
        )
        target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._") + (
            f"?{quote(parts.query, safe='/%:@!$&()*+,;=~-._?')}" if parts.query else ""
        )
        address = httpcore.URL(
            scheme=parts.scheme.encode(), host=host, port=parts.port, target=target.encode("ascii")
        )
        limit, data = self._limits.body_bytes, bytearray()
        async with (
            httpcore.AsyncConnectionPool(self._tls, network_backend=self._backend) as pool,
            pool.stream("GET", address, headers=_HEADERS) as answer,
        ):
            headers = {name.lower(): value for name, value in answer.headers}
            if answer.status in (301, 302, 303, 307, 308):
                return headers[b"location"].decode("ascii") if b"location" in headers else ""
            if (
                answer.status != 200
                or headers.get(b"content-encoding", b"identity").lower() != b"identity"
            ):
                raise _Elsewhere
            async for chunk in answer.aiter_stream():
                if len(data) + len(chunk) > limit:
                    raise RequestError(
                        f"expected {media.where} of at most {limit:,} bytes, found more; send a smaller one, or "
                        "start the server with a larger --max-body-mib",
                        media.where,
                        code="too_large",
                    )
                hold.take(len(chunk))
                data += chunk
        return bytes(data), headers.get(b"content-type", b"").partition(b";")[0].decode(
            "ascii", "replace"
        ).strip().lower()
