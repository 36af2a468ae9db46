"""The data section of a run's configuration: sources, their mix, curriculum and selection; its schedule. Part of mmrl.config.

    data:
      train:
        - {task: grounding, path: refs.jsonl, weight: 2, pass_rate: {file: runs/base/predictions.jsonl, metric: iou}}
        - {task: counting, path: counts.jsonl}
      balance: tasks
      curriculum: [{until: 0.3, difficulty: [0, 0.5]}, {until: 1.0, weights: {counts: 2}}]
      selection: variance
"""
from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

__all__ = ["CurriculumStage", "DataConfig", "DataSource", "OfflineConfig", "PassRateConfig", "ScheduleConfig", "Section",
           "SelectionConfig"]

Bounds = tuple[float | None, float | None]
Missing = Literal["error", "keep", "drop"]


class Section(BaseModel):
    """A section of the configuration: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", validate_default=True, protected_namespaces=(), validate_assignment=True)


def _text_keys(value: Any) -> Any:
    return {str(k): v for k, v in value.items()} if isinstance(value, dict) else value


def _kind_alone(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


class PassRateConfig(Section):
    """Keep samples that a policy neither always nor never solves, by its logged completions (EasyVideoR1: 0 < pass@8 < 1)."""

    file: str  # predictions.jsonl of an evaluation, or rollouts/step_*.jsonl
    metric: str = "correct"  # averaged over a sample's completions: reward, parse_rate, or a metric or reward part
    min: float = 0.1  # bounds of the average, both included
    max: float = 0.9
    mode: Literal["sampled", "greedy", "all"] = "sampled"  # of predictions; rollouts are sampled
    missing: Missing = "error"  # samples without a record

    @model_validator(mode="after")
    def _ordered(self) -> PassRateConfig:
        if self.min > self.max:
            raise ValueError(f"pass_rate.min ({self.min:g}) cannot exceed pass_rate.max ({self.max:g})")
        return self


class DataSource(Section):
    """One data file or folder read by one task."""

    task: str  # built-in name, package/name, or file.py:Name
    path: str  # file or folder, or hf://owner/name[/subset][:split]
    weight: float = Field(1.0, gt=0)  # share of prompts drawn from it, relative to the other sources
    limit: int | None = Field(None, ge=1)  # first n samples only (those that passed the filter)
    pass_rate: PassRateConfig | None = None  # offline filter
    params: dict[str, Any] = {}  # passed to the task: prompt, reward mode, weights, reader options


class CurriculumStage(Section):
    """What is drawn until a share of the run is done. After the last stage: everything, at the configured weights."""

    until: float = Field(gt=0, le=1)  # share of train.steps
    weights: Annotated[dict[str, Annotated[float, Field(ge=0)]], BeforeValidator(_text_keys)] = {}
    # ^ by source name or place in data.train (0, 1 ..); 0 leaves a source out; others keep their own weight
    difficulty: Bounds | None = None  # bounds on params.difficulty of the samples, both included; null: open
    pass_rate: Bounds | None = None  # bounds on the pass rate of data.train[].pass_rate
    missing: Missing = "error"  # samples without a difficulty or pass rate that is bounded here

    @model_validator(mode="after")
    def _ordered(self) -> CurriculumStage:
        for name in ("difficulty", "pass_rate"):
            low, high = getattr(self, name) or (None, None)
            if low is not None and high is not None and low > high:
                raise ValueError(f"curriculum {name}: expected [low, high] with low <= high, found [{low:g}, {high:g}]")
        return self


class SelectionConfig(Section):
    """Groups whose rewards hardly differ are replaced, high-variance samples come again: mmrl/algorithms/selection.py."""

    kind: Literal["none", "variance", "std"] = "none"  # variance: VCRL, relative to the largest possible; std: of rewards
    threshold: float | list[tuple[int, float]] = 0.3  # kept from here on; variance in [0, 1], std in rewards
    # ^ or pairs [last step, threshold], the last one for good; VCRL: [[20, 0.3], [21, 0.8]]
    replay_share: float = Field(0.5, ge=0, le=1)  # of a step's places that may be refilled from the memory
    memory: int = Field(256, ge=1)  # samples remembered
    momentum: float = Field(0.9, ge=0, lt=1)  # of a remembered sample's priority
    rest: int = Field(5, ge=1)  # steps before a sample may come again from the memory

    @model_validator(mode="after")
    def _reachable(self) -> SelectionConfig:
        levels = [self.threshold] if isinstance(self.threshold, float) else [level for _, level in self.threshold]
        if not levels or min(levels) < 0 or (self.kind == "variance" and max(levels) > 1):
            raise ValueError("selection.threshold: expected numbers of at least 0 (kind variance is relative: expected [0, 1]), "
                             f"found {self.threshold}")
        return self


class OfflineConfig(Section):
    """algorithm.offline: demonstrations of the rows (params.offline) in each group, LUFFY (mmrl/algorithms/offline.py).

    They count in the group's advantages, their tokens are weighed by f(pi / b) and not clipped, and no KL term applies to
    them. Not with advantage pass_k (it counts what the policy itself gets right) nor importance sequence (f is per token).
    """

    per_group: int = Field(0, ge=0)  # most demonstrations per group; 0: off; LUFFY: 1 of 8
    gold: bool = False  # rows without demonstrations: the task's own gold answer
    gamma: float | None = Field(0.1, gt=0)  # f(x) = x / (x + gamma), strongest where pi / b = gamma; null: f(x) = x
    behaviour: Literal["one", "given"] = "one"  # b: 1 (LUFFY), or the row's log-probs where it has them
    cap: float = Field(2.0, ge=1)  # largest pi / b
    replace: bool = True  # they take the place of rollouts; false: groups grow
    only_when_failing: bool = False  # only in groups without a right rollout (all rollouts are made, then the last replaced)
    until: float = Field(1.0, gt=0, le=1)  # share of train.steps after which none are added


class ScheduleConfig(Section):
    """When rollouts, rewards and training run (mmrl/pipeline.py). All kinds train on the same groups, but async rolls some of
    them out with older weights. Several processes: serial only."""

    kind: Literal["serial", "pipelined", "async"] = "serial"
    # ^ pipelined: a group is trained on while the next ones are rolled out; async: so are groups of the steps after it
    order: Literal["arrival", "key"] = "arrival"  # key: groups are trained on in fixed order, bit for bit as serial where the
    # ^ micro-batches are the same; prompts close in fixed order by themselves, so that both are one for them
    staleness: int = Field(1, ge=0)  # async: oldest weights (in versions) a group may have been rolled out with
    wave: int | None = Field(None, ge=1)  # prompts answered, scored and handed to training together; null: an eighth of
    # ^ train.prompts_per_step, at least 1 (serial: always all)
    correction: Literal["none", "truncate", "mask"] = "truncate"  # async: tokens of older weights count w = now / then (their
    # ^ probabilities) times, at most threshold times (truncate) or not at all beyond it (mask); mmrl/algorithms/staleness.py
    threshold: float = Field(2.0, gt=0)
    timeline: int = Field(0, ge=0)  # every how many steps RUN/timeline is written, for the report (0: never)

    @model_validator(mode="after")
    def _bounded(self) -> ScheduleConfig:
        if self.kind == "async" and self.staleness < 1:
            raise ValueError("schedule.kind async needs schedule.staleness of at least 1; with 0 it is pipelined")
        return self


class ImageConfig(Section):
    """How pictures are read; their budget is data.min_pixels and data.max_pixels."""

    orientation: Literal["displayed", "stored"] = "displayed"  # of pictures with an EXIF orientation tag: turned as viewers show
    # ^ them, or with the rows and columns of the file; the policy sees, and boxes count, these pixels. A source's own:
    # data.train[].params.reader.orientation


class VideoConfig(Section):
    """How clips are sampled and how large their frames may be (video/sampling.py, video/budget.py); rows may override the
    sampling in params.video. Budgets left out are those of qwen-vl-utils."""

    kind: Literal["fps", "uniform", "keyframes", "timestamps", "all"] = "fps"
    fps: float = Field(2.0, gt=0)
    num_frames: int | None = Field(None, ge=1)  # of kind uniform
    min_frames: int = Field(4, ge=1)
    max_frames: int = Field(768, ge=1)
    min_pixels: int | None = Field(None, ge=1)  # of one frame
    max_pixels: int | None = Field(None, ge=1)
    total_pixels: int | None = Field(None, ge=1)  # of all frames of a clip
    decoder: Literal["auto", "torchcodec", "decord", "pyav", "opencv"] = "auto"


class CacheConfig(Section):
    """The visual tensor cache on disk (video/store.py); in memory it works without a folder, within prompt_cache_gib."""

    dir: str | None = None  # folder, may be shared by runs and machines; null: memory only
    features: bool = True  # also what a frozen vision tower (model.freeze: [vision, projector]) made of the pixels
    limit_gib: float | None = Field(None, gt=0)  # least recently used entries beyond it are removed
    verify: Literal["first", "always", "never"] = "first"  # when checksums are compared: first use in a process ...


class DataConfig(Section):
    """Training and held-out data."""

    train: list[DataSource] = []
    eval: list[DataSource] = []
    on_error: Literal["raise", "record"] = "raise"  # a broken row, picture or clip stops the run, or is listed (rows in
    # ^ rejected.jsonl, media in failures.jsonl)
    balance: Literal["weights", "tasks", "sources"] = "weights"
    # ^ tasks / sources: every task (source name) gets an equal share of the draws; weights then act inside it
    curriculum: list[CurriculumStage] = []
    selection: Annotated[SelectionConfig, BeforeValidator(_kind_alone)] = SelectionConfig()  # `selection: variance` for short
    min_pixels: int | None = Field(None, ge=1)  # picture budget handed to the processor
    max_pixels: int | None = Field(None, ge=1)
    image: ImageConfig = ImageConfig()
    video: VideoConfig = VideoConfig()
    cache: CacheConfig = CacheConfig()
    workers: int = Field(0, ge=0)  # processes that prepare media ahead of time (mmrl/prefetch.py); they need cache.dir
    media_timeout_s: float = Field(300.0, gt=0)  # of one picture or clip in a worker; beyond it the clip has failed
    prompt_cache_gib: float = Field(1.0, ge=0)  # memory for encoded prompts, for pixels and for features, each

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ValueError(f"data.min_pixels ({self.min_pixels}) cannot exceed data.max_pixels ({self.max_pixels})")
        if self.workers and self.cache.dir is None:
            raise ValueError(f"data.workers ({self.workers}) hand their tensors over through the cache: expected data.cache.dir, "
                             "found null; set data.cache.dir to a folder, or data.workers to 0")
        ends = [stage.until for stage in self.curriculum]
        if any(a >= b for a, b in pairwise(ends)):
            raise ValueError(f"data.curriculum: expected ascending 'until', found {', '.join(f'{e:g}' for e in ends)}")
        return self
