"""Requests that are too much work end alone: processes that read them are killed, bounded and replaced; others are answered."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import pickle
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import psutil
import pytest
import torch
from PIL import Image

from mmrl.config import DataConfig
from mmrl.serve.errors import RequestError
from mmrl.serve.limits import Limits
from mmrl.serve.media import MediaRules
from mmrl.serve.pool import Readers, _Job, _Turns
from mmrl.serve.preparing import Reading, Recipe
from mmrl.serve.protocol import Defaults
from mmrl.types import Sample
from scripts._serve_kit import HEAD, raw, said
from tests.kits.clip_kit import make_clip
from tests.kits.engine_kit import picture, policy
from tests.serve.serve_kit import Server, asking, serving

pytestmark = pytest.mark.slow
QUESTION = "red circle"
MOST_TOKENS = 2000


def readers_of(arch: str = "qwen2_5_vl", **limits: Any) -> Readers:
    p = policy(arch)
    bounds = Limits(**{"workers": 2, **limits})
    recipe = Recipe(
        p.processor,
        p.base.config,
        p.template,
        DataConfig(),
        MOST_TOKENS,
        Defaults("m"),
        MediaRules(),
        bounds,
    )
    return Readers(recipe, bounds)


@contextlib.contextmanager
def started(readers: Readers) -> Iterator[Readers]:
    try:
        readers.start()
        yield readers
    finally:
        readers.close()
    assert not [c for c in psutil.Process().children(recursive=True) if c.name() == "mmrl-reader"]


def body_of(content: Any, **options: Any) -> bytes:
    return json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": content}], **options}
    ).encode()


def read(readers: Readers, folder: Path, *bodies: bytes) -> list[Reading | RequestError]:
    """What becomes of requests that come at once."""

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(
            *(readers.read(body, str(folder)) for body in bodies), return_exceptions=True
        )

    return asyncio.run(all_of_them())


def bomb(megapixels: float, count: int = 1) -> list[dict[str, Any]]:
    """Pictures of so many pixels each in a few kilobytes, no two of the same bytes: what follows a PNG's end is not read."""
    side, stream = int((megapixels * 1e6) ** 0.5), io.BytesIO()
    Image.new("L", (side, side)).save(stream, "PNG")
    urls = [
        f"data:image/png;base64,{base64.b64encode(stream.getvalue() + bytes([n])).decode()}"
        for n in range(count)
    ]
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


@pytest.mark.parametrize("arch", ["qwen2_5_vl", "qwen3_vl"])
def test_prompts_are_those_of_training(arch: str, tmp_path: Path) -> None:
    """Ids, rotary positions, identities and pixels, against the model's own encoder in this process; also in the second process."""
    p, clip = policy(arch), make_clip(tmp_path, "a")
    pictures = [picture((112, 84)), picture((640, 427), 1), picture((37, 211), 2)]
    contents: list[Any] = [
        "no media",
        asking("one", pictures[0]),
        asking("three", *pictures),
        asking("clip", clips=(clip,)),
        asking("both", pictures[1], clips=(clip,)),
    ]
    media: list[Sequence[str]] = [(), pictures[:1], pictures, (), pictures[1:2]]
    with started(readers_of(arch)) as readers:
        found = read(readers, tmp_path, *(body_of(c) for c in contents))
    for content, images, one in zip(contents, media, found, strict=True):
        assert isinstance(one, Reading) and one.prompt is not None, one
        videos = (clip,) if "video_url" in str(content)[:400] or content == contents[4] else ()
        visuals = p.encoder.references(
            Sample("of this request", "", "", "", None, tuple(images), videos, {})
        )
        own = p.encoder.prompt_of(one.asked.messages, visuals, "of this request")
        assert torch.equal(one.prompt.ids_P, own.ids_P) and torch.equal(
            one.prompt.kinds_P, own.kinds_P
        )
        assert (
            torch.equal(one.prompt.positions_3P, own.positions_3P)
            and one.prompt.next_position == own.next_position
        )
        assert one.prompt.fingerprint == own.fingerprint and len(one.prompt.visuals) == len(
            own.visuals
        )
        for mine, its in zip(own.visuals, one.prompt.visuals, strict=True):
            assert its.identity == mine.identity and its.size == mine.size and its.path == ""
            assert torch.equal(p.encoder.visuals.pixels(its), p.encoder.visuals.pixels(mine))


def test_what_takes_too_long_is_killed_and_small_requests_do_not_wait(tmp_path: Path) -> None:
    """The limit leaves small requests and a clip time on a busy machine: a multiple of what they take there now."""
    large, clip = body_of([*bomb(25, 60), {"type": "text", "text": "?"}]), make_clip(tmp_path, "a")

    def seconds(readers: Readers, content: Any) -> float:
        began = time.monotonic()
        read(readers, tmp_path, body_of(content))
        return time.monotonic() - began

    with started(readers_of()) as readers:
        # the first clip also starts what a process needs, as it does below in one that was replaced
        first = seconds(readers, asking("clip", clips=(clip,)))
        limit = max(1.5, 6 * first, 20 * seconds(readers, asking("one", picture((56, 56)))))
    with started(readers_of(prepare_s=limit)) as readers:
        answers = read(
            readers,
            tmp_path,
            large,
            body_of("small"),
            body_of(asking("one", picture((56, 56)))),
            large,
        )
        for late in (answers[0], answers[3]):
            assert isinstance(late, RequestError) and late.code == "timeout" and late.status == 400
        assert all(isinstance(a, Reading) and a.prompt is not None for a in answers[1:3])
        [again] = read(
            readers, tmp_path, body_of(asking("clip", clips=(make_clip(tmp_path, "after"),)))
        )
        assert isinstance(again, Reading) and again.prompt is not None, "the process was replaced"


def test_small_requests_overtake_large_ones(tmp_path: Path) -> None:
    """The first process waits for them, however many large ones are waiting for the others."""
    large = body_of([*bomb(25, 60), {"type": "text", "text": "?"}])

    async def both(readers: Readers) -> list[Reading]:
        work = [asyncio.ensure_future(readers.read(large, str(tmp_path))) for _ in range(3)]
        await asyncio.sleep(0.3)
        small = [
            await readers.read(body, str(tmp_path))
            for body in (body_of("x"), body_of(asking("one", picture((56, 56)))))
        ]
        assert not any(task.done() for task in work), "while all of them are under way"
        readers.close()
        # those that no process had taken as well: at once
        ends = await asyncio.gather(*work, return_exceptions=True)
        assert all(isinstance(end, RequestError) and end.status == 503 for end in ends)
        return small

    with started(readers_of()) as readers:
        assert all(one.prompt is not None for one in asyncio.run(both(readers)))


def test_memory_beyond_the_limit_ends_one_request(tmp_path: Path) -> None:
    with started(readers_of(worker_bytes=64 << 20)) as readers:
        [refused] = read(readers, tmp_path, body_of([*bomb(45), {"type": "text", "text": "?"}]))
        assert isinstance(refused, RequestError) and refused.status == 400, refused
        assert refused.code in ("too_large", "crashed", "unreadable", "truncated"), (
            "who sees it first is the library's affair"
        )
        [fine] = read(readers, tmp_path, body_of(asking("one", picture((112, 84)))))
        assert isinstance(fine, Reading) and fine.prompt is not None


def test_costs_are_known_before_work(tmp_path: Path) -> None:
    """More tokens than a prompt may have, by the sizes in headers: a clip of 10,000 frames was decoded first, for half a minute."""
    clip = make_clip(tmp_path, "long")
    text = {"type": "text", "text": "?"}
    with started(
        readers_of(workers=1, total_pixels=30_000_000, pixels=20_000_000, media=200)
    ) as readers:
        for content, words in (
            ([*bomb(21), text], "at most 20,000,000 pixels"),
            ([*bomb(16, 2), text], "at most 30,000,000 pixels together"),
            ([*bomb(0.2, 140), text], f"at most {MOST_TOKENS} prompt tokens, found"),
            (
                asking("?", *[picture((640, 427))] * 40, clips=(clip,) * 20),
                f"at most {MOST_TOKENS} prompt tokens, found",
            ),
        ):
            [refused] = read(readers, tmp_path, body_of(content))
            assert (
                isinstance(refused, RequestError)
                and words in str(refused)
                and refused.status == 400
            ), refused


def test_a_process_that_dies_costs_the_request_it_had(tmp_path: Path) -> None:
    """Killed from outside, as a fault in a decoder would end it."""
    with started(readers_of()) as readers:
        [fine] = read(readers, tmp_path, body_of("x"))
        assert isinstance(fine, Reading)
        pids = [
            place._process.process.pid for place in readers._places if place._process is not None
        ]
        killer = threading.Timer(
            0.4, lambda: [os.kill(pid, signal.SIGKILL) for pid in pids if pid is not None]
        )
        killer.start()
        [lost] = read(readers, tmp_path, body_of([*bomb(25, 20), {"type": "text", "text": "?"}]))
        killer.join()
        assert isinstance(lost, RequestError) and lost.code == "crashed" and "-9" in str(lost)
        answers = read(readers, tmp_path, *[body_of("y")] * 4)
        assert sum(isinstance(a, Reading) for a in answers) >= 3, (
            "one request at most finds out that an idle one was killed"
        )


def test_clients_take_turns() -> None:
    turns = _Turns()
    for name in ("a1", "a2", "a3", "b1", "a4", "c1", "b2"):
        turns.put(_Job(b"", None, name[0], 1.0, print))
        turns._jobs[name[0]][-1].message = name.encode()
    turns._jobs["a"][1].dropped = True
    assert len(turns) == 7
    taken = [job.message.decode() for job in iter(turns.take, None)]
    assert taken == ["a1", "b1", "c1", "b2", "a3", "a4"] and not len(turns)


def test_an_answer_that_cannot_be_taken_costs_its_request_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where there is no memory for it: the thread that feeds the process ended, and whoever it served waited for ever."""
    with started(readers_of(workers=1)) as readers:
        [fine] = read(readers, tmp_path, body_of("x"))
        assert isinstance(fine, Reading)
        failures = [MemoryError("no room for this answer")]

        def loads(data: bytes) -> Any:
            if failures:
                raise failures.pop()
            return pickle.loads(data)

        monkeypatch.setattr("mmrl.workers.spawned.pickle", SimpleNamespace(loads=loads))
        [lost] = read(readers, tmp_path, body_of("y"))
        assert isinstance(lost, RequestError) and lost.code == "crashed"
        [again] = read(readers, tmp_path, body_of("z"))
        assert isinstance(again, Reading) and again.prompt is not None


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server keeps what requests carry."""
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module")
def server(scratch: Path) -> Iterator[Server]:
    with serving(
        "--max-connections",
        "24",
        "--header-timeout",
        "3",
        "--body-timeout",
        "3",
        "--max-held-mib",
        "4",
        "--max-body-mib",
        "3",
        "--send-timeout",
        "3",
        "--workers",
        "2",
        environment={"TMPDIR": str(scratch)},
    ) as running:
        yield running


def test_half_heads_end_and_make_room(server: Server) -> None:
    """300 were kept for ever. Beyond the most connections, the oldest without a request goes."""
    sockets = [raw(server.port, HEAD[:40]) for _ in range(60)]
    assert server.text(QUESTION, max_tokens=1) is not None, "there is room for one that asks"
    ends = [said(connection) for connection in sockets]
    assert sum(b" 408 " in end for end in ends) >= 20 and all(
        end == b"" or b" 408 " in end for end in ends
    )


@pytest.mark.parametrize(
    "beginning",
    [
        b"",
        b"\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea",
        b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nabc",
    ],
)
def test_other_ways_to_say_nothing_end_too(server: Server, beginning: bytes) -> None:
    connection = raw(server.port, beginning)
    assert isinstance(said(connection), bytes)  # returns: the server closed


@pytest.mark.parametrize("path", [b"/nothing", b"/v1/models"])
def test_bodies_that_are_of_no_use_keep_nobody_out(server: Server, path: bytes) -> None:
    """An answer that needs no body (a wrong path or method, as a wrong key) comes before it: such connections stayed until the
    body's time was up, and whoever had no key could take them all."""
    sockets = [
        raw(
            server.port,
            b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nabc",
        )
        for _ in range(40)
    ]
    assert sockets[-1].recv(12) in (b"HTTP/1.1 404", b"HTTP/1.1 405")
    assert server.text(QUESTION, max_tokens=1) is not None
    for connection in sockets:
        connection.close()


def test_bodies_that_do_not_come_end(server: Server) -> None:
    connection = raw(server.port, HEAD + b"Content-Length: 1000\r\n\r\n{")
    end = said(connection)
    assert b"408 Request Timeout" in end and b"--body-timeout" in end


def held_bytes(server: Server) -> int:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        rows = dict(
            line.rsplit(" ", 1)
            for line in answer.read().decode().splitlines()
            if not line.startswith("#")
        )
    return int(rows["mmrl_serve_body_bytes_held"])


def test_unfinished_bodies_are_held_within_a_budget(server: Server) -> None:
    """20 connections with 190 MB each held 3.6 GB before; now those beyond the budget are refused, and small requests go on."""
    sockets = []
    for _ in range(6):
        connection = raw(server.port, HEAD + b"Content-Length: 3000000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"x" * 2_000_000)
        sockets.append(connection)
    assert held_bytes(server) <= 4 << 20
    assert server.text(QUESTION, max_tokens=1) is not None
    ends = [said(connection) for connection in sockets]
    assert (
        sum(b" 503 " in e or e == b"" for e in ends) >= 3 and sum(b" 408 " in e for e in ends) >= 1
    )
    assert held_bytes(server) == 0


def test_lengths_are_told_and_true(server: Server) -> None:
    for head, status in (
        (b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", b" 411 "),
        (b"Content-Length: 99999999999999\r\n\r\nx", b" 413 "),
        (b"Content-Length: -1\r\n\r\n", b" 400 "),
        (b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}", b" 400 "),
        (b"X-Long: " + b"x" * 200_000 + b"\r\n\r\n", b" 400 "),
    ):
        found = said(raw(server.port, HEAD + head))
        assert status in found[:40], (head[:40], found[:200])


def test_chunks_are_refused_by_the_head(server: Server) -> None:
    """Not by the application, which would be asked after all chunks that have come were parsed: 200,000 of one byte a second."""
    found = said(
        raw(server.port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 20_000)
    )
    # closed while the client was still sending
    assert b" 411 " in found[:40] or found == b"", found[:200]
    quiet = said(raw(server.port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n"))
    assert b" 411 " in quiet[:40] and quiet.endswith(b"\r\n\r\n"), quiet[:200]


def test_malformed_requests_are_never_the_servers_fault(server: Server) -> None:
    for sent in (
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"temperature": 1' + b"0" * 400 + b"}",
        b'{"user": "\\ud800"}',
        b"[" * 100_000,
        json.dumps(
            {"model": server.model, "messages": [{"role": "user", "content": "\ud800"}]}
        ).encode(),
    ):
        found = said(
            raw(
                server.port,
                HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(sent) + sent,
            )
        )
        assert b" 400 " in found[:40] and b"invalid_request_error" in found, (
            sent[:60],
            found[:300],
        )


def test_answers_that_nobody_takes_end(server: Server) -> None:
    """A client that streams and never reads keeps its connection no longer than --send-timeout."""
    body = json.dumps(
        {
            "model": server.model,
            "messages": [{"role": "user", "content": QUESTION}],
            "stream": True,
            "n": 32,
            "logprobs": True,
            "top_logprobs": 20,
            "temperature": 10.0,
            "seed": 1,
            "max_tokens": 200,
        }
    ).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        connection.settimeout(60)
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
        process, mine, ends = (
            psutil.Process(server.process.pid),
            connection.getsockname(),
            time.monotonic() + 120,
        )
        while any(c.raddr == mine for c in process.net_connections()) and time.monotonic() < ends:
            time.sleep(0.2)
        assert b"[DONE]" not in said(connection) and time.monotonic() < ends


def test_short_questions_do_not_wait_behind_long_answers(server: Server) -> None:
    """64 answers of thousands of tokens fill the cache for minutes; a short question is answered while they are written."""
    streams = [
        server.chat(QUESTION, stream=True, n=64, max_tokens=6000, temperature=10.0, seed=n)
        for n in range(3)
    ]
    try:
        next(iter(streams[0]))
        assert server.text(QUESTION, max_tokens=1) is not None
        with urllib.request.urlopen(f"{server.url}/health", timeout=30) as answer:
            state = json.load(answer)
        assert state["running"] >= 1 and state["waiting"] >= 1, "the long ones are not done"
    finally:
        for stream in streams:
            stream.close()


def test_what_a_request_carried_is_not_kept_while_it_is_answered(
    server: Server, scratch: Path
) -> None:
    """Its files were there until the last token: 1024 requests of 256 MiB may wait."""
    stream = server.chat(
        asking("what?", picture((112, 84))), stream=True, n=64, max_tokens=6000, temperature=10.0
    )
    try:
        next(iter(stream))
        assert [f for f in scratch.rglob("*") if f.is_file()] == []
    finally:
        stream.close()


def test_stop_texts_of_a_megabyte_are_refused_and_long_ones_matched(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="--max-stop-chars"):
        server.text(QUESTION, stop=["x" * 1_000_000])
    full = server.text(QUESTION)
    assert (
        server.text(QUESTION, stop=[full[2:9] + "x" * 4000, full[4:6]])
        == full[: full.index(full[4:6])]
    )
