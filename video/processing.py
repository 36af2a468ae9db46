"""What a processor makes of pictures, clips and sounds: patches packed as bytes and what is known of them; nothing is kept.

    Processing(processor).cost("video", "clip.mp4")          # (pixels to decode, tokens to come), from the header alone

mmrl.video.visuals keeps what is made here, and calls nothing of the processor that is not in this file.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mmrl.errors import ConfigError, MediaError
from mmrl.video.audio import AudioReader, SoundCodec, probe_audio, read_audio
from mmrl.video.clips import ClipReader, GridClips
from mmrl.video.decode import measure, read_clip
from mmrl.video.media import Orientation, image_size, open_image
from mmrl.video.pictures import GridReader, PictureReader
from mmrl.video.pixels import ByteCodec
from mmrl.video.references import VideoSettings
from mmrl.video.sampling import FrameSampling, sample_rate

if TYPE_CHECKING:
    import torch

__all__ = ["CLIP_SOUND", "Built", "Processing", "pixel_digest", "processor_fingerprint"]

CLIP_SOUND = (
    "expected clips without their sound, found use_audio_in_video: the tokens of a clip and of its sound would have to alternate "
    "in time, and are not laid out so; leave it out, or name the clip among the audio files, too"
)
Built = tuple[dict[str, "torch.Tensor"], dict[str, Any]]
"""{"pixels": packed patches}, and grid, sizes, times and digest of them."""


@functools.cache
def _versions() -> str:
    found = []
    for name in (
        "transformers",
        "torch",
        "torchvision",
        "pillow",
        "av",
        "decord",
        "torchcodec",
        "opencv-python-headless",
    ):
        try:
            found.append(f"{name}={importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name}=none")
    return ",".join(found)


def processor_fingerprint(part: Any) -> str:
    """Hash of an image or video processor: class, every setting, and the versions of all that decodes and resizes."""
    settings = json.dumps(part.to_dict(), sort_keys=True, default=str)
    text = f"{type(part).__name__};{_versions()};{settings}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def pixel_digest(tensor: torch.Tensor) -> str:
    """Hash of a tensor's type, shape and bytes."""
    import torch

    digest = hashlib.blake2b(f"{tensor.dtype}:{tuple(tensor.shape)};".encode(), digest_size=16)
    digest.update(memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest.hexdigest()


class Processing:
    """The picture and video parts of one processor with their options; `image_options` are those of its pictures' call, and
    `reader` makes it, `clips` that of its clips (None: those of a processor that cuts patches), `ears` that of its sounds.
    `no_clips` and `no_audio`: why clips and sounds are refused, "" where they are not. `max_seconds`: the longest sound that is
    read (None: what its processor takes)."""

    def __init__(
        self,
        processor: Any,
        image_options: Mapping[str, Any] | None = None,
        settings: VideoSettings | None = None,
        reader: PictureReader | None = None,
        no_clips: str = "",
        clips: ClipReader | None = None,
        ears: AudioReader | None = None,
        no_audio: str = "",
        max_seconds: float | None = None,
    ) -> None:
        self.ears, self.no_audio, self.max_seconds = ears, no_audio, max_seconds
        self.processor, self.settings = processor, settings or VideoSettings()
        self.image_options = dict(image_options or {})
        self.reader = reader or GridReader(processor.image_processor)
        self.no_clips, self.own_clips = no_clips, clips
        self._codecs: dict[str, ByteCodec | SoundCodec] = {}
        self._prints: dict[str, str] = {}
        self._check_bounds()

    def _check_bounds(self) -> None:
        """Raises ConfigError for bounds on frames that no frame can meet."""
        if self.no_clips:
            return
        self.clips.check(self.settings)

    @functools.cached_property
    def clips(self) -> ClipReader:
        """How clips are read."""
        return self.own_clips or GridClips(self.processor.video_processor)

    @property
    def hears(self) -> AudioReader:
        """How sounds are read. Raises ConfigError where they are refused."""
        if self.ears is None:
            why = self.no_audio or "this cache was made for pictures and clips"
            raise ConfigError(f"expected pictures and clips alone, found a sound: {why}")
        return self.ears

    def _part(self, kind: str) -> Any:
        if kind == "audio":
            return self.hears.part
        return self.processor.image_processor if kind == "image" else self.processor.video_processor

    def codec(self, kind: str) -> Any:
        """The codec of 'image' or 'video' (ByteCodec) or 'audio' (SoundCodec)."""
        if kind not in self._codecs and kind == "audio":
            self._codecs[kind] = SoundCodec(self.hears)
        if kind not in self._codecs:
            part = self._part(kind)
            layout, normalise = self.reader.layout, self.reader.normalise
            if kind == "video":
                layout, normalise = self.clips.layout, self.clips.normalise
            self._codecs[kind] = ByteCodec(part, layout, normalise)
        return self._codecs[kind]

    def _fingerprint(self, kind: str) -> str:
        if kind not in self._prints:
            self._prints[kind] = processor_fingerprint(self._part(kind))
        return self._prints[kind]

    def sample(self, overrides: Mapping[str, Any] | None) -> FrameSampling:
        """How a clip is sampled: as configured, with `overrides` of FrameSampling. Raises ConfigError."""
        if self.no_clips:
            raise ConfigError(f"expected pictures alone, found a clip: {self.no_clips}")
        if overrides and overrides.get("use_audio_in_video"):
            raise ConfigError(CLIP_SOUND)
        return (
            FrameSampling.from_mapping(overrides, self.settings.sampling)
            if overrides
            else self.settings.sampling
        )

    def _patches(self, picture: Any) -> tuple[torch.Tensor, tuple[int, int, int], tuple[int, int]]:
        """(packed patches, their grid t, h, w, width and height that they show) of one picture, as PIL's or as uint8 (C, H, W)."""
        values, grid, resized_wh = self.reader.read(picture, self.image_options)
        return self.codec("image").pack(values), grid, resized_wh

    def _build_image(self, path: str, orientation: Orientation) -> Built:
        picture = open_image(path, orientation=orientation)
        packed, grid, resized_wh = self._patches(picture)
        return {"pixels": packed}, {
            "kind": "image",
            "grid_thw": list(grid),
            "orig_wh": list(picture.size),
            "resized_wh": list(resized_wh),
            "digest": pixel_digest(packed),
        }

    @property
    def most_seconds(self) -> float:
        """The longest sound that is read."""
        most = self.hears.most_seconds
        return most if self.max_seconds is None else min(most, self.max_seconds)

    def _build_audio(self, path: str) -> Built:
        ears = self.hears
        samples_N = read_audio(path, rate=ears.rate, max_seconds=self.most_seconds)
        try:
            frames_nD = ears.read(samples_N)
        except MediaError as err:
            raise MediaError(f"{path}: {err}", kind=err.kind, path=path) from err
        return {"pixels": frames_nD}, {
            "kind": "audio",
            "grid_thw": [len(frames_nD), 1, 1],
            "orig_wh": [0, 0],
            "resized_wh": [0, 0],
            "duration_s": len(samples_N) / ears.rate,
            "digest": pixel_digest(frames_nD),
        }

    def _build_video(self, path: str, sampling: FrameSampling) -> Built:
        import torch

        codec = self.codec("video")
        clip = read_clip(
            path,
            sampling,
            decoder=self.settings.decoder,
            size=functools.partial(self._frame_size, path),
        )
        T, new_height, new_width, _ = clip.rgb_THWC.shape
        frames_TCHW = torch.from_numpy(clip.rgb_THWC).permute(0, 3, 1, 2)
        values, grid = self.clips.read(frames_TCHW)
        packed = codec.pack(values)
        start = sampling.start or 0.0
        end = (
            clip.info.duration_s
            if sampling.end is None
            else min(sampling.end, clip.info.duration_s)
        )
        shown = max(end - start, 1e-6)
        rate = sample_rate(
            clip.info.timestamps_s, sampling, clip.indices, clip.info.fps, clip.info.duration_s
        )
        meta = {
            "kind": "video",
            "grid_thw": list(grid),
            "orig_wh": [clip.info.width, clip.info.height],
            "resized_wh": [new_width, new_height],
            "frames": T,
            "indices": [int(i) for i in clip.indices],
            "timestamps_s": [max(0.0, float(t) - start) for t in clip.timestamps_s],
            "duration_s": shown,
            "sample_fps": rate,
            "decoder": clip.decoder,
            "digest": pixel_digest(packed),
        }
        return {"pixels": packed}, meta

    def _frame_size(self, path: str, count: int, height: int, width: int) -> tuple[int, int]:
        """(height, width) to which `count` frames of a clip are resized. Raises MediaError."""
        try:
            return self.clips.frame_size(self.settings, count, height, width)
        except MediaError as err:
            raise MediaError(f"{path}: {err}", kind=err.kind, path=path) from err

    def cost(
        self, kind: str, path: str, overrides: Mapping[str, Any] | None = None
    ) -> tuple[int, int]:
        """(pixels to decode, tokens to come) of a picture or clip, from its header and packets; of a sound (0, tokens, about), the
        longest that is read where its header does not tell. Raises MediaError, ConfigError."""
        if kind == "audio":
            ears, most = self.hears, self.most_seconds
            told = probe_audio(path).duration_s
            seconds = most if told is None else min(told, most)
            return 0, max(0, ears.tokens(ears.frames(int(seconds * ears.rate))))
        if kind == "image":
            width, height = image_size(path, (overrides or {}).get("orientation", "displayed"))
            return width * height, self.reader.tokens(height, width, self.image_options)
        count, info = measure(path, self.sample(overrides))
        height, width = self._frame_size(path, count, info.height, info.width)
        tokens = self.clips.tokens(count, height, width)
        return count * info.width * info.height, tokens
