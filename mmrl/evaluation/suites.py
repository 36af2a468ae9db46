"""Named evaluation suites: which file, which task, which metric, under which protocol.

    mmrl eval CHECKPOINT --suite refcoco_val,screenspot_v2 --data-root /data --limit 500
    mmrl eval --list-suites

configs/suites.yaml holds them; `--suites FILE` names another file of the same form. Paths are relative to the data root
(`--data-root` or MMRL_DATA) and named as the official downloads name them. A suite's settings (length of the answer,
pixels, frames of clips) go over those of the checkpoint, and overrides on the command line go over both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mmrl.config import DataSource, RunConfig, VideoConfig, merge, parse_overrides
from mmrl.config.shipped import shipped
from mmrl.errors import ConfigError, DataError, did_you_mean

__all__ = [
    "AnswerLevel",
    "Suite",
    "SuiteBook",
    "SuiteRow",
    "SuiteSettings",
    "check_files",
    "configure",
    "default_suites_file",
    "load_suites",
    "markdown",
    "read_at",
    "source_of",
    "suite_row",
    "video_words",
]

AnswerLevel = Literal["strict", "native", "official"]
"""How freely answers are read, the task parameter `answers` (mmrl.rewards.reading)."""

_ROOT = "{root}"  # stands for the data root in a suite's parameters


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class SuiteVideo(_Strict):
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


class SuiteSettings(_Strict):
    """What changes the number beside the prompt; null leaves the checkpoint's own."""

    max_new_tokens: int | None = Field(None, ge=1)
    max_prompt_tokens: int | None = Field(None, ge=16)
    min_pixels: int | None = Field(None, ge=1)
    max_pixels: int | None = Field(None, ge=1)
    video: SuiteVideo = SuiteVideo()


class Suite(_Strict):
    """One suite. `metric` is a metric of the scores ('acc@0.5'), 'summary/NAME' of Task.summarize, or 'benchmark/NAME' of
    Task.benchmark. `official` says whether this is the benchmark's own protocol, so that the number may be compared."""

    task: str
    path: str
    metric: str
    official: bool
    split: str = ""
    params: dict[str, Any] = {}
    # the task parameter of that name; null: the task's own default
    answers: AnswerLevel | None = None
    # the benchmark whose own extractor reads at official; without one, official reads as native
    extractor: str | None = None
    settings: SuiteSettings = SuiteSettings()
    # what must exist below the data root; a name that ends with / is a folder; default: path
    files: list[str] = []
    download: str  # how the official download names the files, and where they go
    notes: str = ""

    @model_validator(mode="after")
    def _an_extractor_for_official(self) -> Suite:
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
    def needed(self) -> list[str]:
        """Files and folders that must exist below the data root."""
        return self.files or [self.path]


@dataclass(frozen=True)
class SuiteBook:
    """All suites of a file, and names for several at once."""

    file: Path
    suites: Mapping[str, Suite]
    groups: Mapping[str, tuple[str, ...]]

    def select(self, wanted: str) -> dict[str, Suite]:
        """'refcoco,screenspot_v2' -> the suites, groups spelt out, each once, in the order asked for.

        Raises ConfigError with a suggestion for a name that is neither.
        """
        known = [*self.suites, *self.groups]
        chosen: dict[str, Suite] = {}
        for name in filter(None, (part.strip() for part in wanted.split(","))):
            if name not in known:
                raise ConfigError(
                    f"unknown suite '{name}'.{did_you_mean(name, known)} {self.file} has: "
                    f"{', '.join(self.suites)}; groups: {', '.join(self.groups) or 'none'}"
                )
            for member in self.groups.get(name, (name,)):
                chosen[member] = self.suites[member]
        if not chosen:
            raise ConfigError(
                f"expected --suite NAME,..., found {wanted!r}; {self.file} has: {', '.join(known)}"
            )
        return chosen


def default_suites_file() -> Path:
    """configs/suites.yaml here, else the one that is installed."""
    return shipped("configs/suites.yaml")


def _explain(name: str, error: ValidationError) -> Iterable[str]:
    for item in error.errors():
        where = ".".join(str(p) for p in item["loc"])
        key = str(item["loc"][-1]) if item["loc"] else "it"
        inner: dict[tuple[Any, ...], type[BaseModel]] = {
            ("settings",): SuiteSettings,
            ("settings", "video"): SuiteVideo,
        }
        known = list(inner.get(item["loc"][:-1], Suite).model_fields)
        if item["type"] == "extra_forbidden":
            yield f"suite '{name}': unknown key '{where}'.{did_you_mean(key, known)} Known here: {', '.join(known)}"
        else:
            yield f"suite '{name}': {where or 'it'}: {item['msg']}, found {item['input']!r}"[:300]


def suites_tree(file: Path) -> dict[str, Any]:
    """The mapping in a suites file, which has suites. Raises ConfigError."""
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"expected a suites file, found '{file}': {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file}: expected YAML in UTF-8, found another content: {error}"
        ) from error
    if not isinstance(tree, dict) or not isinstance(tree.get("suites"), dict) or not tree["suites"]:
        raise ConfigError(
            f"{file}: expected a mapping 'suites' of names to suites, found "
            f"{sorted(map(str, tree)) if isinstance(tree, dict) else type(tree).__name__}"
        )
    return tree


def load_suites(path: str | Path | None = None) -> SuiteBook:
    """Read a suites file (default: configs/suites.yaml). Raises ConfigError naming every problem in it."""
    file = Path(path) if path is not None else default_suites_file()
    tree = suites_tree(file)
    suites: dict[str, Suite] = {}
    problems = [
        f"unknown key '{key}'.{did_you_mean(key, ('suites', 'groups'))} Known here: suites, groups, and names that "
        "begin with a dot for shared parts"
        for key in map(str, tree)
        if key not in ("suites", "groups") and not key.startswith(".")
    ]
    for name, values in tree["suites"].items():
        try:
            suites[str(name)] = Suite.model_validate(values)
        except ValidationError as error:
            problems += _explain(name, error)
    groups = {str(k): tuple(v) for k, v in (tree.get("groups") or {}).items()}
    problems += [
        f"group '{name}': unknown suite '{member}'.{did_you_mean(member, tree['suites'])}"
        for name, members in groups.items()
        for member in members
        if member not in tree["suites"]
    ]
    if problems:
        raise ConfigError(f"{file}: {len(problems)} problem(s)\n  " + "\n  ".join(problems))
    return SuiteBook(file, suites, groups)


def _matches(pattern: str, root: Path) -> list[Path]:
    """Files or folders that `pattern` stands for: a name, or one with * in its parts; a name that ends in / is a folder."""
    found = sorted(root.glob(pattern.rstrip("/"))) if "*" in pattern else [root / pattern]
    return [p for p in found if (p.is_dir() if pattern.endswith("/") else p.exists())]


def check_files(suites: Mapping[str, Suite], root: Path) -> None:
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


def _data_path(suite: Suite, root: Path) -> Path:
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
    suite: Suite,
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


def configure(base: RunConfig, suite: Suite, overrides: Sequence[str] = ()) -> RunConfig:
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


@dataclass(frozen=True)
class SuiteRow:
    """One line of the table. low and high are None where the metric is one number of a whole set (AP)."""

    suite: str
    n: int
    metric: str
    value: float | None
    low: float | None
    high: float | None
    parse_failures: int
    truncated: int
    official: bool
    limited: bool
    sampled: float | None = None
    error: str = ""
    settings: Mapping[str, int] = field(default_factory=dict)  # as they were, overrides included
    # data.video as it was; {} for a suite without clips
    video: Mapping[str, Any] = field(default_factory=dict)
    answers: str = ""  # how freely answers were read; "": the task's own default
    extractor: str = ""  # the benchmark whose own extractor read them; "": none

    @property
    def shown(self) -> str:
        """'0.873 [0.851, 0.893]', '0.412', or '-'."""
        if self.value is None:
            return "-"
        spread = (
            f" [{self.low:.3f}, {self.high:.3f}]"
            if self.low is not None and self.high is not None
            else ""
        )
        return f"{self.value:.3f}{spread}"

    def as_dict(self) -> dict[str, Any]:
        """For suites.json."""
        return asdict(self)


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _numbers(results: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """{'mean', 'low', 'high'} of the suite's metric; {} when it was not measured."""
    kind, _, name = metric.partition("/")
    if kind not in ("summary", "benchmark"):
        return dict(results.get("greedy", {}).get(metric, {}))
    tables = (
        results.get("summary", {}).get("greedy", {})
        if kind == "summary"
        else results.get("benchmark", {})
    )
    values = [table[name] for table in tables.values() if name in table]
    return {"mean": math.fsum(values) / len(values)} if values else {}


def suite_row(
    name: str,
    suite: Suite,
    results: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    limit: int | None,
    config: RunConfig | None = None,
    answers: str | None = None,
) -> SuiteRow:
    """The line of one evaluated suite, from its results and prediction rows, and the settings it ran with. A metric that
    was not measured, or an official scorer that failed, is an error in it."""
    greedy = [r for r in rows if r["mode"] == "greedy"]
    found = _numbers(results, suite.metric)
    errors = [
        f"{source}: {table['error']}"
        for source, table in results.get("benchmark", {}).items()
        if "error" in table
    ]
    if not found and not errors:
        known = [
            *results.get("greedy", {}),
            *(
                f"summary/{k}"
                for t in results.get("summary", {}).get("greedy", {}).values()
                for k in t
            ),
            *(f"benchmark/{k}" for t in results.get("benchmark", {}).values() for k in t),
        ]
        errors = [
            f"expected metric '{suite.metric}', found {', '.join(known)}.{did_you_mean(suite.metric, known)}"
        ]
    sampled = results.get("sampled", {}).get(suite.metric, {}).get("mean")
    return SuiteRow(
        name,
        len(greedy),
        suite.metric,
        _finite(found.get("mean")),
        _finite(found.get("low")),
        _finite(found.get("high")),
        sum(not r["score"]["parsed"] for r in greedy),
        sum(r["stop"] == "length" for r in greedy),
        suite.official and suite.level(answers) in (suite.answers, "official"),
        limit is not None and len(greedy) >= limit,
        _finite(sampled),
        "; ".join(errors),
        _used(config) if config else {},
        config.data.video.model_dump() if config and any(r.get("videos") for r in rows) else {},
        suite.level(answers) or "",
        suite.extractor or "" if suite.level(answers) == "official" else "",
    )


def _used(config: RunConfig) -> dict[str, int]:
    found = {
        "max_new_tokens": config.rollout.max_new_tokens,
        "max_prompt_tokens": config.model.max_prompt_tokens,
        "min_pixels": config.data.min_pixels,
        "max_pixels": config.data.max_pixels,
    }
    return {k: v for k, v in found.items() if v is not None}


def markdown(rows: Sequence[SuiteRow], suites: Mapping[str, Suite], checkpoint: str) -> str:
    """The table as Markdown, with each suite's protocol below it."""
    lines = [
        f"# {checkpoint}",
        "",
        "| suite | n | metric | value (95 %) | parse failures | truncated | official |",
        "|---|--:|---|--:|--:|--:|---|",
    ]
    for row in rows:
        count = f"{row.n}{' (first n)' if row.limited else ''}"
        official = "yes" if row.official and not row.limited else "no"
        lines.append(
            f"| {row.suite} | {count} | {row.metric} | {row.shown} | {row.parse_failures} | {row.truncated} | "
            f"{official} |"
        )
    lines.append("")
    for row in rows:
        suite = suites[row.suite]
        facts = ", ".join(f"{k} {v}" for k, v in row.settings.items())
        words = [
            f"split {suite.split}" if suite.split else "",
            f"answers: {row.answers}{f' ({row.extractor})' if row.extractor else ''}"
            if row.answers
            else "",
            facts,
            f"video: {video_words(row.video)}" if row.video else "",
            " ".join(suite.notes.split()),
        ]
        lines.append(f"- {row.suite}: task {suite.task}; " + "; ".join(w for w in words if w))
        if row.error:
            lines.append(f"  - error: {row.error}")
    return "\n".join(lines) + "\n"
