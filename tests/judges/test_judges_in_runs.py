"""A judge in a run: `mmrl serve` judges, and a run that is killed gets the verdicts it had."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from mmrl.judges import Judge
from mmrl.judges.store import keep_in
from scripts._judge_server import judge_server
from tests.kits.engine_kit import (
    ALBUM,
    album_data,
    cli,
    config_file,
    picture,
    read_jsonl,
    small_run,
    start_cli,
)
from tests.serve.serve_kit import serving

pytestmark = pytest.mark.slow


def test_a_served_model_judges(tmp_path: Path) -> None:
    """Its share of two words is that of the log-probabilities which OpenAI's own client is told."""
    keep_in(tmp_path)
    rubric = {"system": "You judge.", "prompt": "Is it right? {answer}"}
    with serving() as server:
        settings: dict[str, Any] = {
            "url": f"{server.url}/v1",
            "model": server.model,
            "rubric": rubric,
        }
        [system, user] = Judge(**settings).template.messages({"answer": "a red cup"})
        told = server.client.chat.completions.create(
            model=server.model,
            messages=[system, user],
            temperature=0,
            max_tokens=1,
            logprobs=True,
            top_logprobs=20,
        )
        top = told.choices[0].logprobs.content[0].top_logprobs
        first, second = list({t.token.strip().lower(): t for t in top if t.token.strip()})[:2]
        mass = [
            math.fsum(math.exp(t.logprob) for t in top if t.token.strip().lower() == word)
            for word in (first, second)
        ]
        words = Judge(**settings, read="words", words=(first, second))
        told_by_words = asyncio.run(words.grade("q", "a red cup"))
        junk = asyncio.run(Judge(**settings, max_tokens=8).grade("q", "a red cup"))
    assert told_by_words.value == pytest.approx(mass[0] / sum(mass), abs=1e-5)
    assert told_by_words.tokens == (told.usage.prompt_tokens, 1)
    assert junk.value is None and (junk.reason or "").startswith("judge_junk")
    assert junk.text, "what the tiny model said instead"


def test_a_killed_run_gets_the_verdicts_it_had(tmp_path: Path) -> None:
    """A fickle judge would give another score to each of the questions that are asked again after the kill."""
    data = album_data(tmp_path / "data", [[picture((56, 56), i)] for i in range(8)])
    with judge_server(0.02, fickle=True) as url:
        judge = {"url": url, "model": "fickle", "rubric": {"prompt": "{answer}"}}
        source = {"task": "judged", "path": data, "params": {"task": ALBUM, "judge": judge}}
        tree = small_run(
            tmp_path,
            data,
            data={"train": [source]},
            reward={"workers": 1, "timeout_s": 60},
            eval={"every": 0, "best_metric": None},
            train={"steps": 12, "save_every": 5, "prompts_per_step": 3},
        )
        run = start_cli("train", config_file(tmp_path / "run.yaml", tree))
        rollouts = [tmp_path / "run" / "rollouts" / f"step_{n:06d}.jsonl" for n in range(13)]
        end = time.monotonic() + 240
        while not rollouts[7].exists() and run.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        assert run.poll() is None, run.communicate()
        os.kill(run.pid, signal.SIGKILL)
        run.communicate()
        had = [[row["score"]["value"] for row in read_jsonl(rollouts[n])] for n in (6, 7)]
        cli("resume", str(tmp_path / "run"), "--trust-code")
        got = [[row["score"]["value"] for row in read_jsonl(rollouts[n])] for n in (6, 7)]
        with urllib.request.urlopen(url) as answer:
            requests = json.load(answer)["requests"]
    assert got == had and len(set(had[0])) > 1
    lines = [
        json.loads(line)["key"]
        for path in (tmp_path / "run" / "verdicts").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert len(lines) == len(set(lines)) <= requests
    row = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    assert row["step"] == 12 and row["train/judge_failed"] == 0.0 < row["train/judge_asked"]
