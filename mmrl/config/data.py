"""The section `data`: sources, their mix, curriculum and selection, pictures, clips and the cache. Part of mmrl.config.

data:
  train:
    - {task: grounding, path: refs.jsonl, weight: 2, pass_rate: {file: runs/base/predictions.jsonl, metric: iou}}
    - {task: counting, path: counts.jsonl}
  balance: tasks
  curriculum: [{until: 0.3, difficulty: [0, 0.5]}, {until: 1.0, weights: {counts: 2}}]
  selection: variance
"""

from __future__ import annotations

import itertools
import os
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

from mmrl.config.section import HomePath, Section

__all__ = [
    "AudioConfig",
    "CacheConfig",
    "CurriculumStage",
    "DataConfig",
    "DataSource",
    "ImageConfig",
    "PassRateConfig",
    "SelectionConfig",
    "VideoConfig",
]

Bounds = tuple[float | None, float | None]
Missing = Literal["error", "keep", "drop"]


class _Section(Section, BaseModel):
    """The sections of this file (BaseModel is named so that linters know what their defaults are)."""


def _text_keys(value: Any) -> Any:
    return {str(k): v for k, v in value.items()} if isinstance(value, dict) else value


def _kind_alone(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


def _from_home(value: Any) -> Any:
    """Parameters in which a text that begins with ~/ (params.reader.image_root) is a path from the home folder."""
    if isinstance(value, dict):
        return {key: _from_home(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_from_home(below) for below in value]
    return os.path.expanduser(value) if isinstance(value, str) and value[:2] == "~/" else value


def _reads_officially(params: Any) -> bool:
    """Whether a task's parameters, also those of a mixed task's members, set answers: official."""
    if not isinstance(params, dict):
        return False
    return params.get("answers") == "official" or any(
        _reads_officially(value) for value in params.values()
    )


class PassRateConfig(_Section):
    """Keep samples that a policy neither always nor never solves, by its logged completions (EasyVideoR1: 0 < pass@8 < 1)."""

    file: HomePath
    """predictions.jsonl of an evaluation, or rollouts/step_*.jsonl of a run."""
    metric: str = "correct"
    """Averaged over a sample's completions: reward, parse_rate, or a metric or reward part."""
    min: float = 0.1
    """Lowest average that is kept."""
    max: float = 0.9
    """Highest average that is kept."""
    mode: Literal["sampled", "greedy", "all"] = "sampled"
    """Which completions of predictions.jsonl count; those of rollouts are sampled."""
    missing: Missing = "error"
    """Samples without a record: an error, kept, or dropped."""

    @model_validator(mode="after")
    def _ordered(self) -> PassRateConfig:
        if self.min > self.max:
            raise ValueError(
                f"pass_rate.min ({self.min:g}) cannot exceed pass_rate.max ({self.max:g})"
            )
        return self


class DataSource(_Section):
    """One data file or folder, read by one task."""

    task: str
    """Built-in name, package/name, or file.py:Name."""
    path: HomePath
    """File or folder, or hf://owner/name[/subset][:split]."""
    weight: float = Field(1.0, gt=0)
    """Share of prompts drawn from it, relative to the other sources."""
    limit: int | None = Field(None, ge=1)
    """Only the first n samples (of those that passed the filter); null: all."""
    pass_rate: PassRateConfig | None = None
    """Offline filter by pass rate; null: none."""
    params: Annotated[dict[str, Any], AfterValidator(_from_home)] = {}
    """Settings of the task: prompt, reward mode, weights, options of the reader; the task's class lists them."""


class CurriculumStage(_Section):
    """What is drawn until a share of the run is done. After the last stage: everything, at the configured weights."""

    until: float = Field(gt=0, le=1)
    """Share of train.steps at which the stage ends."""
    weights: Annotated[dict[str, Annotated[float, Field(ge=0)]], BeforeValidator(_text_keys)] = {}
    """Weights by source name or place in data.train (0, 1 ...); 0 leaves a source out; others keep their own weight."""
    difficulty: Bounds | None = None
    """Bounds on params.difficulty of the samples, both included; a null bound is open."""
    pass_rate: Bounds | None = None
    """Bounds on the pass rate of data.train[].pass_rate, both included."""
    missing: Missing = "error"
    """Samples without a difficulty or pass rate that is bounded here: an error, kept, or dropped."""

    @model_validator(mode="after")
    def _ordered(self) -> CurriculumStage:
        for name in ("difficulty", "pass_rate"):
            low, high = getattr(self, name) or (None, None)
            if low is not None and high is not None and low > high:
                raise ValueError(
                    f"curriculum {name}: expected [low, high] with low <= high, found [{low:g}, {high:g}]"
                )
        return self


class SelectionConfig(_Section):
    """Groups whose rewards hardly differ are replaced, samples of high variance come again (mmrl/algorithms/selection.py)."""

    kind: Literal["none", "variance", "std"] = "none"
    """variance: relative to the largest possible (VCRL); std: of the rewards."""
    threshold: float | list[tuple[int, float]] = 0.3
    """Groups are kept from here on: a variance in [0, 1], or a std in rewards. Or pairs [last step, threshold], the last one for
    good; VCRL: [[20, 0.3], [21, 0.8]]."""
    replay_share: float = Field(0.5, ge=0, le=1)
    """Share of a step's places that may be filled from the memory."""
    memory: int = Field(256, ge=1)
    """Samples remembered."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Share of the old priority that a remembered sample keeps each time it is rolled out."""
    rest: int = Field(5, ge=1)
    """Steps before a sample may come again from the memory."""

    @model_validator(mode="after")
    def _reachable(self) -> SelectionConfig:
        levels = (
            [self.threshold]
            if isinstance(self.threshold, float)
            else [level for _, level in self.threshold]
        )
        ends = [] if isinstance(self.threshold, float) else [last for last, _ in self.threshold]
        if any(b <= a for a, b in itertools.pairwise(ends)):
            raise ValueError(
                "selection.threshold: expected pairs [last step, threshold] with rising steps, found "
                f"{self.threshold}; for example [[20, 0.3], [21, 0.8]]"
            )
        if not levels or min(levels) < 0 or (self.kind == "variance" and max(levels) > 1):
            raise ValueError(
                "selection.threshold: expected numbers of at least 0 (kind variance is relative: expected [0, 1]), "
                f"found {self.threshold}"
            )
        return self

    def threshold_at(self, step: int) -> float:
        """The threshold that holds at `step`."""
        if isinstance(self.threshold, float):
            return self.threshold
        found = (level for last, level in self.threshold if step <= last)
        return next(found, self.threshold[-1][1])


class ImageConfig(_Section):
    """How pictures are read; their budget is data.min_pixels and data.max_pixels."""

    orientation: Literal["displayed", "stored"] = "displayed"
    """Pictures with an EXIF orientation tag: turned as viewers show them, or with the rows and columns of the file. The policy
    sees, and boxes count, these pixels. A source's own: data.train[].params.reader.orientation."""


class VideoConfig(_Section):
    """How clips are sampled and how large their frames may be (video/sampling.py, video/budget.py); rows may override the
    sampling in params.video. Budgets left out are those of qwen-vl-utils."""

    kind: Literal["fps", "uniform", "keyframes", "timestamps", "all"] = "fps"
    """Which frames are shown: at a rate, a number of evenly spaced ones, key frames of the file, at given times, or all."""
    fps: float = Field(2.0, gt=0)
    """Frames per second of kind fps."""
    num_frames: int | None = Field(None, ge=1)
    """Number of frames of kind uniform; most frames of kind keyframes."""
    min_frames: int = Field(4, ge=1)
    """Fewest frames of kind fps."""
    max_frames: int = Field(768, ge=1)
    """Most frames of kinds fps and keyframes; a clip with more is an error of kind all."""
    min_pixels: int | None = Field(None, ge=1)
    """Fewest pixels of a frame after resizing."""
    max_pixels: int | None = Field(None, ge=1)
    """Most pixels of a frame after resizing."""
    total_pixels: int | None = Field(None, ge=1)
    """Most pixels of all frames of a clip together."""
    decoder: Literal["auto", "torchcodec", "decord", "pyav", "opencv"] = "auto"
    """Library that decodes; auto: PyAV."""


class AudioConfig(_Section):
    """How audio files are read (video/audio.py), by families that hear (`mmrl families list`)."""

    max_seconds: float | None = Field(None, gt=0)
    """The longest sound that is read; a longer one is refused before it is decoded, never cut. null: the longest that the model's
    processor takes (Qwen2.5-Omni: 300)."""


class CacheConfig(_Section):
    """The cache of visual tensors on disk (video/store.py); without a folder it works in memory, within prompt_cache_gib."""

    dir: HomePath | None = None
    """Folder, may be shared by runs and machines; null: memory only."""
    features: bool = True
    """Also keep what a frozen vision tower (model.freeze: [vision, projector]) made of the pixels, and a frozen audio tower
    (model.freeze: [audio]) of the sounds."""
    limit_gib: float | None = Field(None, gt=0)
    """Least recently used entries beyond it are removed; null: no limit."""
    verify: Literal["first", "always", "never"] = "first"
    """When checksums are compared: at an entry's first use in a process, at every use, or never."""


class DataConfig(_Section):
    """Training and held-out data."""

    train: list[DataSource] = []
    """What is trained on."""
    eval: list[DataSource] = []
    """What is evaluated on, before, during and after training."""
    on_error: Literal["raise", "record"] = "raise"
    """A broken row, picture or clip stops the run, or is listed (rows in rejected.jsonl, media in failures.jsonl)."""
    balance: Literal["weights", "tasks", "sources"] = "weights"
    """tasks, sources: every task (source name) gets an equal share of the draws; weights then act inside it."""
    curriculum: list[CurriculumStage] = []
    """Stages of a curriculum, in order of `until`."""
    selection: Annotated[SelectionConfig, BeforeValidator(_kind_alone)] = SelectionConfig()
    """Which groups are kept by the spread of their rewards; `selection: variance` for short."""
    min_pixels: int | None = Field(None, ge=1)
    """Fewest pixels of a picture after the processor's resize; null: the processor's own."""
    max_pixels: int | None = Field(None, ge=1)
    """Most pixels of a picture after the processor's resize; null: the processor's own."""
    image: ImageConfig = ImageConfig()
    video: VideoConfig = VideoConfig()
    audio: AudioConfig = AudioConfig()
    cache: CacheConfig = CacheConfig()
    workers: int = Field(0, ge=0)
    """Processes that prepare media ahead of time (mmrl/workers/prefetch.py); they need cache.dir."""
    media_timeout_s: float = Field(300.0, gt=0)
    """Seconds for one picture or clip in a worker; beyond it the clip has failed."""
    prompt_cache_gib: float = Field(1.0, ge=0)
    """GiB of memory for encoded prompts, for pixels and for features, each."""

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        if (
            self.min_pixels is not None
            and self.max_pixels is not None
            and self.min_pixels > self.max_pixels
        ):
            raise ValueError(
                f"data.min_pixels ({self.min_pixels}) cannot exceed data.max_pixels ({self.max_pixels})"
            )
        if self.workers and self.cache.dir is None:
            raise ValueError(
                f"data.workers ({self.workers}) hand their tensors over through the cache: expected data.cache.dir, "
                "found null; set data.cache.dir to a folder, or data.workers to 0"
            )
        for source in self.train:
            if _reads_officially(source.params):
                raise ValueError(
                    f"data.train of {source.path}: answers: official reads as a benchmark's program does, which takes "
                    "the first letter of a guess or the right number of a list: a policy learns to give those; train "
                    "with answers: native (or strict) and evaluate with official"
                )
        ends = [stage.until for stage in self.curriculum]
        if any(a >= b for a, b in pairwise(ends)):
            raise ValueError(
                f"data.curriculum: expected ascending 'until', found {', '.join(f'{e:g}' for e in ends)}"
            )
        return self
