"""The contracts everything else speaks: Sample -> Turn -> Rollout -> RolloutGroup, each with its Score.

Plain frozen dataclasses, importable without torch, picklable, and the only part of mmrl that `rewards` and `video`
may import (with coords and errors). A failed rollout is data (error, reason), never a crash, never dropped.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from mmrl.coords import CoordFrame

__all__ = [
    "AudioSize",
    "ImageSize",
    "RewardContext",
    "Rollout",
    "RolloutGroup",
    "Sample",
    "Score",
    "StopReason",
    "Turn",
    "VideoSize",
]

_EMPTY: Mapping[str, Any] = MappingProxyType({})


class StopReason(str, enum.Enum):
    """Why generation ended."""

    EOS = "eos"  # the model ended its turn
    LENGTH = "length"  # cut by the length limit: the answer may be incomplete
    ERROR = "error"  # no usable completion; Rollout.error says why


@dataclass(frozen=True)
class Sample:
    """One question. Media are references (paths; a video may also be a folder of frames, an audio file also a clip whose sound is
    meant); tensors live in the policy's encoder or the cache. Times are seconds from the beginning of the shown part of a video.

    `answer` is the task's own ground truth (grounding: one [x1, y1, x2, y2] box in pixels of the original image).
    `params` are per-sample settings of the task or its rewards (thresholds, weights, image width and height).
    """

    id: str
    task: str
    source: str
    question: str
    answer: Any
    images: tuple[str, ...] = ()
    videos: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    audios: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        vars(self)["params"] = dict(self.params)


@dataclass(frozen=True)
class ImageSize:
    """Width and height in pixels of a picture on disk and as the vision tower saw it."""

    orig_wh: tuple[int, int]
    resized_wh: tuple[int, int]


@dataclass(frozen=True)
class VideoSize:
    """A clip on disk and as the vision tower saw it: pixels of a frame (width, height) before and after resizing, seconds of
    the shown part, and when each shown frame is, in seconds from the beginning of the shown part."""

    orig_wh: tuple[int, int]
    resized_wh: tuple[int, int]
    duration_s: float
    timestamps_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class AudioSize:
    """How long a sound is, in seconds."""

    duration_s: float


@dataclass(frozen=True)
class RewardContext:
    """What a reward may know beside text and truth: progress, coordinate frame, sizes of media, how the text ended.

    `step` of `total_steps` drives schedules such as Dynamic IoU; evaluation passes step == total_steps.
    """

    step: int
    total_steps: int
    frame: CoordFrame
    images: tuple[ImageSize, ...] = ()
    stop: StopReason = StopReason.EOS
    num_tokens: int = 0
    max_tokens: int = 0
    videos: tuple[VideoSize, ...] = ()
    audios: tuple[AudioSize, ...] = ()

    def in_frame(self, frame: CoordFrame) -> RewardContext:
        """The same with another coordinate frame."""
        # per completion: setting nine fields of a frozen class one by one takes three times as long
        other = object.__new__(type(self))
        vars(other).update(vars(self), frame=frame)
        return other

    @property
    def progress(self) -> float:
        """step / total_steps, clipped to [0, 1]."""
        return min(1.0, max(0.0, self.step / self.total_steps)) if self.total_steps > 0 else 1.0


@dataclass(frozen=True)
class Turn:
    """What the policy did when it was shown something: a text answer, a tool call, a click, a chunk of robot actions.

    `logprobs` are the behaviour policy's fp32 log-probabilities, one per token id. They belong to the distribution really sampled
    from (after temperature), before top-p / top-k truncation.

    `prompt` is the encoded observation (mmrl.policy.encode.Prompt); None where the sample alone is shown, which training encodes
    anew and compares with `RolloutGroup.fingerprint`. The rest is of environments, see mmrl.algorithms.trajectories: the critic's
    `values` (V,) of the observation (one, or one per action step), and for the steps that the turn took, (C,), their `rewards`
    and which were executed (`valid`); then whether the environment ended by it.

    `decision` is what a policy chose that is no token (the denoising chain of a flow, mmrl.robotics.flow): the policy's own
    `evaluate` takes it in the place of token_ids, which then name the nearest bins, for people. None: the tokens are it.
    `parsed`: whether the environment could read it.

    `versions`: of the weights that wrote each token, where newer ones took over within the turn (schedule.partial_rollouts);
    `policy_version` is then the oldest. (): one version wrote all.

    `experts`: which ones of a mixture computed prompt and tokens (mmrl.policy.routing.TurnExperts), where they are to be replayed.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    stop: StopReason
    policy_version: int = 0
    prompt: Any = None
    values: tuple[float, ...] = ()
    rewards: tuple[float, ...] = ()
    valid: tuple[bool, ...] = ()
    terminated: bool = False
    truncated: bool = False
    decision: Any = None
    parsed: bool = True
    versions: tuple[int, ...] = ()
    experts: Any = None

    def __post_init__(self) -> None:
        if self.versions and len(self.versions) != len(self.token_ids):
            raise ValueError(
                f"expected one version per token, or none, found {len(self.versions)} for {len(self.token_ids)} tokens"
            )
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"expected one log-prob per token, found {len(self.logprobs)} for {len(self.token_ids)} tokens"
            )

    @property
    def reward(self) -> float:
        """Sum of the environment's rewards over the executed steps."""
        return float(sum(r for r, v in zip(self.rewards, self.valid, strict=True) if v))


@dataclass(frozen=True)
class Score:
    """A reward in [0, 1] with its breakdown: value == sum(weights[k] * parts[k]) always.

    `reason` names why parsing failed or why a reward could not be computed; such a score is 0 (less where a part can
    punish) and stays in every denominator. `metrics` are observed, not rewarded (iou, precision ...). `detail` is for
    people: boxes to draw etc.
    """

    value: float
    parsed: bool
    reason: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    detail: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fields = vars(self)
        fields["parts"] = parts = dict(self.parts)
        fields["weights"] = weights = dict(self.weights)
        fields["metrics"], fields["detail"] = dict(self.metrics), dict(self.detail)
        if not math.isfinite(self.value):
            raise ValueError(
                f"a score must be finite, found {self.value!r} with parts {dict(self.parts)}"
            )
        if parts.keys() != weights.keys():
            raise ValueError(
                f"parts {sorted(self.parts)} and weights {sorted(self.weights)} must have the same names"
            )

    @classmethod
    def combine(
        cls,
        parts: Mapping[str, float],
        weights: Mapping[str, float],
        *,
        parsed: bool,
        reason: str | None = None,
        metrics: Mapping[str, float] = _EMPTY,
        detail: Mapping[str, Any] = _EMPTY,
    ) -> Score:
        """The weighted sum of `parts`; weights are used as given (normalise them to keep the value in [0, 1])."""
        value = math.fsum(weights[k] * parts[k] for k in parts)
        return cls(value, parsed, reason, parts, weights, metrics, detail)

    @classmethod
    def failure(
        cls, reason: str, parts: Sequence[str] = (), weights: Mapping[str, float] = _EMPTY
    ) -> Score:
        """A recorded zero: every named part is 0, parsed is False, the reason is kept."""
        return cls(
            0.0, False, reason, dict.fromkeys(parts, 0.0), {k: weights.get(k, 0.0) for k in parts}
        )


@dataclass(frozen=True)
class Rollout:
    """The turns of one attempt at a sample, with one score: a VLM answer is a rollout of one turn, a robot episode of sixty.

    With `error` it could not be finished: it counts, and nothing is learned from it.
    `offline` marks a demonstration: somebody else wrote it, and its log-probs are theirs (0 where unknown).
    `replayed` marks a success of older weights (mmrl.algorithms.replay), with their log-probs.
    `info`: what an environment says at the end (success_once, success_at_end).
    `final`: the encoded last observation, where a critic's value of it is wanted. `frames`: pictures, where asked for.
    `final_value`: what a critic expects after the last turn, where training has computed it (mmrl.training.answer_critic).
    `film`: what its turns were shown (mmrl.rollout.film.Film), where people are to see it.
    `tree`: its tree's number in the group, where it was sampled in one (mmrl.rollout.trees); the first `shared_turns` of its turns
    were written for another rollout of the tree.
    """

    turns: tuple[Turn, ...]
    score: Score | None = None
    error: str | None = None
    offline: bool = False
    info: Mapping[str, float] = field(default_factory=dict)
    final: Any = None
    frames: tuple[Any, ...] = ()
    final_value: float = 0.0
    film: Any = None
    replayed: bool = False
    tree: int | None = None
    shared_turns: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens written by the policy over all turns."""
        return sum(len(t.token_ids) for t in self.turns)

    @property
    def steps(self) -> int:
        """Steps executed in an environment."""
        return sum(sum(t.valid) for t in self.turns)

    @property
    def reward(self) -> float:
        """Sum of the environment's rewards."""
        return float(sum(t.reward for t in self.turns))

    @property
    def terminated(self) -> bool:
        """Whether the environment came to an end of its own."""
        return bool(self.turns) and self.turns[-1].terminated

    @property
    def truncated(self) -> bool:
        """Whether it was cut off."""
        return bool(self.turns) and self.turns[-1].truncated

    def oldest_version(self, default: int) -> int:
        """That of the oldest weights that acted in it; `default` where nothing was written (a failed reset)."""
        return min((t.policy_version for t in self.turns if t.token_ids), default=default)


@dataclass(frozen=True)
class RolloutGroup:
    """One sample with its G rollouts, the unit the trainer consumes.

    `fingerprint` hashes the media tensors and rotary positions seen at rollout; training recomputes and compares it.
    `contrast` holds rollouts on a changed input (T-GRPO's shuffled frames and the like); they are never trained on.
    `view` names the change; '' where none applies. A group with a view and no contrast was one where it could not matter.
    `probe` marks groups whose contrast was rolled out whether or not it matters: an unbiased sample of them all.
    `replaced` holds rollouts whose places demonstrations or past successes took: they count in metrics and are not trained on.
    `key` orders groups and seeds their sampling: (step, position in the step, attempt).
    """

    sample: Sample
    rollouts: tuple[Rollout, ...]
    fingerprint: str = ""
    key: tuple[int, int, int] = (0, 0, 0)
    contrast: tuple[Rollout, ...] = ()
    view: str = ""
    probe: bool = False
    error: str | None = None
    replaced: tuple[Rollout, ...] = ()

    @property
    def rewards_G(self) -> tuple[float, ...]:
        """Reward of each rollout; one without a score counts as 0."""
        return tuple(r.score.value if r.score else 0.0 for r in self.rollouts)
