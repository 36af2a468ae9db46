"""What strangers sent to `mmrl serve` and should not have: requests that cost more than they are, or that ended in status 500."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmrl.cli.serving import ServeOptions, serve_command
from mmrl.errors import ConfigError
from mmrl.operations.listening import is_loopback
from mmrl.policy.tiny import make_tokenizer
from mmrl.serve.decode import Row
from mmrl.serve.errors import RequestError
from mmrl.serve.limits import Limits
from mmrl.serve.protocol import Defaults, Sampling, read_body
from mmrl.serve.text import StopTexts, TextStream, decode
from tests.serve.serve_kit import CHECKPOINT

DEFAULTS = Defaults("m")
TOKENIZER = make_tokenizer()


def refused(body: bytes, limits: Limits | None = None) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read_body(body, DEFAULTS, limits)
    json.dumps(caught.value.body(), ensure_ascii=False).encode()
    return caught.value


def request(**options: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "?"}], **options}


def raw(text: str, **options: Any) -> bytes:
    """A request whose JSON holds `text` where it says "HERE"."""
    return json.dumps(request(**options)).replace('"HERE"', text).encode()


DEEP = "[" * 900 + "]" * 900  # JSON may be so deep; repr() may not
TEXT = [{"role": "user", "content": "HERE"}]


@pytest.mark.parametrize(
    "body",
    [
        raw("9" * 5000, seed="HERE"),
        raw("9" * 5000, max_tokens="HERE"),
        raw("1" + "0" * 400, temperature="HERE"),
        raw("-1" + "0" * 400, top_p="HERE"),
        raw("1" + "0" * 4299, seed="HERE"),
        raw("1" + "0" * 4299, user="x", zzz="HERE"),
        raw("1e999", temperature="HERE"),
        raw("NaN", temperature="HERE"),
        raw(DEEP, stop="HERE"),
        raw(DEEP, tools="HERE"),
        raw("[" * 200_000 + "]" * 200_000, stop="HERE"),
        raw(DEEP, messages="HERE"),
        raw('"\\ud800"', messages=TEXT),
        raw('"\\uD83D x"', stop="HERE"),
        raw('"\\udc00"', model="HERE"),
        raw('{"\\ud800": 1}', metadata="HERE"),
        b'{"model": "m", "\\ud800": 1}',
        b"\xff\xfe",
        b"",
        b"[]",
        b"null",
        b'"\\ud800"',
        b"1" * 10_000,
        b"{",
        json.dumps(request()).encode("utf-16"),
        json.dumps(request()).encode().replace(b'"?"', b'"\xed\xa0\x80"'),
    ],
)
def test_whatever_is_malformed_is_the_clients_fault(body: bytes) -> None:
    """Status 500 before: integers beyond Python's digits, numbers beyond its floats, half characters, lists deeper than repr()."""
    error = refused(body)
    assert error.status in (400, 404) and "expected" in str(error) and len(str(error)) < 1500


def test_whole_characters_written_as_surrogate_pairs_are_text() -> None:
    asked = read_body(raw('"\\ud83d\\ude00 \\\\ud800"', messages=TEXT), DEFAULTS)
    assert asked.messages[-1]["content"] == [{"type": "text", "text": "\U0001f600 \\ud800"}]


@given(
    st.recursive(
        st.none() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text(st.characters(), max_size=5), inner, max_size=3)
        ),
        max_leaves=6,
    ),
    st.sampled_from(
        [
            "messages",
            "stop",
            "seed",
            "temperature",
            "tools",
            "media_io_kwargs",
            "user",
            "zz",
            "model",
            "n",
        ]
    ),
)
@settings(max_examples=200)
@example("\ud800", "user")
def test_any_json_is_read_or_refused(value: Any, key: str) -> None:
    """Characters include half ones; what is accepted can be written as UTF-8."""
    try:
        asked = read_body(json.dumps(request(**{key: value})).encode(), DEFAULTS)
    except RequestError as error:
        assert error.status in (400, 404)
        json.dumps(error.body(), ensure_ascii=False).encode()
    else:
        json.dumps(asked.messages, ensure_ascii=False).encode()


def test_stop_texts_media_and_texts_are_bounded_before_work() -> None:
    limits = Limits(stop_chars=10, media=2, text_bytes=20)
    assert "--max-stop-chars" in str(refused(raw(json.dumps("x" * 11), stop="HERE"), limits))
    assert "--max-stop-chars" in str(
        refused(raw(json.dumps(["x" * 6, "y" * 6]), stop="HERE"), limits)
    )
    assert read_body(raw(json.dumps("x" * 10), stop="HERE"), DEFAULTS, limits).sampling.stop == (
        "x" * 10,
    )
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    error = refused(
        json.dumps(request(messages=[{"role": "user", "content": [picture] * 3}])).encode(), limits
    )
    assert "at most 2 pictures and videos, found 3" in str(error)
    error = refused(
        json.dumps(request(messages=[{"role": "user", "content": "é" * 11}])).encode(), limits
    )
    assert (
        "at most 20 bytes of text, found 22" in str(error)
        and error.code == "context_length_exceeded"
    )
    assert "--max-stop-chars" in str(refused(raw(json.dumps("x" * 1_000_000), stop="HERE"))), (
        "the default holds, too"
    )


@pytest.mark.slow
@given(
    st.text("ab", max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=7), min_size=1, max_size=4),
    st.integers(1, 5),
)
@settings(max_examples=400)
def test_stop_texts_are_found_as_python_finds_them(text: str, stops: list[str], width: int) -> None:
    """Self-overlapping ones across pieces, against str.find: in the piece where one ends, the text is cut at the first begun."""
    ids = TOKENIZER(text)["input_ids"]
    stream, given = TextStream(TOKENIZER, StopTexts(stops)), ""
    for n, token in enumerate(ids):
        given += stream.add(token)
        so_far = decode(TOKENIZER, ids[: n + 1])
        found = [at for at in (so_far.find(stop) for stop in stops) if at >= 0]
        assert stream.stopped == bool(found)
        if found:
            assert given == so_far[: min(found)]
            return
        held = max(k for stop in stops for k in range(len(stop)) if so_far.endswith(stop[:k]))
        assert given == so_far[: len(so_far) - held], (
            "all that cannot become a stop text is given out, and no more"
        )
    assert given + stream.finish() == text


class _Counting:
    """The tokenizer, and how many tokens it was asked to decode."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, ids: list[int], **options: Any) -> str:
        self.decoded += len(ids)
        return TOKENIZER.decode(ids, **options)


@pytest.mark.parametrize("text", ["\ufffd" * 600, "\ufffdx" * 300, "a" * 600, "\U0001f600" * 200])
def test_work_per_token_does_not_grow_with_the_answer(text: str) -> None:
    """A model may be made to repeat U+FFFD, the sign of half a character: each token decoded all before it again."""
    tokenizer = _Counting()
    ids = TOKENIZER(text)["input_ids"]
    stream = TextStream(tokenizer, StopTexts(["y" * 4096]))
    whole = "".join(map(stream.add, ids)) + stream.finish()
    assert whole == decode(TOKENIZER, ids) == stream.text
    assert tokenizer.decoded < 120 * len(ids)


@pytest.mark.slow
@given(st.lists(st.integers(0, len(TOKENIZER) - 1), min_size=20, max_size=80))
@settings(max_examples=150)
def test_long_rows_of_broken_characters_are_given_as_they_decode(ids: list[int]) -> None:
    halves = [t for t in range(len(TOKENIZER)) if decode(TOKENIZER, [t]).endswith("\ufffd")] or ids
    mixed = [halves[i % len(halves)] if i % 5 else i for i in ids]
    stream = TextStream(TOKENIZER)
    assert "".join(map(stream.add, mixed)) + stream.finish() == decode(TOKENIZER, mixed)


def test_choices_that_wait_hold_no_memory_for_what_they_may_write() -> None:
    """128 choices of 128,000 tokens, asked for in 200 bytes, held 131 MB of noise from when they came, before their turn."""
    tracemalloc.start()
    rows = [
        Row(
            n,
            Sampling(n=128, temperature=1.0),
            128_000,
            (n,),
            print,
            lambda: True,
            TextStream(TOKENIZER),
        )
        for n in range(128)
    ]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len({row.draw() for row in rows}) == 128
    assert peak < 4 << 20


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.168.1.5", "example.org", "127.0.0.1.example.org"]
)
def test_beyond_this_machine_a_key_is_needed(host: str) -> None:
    with pytest.raises(
        ConfigError, match=r"expected a key for a server that listens at .* --no-key"
    ):
        serve_command(
            CHECKPOINT, None, [], ServeOptions(host=host, engine="none, should it get that far")
        )
    assert not is_loopback(host)


def test_this_machine_is_known_by_its_names() -> None:
    assert all(
        map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "LOCALHOST"))
    )
