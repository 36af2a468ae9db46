"""What a client of a rollout server may say that is not so: names of tensors, fingerprints, lengths, documents of nonsense."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from mmrl.rollout.vllm_inputs import WireMedia, WirePrompt, WireSampling
from mmrl.rollout.vllm_server import LIMITS, RolloutServer
from mmrl.rollout.vllm_wire import (
    MalformedError,
    content_of,
    dump,
    dump_prompts,
    load,
    load_prompts,
)
from mmrl.serve.limits import Limits

KEY = "k"
PICTURE, OTHER = torch.arange(12.0).view(3, 4), torch.zeros(3, 4)


class _Engine:
    """In place of vLLM: remembers what it was asked."""

    def __init__(self) -> None:
        self.settings = SimpleNamespace(model="m", dtype="float32", max_model_len=64)
        self.asked: list[Any] = []

    def generate(self, asked: list[tuple[WirePrompt, WireSampling]]) -> list[Any]:
        self.asked += [prompt for prompt, _ in asked]
        return [[] for _ in asked]

    def load(self, weights: Any) -> list[dict[str, int]]:
        return [{name: 1 for name, _ in weights}]

    def close(self) -> None:
        """Nothing is open."""


def client_of(limits: Limits = LIMITS) -> tuple[TestClient, _Engine]:
    engine = _Engine()
    server = RolloutServer(engine, api_key=KEY, limits=limits)  # type: ignore[arg-type]
    client = TestClient(server.app(), headers={"Authorization": f"Bearer {KEY}"})
    body = dump(
        {"first": True, "last": True, "sync": "s", "base": "", "names": ["w"]},
        {"w": torch.zeros(1)},
    )
    assert client.post("/weights", content=body).status_code == 200
    return client, engine


def prompt(
    tensor: torch.Tensor | None, hash: str = "stated", fingerprint: str = "mine"
) -> WirePrompt:
    media = (WireMedia("image", hash, "pixels", (1, 2, 2), 1, 1, tensor),)
    return WirePrompt((5, 6, 7), (0, 1, 0), torch.zeros(3, 3), fingerprint, media)


SAMPLING = {
    "count": 1,
    "seed": 1,
    "temperature": 1.0,
    "max_tokens": 4,
    "stop_ids": [0],
    "banned_ids": [],
}


def question(
    asked: WirePrompt, known: dict[str, str] | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = {}
    return {
        "weights": "s",
        "prompts": dump_prompts([asked], tensors, known),
        "sampling": [SAMPLING],
    }, tensors


def test_another_picture_cannot_be_stored_under_a_name_that_others_ask_for() -> None:
    """The tensor was kept under the hash that the client stated, for every run that asked for it afterwards."""
    client, engine = client_of()
    document, tensors = question(prompt(PICTURE))
    [name] = [n for n in tensors if n.startswith("media/")]
    forged = client.post("/generate", content=dump(document, {**tensors, name: OTHER}))
    assert forged.status_code == 400 and "have that content" in forged.json()["error"]
    honest, _ = question(prompt(None), {"stated": content_of(PICTURE)})
    bare = {"positions/0": torch.zeros(3, 3)}
    assert client.post("/generate", content=dump(honest, bare)).status_code == 409, (
        "nothing was stored"
    )
    assert client.post("/generate", content=dump(document, tensors)).status_code == 200
    assert client.post("/generate", content=dump(honest, bare)).status_code == 200
    assert [torch.equal(p.media[0].tensor, PICTURE) for p in engine.asked] == [True, True]


def test_stated_hashes_and_fingerprints_do_not_reach_the_engines_caches() -> None:
    """vLLM keeps encoded pictures by hash and prefixes by fingerprint: two clients may state the same for different prompts."""
    client, engine = client_of()
    for tensor in (PICTURE, OTHER, PICTURE):
        document, tensors = question(prompt(tensor))
        assert client.post("/generate", content=dump(document, tensors)).status_code == 200
    moved, tensors = question(prompt(PICTURE))
    tensors["positions/0"] = torch.ones(3, 3)
    assert client.post("/generate", content=dump(moved, tensors)).status_code == 200
    one, two, same, elsewhere = engine.asked
    assert one.media[0].hash == same.media[0].hash != two.media[0].hash and "stated" not in (
        one.media[0].hash,
        two.media[0].hash,
    )
    assert (
        one.fingerprint == same.fingerprint
        and len({one.fingerprint, two.fingerprint, elsewhere.fingerprint, "mine"}) == 4
    )


@pytest.mark.parametrize("path", ["/generate", "/probe", "/weights"])
@pytest.mark.parametrize(
    "document",
    [
        {},
        {"weights": "s"},
        {"weights": "s", "prompts": [{}], "sampling": [SAMPLING], "completions": [[1]]},
        {"weights": 3, "prompts": 4, "sampling": 5},
        {"first": 1, "last": 1},
        {"prompts": [1], "sampling": [1], "completions": [1], "weights": "s"},
        {"weights": "s", "prompts": [], "sampling": [SAMPLING], "completions": [[1]]},
        {
            "weights": "s",
            "prompts": [{"ids": "abc", "kinds": [], "fingerprint": 1, "media": [{"content": 1}]}],
            "sampling": [SAMPLING],
            "completions": [[1]],
        },
    ],
)
def test_documents_of_nonsense_are_the_clients_fault(path: str, document: dict[str, Any]) -> None:
    client, engine = client_of()
    answer = client.post(path, content=dump(document, {"positions/0": torch.zeros(3, 1)}))
    assert answer.status_code == 400 and "expected" in answer.json()["error"] and not engine.asked


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"x",
        b"\xff" * 100,
        (8).to_bytes(8, "little") + b'{"a": 1}',
        (2).to_bytes(8, "little") + b"[]",
        (1 << 62).to_bytes(8, "little"),
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
    ],
)
def test_bodies_of_nonsense_are_the_clients_fault(body: bytes) -> None:
    with pytest.raises(MalformedError):
        load(body)
    assert client_of()[0].post("/generate", content=body).status_code == 400


def test_bodies_are_bounded_and_keys_asked_for_before_they_are_read() -> None:
    client, _ = client_of(Limits(body_bytes=2000, held_bytes=4000))
    assert client.post("/generate", content=b"x" * 2001).status_code == 413
    assert client.post("/generate", content=iter([b"x"])).status_code == 411, (
        "in chunks of unknown length"
    )
    refused = client.post(
        "/generate", content=b"x" * 1_000_000, headers={"Authorization": "Bearer none"}
    )
    assert refused.status_code == 401 and refused.headers["connection"] == "close"


def test_a_document_in_a_tensor_file_is_json() -> None:
    document, tensors = question(prompt(PICTURE))
    found, came = load(dump(document, tensors))
    prompts, missing = load_prompts(found["prompts"], came, lambda name: None)
    assert json.dumps(found) and not missing and torch.equal(prompts[0].media[0].tensor, PICTURE)
