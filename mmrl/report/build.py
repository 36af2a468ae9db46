"""One self-contained page about a run: results, curves, pictures through training, worst cases, alarms, timing.

    mmrl report runs/demo        # writes runs/demo/report.html

Every number comes from the files in the run's folder; what is missing is said. The page opens without a network and
may not load anything: its content security policy allows only its own style and script (by hash) and embedded pictures.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

from mmrl.files import printable, write_text
from mmrl.report.charts import smoothing_note
from mmrl.report.compare import comparison_body
from mmrl.report.contrast import configured_view, contrast_curves, contrast_names, view_name
from mmrl.report.curves import held_out_curves, other_metrics, source_curves, training_curves
from mmrl.report.data import data_section
from mmrl.report.embodied import embodied_outcome, embodied_sections, embodied_verdict, is_embodied
from mmrl.report.filmstrip import Figures
from mmrl.report.gallery import gallery, parse_failures, worst_cases
from mmrl.report.gantt import schedule_section
from mmrl.report.load import Find, Run, load_run
from mmrl.report.rollouts import rollouts
from mmrl.report.sections import alarms, configuration, dead_note, timing
from mmrl.report.sources import source_tables
from mmrl.report.text import esc
from mmrl.report.verdict import Outcome, header, outcome, tiles, verdict

__all__ = ["build_comparison", "build_report", "page", "write_page"]


def page(title: str, body: str) -> str:
    """The whole HTML file."""
    files = resources.files("mmrl.report")
    style, script = (
        files.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    media = "media-src data:; " if "<video" in body else ""
    policy = (
        f"default-src 'none'; img-src data:; {media}style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{esc(title)}</title>\n'
        f'<link rel="icon" href="data:,">\n<style>\n{style}</style>\n</head>\n<body>\n{body}\n<script>{script}'
        f"</script>\n"
        "</body>\n</html>\n"
    )


def write_page(path: Path, text: str) -> Path:
    """Write the file whole or not at all; returns `path`."""
    write_text(path, printable(text))
    return path


def _navigation(sections: Sequence[tuple[str, str, str]]) -> str:
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in sections)
    return (
        f'<nav><div class="links">{links}</div><button type="button" class="theme" '
        'aria-label="switch between light and dark">◐</button></nav>'
    )


def _cards(charts: Sequence[str], kind: str = "") -> str:
    return (
        f'<div class="charts {kind}">{"".join(f"<div class=card>{c}</div>" for c in charts)}</div>'
    )


def _curves(run: Run, headline: str) -> str:
    front, more = held_out_curves(run, headline)
    train = training_curves(run)
    out = [
        "<h3>Held-out</h3>",
        _cards(front, "wide")
        if front
        else '<p class="missing">No finished evaluation in eval/.</p>',
    ]
    if parts := source_curves(run):
        out += ["<h3>Held-out, each source by its own metric</h3>", _cards(parts)]
    if more:
        out.append(f"<details><summary>Other held-out metrics</summary>{_cards(more)}</details>")
    note = smoothing_note(len(run.metrics))
    out += [
        f"<h3>Training <small>{note}</small></h3>" if note and train else "<h3>Training</h3>",
        _cards(train) if train else '<p class="missing">metrics.jsonl holds no steps yet.</p>',
        *_contrast(run),
        other_metrics(run, contrast_names(run)),
    ]
    return "".join(out)


def _contrast(run: Run) -> list[str]:
    """Curves of contrast groups, where a run has them."""
    charts = contrast_curves(run)
    title = (
        "Does the policy use what it is shown? <small>training accuracy with the input as it is and changed: "
        f"{esc(view_name(configured_view(run)))}</small>"
    )
    return [f"<h3>{title}</h3>", _cards(charts)] if charts else []


def _notes(run: Run) -> str:
    if not run.notes:
        return ""
    items = "".join(f"<li>{esc(note)}</li>" for note in run.notes)
    return (
        f'<details class="notes"><summary>Missing or unreadable <small>{len(run.notes)}</small></summary>'
        f"<ul>{items}</ul></details>"
    )


def row_metric(run: Run, found: Outcome) -> str:
    """What single answers are ordered by: each one's own headline where sources differ, else the run's."""
    if found.headline == "macro" or (
        len({s for e in run.evals for s in e.per_source}) > 1
        and any(e.headlines for e in run.evals)
    ):
        return "headline"
    return found.headline if found.headline != "parse_rate" else "reward"


def _sections(run: Run, found: Outcome, find: Find | None) -> list[tuple[str, str, str]]:
    """(key, title, HTML) of what a run of answers has."""
    metric = row_metric(run, found)
    figures = Figures(run.folder, find=find)
    makers: list[tuple[str, str, Callable[[], str]]] = [
        ("results", "Results", lambda: tiles(found)),
        ("curves", "Curves", lambda: _curves(run, found.headline)),
        ("sources", "Sources", lambda: source_tables(run, found)),
        ("gallery", "Gallery", lambda: gallery(run, figures, metric)),
        ("worst", "Worst cases", lambda: worst_cases(run, figures, metric) + parse_failures(run)),
        ("rollouts", "Rollouts", lambda: rollouts(run, figures)),
        ("alarms", "Alarms", lambda: alarms(run)),
        ("timing", "Timing", lambda: timing(run)),
        ("schedule", "Schedule", lambda: schedule_section(run)),
        ("data", "Data", lambda: data_section(run)),
        ("configuration", "Configuration", lambda: configuration(run) + _notes(run)),
    ]
    made = [(key, title, make()) for key, title, make in makers]
    return [
        section
        for section in made
        if section[2] or section[0] not in ("rollouts", "schedule", "data")
    ]


def build_report(run_dir: Path, out: Path | None = None, *, find: Find | None = None) -> Path:
    """Write RUN/report.html, or `out`, and return its path; works on finished, running, broken-off and empty runs.

    `find` says where pictures and clips that rows name lie; by default wherever this user can read them.
    Raises DataError when `run_dir` is not a folder.
    """
    run = load_run(Path(run_dir))
    embodied = is_embodied(run)
    found = embodied_outcome(run) if embodied else outcome(run)
    sections = (
        embodied_sections(run, found, _notes(run)) if embodied else _sections(run, found, find)
    )
    sentence = embodied_verdict(run, found) if embodied else verdict(run, found)
    body = (
        header(run, found, sentence)
        + dead_note(run)
        + _navigation(sections)
        + "<main>"
        + "".join(
            f'<section id="{key}"><h2>{title}</h2>{content}</section>'
            for key, title, content in sections
        )
        + "</main>"
    )
    body += "<footer>Written by mmrl from the files of this run.</footer>"
    return write_page(out or run.folder / "report.html", page(f"{run.name} · mmrl", body))


def build_comparison(run_dirs: Sequence[Path], out: Path) -> Path:
    """One page that lays the curves and last results of several runs over each other; returns `out`."""
    runs = [load_run(Path(d)) for d in run_dirs]
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    return write_page(out, page("Comparison · mmrl", comparison_body(runs)))
