"""Qwen2.5-Omni's thinker hears what its processor makes of a file; models that do not hear say so. What every family keeps, sounds
among it, is tests/diagnostics/test_families.py's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.config import CacheConfig, DataConfig, LoraSettings, ModelConfig
from mmrl.errors import ConfigError, DataError, MediaError
from mmrl.evaluation.rescore import logged_context
from mmrl.policy.loading import load_policy
from mmrl.policy.policy import Policy
from mmrl.policy.vision import feature_rows
from mmrl.rollout.views import changed_prompt
from mmrl.tasks.readers.own import read_own
from mmrl.types import Sample
from mmrl.video.audio import read_audio
from mmrl.video.media import open_image
from tests.kits.clip_kit import Clips, clip
from tests.kits.engine_kit import (
    Album,
    cli_here,
    config_file,
    fresh_policy,
    picture,
    policy,
    read_jsonl,
    small_run,
    tiny_folder,
)
from tests.video.sound_kit import tone, write_sound

TASK = Album()
WORDS = ((7, 8, 9), (10,), (11, 12))


def sample_of(audios: tuple[str, ...], images: tuple[str, ...] = (), **more: Any) -> Sample:
    return Sample(
        "0", "album", "test", "Which tone is higher?", None, images, audios=audios, **more
    )


def omni(folder: Path | None = None, max_seconds: float | None = None, **model: Any) -> Policy:
    settings = ModelConfig(path=tiny_folder("qwen2_5_omni"), device="cpu", **model)
    data = DataConfig(cache=CacheConfig(dir=None if folder is None else str(folder)))
    data.audio.max_seconds = max_seconds
    return load_policy(settings, data)


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.mp3"])
def test_a_row_with_a_sound_becomes_the_processors_own_prompt(name: str, tmp_path: Path) -> None:
    """Of wav, flac and mp3, mono and stereo, at any rate: token ids, frames, and positions of the model's own making."""
    p = policy("qwen2_5_omni")
    write_sound(tmp_path / name, tone(0.9, 44100, channels=2), 44100)
    write_sound(tmp_path / "b.wav", tone(1.7, 8000), 8000)
    row = {"audios": [name, "b.wav"], "image": picture((112, 84)), "question": "?", "answer": "red"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    read = read_own(tmp_path / "rows.jsonl", task="album", check=lambda *args: args[1])
    (sample,) = read.samples
    assert sample.audios == (str(tmp_path / name), str(tmp_path / "b.wav"))
    prompt = p.encoder(sample, TASK)
    heard = [read_audio(path, rate=16000, max_seconds=30.0) for path in sample.audios]
    own = p.processor(
        text=[p.encoder.text(sample, TASK)],
        images=[open_image(sample.images[0])],
        audio=heard,
        return_tensors="pt",
    )
    assert torch.equal(own["input_ids"][0], prompt.ids_P)
    assert [v.kind for v in prompt.visuals] == ["image", "audio", "audio"]
    assert [a.duration_s for a in prompt.audios] == pytest.approx([0.9, 1.7], abs=0.06)
    mask_RT = own["feature_attention_mask"].bool()
    frames = [p.encoder.visuals.pixels(v) for v in prompt.visuals if v.kind == "audio"]
    assert torch.equal(torch.cat(frames), own["input_features"].transpose(1, 2)[mask_RT])
    assert prompt.kinds_P.bincount().tolist()[3] == sum(v.tokens for v in prompt.visuals[1:])
    positions, deltas = p.base.get_rope_index(
        own["input_ids"],
        own["image_grid_thw"],
        None,
        own["attention_mask"],
        audio_seqlens=mask_RT.sum(1),
    )
    assert torch.equal(positions[:, 0], prompt.positions_3P)
    assert prompt.next_position == prompt.length + int(deltas)


def test_a_sound_alone_and_beside_a_clip(tmp_path: Path) -> None:
    """Positions of sounds alone are those of text; a clip's seconds count 25 each, as a sound's do."""
    p = policy("qwen2_5_omni")
    path = write_sound(tmp_path / "a.wav", tone(1.0))
    alone = p.encoder(sample_of((path,)), TASK)
    assert torch.equal(alone.positions_3P[0], torch.arange(alone.length))
    both = p.encoder(replace(sample_of((path,)), id="1", videos=(clip(tmp_path),)), TASK)
    (shown,) = [v for v in both.visuals if v.kind == "video"]
    step = 25 * 2 / shown.sample_fps
    times = both.positions_3P[0, both.kinds_P == 2].unique()
    assert (times - times[0]).tolist() == [int(i * step) for i in range(shown.grid_thw[0])]


def test_the_sound_of_a_clip_in_step_with_it_is_refused(tmp_path: Path) -> None:
    p = policy("qwen2_5_omni")
    params = {"video": {"use_audio_in_video": True}}
    sample = replace(sample_of(()), id="2", videos=(clip(tmp_path),), params=params)
    with pytest.raises(
        DataError, match=r"sample 2: .*alternate in time.*name the clip among the audio files"
    ):
        p.encoder(sample, TASK)


def test_a_model_that_does_not_hear_says_so(tmp_path: Path) -> None:
    path = write_sound(tmp_path / "a.wav", tone(0.5))
    deaf = policy("qwen2_5_vl")
    with pytest.raises(
        DataError, match="expected no audio files, found 1: a model of family qwen2_5_vl"
    ):
        deaf.encoder(sample_of((path,)), TASK)
    with pytest.raises(
        ConfigError, match="found a sound: a model of family qwen2_5_vl does not hear"
    ):
        deaf.encoder.visuals.audio(path)
    with pytest.raises(
        ConfigError, match=r"model\.freeze entries of vision, projector, language for"
    ):
        fresh_policy("qwen2_5_vl", freeze=["audio"])


def test_wrong_items_and_long_sounds_are_told(tmp_path: Path) -> None:
    p = omni(max_seconds=2.0)
    path = write_sound(tmp_path / "a.wav", tone(0.5))
    with pytest.raises(DataError, match="one audio item per sound, found 0 items for 1 sounds"):
        p.encoder(sample_of((path,)), Clips())
    with pytest.raises(DataError, match=r"1 times <\|AUDIO\|> in the prompt, found 2"):
        p.encoder(replace(sample_of((path,)), question="<|AUDIO|>"), TASK)
    for token in p.family.reserved:
        for audios, images in (((path,), (picture((112, 84)),)), ((), ())):
            asked = replace(sample_of(audios, images), question=f"Say {token} now")
            with pytest.raises(DataError, match=r"sample 0: .*<\|.*remove it from the row"):
                p.encoder(asked, TASK)
    with pytest.raises(DataError, match=r"found <\|audio_bos\|>"):
        p.encoder.prompt_of([{"role": "user", "content": "<|audio_bos|>"}], ())
    long = write_sound(tmp_path / "b.wav", tone(2.5))
    with pytest.raises(MediaError, match=r"at most 2 s of sound, found 2\.5 s") as caught:
        p.encoder(sample_of((long,)), TASK)
    assert caught.value.kind == "too_long"
    with pytest.raises(MediaError, match=r"expected an audio file, found none at .*c\.wav"):
        p.encoder(sample_of((str(tmp_path / "c.wav"),)), TASK)


def test_features_of_sounds_are_kept_as_those_of_pictures(tmp_path: Path) -> None:
    """In memory and on disk: the same log-probs as without; each tower by itself; read again after a restart, bit for bit."""
    first = write_sound(tmp_path / "a.wav", tone(0.7))
    second = write_sound(tmp_path / "b.wav", tone(1.3, hertz=900.0))
    sample = sample_of((first, second), (picture((112, 84)),))

    def asked(p: Policy) -> torch.Tensor:
        return p.evaluate([p.encoder(sample, TASK)] * 3, WORDS).logp_N

    with torch.no_grad():
        wanted = asked(omni())
        for freeze, encoded in (
            (["audio"], 2),
            (["vision", "projector"], 1),
            (["audio", "vision", "projector"], 0),
        ):
            p = omni(tmp_path / "cache", freeze=freeze)
            found = asked(p)
            assert torch.allclose(found, wanted, atol=1e-5)
            assert torch.equal(asked(p), found)
            assert p.encoder.visuals.stats.encoded == encoded
            assert (p.tower("audio") is None) == ("audio" not in freeze)
        again = omni(tmp_path / "cache", freeze=["audio", "vision", "projector"])
        assert torch.equal(asked(again), found)
        stats = again.encoder.visuals.stats
        assert (stats.built, stats.encoded) == (0, 0) and stats.feature_hits >= 3


def test_views_of_sounds(tmp_path: Path) -> None:
    """Masked, a sound is silence; mirrored, it is what it was; the question alone has none."""
    p = policy("qwen2_5_omni")
    path = write_sound(tmp_path / "a.wav", tone(0.5))
    sample = sample_of((path,))
    prompt = p.encoder(sample, TASK)
    assert changed_prompt(p.encoder, sample, TASK, prompt, "mirror") is None
    assert changed_prompt(p.encoder, sample, TASK, prompt, "shuffle") is None
    masked = changed_prompt(p.encoder, sample, TASK, prompt, "mask")
    assert masked is not None and masked.fingerprint != prompt.fingerprint
    silent = write_sound(tmp_path / "b.wav", np.zeros((1, 8000)))
    kept = p.encoder.visuals.pixels(p.encoder.visuals.audio(silent))
    assert torch.allclose(p.encoder.visuals.pixels(masked.visuals[0]), kept)
    alone = changed_prompt(p.encoder, sample, TASK, prompt, "question_only")
    assert alone is not None and not alone.visuals and alone.length < prompt.length


def test_an_adapter_leaves_what_hears_alone() -> None:
    """It reaches the text model, whose towers' layers have the same names."""
    p = omni(lora=LoraSettings(r=4))
    names = [name for name, _ in p.trainable()]
    assert names and all(".model." in n and ".layers." in n and "lora" in n for n in names)
    # beside the text model until transformers 5.20, one level above it since
    assert not any(tower in n for n in names for tower in ("audio_tower", "visual"))
    assert p.tower("audio") is not None and p.tower() is not None


def test_each_trained_tower_runs_once_whatever_is_shown(tmp_path: Path) -> None:
    """As sharded engines need it: the same log-probs, and a gradient, of zeros, for a tower that had nothing to read."""
    path = write_sound(tmp_path / "a.wav", tone(0.7))
    samples = [
        replace(sample_of(audios, images), id=str(i))
        for i, (audios, images) in enumerate(
            [((path,), ()), ((), (picture((112, 84)),)), ((path,), (picture((56, 56)),)), ((), ())]
        )
    ]
    for freeze in ([], ["audio"], ["vision", "projector"]):
        p = omni(freeze=freeze)
        for sample in samples:
            prompt = p.encoder(sample, TASK)
            with torch.no_grad():
                wanted = p.evaluate([prompt] * 3, WORDS).logp_N
            p.lockstep = True
            p.model.zero_grad(set_to_none=True)
            found = p.evaluate([prompt] * 3, WORDS).logp_N
            found.sum().backward()
            p.lockstep = False
            assert torch.allclose(found, wanted, atol=1e-5)
            for encoders in p.family.parts.encoders(p.body):
                named = {id(q): n for n, q in p.base.named_parameters()}
                learned = [q for q in encoders.parameters if "audio_bos_eos" not in named[id(q)]]
                trained = all(q.requires_grad for q in learned)
                assert all((q.grad is not None) == trained for q in learned)
                shown = {"vision": sample.images, "audio": sample.audios}[encoders.sense]
                assert not trained or any(q.grad.any() for q in learned) == bool(shown)


def test_rows_of_features_stand_in_the_order_of_their_tokens(tmp_path: Path) -> None:
    """What processes that compute one row together exchange."""
    first = write_sound(tmp_path / "a.wav", tone(0.7))
    second = write_sound(tmp_path / "b.wav", tone(0.5, hertz=900.0))
    for freeze in ([], ["audio"], ["audio", "vision", "projector"]):
        p = omni(freeze=freeze)
        cache = p.encoder.visuals
        visuals = [cache.audio(first), cache.image(picture((112, 84))), cache.audio(second)]
        with torch.no_grad():
            rows = feature_rows(p.body, cache, visuals, p.device, p.towers())
            parts = [
                p.family.features(p.body, v.kind, cache.pixels(v), [v.grid_thw])[0].main
                for v in visuals
            ]
        assert torch.allclose(rows, torch.cat(parts), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [{}, {"freeze": ["vision", "projector", "audio"]}, {"lora": {"r": 4}}]
)
def test_a_run_learns_from_rows_with_sounds(model: dict[str, Any], tmp_path: Path) -> None:
    """Media workers, cache on disk, rollouts, update and evaluation: log-probs of training are those of rollouts."""
    rows = [
        {
            "id": str(i),
            "question": "Which tone is it?",
            "images": [picture((56, 56))] if i % 2 else [],
            "audios": [write_sound(tmp_path / f"{i}.flac", tone(0.4 + i / 10, 22050), 22050)],
        }
        for i in range(6)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tiny_folder("qwen2_5_omni")
    tree = small_run(
        tmp_path,
        str(file),
        str(file),
        model={"path": path, **model},
        data={"cache": {"dir": str(tmp_path / "cache")}, "workers": 1},
    )
    cli_here("train", config_file(tmp_path / "run.yaml", tree))
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    gaps = [r["train/logprob_gap/max"] for r in metrics if "train/logprob_gap/max" in r]
    assert len(gaps) == 2 and max(gaps) < 1e-4
    written = read_jsonl(tmp_path / "run" / "rollouts" / "step_000001.jsonl")
    assert all(r["audio_sizes"] and r["sample"]["audios"] for r in written)
    again = logged_context(written[0])
    assert [a.duration_s for a in again.audios] == [written[0]["audio_sizes"][0]["duration_s"]]


def _whole(folder: Path) -> dict[str, torch.Tensor]:
    """A whole tiny Qwen2.5-Omni, thinker, talker and token2wav, saved as transformers saves it; the thinker's tensors."""
    import transformers as hf

    thinker = hf.AutoConfig.from_pretrained(tiny_folder("qwen2_5_omni"))
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    dit = {
        **small,
        "emb_dim": 16,
        "num_embeds": 9,
        "mel_dim": 8,
        "enc_emb_dim": 8,
        "enc_dim": 8,
        "enc_channels": [8, 8, 8, 8, 24],
        "enc_attention_channels": 4,
        "enc_se_channels": 4,
    }
    vocoder = {
        "mel_dim": 8,
        "upsample_initial_channel": 16,
        "upsample_rates": [2, 2],
        "upsample_kernel_sizes": [4, 4],
    }
    config = hf.Qwen2_5OmniConfig(
        thinker_config=thinker.to_dict(),
        talker_config={
            **small,
            "vocab_size": 64,
            "embedding_size": 64,
            "intermediate_size": 32,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 3, 3],
            },
        },
        token2wav_config={"dit_config": dit, "bigvgan_config": vocoder},
    )
    model = hf.Qwen2_5OmniForConditionalGeneration(config)
    model.save_pretrained(folder)
    hf.AutoProcessor.from_pretrained(tiny_folder("qwen2_5_omni")).save_pretrained(folder)
    return model.thinker.state_dict()


def test_of_a_whole_checkpoint_the_thinker_is_trained(tmp_path: Path) -> None:
    """Talker and token2wav are not loaded; what is saved is a thinker that transformers reads, with and without its Auto class."""
    import transformers as hf

    from mmrl.diagnostics.shapes import config_of

    theirs = _whole(tmp_path / "whole")
    assert (
        json.loads((tmp_path / "whole" / "config.json").read_text())["model_type"] == "qwen2_5_omni"
    )
    p = load_policy(ModelConfig(path=str(tmp_path / "whole"), device="cpu"))
    ours = p.base.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)
    assert p.template.name == "qwen2_5_omni"
    assert config_of(str(tmp_path / "whole")).model_type == "qwen2_5_omni_thinker"
    p.save(tmp_path / "saved")
    for kind in (hf.Qwen2_5OmniThinkerForConditionalGeneration, hf.AutoModelForImageTextToText):
        read, told = kind.from_pretrained(tmp_path / "saved", output_loading_info=True)
        assert not told["missing_keys"] and not told["unexpected_keys"]
        assert all(torch.equal(ours[n], t) for n, t in read.state_dict().items())
    again = load_policy(ModelConfig(path=str(tmp_path / "saved"), device="cpu"))
    assert all(torch.equal(ours[n], t) for n, t in again.base.state_dict().items())
