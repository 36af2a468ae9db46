"""Sounds of a request: what a model that hears answers is what `mmrl eval` gets of it, in both of the forms that clients send."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from mmrl.config import ModelConfig
from mmrl.policy.loading import template_for
from mmrl.registry import task_from_spec
from tests.kits.engine_kit import picture, read_jsonl, tiny_folder
from tests.kits.launch_kit import run_here
from tests.serve.serve_kit import asking, data_url, serving
from tests.video.sound_kit import tone, write_sound

pytestmark = pytest.mark.slow  # a server loads torch and a model


def spoken(path: Path, form: str) -> dict[str, Any]:
    """A content part as OpenAI's clients send sounds."""
    data = base64.b64encode(path.read_bytes()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": form}}


def part_of(path: Path) -> dict[str, Any]:
    """Of wav as OpenAI's clients send it, of others as an address."""
    if path.suffix == ".wav":
        return spoken(path, "wav")
    return {"type": "audio_url", "audio_url": {"url": data_url(path, f"audio/{path.suffix[1:]}")}}


def test_sounds_are_heard_as_mmrl_eval_hears_them(tmp_path: Path) -> None:
    model = tiny_folder("qwen2_5_omni")
    high, low = tmp_path / "high.wav", tmp_path / "low.flac"
    write_sound(high, tone(0.9, 44100, channels=2), 44100)
    write_sound(low, tone(1.7, 8000), 8000)
    rows = [
        {"audio": str(high), "question": "Which?", "answer": "a"},
        {"audios": [str(high), str(low)], "question": "Which?", "answer": "a"},
        {"audio": str(low), "image": picture((112, 84)), "question": "Which?", "answer": "a"},
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = run_here(
        "mmrl.cli.main",
        *("eval", str(model), "model.device=cpu", "model.system=''", "--task", "open_text"),
        *("--data", str(data), "--out", str(tmp_path / "out"), "rollout.max_new_tokens=12"),
    )
    assert asked.returncode == 0, asked.stderr
    wanted = [row["text"] for row in read_jsonl(tmp_path / "out" / "predictions.jsonl")]
    task = task_from_spec("open_text", {})
    template = template_for("qwen2_5_omni", ModelConfig(path=str(model), system=""))
    contents = []
    for sample in task.load(str(data)):
        images, audios = iter(sample.images), iter(sample.audios)
        parts = {
            "image": lambda images=images: asking("", next(images))[0],
            "audio": lambda audios=audios: part_of(Path(next(audios))),
            "text": lambda: None,
        }
        [message] = [m for m in task.messages(sample, template) if m["role"] == "user"]
        contents.append([parts[item["type"]]() or item for item in message["content"]])
    ask = {"type": "text", "text": "Which?"}
    short = "data.audio.max_seconds=2"
    with serving("model.device=cpu", "model.system=''", short, checkpoint=str(model)) as server:
        found = [server.text(content, max_tokens=12) for content in contents]
        assert found == wanted and len({*found}) > 1
        for part, words in [
            (spoken(high, "pcm16"), "format of wav, mp3, flac"),
            ({"type": "input_audio", "input_audio": "AAAA"}, "an object with data and format"),
            ({"type": "audio_url", "audio_url": {"url": data_url(low)}}, "data:audio/wav;base64"),
            (spoken(Path(picture((112, 84))), "wav"), "the media sent"),
        ]:
            with pytest.raises(openai.BadRequestError, match=words):
                server.text([part, ask])
        long = tmp_path / "long.wav"
        write_sound(long, tone(2.5, 8000), 8000)
        with pytest.raises(openai.BadRequestError, match="at most 2"):
            server.text([spoken(long, "wav"), ask])
        # it still answers
        assert server.text(contents[0], max_tokens=12) == wanted[0]
