"""Frames of scores between a reward process and the run: whole, in order, and believed only from the writer of that process."""

from __future__ import annotations

import os
import pickle
import struct
import threading
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

import mmrl.workers.reward_pipe as reward_pipe
from mmrl.types import Score
from mmrl.workers.reward_pipe import CLOSED, TOKEN_BYTES, GarbledError, ScoreInbox, ScoreWriter

TOKEN = bytes(range(TOKEN_BYTES))
LONGEST = 8 << 20
Ends = tuple[Connection, Connection]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The run's end and the reward process's."""
    here, there = Pipe(duplex=True)
    yield here, there
    for end in (here, there):
        if not end.closed:
            end.close()


def score(value: float, **detail: Any) -> Score:
    return Score(value, True, parts={"accuracy": value}, weights={"accuracy": 1.0}, detail=detail)


def frame(data: bytes, token: bytes = TOKEN, length: int | None = None) -> bytes:
    return token + struct.pack(">I", len(data) if length is None else length) + data


def ended(act: Callable[[], None]) -> int:
    """The exit status of a fork that does it and goes on to its end, which is 99."""
    child = os.fork()
    if not child:
        try:
            act()
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_scores_come_in_order_once_they_are_whole(ends: Ends) -> None:
    here, there = ends
    inbox, writer = ScoreInbox(here, TOKEN), ScoreWriter(there, TOKEN)
    assert inbox.read() == []
    sent = [(number, score(number / 4, word="é" * number)) for number in range(3)]
    for job, one in sent:
        writer.add(job, one, ())
    assert inbox.read() == [], "nothing goes before it is flushed"
    writer.flush()
    assert inbox.read() == sent and inbox.read() == []
    writer.flush()
    assert inbox.read() == [], "and nothing goes twice"
    # byte by byte: a frame is there with its last one
    data = frame(pickle.dumps(sent[1]))
    for byte in data[:-1]:
        os.write(there.fileno(), bytes([byte]))
        assert inbox.read() == []
    os.write(there.fileno(), data[-1:] + data)
    assert inbox.read() == [sent[1], sent[1]]


def test_more_than_a_pipe_holds_is_sent_and_read_in_parts(ends: Ends) -> None:
    here, there = ends
    writer, inbox, found = ScoreWriter(there, TOKEN), ScoreInbox(here, TOKEN), []
    sent = [(number, score(0.5, text="x" * 20_000)) for number in range(200)]
    for job, one in sent:
        writer.add(job, one, ())
    sender = threading.Thread(target=writer.flush)
    sender.start()
    while len(found) < len(sent):
        found += inbox.read()
    sender.join()
    assert found == sent


def test_the_longest_score_goes_and_a_longer_one_is_a_recorded_failure(ends: Ends) -> None:
    here, there = ends
    writer, inbox = ScoreWriter(there, TOKEN), ScoreInbox(here, TOKEN)
    overhead = len(pickle.dumps((1, score(1.0, text="x" * LONGEST)))) - LONGEST
    for job, size in ((1, LONGEST - overhead), (2, LONGEST - overhead + 1)):
        writer.add(job, score(1.0, text="x" * size), ("accuracy", "format"))
    writer.add(3, score(1.0, text=lambda: 0), ("accuracy",))
    sender = threading.Thread(target=writer.flush)
    sender.start()
    found: dict[int, Score] = {}
    while len(found) < 3:
        found |= dict(inbox.read())
    sender.join()
    assert found[1].value == 1.0 and len(found[1].detail["text"]) == LONGEST - overhead
    assert found[2].value == 0 and {*found[2].parts} == {"accuracy", "format"}
    assert "expected a score of at most 8,388,608 bytes, found 8,388,609" in str(found[2].reason)
    assert found[3].value == 0 and "cannot be sent between processes" in str(found[3].reason)


def test_one_look_takes_what_is_there_up_to_some_dozens_of_scores(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In however many pieces it comes; more than that waits for the next look, and the deadlines between the two."""
    here, there = ends
    writer, inbox = ScoreWriter(there, TOKEN), ScoreInbox(here, TOKEN)
    for number in range(100):
        writer.add(number, score(0.5), ())
    writer.flush()
    monkeypatch.setattr(reward_pipe, "_READ", 16)
    assert [len(inbox.read()) for _ in range(3)] == [65, 35, 0]


class Unsendable:
    """Whose error is a long one."""

    def __reduce__(self) -> Any:
        raise ValueError("x" * 1000)


def test_numbers_that_others_rely_on() -> None:
    """A token of 64 bits; sysexits' EX_IOERR in the words of a reward_crash; half a thousand characters of a reason."""
    assert TOKEN_BYTES == 8 and CLOSED == os.EX_IOERR == 74
    writer = ScoreWriter(Pipe()[1], TOKEN)
    writer.add(1, score(1.0, text=Unsendable()), ())
    _, failed = pickle.loads(writer._waiting[0][TOKEN_BYTES + 4 :])
    assert len(failed.reason) == 500


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (frame(pickle.dumps((1, score(1.0))), token=TOKEN[::-1]), "found other bytes"),
        (b"print" * 4, "found other bytes"),
        (frame(b"", length=LONGEST + 1), "found other bytes"),
        (frame(b"no pickle"), "a score that cannot be read: UnpicklingError"),
        (frame(pickle.dumps((1, 0.5))), "expected a score, found float"),
        (frame(pickle.dumps(("1", score(1.0)))), "expected a score, found Score"),
        (frame(pickle.dumps(1)), "a score that cannot be read: TypeError"),
    ],
    ids=["token", "text", "length", "pickle", "score", "job", "pair"],
)
def test_what_the_writer_did_not_send_is_not_believed(ends: Ends, data: bytes, said: str) -> None:
    here, there = ends
    os.write(there.fileno(), data)
    with pytest.raises(GarbledError, match=said):
        ScoreInbox(here, TOKEN).read()


def test_a_length_that_is_allowed_is_waited_for(ends: Ends) -> None:
    here, there = ends
    os.write(there.fileno(), frame(b"", length=LONGEST))
    assert ScoreInbox(here, TOKEN).read() == []


def test_what_was_sent_is_read_before_the_end_is_said(ends: Ends) -> None:
    here, there = ends
    writer, inbox = ScoreWriter(there, TOKEN), ScoreInbox(here, TOKEN)
    writer.add(7, score(0.25), ())
    writer.flush()
    os.write(there.fileno(), TOKEN)  # half a frame
    there.close()
    assert inbox.read() == [(7, score(0.25))]
    with pytest.raises(EOFError):
        inbox.read()


def test_an_end_that_left_work_unread_is_an_end(ends: Ends) -> None:
    """Linux says ECONNRESET then."""
    here, there = ends
    inbox = ScoreInbox(here, TOKEN)
    os.write(here.fileno(), b"jobs")
    there.close()
    with pytest.raises(EOFError):
        inbox.read()


def test_a_run_that_is_gone_is_said(ends: Ends) -> None:
    here, there = ends
    writer = ScoreWriter(there, TOKEN)
    writer.add(1, score(1.0), ())
    here.close()
    with pytest.raises(BrokenPipeError):
        writer.flush()


def test_a_process_whose_pipe_was_taken_away_ends(ends: Ends) -> None:
    _, there = ends

    def again() -> ScoreWriter:
        return ScoreWriter(there, TOKEN)  # of the fork itself, as a reward process has it

    def closed() -> None:
        mine = again()
        os.close(there.fileno())
        mine.check()

    def replaced() -> None:
        mine = again()
        os.dup2(os.open("/dev/null", os.O_WRONLY), there.fileno())
        mine.flush()

    def same() -> None:
        again().check()

    assert [ended(act) for act in (closed, replaced, same)] == [CLOSED, CLOSED, 99]


def test_a_forked_copy_ends_and_sends_nothing(ends: Ends) -> None:
    here, there = ends
    writer, inbox = ScoreWriter(there, TOKEN), ScoreInbox(here, TOKEN)
    writer.add(1, score(1.0), ())
    assert ended(writer.check) == ended(writer.flush) == 0
    assert inbox.read() == []
    writer.flush()
    assert inbox.read() == [(1, score(1.0))]
