"""Reading requests, cutting text, keeping media within limits, and the commands around: all without a server."""

from __future__ import annotations

import base64
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from mmrl.cli.serving import ServeOptions, _chosen, serve_command
from mmrl.config import RunConfig
from mmrl.errors import ConfigError, MissingExtraError
from mmrl.policy.loading import load_processor
from mmrl.policy.tiny import make_tokenizer
from mmrl.rollout.cache import PreallocatedCache, joined
from mmrl.serve.errors import RequestError
from mmrl.serve.limits import Limits
from mmrl.serve.media import MediaRules, check_picture, file_of
from mmrl.serve.protocol import Defaults, Media, read_chat
from mmrl.serve.text import StopTexts, TextStream, decode
from mmrl.serve.vllm import system_template, vllm_command
from tests.kits.engine_kit import ENVIRONMENT, REPO, picture, policy, tiny_folder
from tests.serve.serve_kit import data_url

DEFAULTS = Defaults("m", 0.7, 0.9, 5, "Be brief.")
TOKENIZER = make_tokenizer()


def body(**options: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "?"}], **options}


def test_what_a_request_leaves_open_is_the_checkpoints() -> None:
    asked = read_chat(body(max_tokens=None, frequency_penalty=0, user="me"), DEFAULTS)
    s = asked.sampling
    assert (s.temperature, s.top_p, s.top_k, s.n, s.max_tokens, s.seed) == (
        0.7,
        0.9,
        5,
        1,
        None,
        None,
    )
    assert [m["role"] for m in asked.messages] == ["system", "user"] and asked.messages[0][
        "content"
    ][0]["text"] == "Be brief."
    named = read_chat(
        body(temperature=0.2, top_p=1, top_k=-1, max_completion_tokens=3, stop="x", seed=-1),
        DEFAULTS,
    ).sampling
    assert (
        named.temperature,
        named.top_p,
        named.top_k,
        named.max_tokens,
        named.stop,
        named.seed,
    ) == (0.2, 1.0, 0, 3, ("x",), -1)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(("type", "text", "role", "content", "url", "user"))
            | st.text(max_size=5),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("part", "url"),
    [
        (
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}},
            "data:audio/mp3;base64,AAAA",
        ),
        ({"type": "audio_url", "audio_url": {"url": "https://a.example/b.wav"}}, None),
        ({"type": "audio", "audio": "https://a.example/b.wav"}, None),
    ],
)
def test_sounds_have_the_forms_of_openai_and_of_addresses(
    part: dict[str, Any], url: str | None
) -> None:
    asked = read_chat(body(messages=[{"role": "user", "content": [part]}]), DEFAULTS)
    [media] = asked.media
    assert (media.kind, media.url) == ("audio", url or "https://a.example/b.wav")
    assert asked.messages[-1]["content"] == [{"type": "audio"}]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("AAAA", "as an object with data and format"),
        ({"data": "", "format": "wav"}, "data as the file in base64"),
        ({"data": 3, "format": "wav"}, "data as the file in base64, found 3"),
        ({"data": "AAAA"}, "format of wav, mp3"),
        ({"data": "AAAA", "format": "flak"}, "Did you mean 'flac'?"),
        ({"data": "AAAA", "format": "wav", "rate": 1}, "'rate'"),
    ],
)
def test_a_sound_in_another_form_is_named(value: Any, words: str) -> None:
    part = {"type": "input_audio", "input_audio": value}
    with pytest.raises(RequestError) as caught:
        read_chat(body(messages=[{"role": "user", "content": [part]}]), DEFAULTS)
    assert caught.value.status == 400 and words in str(caught.value)


@pytest.mark.slow
@given(
    st.dictionaries(
        st.sampled_from(
            (
                *body(),
                "temperature",
                "top_p",
                "top_k",
                "n",
                "max_tokens",
                "stop",
                "seed",
                "stream",
                "tools",
                "stream_options",
                "logprobs",
                "top_logprobs",
                "media_io_kwargs",
                "logit_bias",
                "zzz",
            )
        ),
        json_values,
        max_size=4,
    ),
    json_values,
)
@settings(max_examples=300)
def test_whatever_is_sent_is_read_or_refused_with_words(
    changes: dict[str, Any], alone: Any
) -> None:
    for sent in (body(**changes), body(messages=[{"role": "user", "content": [alone]}]), alone):
        try:
            asked = read_chat(sent, DEFAULTS)
        except RequestError as error:
            assert (
                "expected" in str(error) and error.status in (400, 404) and len(str(error)) < 1500
            )
            json.dumps(error.body())
        else:
            assert asked.messages[-1]["role"] == "user" and 0 <= asked.sampling.temperature <= 10


@given(
    st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30),
    st.lists(st.text("ab1 e<", min_size=1, max_size=3), max_size=3),
)
@settings(max_examples=300)
def test_pieces_of_text_are_the_whole_text_up_to_the_first_stop(
    ids: list[int], stops: list[str]
) -> None:
    """Bytes of half characters, special tokens and stop strings across tokens included."""
    whole = decode(TOKENIZER, ids)
    stream, pieces = TextStream(TOKENIZER, StopTexts(stops)), []
    for token in ids:
        pieces.append(stream.add(token))
        if stream.stopped:
            break
        assert "".join(pieces) == whole[: len("".join(pieces))] and not any(
            stop in "".join(pieces) for stop in stops
        )
    pieces.append(stream.finish())
    ends = [at for at in (whole.find(stop) for stop in stops) if at >= 0]
    assert "".join(pieces) == stream.text == (
        whole[: min(ends)] if ends else whole
    ) and stream.stopped == bool(ends)


def test_joined_caches_hold_the_rows_asked_for_aligned_at_their_ends() -> None:
    torch.manual_seed(0)
    parts = []
    for rows, width in ((3, 5), (2, 2)):
        cache = PreallocatedCache(9)
        for layer in range(2):
            cache.update(torch.randn(rows, 2, width, 4), torch.randn(rows, 2, width, 3), layer)
        parts.append(cache)
    cache = joined([(parts[0], torch.tensor([2, 0]), 1), (parts[1], torch.tensor([1]), 0)], 6)
    for number, layer in enumerate(cache.layers):
        one, two = parts[0].layers[number], parts[1].layers[number]
        assert torch.equal(layer.keys[:2], one.keys[[2, 0]][:, :, 1:])
        assert torch.equal(layer.values[:2], one.values[[2, 0]][:, :, 1:])
        assert torch.equal(layer.keys[2, :, 2:], two.keys[1]) and not layer.values[2, :, :2].any()
    keys, _ = cache.update(torch.ones(3, 2, 1, 4), torch.ones(3, 2, 1, 3), 0)
    assert keys.shape == (3, 2, 5, 4) and cache.get_seq_length() == 5


def test_pictures_are_checked_by_their_header(tmp_path: Path) -> None:
    sent = Media("image", data_url(picture((112, 84))), "messages[0]")
    path = file_of(sent, tmp_path, MediaRules())
    assert (
        Path(path).read_bytes() == Path(picture((112, 84))).read_bytes()
        and Path(path).parent == tmp_path
    )
    assert check_picture(path, sent, 112 * 84) == 112 * 84
    with pytest.raises(
        RequestError, match="at most 9,407 pixels, found 112 x 84 = 9,408; shrink it"
    ):
        check_picture(path, sent, 112 * 84 - 1)


def test_vllm_gets_the_prompts_and_limits_of_training(tmp_path: Path) -> None:
    p = policy()
    settings = RunConfig.model_validate(
        {
            "model": {"path": "ckpt", "max_prompt_tokens": 2000, "dtype": "fp32"},
            "rollout": {"temperature": 0.6, "max_new_tokens": 99},
            "data": {
                "min_pixels": 784,
                "max_pixels": 7840,
                "video": {"kind": "uniform", "num_frames": 8},
            },
        }
    )
    command = vllm_command(
        settings,
        ServeOptions(media_root=tmp_path, name="x", api_key="k"),
        p.processor,
        p.base.config,
    )
    options = dict(zip(command[3::2], command[4::2], strict=True))
    assert options["--chat-template"] == system_template(
        p.processor.chat_template, p.template.system
    ), "no file of it stays behind"
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert (options["--model"], options["--served-model-name"], options["--max-model-len"]) == (
        "ckpt",
        "x",
        "6096",
    )
    assert json.loads(options["--mm-processor-kwargs"]) == {
        "size": {"shortest_edge": 784, "longest_edge": 7840}
    }
    assert (
        json.loads(options["--media-io-kwargs"]) == {"video": {"num_frames": 8}}
        and options["--dtype"] == "float32"
    )
    assert json.loads(options["--override-generation-config"])["max_new_tokens"] == 99
    assert options["--allowed-local-media-path"] == str(tmp_path.resolve()) and "k" not in command
    assert options["--allowed-media-domains"] == "none.invalid"
    remote = vllm_command(
        settings,
        ServeOptions(allow_remote_media=True, media_hosts=("a.org", "b.org")),
        p.processor,
        p.base.config,
    )
    at = remote.index("--allowed-media-domains")
    assert (
        remote[at + 1 : at + 3] == ["a.org", "b.org"]
        and remote[remote.index("--served-model-name") + 1] == "ckpt"
    )
    assert "--hf-overrides" not in options


@pytest.mark.parametrize(
    ("gpu", "said", "told"),
    [
        (True, {}, {}),
        (True, {"memory": 0.3, "kv_cache_gib": 2.5}, {"--gpu-memory-utilization": "0.3"}),
        (True, {"memory": 0.45}, {"--gpu-memory-utilization": "0.45"}),
        (False, {"kv_cache_gib": 2.5}, {"--kv-cache-memory-bytes": str(5 * 2**29)}),
        (
            True,
            {
                "tensor_parallel": 2,
                "mode": "server",
                "url": "http://there:1",
                "compare_weights": False,
            },
            {"--tensor-parallel-size": "2"},
        ),
    ],
)
def test_vllm_gets_what_is_said_of_its_machine(
    gpu: bool,
    said: dict[str, Any],
    told: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Defaults are left to vLLM: those of engine.vllm leave room for a training process."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    p = policy()
    settings = RunConfig.model_validate(
        {"model": {"path": "ckpt", "dtype": "fp32", "device": "cpu"}, "engine": {"vllm": said}}
    )
    command = vllm_command(settings, ServeOptions(), p.processor, p.base.config)
    options = dict(itertools.pairwise(command))
    names = ("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--tensor-parallel-size")
    assert {name: options[name] for name in names if name in options} == told


def test_vllm_is_told_what_transformers_takes_for_granted() -> None:
    """vLLM does not start with a Qwen3-VL-MoE whose configuration lacks norm_topk_prob, and transformers writes none."""
    folder = tiny_folder("qwen3_vl_moe")
    command = vllm_command(
        RunConfig.model_validate({"model": {"path": folder}}),
        ServeOptions(),
        load_processor(folder),
        AutoConfig.from_pretrained(folder),
    )
    told = json.loads(command[command.index("--hf-overrides") + 1])
    assert told == {"text_config": {"norm_topk_prob": True}}


def test_vllms_chat_template_begins_as_the_run_did() -> None:
    p = policy()
    user = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    system = 'Say "yes" or {{ no }}.'
    template = system_template(p.processor.chat_template, system)
    for messages in (user, [{"role": "system", "content": "Mine."}, *user]):
        wanted = (
            messages
            if messages[0]["role"] == "system"
            else [{"role": "system", "content": [{"type": "text", "text": system}]}, *messages]
        )
        shown = p.processor.tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        assert shown == p.processor.apply_chat_template(
            wanted, tokenize=False, add_generation_prompt=True
        )
    assert system_template("x", "") == "x"


def test_engines_are_chosen_by_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _chosen(ServeOptions(engine="own")) == "own"
    with pytest.raises(ConfigError, match="Did you mean 'vllm'"):
        _chosen(ServeOptions(engine="vlm"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert _chosen(ServeOptions()) == "own"
    with pytest.raises(MissingExtraError, match=r"pip install -e '.*\[vllm\]'"):
        _chosen(ServeOptions(engine="vllm"))


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"host": "0.0.0.0", "api_key": "k"}, r"found 0\.0\.0\.0: .*/invocations"),
        ({"host": "::", "no_key": True}, "found ::"),
        ({"host": "a.example", "api_key": "k"}, r"found a\.example"),
        ({"limits": Limits(pixels=1000, waiting=2)}, r"some given \(pixels, waiting\)"),
        ({"text_bytes": 4096}, r"some given \(text_bytes\)"),
    ],
)
def test_vllms_server_is_not_given_what_it_does_not_hold_to(
    asked: dict[str, Any], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were dropped without a word, and strangers had whatever vLLM lets them."""
    with pytest.raises(ConfigError, match=found):
        _chosen(ServeOptions(engine="vllm", **asked))
    with pytest.raises(ConfigError, match=found):
        serve_command("x", None, [], ServeOptions(engine="vllm", **asked))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert _chosen(ServeOptions(**asked)) == "own"
    for host in ("127.0.0.1", "localhost", "::1"):
        here = ServeOptions(host=host, limits=Limits(workers=8))  # as the command line makes them
        assert _chosen(here) == _chosen(replace(here, engine="vllm")) == "vllm"


@pytest.mark.slow  # a process of its own, with torch
def test_without_the_extra_the_command_names_it() -> None:
    code = (
        "import sys; sys.modules['starlette'] = None; sys.argv = ['mmrl', 'serve', 'assets/tiny_vlm', '--engine', 'own']\n"
        "from mmrl.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPO,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (
        done.returncode == 2 and "[serve]'" in done.stderr and "pip install -e '" in done.stderr
    ), done.stderr


def test_checkpoints_that_act_and_missing_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mmrl eval CHECKPOINT --suite"):
        serve_command(str(REPO / "assets" / "tiny_vla"), None, [], ServeOptions())
    with pytest.raises(ConfigError, match="--media-root"):
        serve_command("x", None, [], ServeOptions(media_root=tmp_path / "none"))


def test_the_entry_point_for_lmms_eval_names_what_is_there() -> None:
    text = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points."lmms_eval.models"]\nmmrl = "mmrl.serve.lmms:manifest"\n' in text
    from mmrl.serve import lmms

    assert callable(lmms.manifest)
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = lmms.Other


def test_lmms_evals_frames_are_left_to_the_server() -> None:
    from mmrl.serve.lmms import _without_frames

    def create(**payload: Any) -> dict[str, Any]:
        return payload

    sent = {"model": "m", "extra_body": {"media_io_kwargs": {"video": {"num_frames": 10}}}}
    assert _without_frames(create, **sent) == {"model": "m"}
    assert _without_frames(create, extra_body={"a": 1, "media_io_kwargs": {}}) == {
        "extra_body": {"a": 1}
    }


def test_base64_may_be_broken_into_lines(tmp_path: Path) -> None:
    data = Path(picture((56, 56))).read_bytes()
    lines = base64.encodebytes(data).decode()
    assert (
        Path(
            file_of(Media("image", f"data:image/png;base64,{lines}", "p"), tmp_path, MediaRules())
        ).read_bytes()
        == data
    )
