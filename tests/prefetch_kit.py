"""What tests of the media workers share: small clips, a policy with a cache, and a visual cache that kills or hangs workers."""
from __future__ import annotations

import multiprocessing
import os
import signal
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.config import DataConfig, DataSource, ModelConfig
from mmrl.config_data import CacheConfig, VideoConfig
from mmrl.data import LoadedSource
from mmrl.policy.loading import load_policy
from mmrl.policy.policy import Policy
from mmrl.types import RewardContext, Sample, Score
from tests.engine_kit import Album, tiny_folder
from video.encode import write_video
from video.visuals import Visual, VisualCache

__all__ = ["Clips", "Deadly", "broken_clip", "cached_policy", "clip_sample", "loaded", "make_clip"]

VIDEO = VideoConfig(kind="uniform", num_frames=4, min_pixels=28 * 28, max_pixels=84 * 56)


class Clips(Album):
    """Clips first, then pictures; scores depend on the text alone and are the same in every process."""

    name, headline, metric_names = "clips", "share", ("share",)

    def messages(self, sample: Sample, template: Any) -> list[dict[str, Any]]:
        media = [{"type": "video"} for _ in sample.videos] + [{"type": "image"} for _ in sample.images]
        return [{"role": "user", "content": [*media, {"type": "text", "text": sample.question}]}]

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        share = zlib.crc32(text.encode()) / 2**32
        return Score.combine({"accuracy": share}, {"accuracy": 1.0}, parsed=True, metrics={"share": share})


class Deadly(VisualCache):
    """In a worker, clips named deadly* end the process and clips named hanging* never end; elsewhere both can be read."""

    def video(self, path: str, overrides: Mapping[str, Any] | None = None) -> Visual:
        if multiprocessing.parent_process() is not None:
            if Path(path).name.startswith("deadly"):
                os.kill(os.getpid(), signal.SIGKILL)
            if Path(path).name.startswith("hanging"):
                time.sleep(3600)
        return super().video(path, overrides)


def make_clip(folder: Path, name: str, frames: int = 8) -> str:
    """A clip of smooth noise, another one for every name."""
    path = folder / f"{name}.mp4"
    if not path.exists():
        coarse = np.random.default_rng(zlib.crc32(name.encode())).integers(0, 256, (frames, 4, 6, 3), dtype=np.uint8)
        write_video(path, coarse.repeat(14, 1).repeat(14, 2), 4)
    return str(path)


def broken_clip(folder: Path) -> str:
    """The beginning of a clip."""
    (folder / "broken.mp4").write_bytes(Path(make_clip(folder, "whole")).read_bytes()[:300])
    return str(folder / "broken.mp4")


def clip_sample(number: int, *videos: str, images: Iterable[str] = (), **params: Any) -> Sample:
    """A sample of the task Clips."""
    return Sample(f"c{number}", "clips", "clips", f"What is {number}?", None, tuple(images), videos, params)


def loaded(*samples: Sample, name: str = "clips") -> LoadedSource:
    """The samples as a data source."""
    return LoadedSource(DataSource(task="clips", path=f"{name}.jsonl"), Clips(), samples)


def cached_policy(cache: Path | None, freeze: tuple[str, ...] = ("vision", "projector")) -> Policy:
    """A tiny policy with the cache folder `cache`."""
    data = DataConfig(video=VIDEO, cache=CacheConfig(dir=str(cache) if cache else None))
    return load_policy(ModelConfig(path=tiny_folder(), device="cpu", freeze=list(freeze)), data)
