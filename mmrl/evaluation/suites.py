"""Suites of questions on data files: which file, which task, which metric, under which protocol.

    mmrl eval CHECKPOINT --suite refcoco_val,screenspot_v2 --data-root /data --limit 500

configs/suites.yaml holds them (mmrl.evaluation.suite_book reads it). Paths are relative to the data root
(`--data-root` or MMRL_DATA) and named as the official downloads name them. A suite's settings (length of the answer,
pixels, frames of clips) go over those of the checkpoint, and overrides on the command line go over both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from mmrl.config import DataSource, RunConfig, VideoConfig, merge, parse_overrides
from mmrl.errors import DataError
from mmrl.evaluation.suite_book import Section, Suite

__all__ = [
    "AnswerLevel",
    "DataSuite",
    "SuiteSettings",
    "SuiteVideo",
    "check_files",
    "configure",
    "read_at",
    "source_of",
    "video_words",
]

AnswerLevel = Literal["strict", "native", "official"]
"""How freely answers are read, the task parameter `answers` (mmrl.rewards.reading)."""

_ROOT = "{root}"  # stands for the data root in a suite's parameters


class SuiteVideo(Section):
    """Frames of clips and their pixels, as in data.video; null leaves the checkpoint's own. fps or num_frames chooses the kind."""

    fps: float | None = Field(None, gt=0)
    num_frames: int | None = Field(None, ge=1)
    min_frames: int | None = Field(None, ge=1)
    max_frames: int | None = Field(None, ge=1)
    min_pixels: int | None = Field(None, ge=1)
    max_pixels: int | None = Field(None, ge=1)
    total_pixels: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_kind(self) -> SuiteVideo:
        if self.fps is not None and self.num_frames is not None:
            raise ValueError("fps and num_frames contradict each other; keep one")
        return self


class SuiteSettings(Section):
    """What changes the number beside the prompt; null leaves the checkpoint's own."""

    max_new_tokens: int | None = Field(None, ge=1)
    max_prompt_tokens: int | None = Field(None, ge=16)
    min_pixels: int | None = Field(None, ge=1)
    max_pixels: int | None = Field(None, ge=1)
    video: SuiteVideo = SuiteVideo()


class DataSuite(Suite, BaseModel):
    """One suite. `metric` is a metric of the scores ('acc@0.5'), 'summary/NAME' of Task.summarize, or 'benchmark/NAME' of
    Task.benchmark. `official` says whether this is the benchmark's own protocol, so that the number may be compared."""

    task: str
    path: str
    metric: str
    official: bool
    split: str = ""
    # samples of the split; an evaluation of fewer is not official. null: not known
    count: int | None = Field(None, ge=1)
    params: dict[str, Any] = {}
    # the task parameter of that name; null: the task's own default
    answers: AnswerLevel | None = None
    # the benchmark whose own extractor reads at official; without one, official reads as native
    extractor: str | None = None
    settings: SuiteSettings = SuiteSettings()
    # what must exist below the data root; a name that ends with / is a folder; default: path
    files: list[str] = []
    download: str  # how the official download names the files, and where they go

    @model_validator(mode="after")
    def _an_extractor_for_official(self) -> DataSuite:
        if self.answers == "official" and self.extractor is None:
            raise ValueError(
                "answers: official needs extractor, the benchmark's own; name one of mmrl.rewards.official, or set "
                "answers: native"
            )
        return self

    def level(self, asked: str | None = None) -> str | None:
        """How answers are read when `asked` (the command line's --answers) goes over the suite's own level."""
        level = asked or self.answers
        return "native" if level == "official" and self.extractor is None else level

    @property
    def listed(self) -> dict[str, str]:
        """See Suite."""
        official = "yes" if self.official else "no"
        return {
            "task": self.task,
            "metric": self.metric,
            "official": official,
            "data (below the data root)": self.path,
        }

    @property
    def needed(self) -> list[str]:
        """Files and folders that must exist below the data root."""
        return self.files or [self.path]


def _matches(pattern: str, root: Path) -> list[Path]:
    """Files or folders that `pattern` stands for: a name, or one with * in its parts; a name that ends in / is a folder."""
    found = sorted(root.glob(pattern.rstrip("/"))) if "*" in pattern else [root / pattern]
    return [p for p in found if (p.is_dir() if pattern.endswith("/") else p.exists())]


def check_files(suites: Mapping[str, DataSuite], root: Path) -> None:
    """Raise one DataError that lists, for every suite, what is expected where and how the download names it."""
    missing = []
    for name, suite in suites.items():
        absent = [f for f in suite.needed if not _matches(f, root)]
        if absent:
            missing.append(
                f"suite '{name}': expected below {root}:\n    "
                + "\n    ".join(absent)
                + f"\n  found nothing there. {suite.download}"
            )
    if missing:
        raise DataError(
            "\n".join(missing) + "\nThe data root is set by --data-root FOLDER or MMRL_DATA."
        )


def _data_path(suite: DataSuite, root: Path) -> Path:
    """The one file or folder of the suite. Raises DataError when its pattern fits none or several."""
    found = _matches(suite.path, root)
    if len(found) != 1:
        raise DataError(
            f"expected one file {root / suite.path}, found {len(found)}: "
            f"{', '.join(p.name for p in found[:5]) or 'none'}. {suite.download}"
        )
    return found[0]


def _at(value: Any, root: Path) -> Any:
    """`value` with every {root} in its texts replaced."""
    if isinstance(value, str):
        return value.replace(_ROOT, str(root))
    if isinstance(value, dict):
        return {k: _at(v, root) for k, v in value.items()}
    return [_at(v, root) for v in value] if isinstance(value, list) else value


def read_at(
    task: str, params: Mapping[str, Any], level: str, extractor: str | None = None
) -> dict[str, Any]:
    """`params` of a task with its parameter `answers` set, and at official `extractor`; of a mixed task, those of its members."""
    given = {
        "answers": level,
        **({"extractor": extractor} if level == "official" and extractor is not None else {}),
    }
    if task != "mixed":
        return {**params, **given}
    return {**params, "shared": {**params.get("shared", {}), **given}}


def source_of(
    suite: DataSuite,
    root: Path,
    limit: int | None,
    asked: Mapping[str, Any] | None = None,
    answers: str | None = None,
) -> DataSource:
    """The suite's data source. `asked` are parameters the checkpoint was trained with: its prompt and answer_format are
    used where the suite has none, because a model answers as it was taught to. `answers` goes over the suite's level."""
    taught = {k: v for k, v in (asked or {}).items() if k in ("prompt", "answer_format", "shared")}
    params, level = merge(taught, _at(suite.params, root)), suite.level(answers)
    return DataSource(
        task=suite.task,
        path=str(_data_path(suite, root)),
        limit=limit,
        params=params if level is None else read_at(suite.task, params, level, suite.extractor),
    )


def configure(base: RunConfig, suite: DataSuite, overrides: Sequence[str] = ()) -> RunConfig:
    """`base` with the suite's settings, except where the command line's overrides say otherwise."""
    given = parse_overrides(list(overrides))
    config, wanted = base.model_copy(deep=True), suite.settings

    def free(section: str, key: str) -> bool:
        return key not in given.get(section, {})

    if wanted.max_new_tokens is not None and free("rollout", "max_new_tokens"):
        config.rollout.max_new_tokens = wanted.max_new_tokens
    if wanted.max_prompt_tokens is not None and free("model", "max_prompt_tokens"):
        config.model.max_prompt_tokens = wanted.max_prompt_tokens
    if (
        (wanted.min_pixels, wanted.max_pixels) != (None, None)
        and free("data", "min_pixels")
        and free("data", "max_pixels")
    ):
        config.data = config.data.model_copy(
            update={"min_pixels": wanted.min_pixels, "max_pixels": wanted.max_pixels}
        )
    chosen = _video_of(wanted.video, given.get("data", {}).get("video", {}))
    config.data.video = VideoConfig.model_validate({**config.data.video.model_dump(), **chosen})
    return config


_HOW_MANY = ("kind", "fps", "num_frames")


def _video_of(wanted: SuiteVideo, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a suite changes of data.video: not what the command line gives, nor how frames are chosen when it says how."""
    chosen = {k: v for k, v in wanted.model_dump(exclude_none=True).items() if k not in given}
    if any(k in given for k in _HOW_MANY):
        return {k: v for k, v in chosen.items() if k not in _HOW_MANY}
    if wanted.num_frames is not None:
        return {**chosen, "kind": "uniform"}
    return {**chosen, "kind": "fps", "num_frames": None} if wanted.fps is not None else chosen


def video_words(video: Mapping[str, Any]) -> str:
    """'2 fps, 4 to 768 frames, at most 262144 pixels each' of the values of data.video."""
    kind = video["kind"]
    frames = (
        f"{video['num_frames']} frames"
        if kind == "uniform" and video["num_frames"]
        else (f"{video['fps']:g} fps" if kind == "fps" else f"frames: {kind}")
    )
    words = [frames] + [f"{video['min_frames']} to {video['max_frames']} frames"] * (kind == "fps")
    for name, text in (
        ("min_pixels", "at least {} pixels each"),
        ("max_pixels", "at most {} pixels each"),
        ("total_pixels", "at most {} pixels together"),
    ):
        words += [text.format(video[name])] if video[name] is not None else []
    return ", ".join([*words, f"decoder {video['decoder']}"])
