"""A model card from the files of a run: data, reward, algorithm, protocol, results with intervals, and how to repeat it.

    print(model_card(Path("runs/grounding/checkpoints/best"), "me/boxes-3b"))

Numbers are those of the evaluation of the checkpoint's own step, against the one before training. Nothing of the machine is told:
of files only their names, no folders, no command line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData

from mmrl.config.shipped import SHIPPED
from mmrl.errors import CheckpointError
from mmrl.report.load import EvalStep, Run, load_run
from mmrl.report.published import published_settings
from mmrl.report.rows import gains, paired_ends
from mmrl.report.text import interval, metric_name
from mmrl.report.verdict import Outcome, outcome

__all__ = ["checkpoint_settings_file", "hub_name", "model_card", "run_of"]

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


def model_card(checkpoint: Path, repo: str) -> str:
    """The README.md of a repository on the Hub, with its YAML header (base model, tasks, results).

    Raises CheckpointError where trainer/config.yaml, which every checkpoint of mmrl has, is missing or is no mapping.
    """
    run, step = run_of(checkpoint), _step_of(checkpoint)
    raw = checkpoint_settings_file(checkpoint)
    base = hub_name(_at(raw, "model.path"), run)
    settings, _ = published_settings(raw, base=base)
    body = [
        f"# {repo.rpartition('/')[2]}",
        "",
        _summary(settings, base, step),
        "",
        *_results(run, step),
        *_method(settings),
        *_usage(settings, repo),
        *_repeat(settings, run),
    ]
    header = _header(settings, base, run, step, repo).to_yaml()
    return f"---\n{header}\n---\n\n" + "\n".join(body).rstrip() + "\n"


def checkpoint_settings_file(checkpoint: Path) -> dict[str, Any]:
    """trainer/config.yaml as it is. Raises CheckpointError where it is missing or no mapping."""
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


def _evaluations(run: Run | None, step: int | None) -> tuple[EvalStep, EvalStep] | None:
    """The first evaluation and the checkpoint's own; None where either is missing."""
    if run is None or step is None:
        return None
    first = next((e for e in run.evals if e.step < step), None)
    own = next((e for e in run.evals if e.step == step), None)
    return (first, own) if first is not None and own is not None else None


def _shown(found: Outcome, own: EvalStep) -> list[tuple[str, str]]:
    """(mode, metric) of the table: the headline first, then what its mode measures beside it."""
    names = [(found.mode, found.headline)]
    wanted = {found.headline, *own.headlines.get("per_task", {}).values(), *_ALWAYS_SHOWN}
    for mode, metrics in own.estimates.items():
        names += [(mode, m) for m in metrics if m in wanted]
    return [n for n in dict.fromkeys(names) if n[1] in own.estimates.get(n[0], {})]


def _results(run: Run | None, step: int | None) -> list[str]:
    ends = _evaluations(run, step)
    if run is None or ends is None:
        return ["## Results", "", "No held-out evaluation of this checkpoint lies beside it.", ""]
    first, own = ends
    shown = _shown(outcome(run), own)
    both = paired_ends(first, own, [metric for _, metric in shown])
    paired = gains(first, own, [metric for _, metric in shown])
    counts = sorted({e.n for pair in both.values() for e in pair})
    prompts = f"{counts[0]:,} to {counts[-1]:,}" if len(counts) > 1 else f"{(counts or [0])[0]:,}"
    lines = [
        "## Results",
        "",
        f"Held-out, before training (step {first.step}) and at this checkpoint (step {own.step}), on the same {prompts} prompts; "
        "95 % intervals, the gain paired.",
        "",
        "| metric | mode | before | after | gain |",
        "|---|---|---|---|---|",
    ]
    for mode, metric in shown:
        if (mode, metric) not in both:
            continue
        gain = paired.get((mode, metric))
        cells = [
            *(" ".join(interval(vars(end))) for end in both[mode, metric]),
            " ".join(interval(vars(gain), signed=True)) if gain is not None else "–",
        ]
        lines.append(f"| {metric_name(metric)} | {mode} | {' | '.join(map(str.strip, cells))} |")
    return [*lines, "", _protocol(own), *_alarms(run), ""]


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


def _repeat(settings: Mapping[str, Any], run: Run | None) -> list[str]:
    versions = (
        ", ".join(f"{name} {number}" for name, number in (run.info.get("versions") or {}).items())
        if run is not None
        else ""
    )
    return [
        "## Repeat",
        "",
        "`trainer/config.yaml` holds every setting of the run; with your data at its paths:",
        "",
        "```bash",
        "pip install mmrl-rft",
        "mmrl train trainer/config.yaml",
        "```",
        "",
        *([f"Versions: {versions}.", ""] if versions else []),
    ]


def _header(
    settings: Mapping[str, Any],
    base: str | None,
    run: Run | None,
    step: int | None,
    repo: str,
) -> ModelCardData:
    robot = bool(_at(settings, "env.suite"))
    results = []
    if run is not None and (ends := _evaluations(run, step)) is not None:
        found, own = outcome(run), ends[1]
        pair = paired_ends(*ends, [found.headline]).get((found.mode, found.headline))
        if pair is not None:
            names = [_name_of(d.get("path")) for d in _rows(own.protocol.get("data"))]
            results.append(
                EvalResult(
                    task_type="robotics" if robot else "image-text-to-text",
                    dataset_type="held-out",
                    dataset_name=", ".join(names) or "held-out",
                    metric_type=found.headline,
                    metric_name=f"{metric_name(found.headline)} ({found.mode}, {pair[1].n:,} prompts)",
                    metric_value=round(pair[1].mean, 4),
                )
            )
    return ModelCardData(
        base_model=base,
        library_name="transformers",
        pipeline_tag="robotics" if robot else "image-text-to-text",
        tags=["mmrl", "reinforcement-learning", _method_name(settings).lower(), *_tasks(settings)],
        model_name=repo.rpartition("/")[2] if results else None,
        eval_results=results or None,
    )
