"""What tests with clips share: small clips and broken ones, samples and a task of them, policies with a visual cache, and a cache
that kills or hangs the workers that use it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import stat
import struct
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.config import CacheConfig, DataConfig, DataSource, ModelConfig, VideoConfig
from mmrl.data.sources import LoadedSource
from mmrl.policy.loading import load_policy
from mmrl.policy.policy import Policy
from mmrl.types import RewardContext, Sample, Score
from mmrl.video.encode import write_video
from mmrl.video.visuals import Visual, VisualCache
from tests.kits.engine_kit import Album, picture, tiny_folder

__all__ = [
    "ALL",
    "TASK",
    "VIDEO",
    "Clips",
    "Deadly",
    "broken_clip",
    "cached_policy",
    "clip",
    "clip_sample",
    "loaded",
    "make_clip",
    "mixed_file",
    "policy_of",
    "sample",
]

ALL = VideoConfig(kind="all", min_pixels=28 * 28, max_pixels=64 * 64 * 4)
VIDEO = VideoConfig(kind="uniform", num_frames=4, min_pixels=28 * 28, max_pixels=84 * 56)


class Clips(Album):
    """Clips first, then pictures; scores depend on the text alone and are the same in every process."""

    name, headline, metric_names = "clips", "share", ("share",)

    def messages(self, sample: Sample, template: Any) -> list[dict[str, Any]]:
        media = [{"type": "video"} for _ in sample.videos] + [
            {"type": "image"} for _ in sample.images
        ]
        return [{"role": "user", "content": [*media, {"type": "text", "text": sample.question}]}]

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        share = zlib.crc32(text.encode()) / 2**32
        return Score.combine(
            {"accuracy": share}, {"accuracy": 1.0}, parsed=True, metrics={"share": share}
        )


TASK = Clips()


class Deadly(VisualCache):
    """In a worker, clips named deadly* end the process, those named hanging* never end, and with those named babbling* it writes
    a message of rubbish into its pipe, as a decoder that overwrites descriptors may; elsewhere all can be read."""

    def video(self, path: str, overrides: Mapping[str, Any] | None = None) -> Visual:
        if multiprocessing.parent_process() is not None:
            if Path(path).name.startswith("deadly"):
                os.kill(os.getpid(), signal.SIGKILL)
            if Path(path).name.startswith("hanging"):
                time.sleep(3600)
            if Path(path).name.startswith("babbling"):
                # any number: a worker inherits its pipe under the number that it has in the process that made it
                for number in map(int, os.listdir("/proc/self/fd")):
                    with contextlib.suppress(OSError):
                        if stat.S_ISSOCK(os.fstat(number).st_mode):
                            os.write(number, struct.pack("!i", 4) + b"abcd")
        return super().video(path, overrides)


def clip(
    folder: Path, frames: int = 8, size: tuple[int, int] = (84, 56), seed: int = 0, name: str = ""
) -> str:
    """A clip of smooth noise at 4 frames per second in which every frame differs; `size` is (width, height)."""
    path = folder / (name or f"clip-{frames}-{size[0]}x{size[1]}-{seed}.mp4")
    if not path.exists():
        coarse = np.random.default_rng([frames, seed]).integers(
            0, 256, (frames, 4, 6, 3), dtype=np.uint8
        )
        write_video(path, coarse.repeat(size[1] // 4, 1).repeat(size[0] // 6, 2), 4)
    return str(path)


def make_clip(folder: Path, name: str, frames: int = 8) -> str:
    """The clip `name`.mp4, another one for every name."""
    return clip(folder, frames, seed=zlib.crc32(name.encode()), name=f"{name}.mp4")


def broken_clip(folder: Path) -> str:
    """The beginning of a clip."""
    (folder / "broken.mp4").write_bytes(Path(make_clip(folder, "whole")).read_bytes()[:300])
    return str(folder / "broken.mp4")


def sample(
    videos: tuple[str, ...] = (), images: tuple[str, ...] = (), number: int = 0, **params: Any
) -> Sample:
    """A sample of the task Clips."""
    return Sample(
        f"c{number}", "clips", "clips", f"Which is first in {number}?", None, images, videos, params
    )


def clip_sample(number: int, *videos: str, images: Iterable[str] = (), **params: Any) -> Sample:
    """The same with its number first."""
    return sample(videos, tuple(images), number, **params)


def mixed_file(folder: Path) -> str:
    """Rows of the album task: two questions about clips, one about a picture, about nothing, about a clip of a single frame."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = [
        {"videos": [clip(folder)], "images": []},
        {"videos": [clip(folder, 6, (56, 56), 1)], "images": [picture((56, 56))]},
        {"videos": [], "images": [picture((112, 84))]},
        {"videos": [], "images": []},
        {"videos": [clip(folder, 1)], "images": []},
    ]
    path = folder / "mixed.jsonl"
    named = (
        {"id": f"m{i}", "source": "clips" if r["videos"] else "others", "question": "yes?", **r}
        for i, r in enumerate(rows)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in named), encoding="utf-8")
    return str(path)


def loaded(*samples: Sample, name: str = "clips") -> LoadedSource:
    """The samples as a data source."""
    return LoadedSource(DataSource(task="clips", path=f"{name}.jsonl"), Clips(), samples)


def policy_of(
    arch: str = "qwen2_5_vl",
    *,
    freeze: tuple[str, ...] = (),
    cache: str | None = None,
    memory: float = 1.0,
    video: VideoConfig = ALL,
    limit: int | None = None,
    **options: Any,
) -> Policy:
    """A tiny policy; `memory` in GiB, `limit` of the cache on disk in bytes."""
    disk = CacheConfig(dir=cache, limit_gib=None if limit is None else limit / 2**30)
    data = DataConfig(video=video, cache=disk, prompt_cache_gib=memory)
    return load_policy(
        ModelConfig(path=tiny_folder(arch), device="cpu", freeze=list(freeze), **options), data
    )


def cached_policy(cache: Path | None, freeze: tuple[str, ...] = ("vision", "projector")) -> Policy:
    """A tiny policy with the cache folder `cache`, which sees four frames of a clip."""
    return policy_of(freeze=freeze, cache=str(cache) if cache else None, video=VIDEO)
