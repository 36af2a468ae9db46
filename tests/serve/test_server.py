"""`mmrl serve` as its clients see it: a real process, asked by OpenAI's own client."""

from __future__ import annotations

import json
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from mmrl.config import ModelConfig
from mmrl.policy.loading import template_for
from mmrl.registry import task_from_spec
from mmrl.tasks.scenes import make_scenes
from tests.kits.clip_kit import make_clip
from tests.kits.engine_kit import REPO, picture, read_jsonl
from tests.kits.launch_kit import run_here
from tests.serve.serve_kit import CHECKPOINT, Server, asking, data_url, serving

pytestmark = pytest.mark.slow  # each server loads torch and a model

QUESTION = "red circle"  # as the tiny model was taught to be asked
SYSTEM = "Look."  # it was taught without; a server that forgets it gives other answers
SETTINGS = ("--config", str(REPO / "configs" / "demo.yaml"))
PARAMS = {"prompt": "{question}"}
PHOTO, STRIP = (112, 84), (56, 56)
KEY = "secret"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's media root."""
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(
        *SETTINGS,
        f"model.system={SYSTEM}",
        "--media-root",
        str(folder),
        "--max-body-mib",
        "1",
        "--max-tokens",
        "20",
        "data.video.kind=uniform",
        "data.video.num_frames=4",
        "rollout.batch_tokens=4096",
        "--grace",
        "60",
        "--api-key",
        KEY,
        key=KEY,
    ) as running:
        yield running


def test_the_checkpoint_is_listed_and_healthy(server: Server) -> None:
    [model] = server.client.models.list().data
    assert model.id == server.model == CHECKPOINT
    with urllib.request.urlopen(f"{server.url}/health", timeout=30) as answer:
        assert json.load(answer) == {
            "status": "ok",
            "model": CHECKPOINT,
            "running": 0,
            "waiting": 0,
        }


def test_the_greedy_answer_is_the_one_of_mmrl_eval(server: Server, tmp_path: Path) -> None:
    """Prompt, system text, pixels and decoding are those of training: the same examples, one by one and through the server."""
    task = task_from_spec("grounding", PARAMS)
    data = make_scenes(str(tmp_path / "data"), 6, 7, 112, {0: 1.0}, "serve-", background="graded")
    asked = run_here(
        "mmrl.cli.main",
        "eval",
        CHECKPOINT,
        *SETTINGS,
        f"model.system={SYSTEM}",
        "--task",
        "grounding",
        "--data",
        data,
        "--out",
        str(tmp_path / "out"),
    )
    assert asked.returncode == 0, asked.stderr
    rows = read_jsonl(tmp_path / "out" / "predictions.jsonl")
    template = template_for("qwen2_5_vl", ModelConfig(path=CHECKPOINT, system=SYSTEM))
    for sample, row in zip(task.load(data), rows, strict=True):
        system, message = task.messages(sample, template)
        assert system["role"] == "system", "the server adds it by itself"
        images = iter(sample.images)
        content = [
            {"type": "image_url", "image_url": {"url": data_url(next(images))}}
            if item["type"] == "image"
            else item
            for item in message["content"]
        ]
        answer = server.chat(content, max_tokens=24)
        assert (
            answer.choices[0].message.content == row["text"]
            and answer.usage.completion_tokens == row["num_tokens"]
        )
        assert answer.choices[0].finish_reason == {"eos": "stop", "length": "length"}[row["stop"]]
    assert len({row["text"] for row in rows}) > 1, "answers depend on the pictures"


def test_pictures_clips_and_text_are_all_seen(server: Server, folder: Path) -> None:
    clips = [make_clip(folder, name) for name in ("one", "two")]
    asked = {
        "text": QUESTION,
        "picture": asking(QUESTION, picture(PHOTO)),
        "other picture": asking(QUESTION, picture(PHOTO, 1)),
        "pictures": asking(QUESTION, picture(PHOTO), picture(STRIP)),
        "swapped": asking(QUESTION, picture(STRIP), picture(PHOTO)),
        "clip": asking(QUESTION, clips=(clips[0],)),
        "other clip": asking(QUESTION, clips=(clips[1],)),
        "both": asking(QUESTION, picture(STRIP), clips=(clips[0],)),
    }
    found = {}
    for name, content in asked.items():
        answer = server.chat(content, logprobs=True)
        found[name] = tuple(t.logprob for t in answer.choices[0].logprobs.content)
        usage = answer.usage
        assert (
            usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
            and 1 <= usage.completion_tokens <= 16
        )
    assert len(set(found.values())) == len(asked), "no two of these may look the same to the model"


def test_files_below_the_media_root_are_the_same_as_their_bytes(
    server: Server, folder: Path
) -> None:
    clip = make_clip(folder, "local")
    sent = server.text(asking(QUESTION, clips=(clip,)))
    for part in (
        {"type": "video_url", "video_url": {"url": f"file://{clip}"}},
        {"type": "video", "video": Path(clip).name},
    ):
        assert server.text([part, {"type": "text", "text": QUESTION}]) == sent


def test_frames_may_be_chosen_per_request(server: Server, folder: Path) -> None:
    content = asking(QUESTION, clips=(make_clip(folder, "frames"),))
    few, usual = (
        server.chat(
            content, extra_body={"media_io_kwargs": {"video": {"num_frames": n}}}
        ).usage.prompt_tokens
        for n in (2, 4)
    )
    assert few < usual == server.chat(content).usage.prompt_tokens


def test_a_message_of_its_own_system_text_replaces_the_checkpoints(server: Server) -> None:
    user = {"role": "user", "content": QUESTION}
    answers = [
        server.chat("", messages=[*system, user])
        for system in (
            [],
            [{"role": "system", "content": SYSTEM}],
            [{"role": "developer", "content": "Where is it? Think first, then answer."}],
        )
    ]
    assert (
        answers[0].usage.prompt_tokens
        == answers[1].usage.prompt_tokens
        < answers[2].usage.prompt_tokens
    )
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_several_choices_follow_the_seed_and_share_the_prompt(server: Server) -> None:
    content = asking(QUESTION, picture(PHOTO))
    options = {"temperature": 1.5, "top_p": 0.95, "max_tokens": 12}
    three, again, one, other = (
        server.chat(content, n=n, seed=seed, **options)
        for n, seed in ((3, 7), (3, 7), (1, 7), (3, 8))
    )
    texts = [[c.message.content for c in answer.choices] for answer in (three, again, one, other)]
    assert (
        texts[0] == texts[1]
        and texts[2] == texts[0][:1]
        and texts[3] != texts[0]
        and len(set(texts[0])) == 3
    )
    assert (
        three.usage.prompt_tokens == one.usage.prompt_tokens
        and three.usage.completion_tokens > one.usage.completion_tokens
    )
    assert [c.index for c in three.choices] == [0, 1, 2]


def test_a_stream_says_what_the_whole_answer_says(server: Server) -> None:
    content = asking("Describe the image.", picture(PHOTO))
    for options in (
        {"max_tokens": 20},
        {"temperature": 1.5, "seed": 3, "n": 3, "stop": ["e", "1,"], "max_tokens": 20},
    ):
        whole = server.chat(content, **options)
        chunks = list(
            server.chat(content, stream=True, stream_options={"include_usage": True}, **options)
        )
        texts, reasons = {c.index: "" for c in whole.choices}, {}
        for chunk in chunks[:-1]:
            [choice] = chunk.choices
            assert choice.index not in reasons, "nothing follows a finish reason"
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
        assert [texts[c.index] for c in whole.choices] == [c.message.content for c in whole.choices]
        assert [reasons[c.index] for c in whole.choices] == [c.finish_reason for c in whole.choices]
        assert chunks[-1].usage == whole.usage and len(chunks) > len(whole.choices) + 1


def test_stop_strings_cut_the_text_and_end_the_answer(server: Server) -> None:
    content = asking(QUESTION, picture(PHOTO))
    full = server.text(content, max_tokens=20)
    stop = full[len(full) // 2 :][:2]
    cut = server.chat(content, max_tokens=20, stop=[stop, "never said"])
    assert (
        cut.choices[0].message.content == full[: full.index(stop)]
        and cut.choices[0].finish_reason == "stop"
    )
    assert cut.usage.completion_tokens < server.chat(content, max_tokens=20).usage.completion_tokens


def test_logprobs_are_those_of_the_distribution(server: Server) -> None:
    answer = server.chat(QUESTION, logprobs=True, top_logprobs=3, max_tokens=5)
    content = answer.choices[0].logprobs.content
    assert content and "".join(t.token for t in content) == answer.choices[0].message.content
    for token in content:
        assert token.logprob == token.top_logprobs[0].logprob <= 0, "greedy takes the likeliest"
        assert [t.logprob for t in token.top_logprobs] == sorted(
            (t.logprob for t in token.top_logprobs), reverse=True
        )


def test_requests_at_once_get_the_answers_they_get_alone(server: Server, folder: Path) -> None:
    """Long and short prompts, pictures and clips, greedy and sampled; more than the cache budget holds at once."""
    contents: list[Any] = [
        QUESTION,
        asking(QUESTION, picture(PHOTO)),
        asking("yes", picture(STRIP), picture(PHOTO, 2)),
        asking("How many?", clips=(make_clip(folder, "busy"),)),
        "Describe the video. " * 20,
    ]
    jobs = [
        (
            content,
            {"max_tokens": 4 + 5 * i, "n": 1 + i % 3}
            | ({} if i % 2 else {"temperature": 1.0, "seed": i}),
        )
        for i, content in enumerate(contents * 4)
    ]

    def ask(job: tuple[Any, dict[str, Any]]) -> list[str]:
        return [c.message.content for c in server.chat(job[0], **job[1]).choices]

    alone = [ask(job) for job in jobs]
    with ThreadPoolExecutor(len(jobs)) as pool:
        together = list(pool.map(ask, jobs))
    assert together == alone


def test_bad_requests_are_answered_with_words(server: Server, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(Path(picture(STRIP)).read_bytes())
    (folder / "link.png").unlink(missing_ok=True)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "broken.mp4").write_bytes(b"no clip")
    text = {"type": "text", "text": "?"}

    def image(url: Any, **extra: Any) -> dict[str, Any]:
        return {"content": [{"type": "image_url", "image_url": {"url": url, **extra}}, text]}

    cases: list[tuple[dict[str, Any], str]] = [
        (image("https://example.com/a.png"), "--allow-remote-media"),
        (image("ftp://example.com/a.png"), "scheme 'ftp'"),
        (image(f"file://{tmp_path / 'secret.png'}"), "below the folder of --media-root"),
        (image("../secret.png"), "below the folder"),
        (image(f"file://{folder}/link.png"), "below the folder"),
        (image("data:image/png;base64,@@"), "base64"),
        (image("data:image/png,abc"), "base64"),
        (image("data:image/png;base64,"), "found none"),
        (image("data:image/png;base64,aGVsbG8="), "found unknown content"),
        (image("data:video/mp4;base64,aGVsbG8="), "image part holds one image"),
        (image(data_url(picture(STRIP)), size=3), "'size'"),
        ({"content": [{"type": "video", "video": "broken.mp4"}, text]}, "expected a"),
        (
            {
                "content": [
                    {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AA=="}}
                ]
            },
            "found a sound",
        ),
        ({"content": "a <|image_pad|> b"}, "the question must not contain it"),
        ({"content": "?", "temperature": -1}, "temperature from 0"),
        ({"content": "?", "top_p": 0}, "top_p above 0"),
        ({"content": "?", "n": 0}, "whole number from 1"),
        ({"content": "?", "max_tokens": 1.5}, "max_tokens as a whole number"),
        ({"content": "?", "frequency_penalty": 0.5}, "no frequency_penalty"),
        ({"content": "?", "response_format": {"type": "json_object"}}, "no response_format"),
        ({"content": "?", "extra_body": {"temprature": 1}}, "Did you mean 'temperature'"),
        ({"content": "?", "stop": [""]}, "stop"),
        ({"content": "?", "top_logprobs": 2}, "logprobs to true"),
        ({"content": "?", "max_tokens": 9000}, "8192 tokens"),
        ({"content": "yes no " * 9000}, "prompt tokens"),
        ({"content": ""} | {"messages": []}, "at least one message"),
        (
            {"content": "?", "messages": [{"role": "assistant", "content": "a"}]},
            "last message from role user",
        ),
        ({"content": "?", "messages": [{"role": "tool", "content": "a"}]}, "role of system"),
    ]
    for options, words in cases:
        with pytest.raises(openai.BadRequestError) as caught:
            server.chat(**options)
        found = caught.value.body
        assert (
            isinstance(found, dict)
            and words in found["message"]
            and found["type"] == "invalid_request_error"
        ), (words, found)
        assert str(tmp_path) not in found["message"] or "secret" in found["message"], (
            "paths of the server stay its own"
        )
    assert server.text("?"), "the server is as it was"


def test_wrong_models_bodies_and_addresses_are_told_apart(server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="GET /v1/models lists it"):
        server.client.chat.completions.create(
            model="gpt-4o", messages=[{"role": "user", "content": "?"}]
        )
    with pytest.raises(openai.NotFoundError, match="expected POST /v1/chat/completions"):
        server.client.embeddings.create(model=server.model, input="x")
    with pytest.raises(openai.APIStatusError, match="--max-body-mib") as caught:
        server.text("x" * (3 << 20))
    assert caught.value.status_code == 413
    raw = urllib.request.Request(
        f"{server.url}/v1/chat/completions", b"{not json", {"Authorization": f"Bearer {KEY}"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(raw, timeout=30)
    assert (
        refused.value.code == 400
        and "expected a JSON body" in json.load(refused.value)["error"]["message"]
    )


def wait_for(server: Server, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Until /health says so; a test that never gets there fails by its own time limit."""
    ends = time.monotonic() + 120
    while time.monotonic() < ends:
        with urllib.request.urlopen(f"{server.url}/health", timeout=30) as answer:
            if wanted(json.load(answer)):
                return
        time.sleep(0.05)
    raise AssertionError("the server never got there")


def test_a_client_that_leaves_frees_its_place(server: Server) -> None:
    """Streaming or waiting for the whole: a hundred choices, one after the other for want of cache, that nobody reads."""
    options: dict[str, Any] = {"max_tokens": 4000, "n": 100, "temperature": 1.5, "seed": 1}
    whole = server.chat(QUESTION, **options).usage.completion_tokens
    before = completion_tokens(server)
    stream = server.chat(QUESTION, stream=True, **options)
    next(iter(stream))
    wait_for(server, lambda state: state["running"] == 1)
    stream.close()
    wait_for(server, lambda state: state["running"] == 0)
    body = json.dumps(
        {"model": server.model, "messages": [{"role": "user", "content": QUESTION}], **options}
    ).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n"
            % (KEY.encode(), len(body))
            + body
        )
        wait_for(server, lambda state: state["running"] >= 1)
    wait_for(server, lambda state: state["running"] == 0)
    assert completion_tokens(server) - before < whole, (
        "both together wrote less than one of them alone would have"
    )


def completion_tokens(server: Server) -> int:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        rows = dict(
            line.rsplit(" ", 1)
            for line in answer.read().decode().splitlines()
            if not line.startswith("#")
        )
    assert int(rows['mmrl_serve_responses_total{status="200"}']) > 0
    return int(rows["mmrl_serve_completion_tokens_total"])


def test_another_key_is_refused(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError, match="Authorization"):
        server.client.with_options(api_key="wrong").chat.completions.create(
            model=server.model, messages=[{"role": "user", "content": "?"}]
        )


def test_a_terminated_server_finishes_what_it_began_and_refuses_what_is_new(server: Server) -> None:
    """The last test of the module's server: it ends it."""
    stream = iter(
        server.chat(
            "Describe the image.", stream=True, max_tokens=800, n=8, temperature=2.0, seed=1
        )
    )
    begun = next(stream)
    server.process.send_signal(signal.SIGTERM)
    with pytest.raises((openai.InternalServerError, openai.APIConnectionError)) as refused:
        for _ in range(1000):  # until the signal has arrived
            server.text("?", max_tokens=1)
    assert "shutting down" in str(refused.value), (
        "as long as something runs, new requests are refused with words"
    )
    last = [begun, *stream][-1]
    assert last.choices[0].finish_reason in ("stop", "length")
    assert server.process.wait(60) == 0


def test_the_grace_period_ends() -> None:
    with serving("--grace", "0") as server:
        # one answer may end before a busy machine delivers the signal, 64 do not
        stream = iter(server.chat("?", stream=True, n=64, max_tokens=6000, temperature=10.0))
        next(stream)
        server.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        assert server.process.wait(60) == 0
