"""`mmrl push`: the Hub's own client uploads to a server that speaks its protocol; the card's numbers are those of the run."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmrl.cli.demo import make_data
from mmrl.cli.publishing import prepare, push_command
from mmrl.config import load_config
from mmrl.errors import CheckpointError, ConfigError
from mmrl.report.card import Publication, hub_name, model_card
from mmrl.report.published import published_settings
from mmrl.training.trainer import Trainer
from tests.kits.engine_kit import ENVIRONMENT, REPO, config_file, small_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps with a LoRA adapter on pictures of scenes."""
    folder = tmp_path_factory.mktemp("published")
    make_data(folder / "data", train=6, held_out=5)
    tree = small_run(
        folder / "runs",
        "",
        model={
            "path": str(REPO / "assets" / "tiny_vlm"),
            "system": "Think in <think></think>.",
            "lora": {"r": 2},
        },
        data={
            name: [
                {
                    "task": "grounding",
                    "path": str(folder / "data" / name / "data.jsonl"),
                    "params": {"prompt": "{question}", "mode": "iou"},
                }
            ]
            for name in ("train", "eval")
        },
        rollout={"max_new_tokens": 24},
    )
    Trainer(load_config(config_file(folder / "run.yaml", tree))).fit()
    return folder / "runs" / "run"


class Hub(ThreadingHTTPServer):
    """What the Hub keeps of one repository: files by name, as its REST and Git LFS protocols bring them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.public = False  # whether the repository is there already, and public
        self.address = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def _answer(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != "Bearer hf_test":
            return self._answer({"error": "Invalid username or password."}, 401)
        if "/tree/" in self.path:
            return self._answer(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                    for name, data in self.server.files.items()
                ]
            )
        names = [{"rfilename": name} for name in self.server.files]
        return self._answer(
            {
                "id": "me/boxes",
                "sha": "0" * 40,
                "siblings": names,
                "private": not self.server.public,
            }
        )

    def do_PUT(self) -> None:
        data = self._body()
        self.server.objects[hashlib.sha256(data).hexdigest()] = data
        self._answer({})

    def do_POST(self) -> None:
        body = self._body()
        if self.headers.get("Authorization") != "Bearer hf_test":
            return self._answer({"error": "Invalid username or password."}, 401)
        if self.path.endswith("/repos/create"):
            self.server.created.append(json.loads(body))
            if self.server.public:
                words = "You already created this model repo"
                return self._answer({"error": words, "url": f"{self.server.address}/me/boxes"}, 409)
            return self._answer({"url": f"{self.server.address}/me/boxes", "name": "me/boxes"})
        if "/preupload/" in self.path:
            files = json.loads(body)["files"]
            return self._answer(
                {
                    "files": [
                        {
                            "path": f["path"],
                            "uploadMode": "lfs"
                            if f["path"].endswith(".safetensors")
                            else "regular",
                            "shouldIgnore": False,
                        }
                        for f in files
                    ]
                }
            )
        if self.path.endswith("/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            upload = {"upload": {"href": f"{self.server.address}/upload", "header": {}}}
            return self._answer(
                {"transfer": "basic", "objects": [{**o, "actions": upload} for o in wanted]}
            )
        if self.path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        assert "/commit/" in self.path, self.path
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del self.server.files[value["path"]]
            elif line["key"] == "lfsFile":
                self.server.files[value["path"]] = self.server.objects[value["oid"]]
        return self._answer(
            {
                "commitUrl": f"{self.server.address}/me/boxes/commit/{'0' * 40}",
                "commitOid": "0" * 40,
            }
        )


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def push(hub: Hub, *arguments: str, token: str = "hf_test") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mmrl.cli.main", "push", *arguments],
        env={
            **ENVIRONMENT,
            "HF_ENDPOINT": hub.address,
            "HF_TOKEN": token,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",  # its storage has a protocol of its own; the older one carries the same files
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_hubs_client_uploads_weights_card_and_settings(run: Path, hub: Hub) -> None:
    done = push(hub, str(run / "checkpoints" / "best"), "me/boxes", "--private")
    assert done.returncode == 0, done.stderr
    assert "adapter/ is left out" in done.stdout and hub.address in done.stdout
    best = run / "checkpoints" / "best"
    assert hub.files["model.safetensors"] == (best / "model.safetensors").read_bytes()
    assert {"README.md", "config.json", "tokenizer.json", "trainer/config.yaml"} <= set(hub.files)
    assert not any("optimizer" in name or "state.json" in name for name in hub.files)
    assert hub.created[0]["name"] == "boxes" and hub.created[0]["organization"] == "me"
    everything = b"".join(
        v for k, v in hub.files.items() if not k.endswith((".safetensors", "tokenizer.json"))
    )
    assert str(run.parent.parent).encode() not in everything, "a folder of this machine"
    assert str(REPO).encode() not in everything


def test_a_public_repository_is_not_taken_for_a_private_one(run: Path, hub: Hub) -> None:
    hub.public = True
    done = push(hub, str(run / "checkpoints" / "best"), "me/boxes", "--private")
    assert done.returncode == 2 and "exists and is public" in done.stderr, done.stderr
    assert not hub.files


def test_what_an_earlier_push_left_does_not_stay_among_the_weights(run: Path, hub: Hub) -> None:
    hub.files.update(
        {
            "model-00002-of-00002.safetensors": b"old",
            "adapter/old.bin": b"old",
            "notes.md": b"theirs",
        }
    )
    done = push(hub, str(run / "checkpoints" / "best"), "me/boxes")
    assert done.returncode == 0, done.stderr
    assert "notes.md" in hub.files and "model.safetensors" in hub.files
    assert not {"model-00002-of-00002.safetensors", "adapter/old.bin"} & set(hub.files)


def test_evaluations_and_notes_beside_a_checkpoint_stay_where_they_are(
    run: Path, tmp_path: Path
) -> None:
    """`mmrl eval` writes into the checkpoint's folder: questions, gold answers and paths of pictures."""
    import shutil

    copy = tmp_path / "step_000002"
    shutil.copytree(run / "checkpoints" / "step_000002", copy)
    (copy / "eval").mkdir()
    (copy / "eval" / "predictions.jsonl").write_text("{}", encoding="utf-8")
    (copy / ".env").write_text("HF_TOKEN=hf_abcdefghijklmnop", encoding="utf-8")
    told = prepare(copy, "me/boxes", tmp_path / "out", link=False)
    assert any("left out" in line and ".env" in line and "eval" in line for line in told), told
    published = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*")}
    assert "model.safetensors" in published
    assert not [name for name in published if "eval" in name or ".env" in name]


def test_places_accounts_and_keys_of_any_spelling_are_not_published() -> None:
    settings = {
        "model": {
            "path": "/home/alice/my models/base",
            "system": "Read /home/alice/rules.txt in <think></think>.",
        },
        "data": {
            "cache": {"dir": "/scratch/al ice/cache"},
            "train": [
                {
                    "task": "/home/alice/parity.py:Parity",
                    "path": "/home/alice/My Drive/clients/acme.jsonl",
                    "params": {
                        "api_key": "sk-abcdefghijk",
                        "judge": "10.0.0.5:8000",
                        "store": "alice@box:/data/x",
                        "endpoint": "judge.example",
                        "image_root": "data/clients/acme",
                        "prompt": "{question} and/or <answer>...</answer>, 3:2 at 12:30",
                        "reader": {"columns": {"image": "img"}},
                    },
                }
            ],
        },
        "rollout": {"max_new_tokens": 24},
        "engine": {"vllm": {"url": "http://10.0.0.5:8000"}},
    }
    kept, left_out = published_settings(settings)
    text = json.dumps(kept)
    for part in ("alice", "al ice", "clients", "sk-", "10.0.0.5", "box", "judge.example", "home"):
        assert part not in text, part
    params = kept["data"]["train"][0]["params"]
    assert params["prompt"] == settings["data"]["train"][0]["params"]["prompt"]  # type: ignore[index]
    assert params["image_root"] == "acme" and params["reader"] == {"columns": {"image": "img"}}
    assert kept["model"] == {"path": "base", "system": "Read rules.txt in <think></think>."}
    assert kept["data"]["train"][0]["task"] == "parity.py:Parity"
    assert kept["rollout"] == {"max_new_tokens": 24}
    assert {name.rpartition(".")[2] for name in left_out} == {
        "api_key",
        "judge",
        "store",
        "endpoint",
    }


def test_before_and_after_are_of_the_same_prompts(run: Path, tmp_path: Path) -> None:
    """A checkpoint between is evaluated on the first eval.limit prompts; the one before training was on all."""
    import shutil

    whole = tmp_path / "run"
    shutil.copytree(run, whole, symlinks=True)
    file = whole / "eval" / "step_000002" / "predictions.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    [first, *_] = [r["id"] for r in rows]
    kept = [r for r in rows if r["id"] == first]
    file.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")
    before = [
        json.loads(line)["score"]["value"]
        for line in (whole / "eval" / "step_000000" / "predictions.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
        if json.loads(line)["id"] == first and json.loads(line)["mode"] == "greedy"
    ]
    after = [r["score"]["value"] for r in kept if r["mode"] == "greedy"]
    card = model_card(Publication.of(whole / "checkpoints" / "step_000002"), "me/boxes")
    assert "on the same 1 prompts" in card
    assert f"| Reward | greedy | {before[0]:.3f}" in card and f"| {after[0]:.3f}" in card


def test_a_folder_that_is_gone_is_no_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_name("assets/tiny_vlm") is None and hub_name("runs/base") is None
    assert hub_name("Qwen/Qwen2.5-VL-3B-Instruct") == "Qwen/Qwen2.5-VL-3B-Instruct"


def test_a_refused_token_is_an_error_that_says_what_to_do(run: Path, hub: Hub) -> None:
    done = push(hub, str(run / "checkpoints" / "best"), "me/boxes", token="hf_wrong")
    assert (
        done.returncode == 2 and "hf auth login" in done.stderr and "Traceback" not in done.stderr
    )
    assert not hub.files


def test_a_hub_that_cannot_be_reached_is_an_error(run: Path, hub: Hub) -> None:
    hub.shutdown()
    hub.server_close()
    done = push(hub, str(run / "checkpoints" / "best"), "me/boxes")
    assert done.returncode == 2 and "did not take the upload" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_card_has_the_numbers_of_the_run(run: Path, tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    prepare(run / "checkpoints" / "step_000002", "me/boxes", tmp_path / "out", link=False)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    results = json.loads(
        (run / "eval" / "step_000002" / "results.json").read_text(encoding="utf-8")
    )
    [result] = card.data.eval_results
    assert result.metric_value == pytest.approx(results["sampled"]["reward"]["mean"], abs=5e-5)
    assert (card.data.library_name, card.data.pipeline_tag) == (
        "transformers",
        "image-text-to-text",
    )
    assert {"mmrl", "grpo", "grounding"} <= set(card.data.tags)
    mean = results["sampled"]["reward"]["mean"]
    assert "| Reward | sampled | " in card.text and f"{mean:.3f}"[:4] in card.text
    for words in (
        "step 0",
        "step 2",
        "| group size | 3 |",
        "data.jsonl: 5 samples",
        "Versions: python",
    ):
        assert words in card.text, words


def test_published_settings_still_load_and_name_no_place(run: Path, tmp_path: Path) -> None:
    prepare(run / "checkpoints" / "best", "me/boxes", tmp_path / "out", link=False)
    file = tmp_path / "out" / "trainer" / "config.yaml"
    tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert tree["model"]["path"] == "tiny_vlm" and tree["data"]["train"][0]["path"] == "data.jsonl"
    assert tree["model"]["system"] == "Think in <think></think>."
    assert load_config(str(file)).rollout.group_size == 3


def test_an_adapter_names_a_base_model_that_others_can_load(run: Path, tmp_path: Path) -> None:
    """Beside the run it is an absolute folder, from which peft loads it in any folder; on the Hub the name of the base there."""
    import shutil

    described = json.loads(
        (run / "checkpoints" / "best" / "adapter" / "adapter_config.json").read_text(
            encoding="utf-8"
        )
    )
    assert described["base_model_name_or_path"] == str(REPO / "assets" / "tiny_vlm")
    copy = tmp_path / "copy"
    shutil.copytree((run / "checkpoints" / "best").resolve(), copy)
    for name in ("manifest.json", "state.json"):
        (copy / "trainer" / name).unlink()
    settings = yaml.safe_load((copy / "trainer" / "config.yaml").read_text(encoding="utf-8"))
    settings["model"]["path"] = "Qwen/Qwen2.5-VL-3B-Instruct"
    (copy / "trainer" / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    prepare(copy, "me/boxes", tmp_path / "out", link=False)
    published = json.loads(
        (tmp_path / "out" / "adapter" / "adapter_config.json").read_text(encoding="utf-8")
    )
    assert published["base_model_name_or_path"] == "Qwen/Qwen2.5-VL-3B-Instruct"
    assert "base_model: Qwen/Qwen2.5-VL-3B-Instruct" in (tmp_path / "out" / "README.md").read_text(
        encoding="utf-8"
    )


def test_what_is_no_checkpoint_or_a_damaged_one_is_refused(run: Path, tmp_path: Path) -> None:
    import shutil

    with pytest.raises(ConfigError, match="owner/name"):
        push_command(run / "checkpoints" / "best", "boxes")
    with pytest.raises(CheckpointError, match=r"config.json and weights, found .*nowhere"):
        push_command(tmp_path / "nowhere", "me/boxes")
    with pytest.raises(CheckpointError, match="expected a checkpoint of a run"):
        push_command(REPO / "assets" / "tiny_vlm", "me/boxes", out=tmp_path / "a")
    damaged = tmp_path / "step_000002"
    shutil.copytree((run / "checkpoints" / "step_000002"), damaged)
    data = bytearray((damaged / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (damaged / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="as it was saved"):
        push_command(damaged, "me/boxes", out=tmp_path / "b")
    os.makedirs(tmp_path / "c")
    with pytest.raises(ConfigError, match="new folder"):
        push_command(run / "checkpoints" / "best", "me/boxes", out=tmp_path / "c")
