"""Attacks on `mmrl serve` by one client while another asks for one token at a time: what stalled the server, filled its memory or
made it fetch what it should not. See scripts/torture_trust.py."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import signal
import socket
import socketserver
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from scripts._serve_kit import (
    HEAD,
    MODEL,
    Attacking,
    Beside,
    Server,
    ask,
    beside,
    ending,
    post,
    raw,
    said,
    serving,
)
from scripts._torture_trust import Attack, Outcome, attack

__all__ = ["ATTACKS", "TEXT", "data_url", "stalling"]

_TIMES = 3.0  # a second client's median answer under attack, over its quiet one
_GROWTH_MIB = 1500.0  # two processes may each decode 50 megapixels, and 1 GiB of bodies may be held
TEXT = {"type": "text", "text": "?"}


def data_url(kind: str, data: bytes) -> str:
    """`data` as an address that holds it."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _png(side: int, mode: str = "L") -> dict[str, Any]:
    from PIL import Image

    stream = io.BytesIO()
    picture = (
        Image.fromarray(np.zeros((side, side), np.uint16))
        if mode == "I;16"
        else Image.new(mode, (side, side))
    )
    picture.save(stream, "PNG")
    return {"type": "image_url", "image_url": {"url": data_url("image/png", stream.getvalue())}}


def _clip(frames: int, side: int, damage: bool = False) -> dict[str, Any]:
    import av

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.mov"
        with av.open(str(path), "w") as container:
            stream = container.add_stream("png" if side > 500 else "mpeg4", rate=30)
            stream.width = stream.height = side
            stream.pix_fmt = "rgb24" if side > 500 else "yuv420p"
            rng = np.random.default_rng(0)
            noise = [
                rng.integers(0, 255, (side, side, 3), np.uint8)
                if side <= 500
                else np.zeros((side, side, 3), np.uint8)
                for _ in range(min(frames, 16 if side <= 500 else 1))
            ]
            for n in range(frames):
                frame = av.VideoFrame.from_ndarray(noise[n % len(noise)], format="rgb24")
                frame.pts = n
                for packet in stream.encode(frame):
                    container.mux(packet)
            for packet in stream.encode(None):
                container.mux(packet)
        data = bytearray(path.read_bytes())
    if damage:
        middle = len(data) // 3
        data[middle : middle + len(data) // 8] = np.random.default_rng(1).bytes(len(data) // 8)
    return {"type": "video_url", "video_url": {"url": data_url("video/mp4", bytes(data))}}


def _again(body: bytes) -> Attacking:
    """Asks the same until it is over, and counts the answers by status and code."""

    def run(server: Server, over: Any) -> Counter[Any]:
        seen: Counter[Any] = Counter()
        while not over.is_set():
            status, answer = post(server, body)
            seen[status, (answer.get("error") or {}).get("code")] += 1
        return seen

    return run


def _judged(
    seen: Beside,
    answers: Counter[Any] | None = None,
    *,
    statuses: tuple[int, ...] = (400,),
    growth_mib: float = _GROWTH_MIB,
) -> Outcome:
    """Held when the second client was hardly slower, nothing failed for it, memory was bounded and the answers are as expected."""
    grown = seen.peak_mib - seen.before_mib
    wrong = {k: n for k, n in (answers or {}).items() if k[0] not in statuses}
    held = seen.times < _TIMES and not seen.failed and grown < growth_mib and not wrong
    got = _listed(
        Counter(
            {f"{status} {code or ''}".strip(): n for (status, code), n in (answers or {}).items()}
        )
    )
    words = (
        f"the other client's answer took {statistics.median(seen.attacked_s) * 1000:.0f} ms instead of "
        f"{statistics.median(seen.quiet_s) * 1000:.0f} ms ({seen.times:.2f} times, the worst {max(seen.attacked_s):.2f} s), "
        f"{seen.failed} failed; memory +{grown:.0f} MiB"
    )
    return Outcome(held, words + (f"; the attacker got {got}" if got else ""), seen.figures())


def stalling(
    name: str,
    what: str,
    body: Callable[[], bytes],
    threads: int = 4,
    statuses: tuple[int, ...] = (400,),
    model: Callable[[], contextlib.AbstractContextManager[str]] | None = None,
    growth_mib: float = _GROWTH_MIB,
) -> Attack:
    """An attack by the same request from several connections at once; `model` makes the folder of another model than the usual."""

    def run(options: Any) -> Outcome:
        sent = body()
        with (
            contextlib.nullcontext(MODEL) if model is None else model() as folder,
            serving(model=folder) as server,
        ):
            outcome = _judged(
                *beside(server, [_again(sent)] * threads), statuses=statuses, growth_mib=growth_mib
            )
        return Outcome(
            outcome.held, outcome.result, {**outcome.figures, "request_kib": len(sent) >> 10}
        )

    run.__name__ = name
    return attack(
        what,
        f"the other client's answer takes less than {_TIMES:g} times its quiet time, memory is bounded",
    )(run)


def serve_half_heads(options: Any) -> Outcome:
    def open_them(server: Server, over: Any) -> Counter[Any]:
        sockets = [raw(server.port, HEAD[:50]) for _ in range(300)]
        over.wait()
        return Counter(ending(connection) for connection in sockets)

    with serving() as server:
        seen, ends = beside(server, [open_them], seconds=15)
    outcome = _judged(seen)
    return Outcome(
        outcome.held and ends["408"] + ends["closed"] == 300,
        f"{outcome.result}; 300 ended with {_listed(ends)}",
        outcome.figures,
    )


def _listed(counts: Counter[Any]) -> str:
    return ", ".join(f"{n} x {what}" for what, n in sorted(counts.items(), key=str))


def serve_bodies(options: Any) -> Outcome:
    def send(server: Server, over: Any) -> Counter[Any]:
        connection = raw(server.port, HEAD + b"Content-Length: 200000000\r\n\r\n")
        with contextlib.suppress(OSError):
            for _ in range(190):
                connection.sendall(b"x" * 1_000_000)
        return Counter([ending(connection)])

    with serving() as server:
        seen, ends = beside(server, [send] * 20, seconds=75)
    outcome = _judged(seen, growth_mib=1400)
    return Outcome(
        outcome.held and sum(ends.values()) == 20 and not ends["open"],
        f"{outcome.result}; the 20 bodies ended with {_listed(ends)}",
        outcome.figures,
    )


def serve_one_byte_chunks(options: Any) -> Outcome:
    def send(server: Server, over: Any) -> Counter[Any]:
        ends: Counter[Any] = Counter()
        while not over.is_set():
            with (
                contextlib.suppress(OSError),
                raw(server.port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n") as connection,
            ):
                with contextlib.suppress(OSError):
                    for _ in range(200):
                        connection.sendall(b"1\r\nx\r\n" * 10_000)
                ends[ending(connection)] += 1
        return ends

    with serving() as server:
        seen, ends = beside(server, [send] * 2)
    outcome = _judged(seen)
    return Outcome(
        outcome.held and not ends["open"],
        f"{outcome.result}; ended with {_listed(ends)}",
        outcome.figures,
    )


def serve_unread_answers(options: Any) -> Outcome:
    body = ask(
        "red circle",
        stream=True,
        n=8,
        logprobs=True,
        top_logprobs=20,
        temperature=10.0,
        max_tokens=200,
    )

    def open_them(server: Server, over: Any) -> Counter[Any]:
        sockets = []
        for _ in range(30):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            connection.settimeout(60)
            sockets.append(connection)
        over.wait()
        return Counter(map(kind, sockets))

    def kind(connection: socket.socket) -> str:
        try:
            return "whole" if b"[DONE]" in said(connection) else "ended"
        except TimeoutError:
            return "open"

    with serving("--send-timeout", "5") as server:
        seen, ends = beside(server, [open_them], seconds=30)
    outcome = _judged(seen)
    return Outcome(
        outcome.held and not ends["open"],
        f"{outcome.result}; of 30 streams {_listed(ends)}",
        outcome.figures,
    )


def serve_long_answers(options: Any) -> Outcome:
    body = ask("red circle", n=64, max_tokens=6000, temperature=2.0)

    def send(server: Server, over: Any) -> Counter[Any]:
        with raw(server.port, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body):
            over.wait()
        return Counter()

    with serving() as server:
        seen, _ = beside(server, [send] * 8)
    return _judged(seen)


@contextlib.contextmanager
def _dripping(every_s: float, head: bytes) -> Iterator[int]:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                self.request.recv(65536)
                self.request.sendall(head)
                for _ in range(1000):
                    self.request.sendall(b"x")
                    time.sleep(every_s)

    class Many(socketserver.ThreadingTCPServer):
        allow_reuse_address, daemon_threads, request_queue_size = True, True, 128

    with Many(("127.0.0.1", 0), Handler) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield site.server_address[1]
        site.shutdown()


def serve_drip(options: Any) -> Outcome:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 1000000\r\n\r\n"
    with (
        _dripping(2.0, head) as port,
        serving("--allow-media-hosts", f"127.0.0.1:{port}", "--fetch-timeout", "8") as server,
    ):
        body = ask(
            [{"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{port}/a.png"}}, TEXT],
            max_tokens=1,
        )
        seen, answers = beside(server, [_again(body)] * 48, seconds=25)
    return _judged(seen, answers)


def serve_private_addresses(options: Any) -> Outcome:
    heard: list[bytes] = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            heard.append(self.request.recv(1000))
            self.request.sendall(b"220 banner of a service inside\r\n")

    answers = set()
    with (
        socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as site,
        serving("--allow-remote-media") as server,
    ):
        threading.Thread(target=site.serve_forever, daemon=True).start()
        port = site.server_address[1]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            closed = free.getsockname()[1]
        urls = [
            f"http://{host}:{p}/"
            for p in (port, closed)
            for host in (
                "127.0.0.1",
                "localhost",
                "2130706433",
                "0x7f000001",
                "0177.0.0.1",
                "127.1",
                "[::1]",
                "[::ffff:127.0.0.1]",
                socket.gethostname(),
            )
        ]
        for url in [
            *urls,
            "http://169.254.169.254/latest/meta-data/",
            f"https://localhost:{port}/",
        ]:
            status, answer = post(
                server, ask([{"type": "image_url", "image_url": {"url": url}}, TEXT])
            )
            answers.add((status, answer.get("error", {}).get("message", "").replace(url, "URL")))
        site.shutdown()
    held = not heard and len(answers) == 1 and next(iter(answers))[0] == 400
    return Outcome(
        held,
        f"{len(urls) + 2} spellings: {len(heard)} connections, {len(answers)} different answers, status "
        f"{sorted({status for status, _ in answers})}",
    )


def serve_malformed(options: Any) -> Outcome:
    bodies = [
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"temperature": 1' + b"0" * 400 + b"}",
        b'{"user": "\\ud800"}',
        b"[" * 1_000_000,
        b"{" * 100_000,
        b"\xff" * 1000,
        b"",
        b"null",
        json.dumps({"model": "\ud800"}).encode(),
        b"[" + b"[]," * 5_000_000 + b"0]",
        ask("\ud800"),
        ask("?", stop=["\udfff"]),
        ask("?", seed=10**4299),
        ask("?", metadata={"\ud800": 1}),
        ask("?" * 3_000_000),
        ask(
            [
                {
                    "type": "image_url",
                    "image_url": {
                        "url": data_url("image/png", b"%!PS-Adobe-3.0 EPSF-3.0\nshowpage")
                    },
                },
                TEXT,
            ]
        ),
        ask(
            [
                {
                    "type": "image_url",
                    "image_url": {"url": data_url("image/png", b"\x89PNG\r\n\x1a\n" + b"x" * 99)},
                },
                TEXT,
            ]
        ),
    ]
    with serving() as server:
        statuses = Counter(post(server, body)[0] for body in bodies)
    words = ", ".join(f"{n} x {s}" for s, n in sorted(statuses.items()))
    return Outcome(set(statuses) <= {400, 404}, f"{len(bodies)} requests: {words}")


def serve_damaged_clip(options: Any) -> Outcome:
    with serving() as server:
        status, answer = post(server, ask([_clip(300, 96, damage=True), TEXT], max_tokens=1))
        fine, _ = post(server, ask([_clip(20, 96), TEXT], max_tokens=1))
    words = answer.get("error", {}).get("message", "")[:160]
    return Outcome(
        status == 400 and "damage" in words and fine == 200,
        f"status {status}: {words}; the same undamaged: {fine}",
    )


def serve_killed_readers(options: Any) -> Outcome:
    def kill(server: Server, over: Any) -> Counter[Any]:
        while not over.wait(5.0):
            for process in server.readers:
                with contextlib.suppress(OSError):
                    os.kill(process.pid, signal.SIGKILL)
        return Counter()

    with serving() as server:
        seen, _ = beside(server, [kill], seconds=30)
        end, _ = post(server, ask("red circle", max_tokens=1))
    held = end == 200 and seen.failed <= 40 and seen.times < _TIMES
    return Outcome(
        held,
        f"killed every 5 s: {seen.failed} of {len(seen.attacked_s)} answers failed, the median took "
        f"{seen.times:.2f} times its quiet time, and the server went on ({end})",
        seen.figures(),
    )


def serve_disconnects(options: Any) -> Outcome:
    rng = np.random.default_rng(0)
    questions = [
        f"{colour} {shape}"
        for colour in ("red", "blue", "green", "yellow")
        for shape in ("circle", "square", "triangle")
    ]
    before = set(Path(tempfile.gettempdir()).glob("mmrl-serve-*"))
    with serving() as server:
        alone = {
            q: post(server, ask(q, max_tokens=24))[1]["choices"][0]["message"]["content"]
            for q in questions
        }
        wrong: list[str] = []
        done: Counter[str] = Counter()

        def one(n: int) -> None:
            q = questions[n % len(questions)]
            if n % 2:
                body = ask(q, max_tokens=2000, stream=True, temperature=1.0)
                with raw(
                    server.port, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
                ) as connection:
                    connection.recv(int(rng.integers(1, 4000)))
                done["left"] += 1
                return
            status, answer = post(server, ask(q, max_tokens=24))
            done["answered"] += 1
            if status != 200 or answer["choices"][0]["message"]["content"] != alone[q]:
                wrong.append(q)

        with ThreadPoolExecutor(64) as pool:
            list(pool.map(one, range(256)))
        time.sleep(3)
        left = set(Path(tempfile.gettempdir()).glob("mmrl-serve-*")) - before
    return Outcome(
        not wrong and not left,
        f"64 clients at once, {done['left']} left mid-stream, {done['answered']} greedy "
        f"answers: {len(wrong)} differ from alone; {len(left)} temporary folders left",
    )


def serve_soak(options: Any) -> Outcome:
    """Everything at once for --minutes; memory is read every 5 s and its middle compared with its end."""
    mix = [
        ask([_png(200), TEXT], max_tokens=4),
        ask([_clip(60, 64), TEXT], max_tokens=4),
        ask("red circle", max_tokens=8),
        ask([_png(7000), TEXT], max_tokens=1),
        ask("x" * 300_000),
        ask([_png(3000, "I;16"), TEXT]),
        b'{"user": "\\ud800"}',
        ask([_clip(30, 64, damage=True), TEXT]),
        ask("?", stop=["x" * 10_000]),
    ]
    held, answers, over = [], Counter[int](), threading.Event()
    with serving() as server:

        def run(first: int) -> None:
            n = first
            while not over.is_set():
                answers[post(server, mix[n % len(mix)])[0]] += 1
                n += 1

        threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(6)]
        for thread in threads:
            thread.start()
        begun, files = time.monotonic(), []
        while time.monotonic() < begun + 60 * options.minutes:
            time.sleep(5)
            held.append(server.held_mib())
            files.append(sum(p.num_fds() for p in server.tree[:1]))
        over.set()
        for thread in threads:
            thread.join(150)
    fifth = max(1, len(held) // 5)
    early, late = statistics.median(held[fifth : 2 * fifth]), statistics.median(held[-fifth:])
    good = (
        late - early < 48
        and set(answers) <= {200, 400}
        and max(files[-fifth:]) <= max(files[: 2 * fifth]) + 4
    )
    return Outcome(
        good,
        f"{sum(answers.values())} requests in {options.minutes:g} minutes "
        f"({', '.join(f'{n} x {s}' for s, n in sorted(answers.items()))}): {early:.0f} MiB in the second fifth, "
        f"{late:.0f} MiB in the last, most {max(held):.0f}; {files[0]} files open at first, {files[-1]} at last",
        {"minutes": options.minutes, "mib": [round(h) for h in held[:: max(1, len(held) // 60)]]},
    )


_FREE = "the other client's answer takes less than 3 times its quiet time, memory is bounded"
ATTACKS = [
    stalling(
        "serve_stop_text", "a stop text of 1 MB", lambda: ask("red circle", stop=["x" * 1_000_000])
    ),
    stalling(
        "serve_stop_texts",
        "16 stop texts that overlap themselves, as long as allowed, over long answers",
        lambda: ask(
            "red circle", stop=["<" * 255 + chr(97 + n) for n in range(16)], max_tokens=200
        ),
        statuses=(200,),
    ),
    stalling("serve_text", "20 MB of text", lambda: ask("a " * 10_000_000)),
    stalling("serve_text_as_allowed", "as much text as is tokenised", lambda: ask("ab" * 130_000)),
    stalling("serve_pictures", "6 pictures of 9400 x 9400", lambda: ask([*[_png(9400)] * 6, TEXT])),
    stalling(
        "serve_pictures_as_allowed",
        "6 pictures of 7000 x 7000, which are decoded",
        lambda: ask([*[_png(7000)] * 6, TEXT], max_tokens=1),
        statuses=(200, 400),
    ),
    stalling(
        "serve_deep_picture",
        "a picture of 9400 x 9400 in 16 bits",
        lambda: ask([_png(9400, "I;16"), TEXT]),
    ),
    stalling(
        "serve_deep_picture_as_allowed",
        "a picture of 7000 x 7000 in 16 bits",
        lambda: ask([_png(7000, "I;16"), TEXT], max_tokens=1),
        statuses=(200,),
    ),
    stalling(
        "serve_many_frames",
        "a clip of 10,000 frames of 64 x 64",
        lambda: ask([_clip(10_000, 64), TEXT]),
        statuses=(200, 400),
    ),
    stalling(
        "serve_large_frames",
        "a clip of 4 frames of 8000 x 8000",
        lambda: ask([_clip(4, 8000), TEXT]),
    ),
    stalling(
        "serve_largest_frames",
        "a clip of 1 frame of 16000 x 16000",
        lambda: ask([_clip(1, 16000), TEXT]),
        threads=2,
    ),
    attack("300 connections with half a head", f"closed after --header-timeout; {_FREE}")(
        serve_half_heads
    ),
    attack("20 bodies of 190 MB that do not end", f"at most --max-held-mib are held; {_FREE}")(
        serve_bodies
    ),
    attack("bodies in chunks of one byte", _FREE)(serve_one_byte_chunks),
    attack("30 streams that nobody reads", _FREE)(serve_unread_answers),
    attack("8 requests for 64 answers of 6000 tokens each", _FREE)(serve_long_answers),
    attack("48 pictures from a server that sends a byte every 2 s", f"one deadline holds; {_FREE}")(
        serve_drip
    ),
    attack(
        "addresses of this machine and of metadata services, spelled in many ways",
        "no connection, one answer for all",
    )(serve_private_addresses),
    attack("malformed requests", "status 400, never 500")(serve_malformed),
    attack("a clip damaged in the middle", "status 400 that says so")(serve_damaged_clip),
    attack(
        "processes that read requests killed every 5 s", "they are replaced, the server goes on"
    )(serve_killed_readers),
    attack(
        "64 clients, half of which leave in the middle",
        "greedy answers as alone, nothing left behind",
    )(serve_disconnects),
    attack("a soak of everything together", "memory is flat, no status but 200 and 400")(
        serve_soak
    ),
]
