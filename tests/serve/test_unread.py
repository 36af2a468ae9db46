"""What a client does not take of its answer is bounded: the engine neither waits for it nor fills the memory with it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

import mmrl.serve.unread
from mmrl.serve.app import _Exchange, _stream
from mmrl.serve.decode import Piece, TokenLogp
from mmrl.serve.engine import Accepted, Event, Failed
from mmrl.serve.errors import shutting_down
from mmrl.serve.guard import Budget, Hold
from mmrl.serve.limits import Limits
from mmrl.serve.unread import Unread


def piece(n: int, tops: int = 0) -> Piece:
    return Piece(0, f"{n} ", (TokenLogp("x", -1.0, (("y", -2.0),) * tops),) if tops else ())


def taken(unread: Unread, count: int) -> list[Event | None]:
    async def take() -> list[Event | None]:
        return [await unread.get(0.01) for _ in range(count)]

    return asyncio.run(take())


def test_what_comes_in_comes_out_in_order() -> None:
    events = [Accepted(5), piece(1), piece(2), Failed(shutting_down())]
    unread = Unread(Limits())
    assert [unread.put(event) for event in events] == [True] * 4
    assert taken(unread, 5) == [*events, None]


@pytest.mark.parametrize(("tops", "room"), [(0, 60), (1, 20), (4, 10)])
def test_more_than_the_bound_is_dropped_with_all_that_waits(tops: int, room: int) -> None:
    """Log-probs weigh as much as pieces."""
    unread = Unread(Limits(unread=60))
    assert all(unread.put(piece(n, tops)) for n in range(room))
    assert taken(unread, 1) == [piece(0, tops)]
    assert unread.put(piece(room, tops)), "what was taken makes room"
    assert not unread.put(piece(room + 1, tops)) and not unread.put(piece(room + 2, tops))
    failed, nothing = taken(unread, 2)
    assert isinstance(failed, Failed) and nothing is None
    assert (
        failed.error.status == 408
        and "more than 60 pieces" in str(failed.error)
        and "--max-unread" in str(failed.error)
    )


def test_a_client_that_is_behind_for_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(mmrl.serve.unread, "time", SimpleNamespace(monotonic=lambda: now[0]))
    unread = Unread(Limits(send_s=5.0))
    unread.put(piece(1))
    unread.put(piece(2))
    unread.put(Failed(shutting_down()))
    now[0] = 105.0
    assert taken(unread, 1) == [piece(1)]
    now[0] = 105.5
    (late, closing) = taken(unread, 2)
    assert (
        isinstance(late, Failed)
        and "waited for 6 s" in str(late.error)
        and "--send-timeout" in str(late.error)
    )
    assert isinstance(closing, Failed) and closing.error.status == 503, "an error stays what it is"


def test_the_engine_stops_writing_for_a_stream_that_nobody_takes() -> None:
    """The real exchange and the real stream, and an engine that writes without end while the client takes one piece."""
    nudged: list[bool] = []
    service: Any = SimpleNamespace(
        limits=Limits(unread=100), engine=SimpleNamespace(nudge=lambda: nudged.append(True))
    )

    async def there() -> bool:
        return False

    async def run() -> tuple[list[str], int]:
        exchange = _Exchange(service, SimpleNamespace(is_disconnected=there), "", Hold(Budget(0)))  # type: ignore[arg-type]
        job: Any = SimpleNamespace(cancelled=False)
        exchange._job, exchange.asked = job, SimpleNamespace(include_usage=False)  # type: ignore[assignment]
        exchange.answer = SimpleNamespace(add=lambda p: False, chunk=lambda p: {"text": p.text})  # type: ignore[assignment]
        stream, written = _stream(exchange), 0
        exchange._give(piece(0))
        parts = [await anext(stream)]
        while not job.cancelled and written < 10_000:
            written += 1
            await asyncio.to_thread(exchange._give, piece(written))
            await asyncio.sleep(0)
        return [*parts, *[part async for part in stream]], written

    parts, written = asyncio.run(run())
    assert written == 101 and nudged == [True]
    assert parts[0] == 'data: {"text":"0 "}\n\n' and len(parts) == 2, (
        "one piece, then why there is no other"
    )
    assert '"code":"timeout"' in parts[1] and "100 pieces" in parts[1]
