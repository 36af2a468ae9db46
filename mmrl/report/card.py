"""A model card from the files of a run: data, reward, algorithm, protocol, results with intervals, and how to repeat it.

    print(model_card(Publication.of(Path("runs/grounding/checkpoints/best")), "me/boxes-3b"))

Numbers are those of the evaluation of the checkpoint's own step, against the one before training. Nothing of the machine is told:
of files only their names, no folders, no command line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData

from mmrl.config.shipped import SHIPPED
from mmrl.errors import CheckpointError
from mmrl.report.load import EvalStep, Run, load_run
from mmrl.report.published import published_settings
from mmrl.report.rows import Paired, paired
from mmrl.report.text import interval, metric_name
from mmrl.report.verdict import choose_headline

__all__ = ["Publication", "hub_name", "model_card", "run_of"]

_HUB = re.compile(r"[\w-]+/[\w.-]+")
# folders of users that look like owner/name once the machine they lie on is gone
_LOCAL = ("assets/", "runs/", "models/", "checkpoints/", "outputs/", "data/")
_STEP = re.compile(r"step_(\d+)")
_ALWAYS_SHOWN = ("reward", "parse_rate")


def hub_name(path: Any, run: Run | None = None) -> str | None:
    """`path` where it is the name of a model on the Hugging Face Hub (owner/name), and no folder: here, where the run was started,
    or among the models that come with mmrl; else None."""
    text = str(path or "")
    started = str(run.info.get("cwd") or "") if run is not None else ""
    folders = (Path(), Path(started), SHIPPED)
    local = any((folder / text).exists() for folder in folders) or text.startswith(_LOCAL)
    return text if _HUB.fullmatch(text) and not local else None


def run_of(checkpoint: Path) -> Run | None:
    """The run that wrote the checkpoint, where its folder still lies in it."""
    folder = checkpoint.resolve().parent.parent
    return load_run(folder) if (folder / "run.json").is_file() else None


@dataclass(frozen=True)
class Publication:
    """What is told of a checkpoint: the run that wrote it, its step, the base model's name on the Hub, its settings as others may
    read them, and the names of those that are left out."""

    run: Run | None
    step: int | None
    base: str | None
    settings: Mapping[str, Any]
    left_out: Sequence[str]

    @classmethod
    def of(cls, checkpoint: Path) -> Publication:
        """Raises CheckpointError where trainer/config.yaml, which every checkpoint of mmrl has, is missing or is no mapping."""
        run, raw = run_of(checkpoint), _settings(checkpoint)
        base = hub_name(_at(raw, "model.path"), run)
        settings, left_out = published_settings(raw, base=base)
        return cls(run, _step_of(checkpoint), base, settings, left_out)


def model_card(told: Publication, repo: str) -> str:
    """The README.md of a repository on the Hub, with its YAML header (base model, tasks, results)."""
    settings, results = told.settings, _results_of(told.run, told.step)
    body = [
        f"# {repo.rpartition('/')[2]}",
        "",
        _summary(settings, told.base, told.step),
        "",
        *_results(told.run, results),
        *_method(settings),
        *_usage(settings, repo),
        *_repeat(told.run),
    ]
    header = _header(told, results, repo).to_yaml()
    return f"---\n{header}\n---\n\n" + "\n".join(body).rstrip() + "\n"


def _settings(checkpoint: Path) -> dict[str, Any]:
    file = checkpoint / "trainer" / "config.yaml"
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CheckpointError(
            f"expected a checkpoint of a run, found none at {checkpoint} ({error}); name one such as "
            "runs/NAME/checkpoints/best"
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"expected a mapping in {file}, found {type(found).__name__}")
    return found


def _at(tree: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """tree['a']['b'] of 'a.b'."""
    found: Any = tree
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return default if found is None else found


def _step_of(checkpoint: Path) -> int | None:
    found = _STEP.fullmatch(checkpoint.resolve().name)
    return int(found.group(1)) if found else None


def _tasks(settings: Mapping[str, Any]) -> list[str]:
    sources = _at(settings, "data.train", [])
    env = _at(settings, "env.tasks", [])
    named = [str(s.get("task")) for s in sources if isinstance(s, Mapping)] or list(map(str, env))
    return list(dict.fromkeys(_name_of(name) for name in named))


def _name_of(value: Any) -> str:
    """A file's or folder's own name; a task such as /home/me/parity.py:Parity as parity.py:Parity."""
    text = str(value)
    return text if hub_name(text) or "/" not in text else text.rstrip("/").rpartition("/")[2]


def _method_name(settings: Mapping[str, Any]) -> str:
    """The advantage as papers write it."""
    return str(_at(settings, "algorithm.advantage", "grpo")).upper()


def _summary(settings: Mapping[str, Any], base: str | None, step: int | None) -> str:
    name = _name_of(_at(settings, "model.path", "a base model"))
    source = f"[{base}](https://huggingface.co/{base})" if base else f"`{name}`"
    # a folder of another name than step_N is none of a run's checkpoints: supervised fine-tuning writes such
    how = (
        f" for {step:,} steps with reinforcement learning ({_method_name(settings)})"
        if step
        else ""
    )
    return (
        f"{source}, trained{how} on {', '.join(_tasks(settings)) or 'its task'}, by "
        "[mmrl](https://pypi.org/project/mmrl-rft/)."
    )


@dataclass(frozen=True)
class _Results:
    """The evaluation before training and the checkpoint's own; the metric it is judged by; (mode, metric) -> both ends."""

    first: EvalStep
    own: EvalStep
    headline: tuple[str, str]
    pairs: Mapping[tuple[str, str], Paired]


def _results_of(run: Run | None, step: int | None) -> _Results | None:
    """None where either evaluation is missing."""
    if run is None or step is None:
        return None
    first = next((e for e in run.evals if e.step < step), None)
    own = next((e for e in run.evals if e.step == step), None)
    if first is None or own is None:
        return None
    headline = choose_headline(run)
    shown = _shown(headline, own)
    found = paired(first, own, [metric for _, metric in shown])
    return _Results(first, own, headline, {key: found[key] for key in shown if key in found})


def _shown(headline: tuple[str, str], own: EvalStep) -> list[tuple[str, str]]:
    """(mode, metric) of the table: the headline first, then what is measured beside it."""
    wanted = {headline[1], *own.headlines.get("per_task", {}).values(), *_ALWAYS_SHOWN}
    measured = [(mode, m) for mode, metrics in own.estimates.items() for m in metrics]
    return [n for n in dict.fromkeys([headline, *measured]) if n[1] in wanted and n in measured]


def _results(run: Run | None, found: _Results | None) -> list[str]:
    if run is None or found is None:
        return ["## Results", "", "No held-out evaluation of this checkpoint lies beside it.", ""]
    counts = sorted({p.after.n for p in found.pairs.values()} or {0})
    prompts = " to ".join(f"{n:,}" for n in dict.fromkeys((counts[0], counts[-1])))
    lines = [
        "## Results",
        "",
        f"Held-out, before training (step {found.first.step}) and at this checkpoint (step {found.own.step}), on the same "
        f"{prompts} prompts; 95 % intervals, the gain paired.",
        "",
        "| metric | mode | before | after | gain |",
        "|---|---|---|---|---|",
    ]
    for (mode, metric), pair in found.pairs.items():
        cells = [
            *(" ".join(interval(vars(end))) for end in (pair.before, pair.after)),
            " ".join(interval(vars(pair.gain), signed=True)),
        ]
        lines.append(f"| {metric_name(metric)} | {mode} | {' | '.join(map(str.strip, cells))} |")
    return [*lines, "", _protocol(found.own), *_alarms(run), ""]


def _protocol(own: EvalStep) -> str:
    p = own.protocol
    words = [
        f"{p['samples_per_prompt']} samples per prompt" if p.get("samples_per_prompt") else "",
        *(
            f"{key} {p[key]}"
            for key in ("temperature", "top_p", "max_new_tokens", "seed")
            if key in p
        ),
        *(f"{_name_of(d.get('path'))}: {d.get('samples')} samples" for d in _rows(p.get("data"))),
    ]
    return "Protocol: " + ", ".join(w for w in words if w) + "."


def _rows(value: Any) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def _alarms(run: Run) -> list[str]:
    names = list(dict.fromkeys(str(a.get("name")) for a in run.alarms))
    return ["", f"Alarms of the run: {', '.join(names)}."] if names else []


def _method(settings: Mapping[str, Any]) -> list[str]:
    rows = [
        ("method", _method_name(settings)),
        ("group size", _at(settings, "rollout.group_size")),
        ("prompts per step", _at(settings, "train.prompts_per_step")),
        ("learning rate", _at(settings, "optim.lr")),
        ("clip range", _clip(settings)),
        ("KL coefficient", _at(settings, "algorithm.kl.coef")),
        ("temperature", _at(settings, "rollout.temperature")),
        ("LoRA rank", _at(settings, "model.lora.r")),
        ("frozen parts", ", ".join(_at(settings, "model.freeze", []))),
        ("seed", _at(settings, "seed")),
    ]
    lines = ["## Training", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows if value not in (None, "")]
    for source in _rows(_at(settings, "data.train", [])):
        params = _at(source, "params", {})
        given = ", ".join(f"{k}={v}" for k, v in _told(params))
        lines.append(f"| data | {_name_of(source.get('path'))} |")
        lines.append(
            f"| reward | task `{_name_of(source.get('task'))}`{f', {given}' if given else ''} |"
        )
    return [*(line.replace("\n", " ") for line in lines), ""]


def _told(params: Any) -> Iterable[tuple[str, Any]]:
    """Parameters of a task but for long texts and places."""
    for key, value in params.items() if isinstance(params, Mapping) else ():
        if isinstance(value, (bool, int, float)) or (
            isinstance(value, str) and len(value) <= 40 and "/" not in value and "\\" not in value
        ):
            yield str(key), str(value).replace("|", "\\|")


def _clip(settings: Mapping[str, Any]) -> str:
    low, high = (_at(settings, f"algorithm.clip_{end}") for end in ("low", "high"))
    return f"{low} / {high}" if low is not None else ""


def _usage(settings: Mapping[str, Any], repo: str) -> list[str]:
    if _at(settings, "env.suite"):
        return [
            "## Use",
            "",
            "```bash",
            f"mmrl eval {repo} --suite NAME   # mmrl eval --list-suites",
            "```",
            "",
        ]
    system = _at(settings, "model.system")
    note = f"It was trained with the system text {system!r}." if isinstance(system, str) else ""
    return [
        "## Use",
        "",
        "```python",
        "from transformers import AutoModelForImageTextToText, AutoProcessor",
        "",
        f'model = AutoModelForImageTextToText.from_pretrained("{repo}")',
        f'processor = AutoProcessor.from_pretrained("{repo}")',
        "```",
        "",
        *([note, ""] if note else []),
        "On held-out data: `mmrl eval " + repo + " --task TASK --data FILE.jsonl`.",
        "",
    ]


def _repeat(run: Run | None) -> list[str]:
    versions = (
        ", ".join(f"{name} {number}" for name, number in (run.info.get("versions") or {}).items())
        if run is not None
        else ""
    )
    return [
        "## Repeat",
        "",
        "`trainer/config.yaml` holds the settings of the run, but for what belonged to its machine; with your data at its paths:",
        "",
        "```bash",
        "pip install mmrl-rft",
        "mmrl train trainer/config.yaml",
        "```",
        "",
        *([f"Versions: {versions}.", ""] if versions else []),
    ]


def _header(told: Publication, found: _Results | None, repo: str) -> ModelCardData:
    settings = told.settings
    robot = bool(_at(settings, "env.suite"))
    results = []
    if found is not None and found.headline in found.pairs:
        (mode, metric), after = found.headline, found.pairs[found.headline].after
        names = [_name_of(d.get("path")) for d in _rows(found.own.protocol.get("data"))]
        results.append(
            EvalResult(
                task_type="robotics" if robot else "image-text-to-text",
                dataset_type="held-out",
                dataset_name=", ".join(names) or "held-out",
                metric_type=metric,
                metric_name=f"{metric_name(metric)} ({mode}, {after.n:,} prompts)",
                metric_value=round(after.mean, 4),
            )
        )
    return ModelCardData(
        base_model=told.base,
        library_name="transformers",
        pipeline_tag="robotics" if robot else "image-text-to-text",
        tags=["mmrl", "reinforcement-learning", _method_name(settings).lower(), *_tasks(settings)],
        model_name=repo.rpartition("/")[2] if results else None,
        eval_results=results or None,
    )
