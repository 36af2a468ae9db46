"""Messages of lerobot's protocol: what its own code wrote, what Python's own reader makes of ours, and what strangers send."""

from __future__ import annotations

import os
import pickle
import struct
import sys
import time
import tracemalloc
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.robotics import lerobot_messages as m
from mmrl.robotics.lerobot_pickles import CLASSES, Record, Tensor, read, write
from mmrl.robotics.policy_messages import MessageError
from tests.robotics.lerobot_serving_kit import NAMES, RECORDED, config, observation, recorded, seen
from tests.robotics.openpi_kit import same

HELPERS = "lerobot.async_inference.helpers"


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Classes that pickles of lerobot's find, as they do where it is installed."""
    for name in ("lerobot", "lerobot.async_inference", HELPERS):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name in CLASSES:
        made = type(name, (), {"__module__": HELPERS, "__init__": _init})
        setattr(sys.modules[HELPERS], name, made)
    return sys.modules[HELPERS]


def _init(self: Any, **fields: Any) -> None:
    vars(self).update(fields)


# lerobot's own bytes


def test_what_lerobots_client_wrote_is_read() -> None:
    """Recorded by scripts/check_lerobot.py from lerobot's own code."""
    wanted = RECORDED["wanted"]
    asked = m.read_config(recorded("config"))
    assert (asked.policy_type, asked.actions_per_chunk, asked.device) == ("act", 3, "cpu")
    pictures = {name: (224, 224, 3) for name in ("front", "image2")}
    assert asked.lerobot_features == m.features(NAMES, pictures) and asked.rename_map == {}
    said = m.read_observation(recorded("observation"))
    assert (said.timestamp, said.timestep, said.must_go) == (1.5, 3, True)
    raw = said.observation
    assert [raw[name] for name in NAMES] == wanted["motors"]
    for name in ("front", "image2"):
        assert same(raw[name], np.array(wanted[name], np.uint8))
    assert same(raw["depth"], np.array(wanted["depth"], np.float32))
    assert raw["gripper"] == 0.25 and raw["flag"] and raw["task"].endswith("拿起")


def test_what_lerobots_server_wrote_is_read() -> None:
    """Rows of a larger tensor: torch writes all of it with each."""
    found = m.read_actions(recorded("actions"))
    assert [one.timestep for one in found] == [3, 4, 5]
    assert [one.timestamp for one in found] == [1.5, 1.6, 1.7]
    for one, wanted in zip(found, RECORDED["wanted"]["actions"], strict=True):
        assert same(one.action, np.array(wanted, np.float32))


def test_messages_of_grpc_are_lerobots() -> None:
    theirs = recorded("observation")
    [one] = m.chunks(theirs)
    assert one.SerializeToString() == recorded("chunk")
    large = bytes(range(256)) * (5 << 12)
    sent = list(m.chunks(large))
    assert [[one.transfer_state, len(one.data)] for one in sent] == RECORDED["states"]
    assert m.joined(sent, len(large)) == large
    assert m.message_class("PolicySetup")(data=b"a").SerializeToString() == recorded("setup")
    assert m.message_class("Actions")(data=b"b").SerializeToString() == recorded("answer")
    assert m.empty().SerializeToString() == b""


# ours, read by Python and torch themselves


def test_what_we_write_is_what_lerobots_classes_hold(theirs: types.ModuleType) -> None:
    asked = pickle.loads(config(rename_map={"a": "b"}))
    assert type(asked) is theirs.RemotePolicyConfig and asked.rename_map == {"a": "b"}
    assert asked.lerobot_features["observation.images.image"]["shape"] == (9, 8, 3)
    found = pickle.loads(observation(3))
    assert type(found) is theirs.TimedObservation and found.must_go is True
    assert same(found.observation, seen(3))
    rows = np.random.default_rng(0).standard_normal((4, 7))
    written = m.write_actions([m.TimedAction(0.25 * n, n, row) for n, row in enumerate(rows)])
    for n, (one, row) in enumerate(zip(pickle.loads(written), rows, strict=True)):
        assert type(one) is theirs.TimedAction and (one.timestep, one.timestamp) == (n, 0.25 * n)
        assert one.action.dtype == torch.float32 and not one.action.requires_grad
        assert torch.equal(one.action, torch.tensor(row, dtype=torch.float32))


VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        255,
        256,
        2**31,
        -(2**31),
        2**70,
        1.5,
        float("inf"),
        "",
        "é拿",
        b"",
    ),
    *([], [1, [2.0, "a"]], (), (1,), (1, 2, 3, 4), {}, {"a": {"b": [1]}}),
    *(np.arange(6).reshape(2, 3).astype(t) for t in ("u1", "i2", "<f4", ">f4", "f8", "f2", "?")),
    *(np.zeros((0, 3)), np.array(3.5), np.arange(12.0).reshape(3, 4)[::2, ::-1].T),
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_what_is_written_is_read_by_both(value: Any) -> None:
    plain = value.astype(value.dtype.newbyteorder("=")) if isinstance(value, np.ndarray) else value
    assert same(pickle.loads(write(value)), plain) and same(read(write(value)), plain)
    for protocol in (4, 5):  # of Pythons up to 3.13, and from 3.14 on
        own = value if not isinstance(value, np.ndarray) else plain
        assert same(read(pickle.dumps(own, protocol)), plain)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(2, 3, 4)[1],
        torch.arange(24, dtype=torch.int64)[3:9],
        torch.ones(2, 3, dtype=torch.float64),
        torch.tensor([True, False]),
        torch.tensor(2.5),
        torch.zeros(0, 3),
        torch.arange(6, dtype=torch.uint8).reshape(2, 3),
        torch.ones(2, dtype=torch.float16, requires_grad=True),
    ],
    ids=str,
)
def test_tensors_of_torch_are_read(tensor: torch.Tensor) -> None:
    for protocol in (4, 5):
        assert same(read(pickle.dumps(tensor, protocol)), tensor.detach().numpy())


def test_a_scalar_of_numpy_is_one_number() -> None:
    for value in (np.float32(0.1), np.int64(-3), np.bool_(True), np.uint8(7)):
        assert same(read(pickle.dumps({"a": value}))["a"], value)


def test_what_has_no_place_in_a_pickle_is_an_error() -> None:
    for value in (object(), {1, 2}, np.array(["a"]), np.float32(1), 1j):
        with pytest.raises(TypeError, match="in a pickle, found"):
            write(value)


# strangers


class Runs:
    """A pickle that writes a file where it is run."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.made),)


def _by(module: str, name: str, arguments: bytes) -> bytes:
    return b"\x80\x04c" + f"{module}\n{name}\n".encode() + arguments + b"R."


def test_nothing_that_a_pickle_names_is_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    inner = pickle.dumps(Runs(made), 2)
    attacks = [
        pickle.dumps(Runs(made), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    ]
    attacks += [
        pickle.dumps({"observation": Runs(made)}),
        pickle.dumps([1, Runs(made)]),
        pickle.dumps(OrderedDict(a=Runs(made))),
        _by("torch.storage", "_load_from_bytes", write((inner,))[2:-1]),
        # torch's own reader would run what stands in place of its magic number
        pickle.dumps(_Stored(inner)),
        pickle.dumps(np.array([Runs(made)], object)),
        b"\x80\x04c" + f"{HELPERS}\nos.mkdir\n".encode() + write((str(made),))[2:-1] + b"R.",
        b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93" + write((str(made),))[2:-1] + b"R.",
    ]
    for attack in attacks:
        with pytest.raises(MessageError):
            read(attack)
        for reader in (m.read_observation, m.read_actions, m.read_config):
            with pytest.raises(MessageError):
                reader(attack)
    assert not made.exists()
    pickle.loads(attacks[-1])  # an attack it is
    assert made.is_dir()


class _Stored:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> Any:
        return torch.storage._load_from_bytes, (self.data,)


def _stored(tensor: torch.Tensor) -> bytes:
    """torch's file of a tensor's storage."""
    storage = tensor.__reduce_ex__(4)[1][0]
    data: bytes = storage.__reduce__()[1][0]
    return data


def _tensor(**changes: Any) -> bytes:
    """A pickle that rebuilds a tensor of four numbers, of which something is changed."""
    one = {"count": 4, "offset": 0, "size": (4,), "stride": (1,), **changes}
    data = _stored(torch.arange(4.0)).replace(struct.pack("<q", 4), struct.pack("<q", one["count"]))
    hooks = b"ccollections\nOrderedDict\n)R"
    rest = b"".join(write(one[name])[2:-1] for name in ("offset", "size", "stride"))
    storage = b"ctorch.storage\n_load_from_bytes\n" + write((data,))[2:-1] + b"R"
    called = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + rest + b"\x89" + hooks + b"tR"
    return b"\x80\x04" + called + b"."


def _array(
    shape: bytes = b"K\x02\x85", dtype: str = "f4", order: str = "<", size: int = 8
) -> bytes:
    """A pickle that rebuilds an array, of which something is changed."""
    begun = b"cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85C\x01btR"
    kind = b"cnumpy\ndtype\n" + write((dtype, False, True))[2:-1] + b"R"
    kind += write((3, order, None, None, None, -1, -1, 0))[2:-1] + b"b"
    return (
        b"\x80\x04" + begun + b"(K\x01" + shape + kind + b"\x89" + write(bytes(size))[2:-1] + b"tb."
    )


def test_the_crafted_ones_are_good_where_nothing_is_changed() -> None:
    assert same(read(_tensor()), np.arange(4, dtype=np.float32))
    assert same(read(_array()), np.zeros(2, np.float32))
    assert same(pickle.loads(_array()), np.zeros(2, np.float32))
    assert torch.equal(pickle.loads(_tensor()), torch.arange(4.0))


_SELF = b"\x80\x04]\x94h\x00a."  # a list that holds itself


def _nested(width: int, depth: int) -> bytes:
    """A tuple of the same tuple so many times over, so deep."""
    rows = [b"(" + b"h%c" % n * width + b"t\x94" for n in range(depth)]
    return b"\x80\x04(K\x01\x94" + b"".join(rows) + b"t."


BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "its end too soon"),
    "text": (b"hello", "found the byte b'h' where an instruction stands|found other bytes"),
    "messagepack": (b"\x81\xa1a\x01", "expected a pickle of lerobot's protocol"),
    "more after it": (write(1) + b"x", "found more bytes after it"),
    "two values": (b"\x80\x04K\x01K\x02.", "found other bytes"),
    "no value": (b"\x80\x04.", "found other bytes"),
    "a set": (pickle.dumps({1}), "where an instruction stands"),
    "an object": (pickle.dumps(Path("a")), "asks for 'pathlib.PosixPath'; it was not run"),
    "a class alone": (b"\x80\x04cnumpy\nndarray\n.", "found numpy.ndarray"),
    "another of lerobot's": (
        b"\x80\x04c" + HELPERS.encode() + b"\nget_logger\n)R.",
        "asks for 'lerobot.async_inference.helpers.get_logger'",
    ),
    "a class called": (b"\x80\x04c" + HELPERS.encode() + b"\nTimedAction\n)R.", "found a call of"),
    "a new function": (b"\x80\x04ccollections\nOrderedDict\n)\x81.", "found a call of collections"),
    "content of a function": (b"\x80\x04ccollections\nOrderedDict\n}b.", "content of a record"),
    "arguments of none": (b"\x80\x04ccollections\nOrderedDict\n]\x85R.", "found other bytes"),
    "an array of others": (_array().replace(b"numpy\nndarray", b"numpy\ndtype"), "numpy.ndarray"),
    "an array without content": (_array()[: _array().index(b"(K\x01")] + b".", "found _Array"),
    "objects": (pickle.dumps(np.array([1, None], object)), "found dtype '|O8'"),
    "texts": (pickle.dumps(np.array(["a"])), "found dtype '<U1'"),
    "other order": (_array(order=">"), "little-endian order, found '>'"),
    "no dtype": (_array(dtype="f4\x00"), "found dtype"),
    "too few bytes": (_array(size=4), "expected 8 bytes of an array float32"),
    "huge": (_array(shape=b"(J\xff\xff\xff\x7fJ\xff\xff\xff\x7ft"), "bytes of an array float32"),
    "negative": (_array(shape=b"J\xff\xff\xff\xff\x85"), "sizes as whole numbers from 0 on"),
    "shape of lists": (_array(shape=b"]\x85"), "sizes as whole numbers from 0 on"),
    "tensor beyond": (_tensor(offset=1), "within its storage of 4 numbers, found 1 to 5"),
    "tensor before": (_tensor(offset=-1), "within its storage"),
    "tensor of one number": (_tensor(size=(100, 100), stride=(0, 0)), "contiguous tensor"),
    "tensor turned": (_tensor(size=(2, 2), stride=(1, 2)), "contiguous tensor"),
    "tensor of steps": (_tensor(size=(2,), stride=(2**40,)), "contiguous tensor"),
    "tensor of no steps": (_tensor(stride=()), "an offset, a size and strides"),
    "tensor that is negated": (
        pickle.dumps(torch._neg_view(torch.ones(2))),
        "an offset, a size and strides",
    ),
    "storage of more": (_tensor(count=5), "one storage of torch|found other bytes|within"),
    "storage of bfloat16": (
        pickle.dumps(torch.ones(2, dtype=torch.bfloat16)),
        "asks for 'torch.BFloat16Storage'",
    ),
    "half a character": (b"\x80\x04\x8c\x03\xed\xa0\x80.", "found other bytes"),
    "a map by number": (pickle.dumps({1: 2}), "with str here, found int"),
    "itself": (_SELF, "at most 8 values within one another"),
    "deep": (pickle.dumps([[[[[[[[[1]]]]]]]]]), "at most 8 values within one another"),
    "many": (pickle.dumps([0] * 100_001), "at most 100,000 values"),
    "instructions": (b"\x80\x04" + b"N" * 200_001 + b".", "at most 200,000 instructions"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_strangers_send_is_refused(name: str) -> None:
    data, said = BAD[name]
    with pytest.raises(MessageError, match=said) as error:
        read(data)
    assert len(str(error.value)) < 400 and str(error.value).isprintable()


def _peak(data: bytes) -> tuple[Any, int]:
    """What is read, and the most memory that it took."""
    tracemalloc.start()
    try:
        return read(data), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_references_cost_neither_time_nor_memory() -> None:
    """Tuples of the same two tuples, sixty times over, are 2**60 values; 4 MB, referred to a thousand times, 4 GB."""
    began = time.monotonic()
    with pytest.raises(MessageError, match="within one another"):
        read(_nested(2, 60))
    with pytest.raises(MessageError, match="at most 100,000 values"):
        read(_nested(200, 6))
    array = write(np.zeros(4 << 20, np.uint8))[2:-1]
    found, peak = _peak(b"\x80\x04(" + array + b"\x94" + b"h\x00" * 1000 + b"t.")
    assert len(found) == 1001 and peak < 20 << 20
    stored = write(_stored(torch.zeros(1 << 20)))[2:-1]
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(ctorch.storage\n_load_from_bytes\nh\x00\x85R"
    tensor += b"K\x00K\x01\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
    found, peak = _peak(b"\x80\x04(" + stored + b"\x94" + tensor * 1000 + b"t.")
    assert len(found) == 1001 and same(found[-1], np.zeros(1, np.float32)) and peak < 40 << 20
    assert time.monotonic() - began < 30


PREFIXES = [recorded(name) for name in ("config", "observation", "actions")]


def test_no_beginning_of_a_pickle_is_one() -> None:
    for data in PREFIXES:
        for size in range(0, len(data), 7):
            with pytest.raises(MessageError):
                read(data[:size])


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PREFIXES), st.data())
def test_changed_bytes_are_read_or_refused(data: bytes, drawn: Any) -> None:
    changed = bytearray(data)
    for _ in range(drawn.draw(st.integers(1, 4))):
        changed[drawn.draw(st.integers(0, len(data) - 1))] = drawn.draw(st.integers(0, 255))
    try:
        read(bytes(changed))
    except MessageError as error:
        assert len(str(error)) < 500


# fields


def _observed(**changes: Any) -> bytes:
    fields = {"timestamp": 1.0, "timestep": 0, "observation": {}, "must_go": True, **changes}
    return write(Record("TimedObservation", {k: v for k, v in fields.items() if v != "none"}))


def _acted(*actions: Any, **changes: Any) -> bytes:
    return write(
        [
            Record("TimedAction", {"timestamp": 1.0, "timestep": 0, "action": one, **changes})
            for one in actions
        ]
    )


ROW = Tensor(np.zeros(7))
FIELDS: dict[str, tuple[Callable[[bytes], Any], bytes, str]] = {
    "an action": (m.read_observation, _acted(ROW), "expected a TimedObservation .* found list"),
    "a map": (m.read_observation, write({}), "expected a TimedObservation .* found dict"),
    "no step": (m.read_observation, _observed(timestep="none"), "timestep as int, found NoneType"),
    "half a step": (m.read_observation, _observed(timestep=0.5), "timestep as int, found float"),
    "true for a step": (m.read_observation, _observed(timestep=True), "found bool"),
    "step below 0": (m.read_observation, _observed(timestep=-1), "a timestep from 0 on"),
    "step of 70 bits": (m.read_observation, _observed(timestep=2**70), "a timestep from 0 on"),
    "time of NaN": (m.read_observation, _observed(timestamp=float("nan")), "a finite timestamp"),
    "time of text": (m.read_observation, _observed(timestamp="1"), "as float or int, found str"),
    "list seen": (m.read_observation, _observed(observation=[]), "observation as dict, found list"),
    "must of 1": (m.read_observation, _observed(must_go=1), "must_go as bool, found int"),
    "no actions": (m.read_actions, write([]), "a list of 1 to 10,000 actions, found 0 of them"),
    "one action": (m.read_actions, write(Record("TimedAction", {})), "found Record"),
    "action of a map": (m.read_actions, write([{}]), "expected a TimedAction .* found dict"),
    "action of a list": (m.read_actions, _acted([1.0]), "action as ndarray, found list"),
    "chunk as an action": (m.read_actions, _acted(Tensor(np.zeros((2, 7)))), r"float32 \(2, 7\)"),
    "empty action": (m.read_actions, _acted(Tensor(np.zeros(0))), r"float32 \(0,\)"),
    "truth": (m.read_actions, _acted(np.ones(7, bool)), r"found bool \(7,\)"),
    "sizes": (
        m.read_actions,
        _acted(ROW, Tensor(np.zeros(6))),
        r"one size, found \[\(6,\), \(7,\)\]",
    ),
    "no chunk": (m.read_config, config(actions_per_chunk=0), "actions_per_chunk of at least 1"),
    "other names": (m.read_config, config(rename_map={"a": 1}), "rename_map of texts"),
    "list of features": (
        m.read_config,
        config(lerobot_features=[]),
        "features as dict, found list",
    ),
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_that_cannot_be(name: str) -> None:
    reader, data, said = FIELDS[name]
    with pytest.raises(MessageError, match=said):
        reader(data)


def test_chunks_that_make_no_observation() -> None:
    kind = m.message_class("Observation")
    first, middle, last = (kind(transfer_state=n, data=b"ab") for n in (1, 2, 3))
    assert m.joined([middle, first, middle, last], 6) == b"ababab"  # the first begins anew
    for parts, said in (
        ([], "expected an observation's last chunk"),
        ([first, middle], "expected an observation's last chunk"),
        ([kind(data=b"a")], "expected transfer_state 1, 2 or 3, found 0"),
        ([first, *[middle] * 3, last], "at most 6 bytes, found more"),
    ):
        with pytest.raises(MessageError, match=said):
            m.joined(parts, 6)
