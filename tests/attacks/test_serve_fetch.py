"""Addresses that a server must not fetch, hosts that drip, lie or redirect. Traffic stays on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpcore
import pytest

from mmrl.serve.errors import RequestError
from mmrl.serve.fetch import Fetcher, is_public
from mmrl.serve.guard import Budget, Hold
from mmrl.serve.limits import Limits
from mmrl.serve.media import MediaRules
from mmrl.serve.protocol import Media

PUBLIC = ("8.8.8.8", "93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")
PRIVATE = (
    "127.0.0.1",
    "127.255.0.1",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.0.1",
    "169.254.169.254",
    "100.64.0.1",
    "100.100.100.200",
    "0.0.0.0",
    "0.1.2.3",
    "224.0.0.1",
    "239.1.1.1",
    "240.0.0.1",
    "255.255.255.255",
    "192.0.0.192",
    "192.0.2.1",
    "198.18.0.1",
    "203.0.113.1",
    "168.63.129.16",
    "::",
    "::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "2002:7f00:1::",
    "2001:0:7f00:1::",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%lo",
    "fec0::1",
    "ff02::1",
    "2001:db8::1",
)


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("address", PRIVATE)
def test_other_addresses_are_not(address: str) -> None:
    assert not is_public(address)


@contextlib.contextmanager
def answering(talk: Callable[[socket.socket, bytes], None]) -> Iterator[tuple[int, list[bytes]]]:
    """A server on this machine whose connections `talk` answers; its port, and what it was sent."""
    heard: list[bytes] = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            heard.append(self.request.recv(65536))
            with contextlib.suppress(OSError):
                talk(self.request, heard[-1])

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address, daemon_threads = True, True

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server.server_address[1], heard
        server.shutdown()


def whole(
    body: bytes, status: str = "200 OK", *headers: str
) -> Callable[[socket.socket, bytes], None]:
    head = "\r\n".join(
        [
            f"HTTP/1.1 {status}",
            f"Content-Length: {len(body)}",
            "Connection: close",
            *headers,
            "",
            "",
        ]
    ).encode()
    return lambda connection, sent: connection.sendall(head + body)


def fetch(url: str, folder: Path, *hosts: str, remote: bool = True, **limits: Any) -> bytes:
    """What a request that names `url` gets, or its error."""

    async def one() -> bytes:
        hold = Hold(Budget(1 << 30))
        fetcher = Fetcher(
            MediaRules(remote=remote, hosts=hosts), Limits(**{"fetch_s": 20.0, **limits})
        )
        [path] = await fetcher.files([Media("image", url, "part")], folder, hold)
        return Path(path).read_bytes()

    return asyncio.run(one())


def test_hosts_that_were_named_are_fetched_from(tmp_path: Path) -> None:
    with answering(whole(b"picture")) as (port, heard):
        assert (
            fetch(
                f"http://127.0.0.1:{port}/a%20b/ü?q=1&r",
                tmp_path,
                f"127.0.0.1:{port}",
                remote=False,
            )
            == b"picture"
        )
        assert (
            b"GET /a%20b/%C3%BC?q=1&r HTTP/1.1\r\n" in heard[0]
            and f"Host: 127.0.0.1:{port}".encode() in heard[0]
        )


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "0",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "LOCALHOST",
        "user@127.0.0.1",
        "a:b@localhost",
    ],
)
def test_this_machine_is_not_fetched_from_however_it_is_spelled(host: str, tmp_path: Path) -> None:
    with answering(whole(b"secret")) as (port, heard):
        with pytest.raises(RequestError) as caught:
            fetch(f"http://{host}:{port}/", tmp_path)
        assert not heard and "public http(s) address" in str(caught.value)


def connections(
    monkeypatch: pytest.MonkeyPatch, *answers: Sequence[str]
) -> tuple[list[str], list[tuple[str, int]]]:
    """(names that are asked about, (address, port) of connections tried), both still empty: a resolver that gives `answers` in
    turn, the last one again and again, and no network."""
    asked: list[str] = []
    tried: list[tuple[str, int]] = []

    def resolve(host: Any, port: int, *args: Any, **kwargs: Any) -> Any:
        asked.append(host)
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port))
            for a in answers[min(len(asked), len(answers)) - 1]
        ]

    async def connect(self: Any, host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        tried.append((host, port))
        raise httpcore.ConnectError("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", connect)
    return asked, tried


@pytest.mark.parametrize(
    "addresses", [("93.184.216.34", "127.0.0.1"), ("10.0.0.1", "93.184.216.34")]
)
def test_a_name_of_one_private_address_is_not_fetched_from(
    addresses: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a resolver answers for a name that belongs to an attacker: a public address and one inside. Neither is tried."""
    asked, tried = connections(monkeypatch, addresses)
    with pytest.raises(RequestError, match="public http"):
        fetch("http://rebind.example/", tmp_path)
    assert asked == ["rebind.example"] and tried == []


@pytest.mark.parametrize("port", [8080, 22, 1])
def test_public_addresses_are_fetched_from_at_the_ports_of_the_web_only(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tried = connections(monkeypatch, ["93.184.216.34"])
    with pytest.raises(RequestError, match="public http"):
        fetch(f"http://site.example:{port}/", tmp_path)
    assert tried == []
    with pytest.raises(RequestError, match="public http"):
        fetch("http://site.example:443/", tmp_path)
    assert tried == [("93.184.216.34", 443)]


def test_the_connection_goes_to_the_address_that_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding: the name means this machine from the second question on, and nobody asks a second time."""
    asked, connected = connections(monkeypatch, ["93.184.216.34"], ["127.0.0.1"])
    with pytest.raises(RequestError, match="public http"):
        fetch("http://rebind.example/a.png", tmp_path)
    assert asked == ["rebind.example"] and connected == [("93.184.216.34", 80)]


@pytest.mark.parametrize(
    "target",
    [
        "ftp://127.0.0.1:{inner}/",
        "file:///etc/passwd",
        "gopher://127.0.0.1:{inner}/",
        "//127.0.0.1:{inner}/",
        "http://localhost:{inner}/",
        "http://[::1]:{inner}/",
        "",
        "http://127.0.0.1:{inner}@x/",
    ],
)
def test_redirects_are_checked_as_addresses_are(target: str, tmp_path: Path) -> None:
    with answering(whole(b"secret")) as (inner, heard):
        location = f"Location: {target.format(inner=inner)}"
        with (
            answering(whole(b"", "302 Found", location)) as (port, _),
            pytest.raises(RequestError, match="public http"),
        ):
            fetch(f"http://127.0.0.1:{port}/", tmp_path, f"127.0.0.1:{port}")
        assert not heard


def test_redirects_end(tmp_path: Path) -> None:
    with answering(whole(b"", "307 Again", "Location: /x")) as (port, heard):
        with pytest.raises(RequestError, match="public http"):
            fetch(f"http://127.0.0.1:{port}/", tmp_path, f"127.0.0.1:{port}")
        assert len(heard) == 6
    with answering(
        lambda connection, sent: (
            whole(b"", "302 Found", "Location: /there") if b"GET / " in sent else whole(b"yes")
        )(connection, sent)
    ) as (port, heard):
        assert fetch(f"http://127.0.0.1:{port}/", tmp_path, f"127.0.0.1:{port}") == b"yes"


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_errors_tell_neither_ports_nor_banners(tmp_path: Path) -> None:
    """One text for a closed port, a service that is no HTTP, a refusal and an answer that is none."""
    texts = set()
    for talk in (
        None,
        lambda c, s: c.sendall(b"220 ftp.internal ready\r\n"),
        lambda c, s: None,
        whole(b"x", "403 No"),
        whole(b"x", "200 OK", "Content-Encoding: gzip"),
        lambda c, s: c.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx"),
    ):
        with answering(talk or whole(b"")) as (port, _):
            port = port if talk else closed_port()
            with pytest.raises(RequestError) as caught:
                fetch(f"http://127.0.0.1:{port}/", tmp_path, f"127.0.0.1:{port}")
            texts.add(
                (
                    str(caught.value).replace(str(port), "PORT"),
                    caught.value.status,
                    caught.value.code,
                )
            )
    assert len(texts) == 1 and "220" not in str(texts)


def drip(head: bytes, every_s: float = 0.1) -> Callable[[socket.socket, bytes], None]:
    def talk(connection: socket.socket, sent: bytes) -> None:
        connection.sendall(head)
        for _ in range(600):
            connection.sendall(b"x")
            time.sleep(every_s)

    return talk


@pytest.mark.check_takes(1)
@pytest.mark.parametrize(
    "head",
    [b"", b"HTTP/1.1 200 OK\r\nX-Long: ", b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"],
)
def test_one_deadline_holds_while_bytes_drip(head: bytes, tmp_path: Path) -> None:
    """Each byte renewed the time limit of the socket before."""
    with answering(drip(head)) as (port, heard):
        with pytest.raises(RequestError, match=r"within 0.7 s, found that part was not") as caught:
            fetch(f"http://127.0.0.1:{port}/", tmp_path, f"127.0.0.1:{port}", fetch_s=0.7)
        assert heard and caught.value.code == "timeout"


def test_what_is_fetched_is_bounded(tmp_path: Path) -> None:
    with answering(whole(b"x" * 300_000)) as (port, _):
        with pytest.raises(RequestError, match="at most 1,000 bytes"):
            fetch(f"http://127.0.0.1:{port}/", tmp_path, f"127.0.0.1:{port}", body_bytes=1000)
        with pytest.raises(RequestError, match="found none"):
            fetch(
                f"http://127.0.0.1:{port}/".replace("http", "gopher"), tmp_path, f"127.0.0.1:{port}"
            )


@pytest.mark.slow
def test_one_client_whose_hosts_are_slow_leaves_room_for_others(tmp_path: Path) -> None:
    """A handful of requests to a host that drips held all places until their time was up, again and again."""

    async def both(slow: int, fast: int) -> tuple[Fetcher, list[str], list[str]]:
        fetcher = Fetcher(
            MediaRules(hosts=(f"127.0.0.1:{slow}", f"127.0.0.1:{fast}")),
            Limits(fetches=4, fetch_s=20.0),
        )

        def fetching(port: int, client: str) -> asyncio.Task[list[str]]:
            media = [Media("image", f"http://127.0.0.1:{port}/", "part")]
            return asyncio.ensure_future(
                fetcher.files(media, tmp_path, Hold(Budget(1 << 30)), client)
            )

        slow_ones = [fetching(slow, "a") for _ in range(12)]
        await asyncio.sleep(0.5)
        try:
            found = await fetching(fast, "b"), await fetching(fast, "c")
            assert not any(task.done() for task in slow_ones), "while all of them are at it"
            return fetcher, *found
        finally:
            for task in slow_ones:
                task.cancel()
            await asyncio.gather(*slow_ones, return_exceptions=True)

    with (
        answering(drip(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")) as (slow, _),
        answering(whole(b"yes")) as (fast, _),
    ):
        fetcher, *found = asyncio.run(both(slow, fast))
        assert [Path(path).read_bytes() for [path] in found] == [b"yes", b"yes"]
    gc.collect()
    assert not fetcher._places_of, "nothing is kept of clients that are gone"


def test_a_named_host_means_its_own_ports_only(tmp_path: Path) -> None:
    with answering(whole(b"secret")) as (port, heard):
        for hosts in ((), ("127.0.0.1",), ("127.0.0.1:1",), (f"localhost:{port}",)):
            with pytest.raises(RequestError):
                fetch(f"http://127.0.0.1:{port}/", tmp_path, *hosts)
        assert not heard
