"""Sounds are read as they are, mono and at the rate that is wanted; what is wrong with a file has a name."""

from __future__ import annotations

import os
import wave
from pathlib import Path

import numpy as np
import pytest
import scipy.io.wavfile
import torch
import transformers as hf

from assets.make_video_fixtures import FOLDER
from mmrl.errors import ConfigError, MediaError
from mmrl.video.audio import MelReader, SoundCodec, probe_audio, read_audio, tokens_of
from mmrl.video.containers import mp3_frames
from mmrl.video.visuals import VisualCache
from tests.kits.engine_kit import policy
from tests.video.sound_kit import tone, write_sound


def read(path: Path | str, rate: int = 16000, most: float = 30.0) -> np.ndarray:
    return read_audio(path, rate=rate, max_seconds=most)


def write_wav(path: Path, samples_CN: np.ndarray) -> None:
    """int16 samples at 16 kHz, by Python's own writer."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(samples_CN))
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(samples_CN.T.tobytes())


def kind_of(path: Path | str, most: float = 30.0) -> str:
    with pytest.raises(MediaError) as caught:
        read(path, most=most)
    assert str(path) in str(caught.value) and caught.value.path == str(path)
    return caught.value.kind


def test_lossless_files_give_their_samples(tmp_path: Path) -> None:
    """Of WAV and FLAC every sample of 16 bits; two channels are averaged."""
    told = np.rint(tone(0.7, channels=2) * 32767).astype(np.int16)
    write_wav(tmp_path / "a.wav", told)
    wanted = (told.astype(np.float32) / 32768).mean(0, dtype=np.float32)
    found = read(tmp_path / "a.wav")
    assert found.dtype == np.float32 and np.array_equal(found, wanted)
    write_sound(tmp_path / "a.flac", told / np.float32(32768))
    assert np.array_equal(read(tmp_path / "a.flac"), wanted)
    info = probe_audio(tmp_path / "a.flac")
    assert (info.rate, info.channels, info.codec) == (16000, 2, "flac")
    assert info.duration_s == pytest.approx(0.7)


@pytest.mark.parametrize("channels", [1, 2, 6, 7, 8, 9, 24, 64])
def test_the_channels_of_a_file_are_averaged(channels: int, tmp_path: Path) -> None:
    """Eight and more ended the process: PyAV took what lies behind the list of planes for planes."""
    path = tmp_path / "a.wav"
    write_wav(path, np.random.default_rng(0).integers(-30000, 30000, (channels, 3000), np.int16))
    rate, samples_NC = scipy.io.wavfile.read(path)
    wanted = samples_NC.reshape(3000, -1).astype(np.float64).mean(1) / 32768
    assert rate == 16000 and np.abs(read(path) - wanted).max() < 1e-6


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_other_rates_are_resampled(rate: int, tmp_path: Path) -> None:
    """The same tone comes out, in its place and as long as it was."""
    write_sound(tmp_path / "a.wav", tone(1.0, rate), rate)
    found, wanted = read(tmp_path / "a.wav"), tone(1.0)[0]
    assert abs(len(found) - len(wanted)) <= 2
    inner = slice(400, 15600)  # at its ends a filter knows less
    assert np.abs(found[inner] - wanted[inner]).max() < 2e-3


@pytest.mark.parametrize("name", ["a.mp3", "a.ogg", "a.m4a"])
def test_lossy_files_are_heard(name: str, tmp_path: Path) -> None:
    """What encoders put before and behind a sound is left out where the file says so."""
    write_sound(tmp_path / name, tone(1.0, 48000), 48000)
    found, wanted = read(tmp_path / name), tone(1.0)[0]
    assert len(found) >= len(wanted) - 2
    likeness = [
        np.corrcoef(found[at : at + 15000], wanted[:15000])[0, 1]
        for at in range(min(2200, len(found) - 15000))
    ]
    assert max(likeness) > 0.99


def test_the_sound_of_a_clip_is_heard() -> None:
    assert len(read(FOLDER / "only_sound.m4a")) > 1000
    assert len(read(FOLDER / "sound_with_cover.mp3")) > 1000


def test_what_is_no_sound_is_refused(tmp_path: Path) -> None:
    assert kind_of(tmp_path / "none.wav") == "missing"
    assert kind_of("https://example.org/a.wav") == "missing"
    assert kind_of(tmp_path) == "unsupported"
    os.mkfifo(tmp_path / "pipe.wav")
    assert kind_of(tmp_path / "pipe.wav") == "unsupported"
    (tmp_path / "empty.wav").write_bytes(b"")
    assert kind_of(tmp_path / "empty.wav") == "empty"
    (tmp_path / "text.mp3").write_bytes(b"this is no sound\n" * 50)
    assert kind_of(tmp_path / "text.mp3") == "unsupported"
    (tmp_path / "list.wav").write_text(
        f"ffconcat version 1.0\nfile '{FOLDER / 'only_sound.m4a'}'\n"
    )
    assert kind_of(tmp_path / "list.wav") == "unsupported"
    assert kind_of(FOLDER / "three_frames.mp4") == "no_audio"
    write_wav(tmp_path / "nothing.wav", np.zeros((1, 0), np.int16))
    assert kind_of(tmp_path / "nothing.wav") == "empty"


_DECLARING = ["a.wav", "a.flac", "a.mp3", "a.m4a", "a.mka", "a.webm"]


@pytest.mark.parametrize("name", _DECLARING)
def test_a_file_cut_short_is_refused(name: str, tmp_path: Path) -> None:
    """Where its container says how long it is; Ogg, ADTS and MPEG-TS say nothing."""
    path = Path(write_sound(tmp_path / name, tone(2.0, 48000), 48000))
    data = path.read_bytes()
    assert abs(len(read(path)) - 32000) < 1100
    for share in (0.2, 0.5, 0.9):
        path.write_bytes(data[: int(share * len(data))])
        assert kind_of(path) in ("truncated", "corrupt")


@pytest.mark.parametrize("name", [*_DECLARING[1:], "a.ogg", "a.aac", "a.ts"])
def test_a_hole_in_a_file_is_told(name: str, tmp_path: Path) -> None:
    """Bytes of the middle that were overwritten or are gone; zeros of a WAV are silence."""
    path = Path(write_sound(tmp_path / name, tone(8.0, 48000), 48000))
    data = path.read_bytes()
    begin, end = int(0.4 * len(data)), int(0.7 * len(data))
    path.write_bytes(data[:begin] + bytes(end - begin) + data[end:])
    assert kind_of(path) in ("truncated", "corrupt")
    path.write_bytes(data[:begin] + data[end:])
    if name != "a.aac":  # its frames have no times of their own
        assert kind_of(path) in ("truncated", "corrupt")


@pytest.mark.slow
def test_what_encoders_add_is_no_loss(tmp_path: Path) -> None:
    """Bits by need, with and without the header that counts the frames, at every rate of a codec: all of it is heard."""
    for rate in (8000, 16000, 22050, 44100, 48000):
        path = Path(write_sound(tmp_path / "a.mp3", tone(3.0, rate), rate, options={"abr": "1"}))
        assert mp3_frames(str(path)) is not None
        assert abs(len(read(path)) - 48000) < 100
        bare = path.read_bytes().replace(b"Xing", b"None").replace(b"Info", b"None")
        path.write_bytes(bare)
        assert mp3_frames(str(path)) is None
        assert len(read(path)) >= 48000
        for name in ("a.m4a", "a.mka", "a.ts"):
            assert len(read(write_sound(tmp_path / name, tone(3.0, rate), rate))) >= 48000
    for rate in (8000, 16000, 48000):
        for name in ("a.ogg", "a.webm"):
            assert len(read(write_sound(tmp_path / name, tone(3.0, rate), rate))) >= 47900


@pytest.mark.parametrize("told", [0, 0x7FFFF024, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_a_wav_of_untold_length_is_heard(told: int, tmp_path: Path) -> None:
    """As programs write one into a pipe."""
    path = Path(write_sound(tmp_path / "a.wav", tone(1.0)))
    data = bytearray(path.read_bytes())
    at = data.index(b"data")
    data[4:8] = told.to_bytes(4, "little")
    data[at + 4 : at + 8] = (told - 36 * (told == 0x7FFFF024)).to_bytes(4, "little")
    path.write_bytes(data)
    assert len(read(path)) == 16000 and probe_audio(path).duration_s is None
    assert kind_of(path, 0.5) == "too_long"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_samples_that_are_no_numbers_are_refused(value: float, tmp_path: Path) -> None:
    samples = tone(0.5)
    samples[0, 4000] = value
    path = write_sound(tmp_path / "a.wav", samples, codec=("pcm_f32le", "flt"))
    assert kind_of(path) == "corrupt"


def test_a_long_sound_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what its header says; one that says nothing, or less than there is, where it goes on too long."""
    path = Path(write_sound(tmp_path / "a.wav", tone(3.0)))
    assert len(read(path, most=3.0)) == 48000
    told = path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("mmrl.video.audio._decoded", None)
        assert kind_of(path, 2.0) == "too_long"
    # as written into a pipe: the length is not known yet
    at = told.index(b"data")
    unknown = b"\xff\xff\xff\xff"
    path.write_bytes(told[:4] + unknown + told[8 : at + 4] + unknown + told[at + 8 :])
    assert len(read(path, most=3.0)) == 48000
    assert kind_of(path, 2.0) == "too_long"


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.mp3", "a.ogg", "a.m4a"])
def test_a_damaged_file_is_heard_or_refused(name: str, tmp_path: Path) -> None:
    """Whatever its bytes are: finite samples within the limit, or an error with a kind."""
    path = Path(write_sound(tmp_path / name, tone(0.5, 48000), 48000))
    data, rng = path.read_bytes(), np.random.default_rng(0)
    kinds = set()
    for trial in range(60):
        bad = bytearray(data)
        for _ in range(rng.integers(1, 6)):
            # headers as often as sounds
            bad[rng.integers(0, min(len(bad), 80) if trial % 2 else len(bad))] = rng.integers(256)
        path.write_bytes(bad)
        try:
            found = read(path, most=2.0)
            assert np.isfinite(found).all() and 0 < len(found) <= 2 * 16000 + 400
        except MediaError as err:
            kinds.add(err.kind)
    assert kinds <= {"corrupt", "truncated", "unsupported", "no_audio", "empty", "too_long"}


def test_tags_around_a_sound_are_no_sound(tmp_path: Path) -> None:
    """What stands behind it is not heard; where its last padding ends, FFmpeg counts by the file's size."""
    path = Path(write_sound(tmp_path / "a.mp3", tone(0.5)))
    plain = read(path)
    path.write_bytes(path.read_bytes() + b"TAG" + b"x" * 125)
    found = read(path)
    assert len(found) - len(plain) < 1152 and np.array_equal(found[:7900], plain[:7900])


@pytest.mark.parametrize(("at", "value"), [(24, 5_000_000), (24, 7)])
def test_rates_beyond_reason_are_refused(at: int, value: int, tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    write_wav(path, np.zeros((1, 4000), np.int16))
    data = bytearray(path.read_bytes())
    data[at : at + 4] = value.to_bytes(4, "little")
    path.write_bytes(data)
    assert kind_of(path, 1000.0) == "unsupported"


def test_frames_are_those_of_the_processor() -> None:
    """As many as the sound lasts, whatever it is padded to; a token every 40 ms."""
    part = policy("qwen2_5_omni").processor.feature_extractor
    reader = MelReader(part)
    assert (reader.rate, reader.most_seconds) == (16000, 30.0)
    for count in (480, 16000, 16001, 23456, 480000):
        samples = tone(30.0)[0, :count]
        frames = reader.read(samples)
        whole = part(samples, sampling_rate=16000, return_attention_mask=True, return_tensors="pt")
        mask = whole["attention_mask"][0].bool()
        assert torch.equal(frames, whole["input_features"][0].T[mask])
        assert len(frames) == -(-count // 160)
    assert [tokens_of(n) for n in (3, 4, 100, 101)] == [1, 1, 25, 25]
    with pytest.raises(MediaError, match="at least one token"):
        reader.read(tone(0.015)[0])
    with pytest.raises(MediaError, match=r"more than 20 ms\), found 0\.020 s"):
        reader.read(tone(0.02)[0])
    assert len(reader.read(tone(0.021)[0])) == 3
    codec, silent = SoundCodec(reader), reader.read(np.zeros(16000, np.float32))
    assert torch.allclose(codec.grey(silent), silent)


@pytest.mark.slow
def test_short_sounds_need_no_long_padding() -> None:
    """The frames of a processor of 300 s, within 1e-6, without its 300 s of silence; also of sounds that end in its last frames."""
    part = hf.WhisperFeatureExtractor(feature_size=128, chunk_length=300)
    reader, rng = MelReader(part), np.random.default_rng(0)
    loud_end = np.concatenate([1e-4 * tone(1.0)[0], tone(1.0)[0, :40]])
    for samples in (tone(0.03)[0], tone(1.0)[0], loud_end, rng.normal(0, 0.1, 47_999).astype("f4")):
        whole = part(
            samples,
            sampling_rate=16000,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="pt",
        )
        mask = whole["attention_mask"][0].bool()
        found = reader.read(samples)
        assert (found - whole["input_features"][0].T[mask]).abs().max() <= 1e-6
    small = MelReader(hf.WhisperFeatureExtractor(feature_size=32, chunk_length=1))
    for count in (15_500, 15_999, 16_000):
        assert len(small.read(tone(1.0)[0, :count])) == -(-count // 160)


def test_a_cache_of_sounds(tmp_path: Path) -> None:
    """A sound is read once; a limit set later holds for what was kept; a cache without ears says why."""
    from mmrl.video.store import TensorStore

    p = policy("qwen2_5_omni")
    store = TensorStore(tmp_path / "cache")
    path = write_sound(tmp_path / "a.flac", tone(1.2, channels=2))

    def cache(**options: float) -> VisualCache:
        ears = p.family.ears(p.processor)
        return VisualCache(p.processor, store=store, ears=ears, **options)

    first = cache()
    seen = first.audio(path)
    assert (seen.kind, seen.grid_thw, seen.tokens) == ("audio", (120, 1, 1), 30)
    assert seen.size.duration_s == pytest.approx(1.2)
    again = cache()
    assert again.audio(path) == seen and again.stats.built == 0
    assert torch.equal(again.pixels(seen), first.pixels(seen))
    with pytest.raises(MediaError, match=r"at most 1 s of sound, found 1.2 s"):
        cache(max_seconds=1.0).audio(path)
    with pytest.raises(ConfigError, match="found a sound"):
        VisualCache(p.processor).audio(path)
