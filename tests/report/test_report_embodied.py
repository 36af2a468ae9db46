"""The page of an embodied run: what it says of success, which clips it shows, how stand-in assets are marked; a real run too."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.evaluation.stats import describe
from mmrl.report import build_comparison, build_report
from mmrl.report import clips as clips_module
from mmrl.report.embodied import rate
from mmrl.robotics.evaluate import write_video

TASKS = ("push", "reach")
STATES = 8


def wins(step: int, task: str, state: int, sample: int) -> bool:
    """Known outcomes: reach gets better with the steps, push stays as it is."""
    return state < (2 + step if task == "reach" else 3) and (sample == 0 or state != 0)


def prediction(step: int, task: str, state: int, sample: int, video: bool) -> dict[str, Any]:
    won = wins(step, task, state, sample)
    metrics = {
        "success_once": float(won),
        "success_at_end": float(won and state != 1),
        "return": float(won),
        "steps": 4.0 + state,
    }
    row = {
        "id": f"eval-{state}",
        "source": f"tiny/{task}",
        "task": task,
        "question": "",
        "images": [],
        "videos": [],
        "mode": "greedy" if sample == 0 else "sampled",
        "text": "",
        "stop": "eos",
        "num_tokens": 8,
        "seed": (1 << 30) + state,
        "row": None,
        "headline": "success_once",
        "score": {
            "value": metrics["success_once"],
            "parsed": True,
            "reason": None,
            "parts": {},
            "weights": {},
            "metrics": metrics,
            "detail": {},
        },
    }
    return {**row, "video": f"{TASKS.index(task)}_eval-{state}.mp4"} if video else row


def estimates(rows: list[dict[str, Any]]) -> dict[str, Any]:
    units = [f"{r['source']}/{r['id']}" for r in rows]
    found = {n: [r["score"]["metrics"][n] for r in rows] for n in rows[0]["score"]["metrics"]}
    found |= {"reward": found["success_once"], "parse_rate": [1.0] * len(rows)}
    return {name: dataclasses.asdict(describe(values, units)) for name, values in found.items()}


def evaluation(run: Path, step: int, assets: str, filmed: int) -> None:
    folder, rows = run / "eval" / f"step_{step:06d}", []
    for task in TASKS:
        for state in range(STATES):
            rows += [
                prediction(step, task, state, sample, sample == 0 and state < filmed)
                for sample in range(3)
            ]
            if state < filmed:
                pictures = np.full((5 + state, 32, 32, 3), 40 * state, np.uint8)
                pictures[:, :16] = np.linspace(0, 255, 5 + state, dtype=np.uint8)[
                    :, None, None, None
                ]
                write_video(
                    folder / "videos" / f"{TASKS.index(task)}_eval-{state}.mp4", list(pictures)
                )
    results: dict[str, Any] = {
        "step": step,
        "task": ", ".join(TASKS),
        "per_source": {},
        "per_task": {},
        "failed_attempts": [],
        "headlines": {
            "per_source": {f"tiny/{t}": "success_once" for t in TASKS},
            "per_task": dict.fromkeys(TASKS, "success_once"),
        },
        "failures": {"greedy": {"error": 0}, "sampled": {"error": 0}},
        "protocol": {
            "name": "own",
            "suite": "tiny",
            "tasks": list(TASKS),
            "max_steps": 12,
            "samples_per_prompt": 2,
            "temperature": 1.0,
            "states": "held out: 8 of split eval",
            "render": "numpy",
            "assets": assets,
            "chunk": 2,
            "simulator": {"numpy": "2.0", "render": "numpy"},
            "versions": {"mmrl": "0"},
            "interval": "95 %: Wilson",
        },
    }
    for mode, prefix in (("greedy", ""), ("sampled", "sampled/")):
        chosen = [r for r in rows if r["mode"] == mode]
        results[mode] = estimates(chosen)
        for task in TASKS:
            part = {
                f"{prefix}{k}": v
                for k, v in estimates([r for r in chosen if r["task"] == task]).items()
            }
            part[f"{prefix}headline"] = part[f"{prefix}success_once"]
            results["per_source"].setdefault(f"tiny/{task}", {}).update(part)
            results["per_task"].setdefault(task, {}).update(part)
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    (folder / "predictions.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8"
    )


def make_run(folder: Path, *, assets: str = "the simulator's own", filmed: int = 4) -> Path:
    """A finished run of six steps with known outcomes, as Trainer writes it."""
    for step in (0, 6):
        evaluation(folder, step, assets, filmed)
    rows = [
        {
            "step": s,
            "train/success_once": 0.3 + 0.05 * s,
            "train/success_at_end": 0.2 + 0.05 * s,
            "train/reach/success_once": 0.1 * s,
            "train/push/success_once": 0.4,
            "train/reward": 0.3,
            "train/accuracy": 0.3,
            "train/parse_rate": 1.0,
            "train/groups/asked": 6.0,
            "train/groups/trained": 4.0,
            "train/groups/no_signal": 2.0,
            "train/groups/failed": 0.0,
            "train/entropy": 2.0 - 0.1 * s,
            "train/kl_step": 1e-4,
            "train/clip/low": 0.01,
            "train/clip/high": 0.02,
            "train/logprob_gap/mean": 1e-6,
            "train/logprob_gap/max": 1e-5,
            "train/failed_attempts": float(s == 3),
            "schedule/busy/render": 4.0,
            "schedule/bubble/render": 0.5,
            "schedule/busy/infer": 2.0,
            "schedule/bubble/infer": 0.25,
            "schedule/busy/train": 1.0,
            "schedule/bubble/train": 0.75,
            "time/total": 5.0,
            "perf/control_steps_per_s": 100.0,
        }
        for s in range(1, 7)
    ]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8"
    )
    (folder / "alarms.jsonl").write_text("", encoding="utf-8")
    info = {"name": "robot", "status": "finished", "total_steps": 6, "task": ""}
    (folder / "run.json").write_text(json.dumps(info), encoding="utf-8")
    (folder / "config.yaml").write_text(
        "env: {suite: tiny}\neval: {best_metric: sampled/success_once}\n", encoding="utf-8"
    )
    reasons = [
        f"Traceback (most recent call last):\n  File '{x}'\nRuntimeError: GL <context> lost"
        for x in "xy"
    ]
    reasons.append("no answer to a chunk within 2 s, worker ended; where it was:\nx.py")
    lines = [
        {"step": 3, "source": "push", "id": "train-7", "member": 1, "attempt": 0, "reason": reason}
        for reason in reasons
    ]
    (folder / "failures.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8"
    )
    return folder


def sections(page: Path) -> dict[str, str]:
    """Title -> HTML of the page's sections."""
    text = page.read_text(encoding="utf-8")
    return {
        m[1]: m[2]
        for m in re.finditer(r"<section id=\"[^\"]+\"><h2>([^<]+)</h2>(.*?)</section>", text, re.S)
    }


def words(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


def test_the_verdict_names_rates_and_intervals_before_and_after(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    page = build_report(run).read_text(encoding="utf-8")
    sentence = words(re.search(r'<p class="verdict">(.*?)</p>', page, re.S)[1])  # type: ignore[index]
    assert (
        "Held-out success rate after 6 steps, on 16 held-out initial states: sampled (avg@2)"
        in sentence
    )
    for step, folder in ((0, "step_000000"), (6, "step_000006")):
        results = json.loads((run / "eval" / folder / "results.json").read_text(encoding="utf-8"))
        for mode in ("greedy", "sampled"):
            samples = (0,) if mode == "greedy" else (1, 2)
            by_hand = np.mean(
                [wins(step, t, s, n) for t in TASKS for s in range(STATES) for n in samples]
            )
            mean, edges = rate(results[mode]["success_once"])
            assert mean == f"{100 * by_hand:.0f} %" and f"{mean} {edges}" in sentence
    assert "points" in sentence and "on the same 16 states" in sentence and "rose" in sentence
    assert "stand-in assets" not in page and "not a score" not in page


def test_the_page_has_the_sections_of_acting_and_none_of_answering(tmp_path: Path) -> None:
    found = sections(build_report(make_run(tmp_path)))
    assert list(found) == [
        "Results",
        "Curves",
        "Tasks",
        "Episodes",
        "Failed attempts",
        "Alarms",
        "Timing",
        "Protocol",
        "Configuration",
    ]
    text = words("".join(html for title, html in found.items() if title != "Configuration"))
    for nonsense in (
        "Parse rate",
        "parse rate",
        "IoU",
        "Gallery",
        "Completion",
        "prompts",
        "empty answer",
        "Reward",
    ):
        assert nonsense not in text, nonsense
    for chart in (
        "Success in training",
        "Success by task",
        "Entropy",
        "KL",
        "Log-prob gap",
        "Clipped tokens",
        "Groups",
        "Failed attempts",
    ):
        assert f'<div class="title">{chart}' in found["Curves"], chart
    assert "without signal" in found["Curves"] and "Age of the weights" not in found["Curves"]
    tasks = words(found["Tasks"])
    assert re.search(r"reach greedy 25 % \[7, 59\] 100 % \[68, 100\].*rose 8", tasks), tasks
    assert re.search(r"push greedy 38 % \[14, 69\] 38 % \[14, 69\].*no certain change", tasks), (
        tasks
    )
    timing = words(found["Timing"])
    assert (
        "render 24 s 4 s 50 %" in timing
        and "infer 12 s 2 s 25 %" in timing
        and "train 6 s 1 s 75 %" in timing
    )


def test_success_at_the_end_is_not_shown_twice_where_episodes_stop_at_success(
    tmp_path: Path,
) -> None:
    folder = make_run(tmp_path)
    found = sections(build_report(folder))
    assert (
        "Success at end" in found["Results"]
        and '<div class="title">Success at end' in found["Curves"]
    )
    assert "at the end" in words(found["Curves"])
    for file in folder.glob("eval/*/results.json"):
        results = json.loads(file.read_text(encoding="utf-8"))
        results["protocol"]["success_at_end"] = "the same as success once: episodes stop at success"
        file.write_text(json.dumps(results), encoding="utf-8")
    found = sections(build_report(folder))
    assert "Success at end" not in found[
        "Results"
    ] and "stops there: success at end is the same" in words(found["Results"])
    assert "the same as success once" in words(found["Protocol"])
    curves = found["Curves"]
    assert (
        "Success at end" not in curves
        and "at the end" not in words(curves)
        and "train/success_at_end" not in curves
    )
    assert (
        '<div class="title">Success in training' in curves
        and '<div class="title">Success rate' in curves
    )


@pytest.mark.parametrize(
    ("streamed", "said"),
    [
        (1.0, "Groups were streamed: each was trained on as soon as it closed"),
        (0.0, "Groups were collected, not streamed"),
        (None, ""),
    ],
)
def test_the_schedule_says_whether_groups_were_streamed(
    tmp_path: Path, streamed: float | None, said: str
) -> None:
    folder = make_run(tmp_path)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    extra = {} if streamed is None else {"train/streamed": streamed}
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(r | extra) + "\n" for r in rows), encoding="utf-8"
    )
    found = sections(build_report(folder))
    assert ("Schedule" in found) == bool(said) and said in words(found.get("Schedule", ""))
    assert "train/streamed" not in found["Curves"]


def test_failures_are_counted_by_reason(tmp_path: Path) -> None:
    text = sections(build_report(make_run(tmp_path)))["Failed attempts"]
    assert "RuntimeError: GL &lt;context&gt; lost" in text and "<context>" not in text
    assert re.search(
        r"RuntimeError: GL <context> lost first in full .*? 2 training push", words(text)
    )
    assert re.search(r"no answer to a chunk within 2 s, .*? 1 training push", words(text))


@pytest.mark.parametrize("reason", ["error", "simulator_error"])
def test_episodes_that_were_not_finished_are_said_by_old_and_new_reasons(
    tmp_path: Path, reason: str
) -> None:
    file = make_run(tmp_path) / "eval" / "step_000006" / "results.json"
    found = json.loads(file.read_text())
    found["failures"] = {"greedy": {reason: 2}, "sampled": {reason: 1}}
    file.write_text(json.dumps(found), encoding="utf-8")
    text = words(build_report(tmp_path).read_text(encoding="utf-8"))
    assert "Not finished, counted as failures: 3 episodes at step 6." in text


def test_clips_are_shown_side_by_side_with_outcome_and_stills(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    page = build_report(run)
    html, text = sections(page)["Episodes"], page.read_text(encoding="utf-8")
    assert "media-src data:;" in text
    cards = html.split("<article")[1:]
    titles = [words(re.search(r"<h4>(.*?)</h4>", card)[1]) for card in cards]  # type: ignore[index]
    assert len(titles) == len(set(titles)) == 6 and titles[0] in (
        "tiny/reach · eval-2",
        "tiny/reach · eval-3",
    )  # lost, then won
    files = {base64.b64encode(f.read_bytes()).decode() for f in run.glob("eval/*/videos/*.mp4")}
    for card, title in zip(cards, titles, strict=True):
        task, state = title.split(" · ")[0].removeprefix("tiny/"), int(title[-1])
        shown = re.findall(r"data:video/mp4;base64,([^\"]+)", card)
        assert len(shown) == 2 and set(shown) <= files
        said = re.findall(r'class="badge (?:good|bad)">(\w+)<', card)
        assert said == ["success" if wins(step, task, state, 0) else "failure" for step in (0, 6)]
        stills = re.findall(r"control step (\d+)\"", card)
        assert stills[0] == "0" and stills[len(stills) // 2 - 1] == str(4 + state)
    assert "lost again at the end" in html  # state 1


def test_a_page_holds_only_its_share_of_clips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    monkeypatch.setattr(
        clips_module,
        "MAX_BYTES",
        sum(f.stat().st_size for f in run.glob("eval/*/videos/*.mp4")) // 4,
    )
    html = sections(build_report(run))["Episodes"]
    links = re.findall(r'<a href="(eval/step_\d+/videos/[^"]+)">', html)
    assert (
        links
        and html.count("<video") + len(links) == 12
        and all((run / link).is_file() for link in links)
    )


def test_a_broken_a_missing_and_a_hostile_clip_do_not_break_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for file in run.glob("eval/step_000006/videos/*.mp4"):
        file.write_bytes(b"\0\0\0\x20ftypno video")
    for file in run.glob("eval/step_000000/videos/*.mp4"):
        file.unlink()
    predictions = run / "eval/step_000006/predictions.jsonl"
    predictions.write_text(
        predictions.read_text(encoding="utf-8").replace("1_eval-0.mp4", "../../../run.json"),
        encoding="utf-8",
    )
    html = sections(build_report(run))["Episodes"]
    assert (
        "stills cannot be shown" in html
        and "the clip is missing" in html
        and "run.json" not in html
    )


def test_numbers_on_stand_in_assets_are_marked_everywhere(tmp_path: Path) -> None:
    run = make_run(tmp_path, assets="stand-in")
    page = build_report(run)
    found = sections(page)
    sentence = words(
        re.search(r'<p class="verdict">(.*?)</p>', page.read_text(encoding="utf-8"), re.S)[1]
    )  # type: ignore[index]
    assert "Measured on stand-in assets: not a score of the benchmark." in sentence
    for tile in found["Results"].split('class="card tile"')[1:]:
        assert "stand-in assets" in tile or "Control steps" in tile
    for title in ("Success rate", "Success at end", "Success in training", "Success by task"):
        assert f'<div class="title">{title} (stand-in assets)' in found["Curves"], title
    assert "stand-in assets" in found["Tasks"] and found["Episodes"].count("stand-in assets") == 12
    assert "is not a score of the benchmark" in found["Protocol"]
    both = build_comparison([run], tmp_path / "both.html").read_text(encoding="utf-8")
    assert (
        "stand-in assets: no benchmark score" in both
        and "Training success" in both
        and "Parse rate" not in both
    )


@pytest.mark.parametrize(
    "lost", ["eval", "metrics.jsonl", "failures.jsonl", "run.json", "config.yaml", "alarms.jsonl"]
)
def test_unfinished_runs_have_a_page(tmp_path: Path, lost: str) -> None:
    run = make_run(tmp_path, filmed=1)
    shutil.rmtree(run / lost) if (run / lost).is_dir() else (run / lost).unlink()
    found = sections(build_report(run))
    assert (
        "Timing" in found and "Gallery" not in found and ("Episodes" in found) == (lost != "eval")
    )


def test_rates_are_percent_with_intervals() -> None:
    assert rate({"mean": 0.5, "low": 0.25, "high": 0.75}) == ("50 %", "[25, 75]")
    assert rate({"mean": 0.985, "low": 0.98, "high": 0.99}) == ("98.5 %", "[98.0, 99.0]")
    assert rate({"mean": -0.25, "low": -0.5, "high": 0.0}, signed=True) == (
        "−25 points",
        "[−50, +0]",
    )
    assert rate({"mean": 12.25, "low": None, "high": None}, "steps") == ("12.2", "")
    assert rate(None) == ("–", "") and rate({"mean": float("nan")}) == ("–", "")


@pytest.mark.slow
def test_a_real_run_gets_its_page(tmp_path: Path) -> None:
    from mmrl.training.trainer import Trainer
    from tests.kits.robot_kit import config_of, make_model, make_vla

    make_vla(make_model(tmp_path / "backbone"), trainable=False).save(tmp_path / "policy")
    Trainer(
        config_of(
            tmp_path / "policy", f"dir={tmp_path}", "name=real", "eval.gallery=2", "env.workers=1"
        )
    ).fit()
    run = tmp_path / "real"
    found = sections(build_report(run))
    assert {"Results", "Curves", "Episodes", "Timing", "Schedule", "Protocol"} <= set(
        found
    ) and "Gallery" not in found
    results = json.loads((run / "eval/step_000002/results.json").read_text(encoding="utf-8"))
    assert rate(results["sampled"]["success_once"])[0] in words(found["Results"])
    assert found["Episodes"].count("<video") == 4 and "cannot be shown" not in found["Episodes"]
    protocol = words(found["Protocol"])
    assert (
        "GL backend numpy" in protocol
        and "control steps at most 12" in protocol
        and "held out: 2 of split eval" in protocol
    )


@pytest.mark.slow
@pytest.mark.render("chromium")
def test_the_page_runs_in_a_browser(tmp_path: Path) -> None:
    from tests.report.test_render import browse, console

    done = browse(build_report(make_run(tmp_path)), "--dump-dom")
    assert (
        'data-ready="true"' in done.stdout
        and "data-errors" not in done.stdout
        and console(done) == []
    )
