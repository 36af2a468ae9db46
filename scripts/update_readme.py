"""Write the result tables of the README and of docs/ from assets/results/*.json, so that no number in them was typed by hand.

python -m scripts.update_readme           # rewrite the blocks between <!-- results:NAME --> and <!-- end -->
python -m scripts.update_readme --check   # exit 1 when a block is out of date (a test runs this)
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmrl.config.peers import PEERS
from mmrl.robotics.metaworld_tasks import GROUPS
from scripts._readme_apart import balance, decoupled, judges, sequence, staleness, syncs, viewer
from scripts._readme_docs import install, peer_table, users
from scripts._readme_flow import flow_policies
from scripts._readme_scale import devices, efficiency, engines, gap, gpu, memory, presets, sizes
from scripts._readme_turns import browser, turns, turns_cost, turns_killed, turns_trl, zoom

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(r"(<!-- results:(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _load(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "assets" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def _recorded(
    name: str, options: str = "", script: str = ""
) -> Callable[[Callable[[dict[str, Any]], str]], Callable[[], str]]:
    """A block made of assets/results/NAME.json; while that file is not there, the block says so."""

    def wrap(block: Callable[[dict[str, Any]], str]) -> Callable[[], str]:
        def text() -> str:
            if (ROOT / "assets" / "results" / f"{name}.json").exists():
                return block(_load(name))
            return f"No number has been recorded yet; `python -m scripts.{script or name}{options}` measures."

        return text

    return wrap


def _gain(e: dict[str, float]) -> str:
    return f"{e['mean']:+.2f} [{e['low']:+.2f}, {e['high']:+.2f}]"


def _interval(e: dict[str, float]) -> str:
    return f"{e['mean']:.2f} [{e['low']:.2f}, {e['high']:.2f}]"


def demo() -> str:
    """Held-out results of `make demo`, before and after."""
    found = _load("demo")
    lines = ["| held-out, 200 pictures | before | after |", "|---|---|---|"]
    for mode, label in (("sampled", "sampled, avg@8, T = 1"), ("greedy", "greedy")):
        for metric, title in (("iou", "mIoU"), ("acc@0.5", "Acc@0.5"), ("acc@0.75", "Acc@0.75")):
            cell = found["held_out"][mode][metric]
            lines.append(
                f"| {title}, {label} | {_interval(cell['before'])} | **{_interval(cell['after'])}** |"
            )
    machine = found["machine"]
    lines.append(
        f"\n{found['steps']} steps of 16 prompts x 8 completions, {found['seconds'] / 60:.1f} minutes on one thread of "
        f"{machine['cpu']} ({machine['cores']} cores, no GPU), seed {found['seed']}; brackets are 95 % intervals."
    )
    return "\n".join(lines)


def learning() -> str:
    """Three seeds per reward and the control."""
    found = _load("bench_learning")
    seeds = found["table"][0]["seeds"]
    lines = [
        f"| reward ({seeds} seeds) | sampled mIoU | gain (lowest to highest) | sampled Acc@0.75 | greedy mIoU |",
        "|---|---|---|---|---|",
    ]
    for row in found["table"]:
        s, a, g = row["sampled/iou"], row["sampled/acc@0.75"], row["greedy/iou"]
        lines.append(
            f"| {row['variant']} | {s['before']:.3f} to {s['after']:.3f} | {s['gain']:+.3f} ({s['lowest_gain']:+.3f} to "
            f"{s['highest_gain']:+.3f}) | {a['before']:.3f} to {a['after']:.3f} | {g['before']:.3f} to {g['after']:.3f} |"
        )
    return "\n".join(lines)


def trl() -> str:
    """Seconds per step and peak memory against TRL."""
    found = _load("bench_vs_trl")
    lines = [
        "| setting | prompt tokens | G | new tokens | mmrl s/step | TRL s/step | mmrl is faster by | token bound | "
        "TRL's peak memory / mmrl's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in found["settings"]:
        ours, theirs = (
            statistics.median(x["step_s"] for x in r["rounds"][s]) for s in ("mmrl", "trl")
        )
        lines.append(
            f"| {r['what']} | {r['prompt_tokens']:.0f} | {r['group_size']} | {r['new_tokens']} | {ours:.2f} | "
            f"{theirs:.2f} | "
            f"**{r['speed_ratio']['median']:.1f}x** ({r['speed_ratio']['min']:.1f} to {r['speed_ratio']['max']:.1f}) | "
            f"{r['token_bound']:.1f}x | {r['peak_memory_ratio']['median']:.1f}x |"
        )
    lines.append(
        f"\nTRL {found['versions'].get('trl', '')}, one thread, fp32, the same tiny Qwen2.5-VL in alternation."
    )
    return "\n".join(lines)


def _beside(found: dict[str, Any]) -> str:
    """What to say of seconds that were measured on a machine that had more to do than it has cores."""
    machine = found["machine"]
    if machine["load_1min"] <= machine["cores"]:
        return ""
    return f" on {machine['cores']} cores beside other work (load {machine['load_1min']:.0f})"


def mixed() -> str:
    """Every task of the mixed run, before and after."""
    found = _load("demo_mixed")
    lines = [
        "| held-out, avg@4 at T = 1 (metric) | before | after | gain, paired 95 % interval |",
        "|---|---|---|---|",
    ]
    for source, r in found["held_out"]["sampled"].items():
        lines.append(
            f"| {source} ({r['metric']}) | {r['before']:.2f} | {r['after']:.2f} | {r['gain']:+.2f} "
            f"[{r['low']:+.2f}, {r['high']:+.2f}] |"
        )
    means = {
        (mode, when): statistics.mean(r[when] for r in rows.values())
        for mode, rows in found["held_out"].items()
        for when in ("before", "after")
    }
    lines.append(
        f"| mean of tasks | {means['sampled', 'before']:.2f} | {means['sampled', 'after']:.2f} | |"
    )
    fell = [
        f"{source} ({mode})"
        for mode, rows in found["held_out"].items()
        for source, r in rows.items()
        if r["fell"]
    ]
    lines.append(
        f"\nGreedy, the mean of tasks went from {means['greedy', 'before']:.2f} to {means['greedy', 'after']:.2f}. Fell "
        f"significantly, in either mode: {', '.join(fell) or 'none'}."
    )
    samples = {r["samples"] for r in found["held_out"]["sampled"].values()}
    lines.append(
        f"\n{found['steps']} steps of {found['prompts_per_step']} prompts x {found['group_size']} completions in "
        f"{found['seconds'] / 60:.1f} minutes on one thread of {found['machine']['cpu']}{_beside(found)}, "
        f"seed {found['seed']}; "
        f"{min(samples)} held-out pictures per task."
    )
    return "\n".join(lines)


def gui() -> str:
    """Clicks of the tiny model on generated screens, before and after."""
    if not (ROOT / "assets" / "results" / "demo_gui.json").exists():
        return "`python -m scripts.demo_gui` trains the tiny model on such pages; no number has been recorded yet."
    found = _load("demo_gui")
    cells = [
        f"{row['before']:.2f} to {row['after']:.2f} {how} (gain {row['gain']:+.2f} [{row['low']:+.2f}, {row['high']:+.2f}])"
        for mode, how in (
            ("sampled", f"sampled, avg@{found['samples']}, T = 1"),
            ("greedy", "greedy"),
        )
        for row in [found["held_out"][mode]]
    ]
    return (
        f"`python -m scripts.demo_gui` trains the tiny model on such pages, {found['steps']} steps of "
        f"{found['prompts_per_step']} prompts x {found['group_size']} clicks in {found['seconds'] / 60:.1f} minutes on one "
        f"thread of {found['machine']['cpu']}, seed {found['seed']}. Share of clicks inside the named element, "
        f"{found['held_out']['greedy']['samples']} held-out pages: {'; '.join(cells)}."
    )


def fuzz() -> str:
    """What the fuzzer fed and found."""
    found = _load("fuzz_rewards")
    rows = found["rewards"]
    inputs = [r["inputs"] for r in rows.values()]
    violations = sum(sum(r["violations"].values()) for r in rows.values())
    plain = {n: r for n, r in rows.items() if not n.startswith("math")}
    slowest = max(plain, key=lambda n: plain[n]["slowest_ms"])
    few = {n: r["inputs"] for n, r in rows.items() if r["inputs"] < 200_000}
    exceptions = (
        f" ({', '.join(f'{n} {k:,}' for n, k in few.items())}: they ask a verifier process)"
        if few
        else ""
    )
    return (
        f"{len(rows)} rewards (every task's default, presets and modes), {sum(inputs):,} inputs, at least 200,000 each"
        f"{exceptions}: {violations or 'no'} violations; the slowest single completion took "
        f"{plain[slowest]['slowest_ms']:.1f} ms of CPU time ({slowest})."
    )


@_recorded("hack_search")
def hacks(found: dict[str, Any]) -> str:
    """What pays without looking."""
    from scripts.hack_search import standing, verdict

    rows = found["rewards"]
    counts = {
        how: [r["evaluations"] for r in rows.values() if r["ended"] == how]
        for how in ("evaluations", "time", "answers")
    }
    whole = []
    if counts["evaluations"]:
        whole.append(
            f"{len(counts['evaluations'])} with at least {min(counts['evaluations']):,} each"
        )
    if counts["time"]:
        whole.append(
            f"{len(counts['time'])} ended by time after {min(counts['time']):,} to {max(counts['time']):,}"
        )
    if counts["answers"]:
        whole.append(f"of {len(counts['answers'])} all answers were tried")
    defaults = {name: r for name, r in rows.items() if standing(name, r) == "default"}
    broken = {
        kind: [f"{name} ({standing(name, r)})" for name, r in rows.items() if verdict(r) == kind]
        for kind in ("pays for guessing", "pays for padding")
    }
    holding = sum(verdict(r) == "holds" for r in defaults.values())
    nearest = max(defaults, key=lambda n: defaults[n]["blind"] / defaults[n]["honest"])
    named = ". ".join(
        f"{kind.capitalize()}: {', '.join(names)}" for kind, names in broken.items() if names
    )
    return (
        f"{len(rows)} rewards, {sum(r['evaluations'] for r in rows.values()):,} evaluations: {', '.join(whole)}. "
        f"Of {len(defaults)} defaults {holding} pay a blind answer less "
        f"than a half-right one (nearest: {nearest}, {defaults[nearest]['blind']:.2f} to "
        f"{defaults[nearest]['honest']:.2f}). {named}."
    )


def rewards() -> str:
    """Throughput of the default rewards and of a crowded picture."""
    found = _load("bench_rewards")
    lines = ["| reward, from text to score | completions per second and core |", "|---|---|"]
    for name, r in found["rewards"].items():
        if ":" not in name:
            label = "math (the verifier's answers are remembered)" if name == "math" else name
            lines.append(f"| {label} | {r['per_second']['median']:,.0f} |")
    share = found["demo"]["share"]
    lines.append(
        f"\nIn a step of the demo ({found['demo']['completions_per_step']} completions, "
        f"{found['demo']['step_s']['median']:.2f} s) rewards take {share['median']:.1%} of the time (largest "
        f"{share['max']:.1%}), worker process and pipes included."
    )
    return "\n".join(lines)


def same_answers(found: dict[str, Any]) -> str:
    """Speed of the rewards on an earlier commit's completions."""
    rows, commits = found["rows"], found["commits"]
    ratios = {name: row["ratio"]["median"] for name, row in rows.items()}
    least = min(ratios, key=ratios.__getitem__)
    mean = statistics.geometric_mean(ratios.values())
    differ = sum(row["score_the_same"] < row["completions"] for row in rows.values())
    return (
        f"On the completions and settings of commit {commits['before']}, {len(rows)} rewards are {mean:.2f} times as fast as "
        f"there in the geometric mean; the least ratio is {ratios[least]:.2f} ({least}). In {differ} of them some completions "
        "score differently, because a rule was mended."
    )


_SYSTEMS = {
    "none": "no cache",
    "frames_pt": "frames as .pt",
    "level_1": "level 1: processed pixels",
    "level_1_2": "levels 1 and 2",
}


@_recorded("bench_cache")
def cache(found: dict[str, Any]) -> str:
    """Seconds per phase of a training step on clips, by what is kept of them."""

    def times(value: dict[str, float]) -> str:
        return f"{value['median']:.3g}x ({value['min']:.3g} to {value['max']:.3g})"

    lines = [
        "| frames | kept | s/step | data | vision tower | rollout | log-probs | update | MB on disk | resident MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in found["results"]:
        for system, name in _SYSTEMS.items():
            phases = " | ".join(
                f"{r['phases_s'][system][p]:.2f}"
                for p in ("data", "tower", "rollout", "log-probs", "update")
            )
            lines.append(
                f"| {r['frames']} | {name} | {r['step_s'][system]['median']:.2f} | {phases} | "
                f"{r['bytes_on_disk'][system] / 1e6:.1f} | {r['resident_mib'][system]} |"
            )
    for r in found["results"]:
        ratios = r["ratios"]
        lines.append(
            f"\n{r['frames']} frames: level 1 makes the data phase {times(ratios['data: none / level_1'])} faster than "
            f"decoding and {times(ratios['data: frames_pt / level_1'])} faster than frames as .pt, on "
            f"{ratios['bytes: frames_pt / level_1']:.3g}x less disk; both levels make the whole step "
            f"{times(ratios['step: none / level_1_2'])} faster than no cache."
        )
    clips = found["clips"]
    lines.append(
        f"\n{clips['count']} H.264 clips of {clips['size'][0]} x {clips['size'][1]}, {clips['seconds']} s; a small random "
        f"Qwen2.5-VL, tower frozen, one thread of {found['machine']['cpu']}, four systems in alternation."
    )
    return "\n".join(lines)


@_recorded("torture_cache", " --record")
def torture(found: dict[str, Any]) -> str:
    """What the cache went through and what was wrong afterwards."""
    rounds, totals = found["rounds"], found["totals"]

    def done(start: str) -> int:
        return sum(n for r in rounds for what, n in r["done"].items() if what.startswith(start))

    left = sum(len(r["at_the_end"]["left_behind"]) for r in rounds)
    wrong = totals["wrong"] + sum(r["at_the_end"]["wrong"] for r in rounds)
    still = sum(len(r["stood_still"]) for r in rounds)
    return (
        f"`scripts/torture_cache.py`: {found['processes']} processes share one cache of {found['sources']} sources under "
        f"{done('killed')} SIGKILLs, {done('damage'):,} damaged entries, {done('edited'):,} edited sources, a changed "
        f"processor, eviction and a full disk. {totals['checked']:,} tensors compared with their sources: "
        f"{wrong or 'none'} wrong, {still or 'no'} process stood still, {left or 'nothing'} left behind."
    )


def _gains(table: dict[str, Any]) -> list[str]:
    return [
        f"| {source} ({r['metric']}), {mode} | {r['before']:.2f} | {r['after']:.2f} | {r['gain']:+.2f} [{r['low']:+.2f}, "
        f"{r['high']:+.2f}] |"
        for mode, rows in table.items()
        for source, r in rows.items()
    ]


@_recorded("demo_video", " --record")
def video(found: dict[str, Any]) -> str:
    """Temporal grounding and tracking of the tiny model on generated clips, before and after."""
    clips = {r["samples"] for rows in found["held_out"].values() for r in rows.values()}
    return "\n".join(
        [
            "| when and where, held-out (metric) | before | after | gain, paired 95 % interval |",
            "|---|---|---|---|",
            *_gains(found["held_out"]),
            f"\n{found['steps']} steps of {found['prompts_per_step']} prompts x {found['group_size']} completions in "
            f"{found['seconds'] / 60:.1f} minutes on one thread of {found['machine']['cpu']}{_beside(found)}, "
            f"seed {found['seed']}; "
            f"{min(clips)} held-out clips per task.",
        ]
    )


@_recorded("bench_tgrpo")
def tgrpo(found: dict[str, Any]) -> str:
    """T-GRPO and GRPO on questions that only the order of frames answers."""
    lines = [
        "| T-GRPO and GRPO (mean of seeds, lowest to highest) | accuracy, sampled | greedy | on shuffled frames | "
        "gap to shuffled | groups with shuffled rollouts |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["table"]:
        cells = " | ".join(
            f"{c['before']:.2f} to {c['after']:.2f} ({c['low']:.2f} to {c['high']:.2f})"
            for c in (row[n] for n in ("sampled", "greedy", "shuffled", "gap"))
        )
        lines.append(
            f"| {row['variant']} ({row['seeds']} seeds) | {cells} | {row['rolled_out']:.0%} |"
        )
    return "\n".join(lines)


def robots() -> str:
    """Success of tiny policies before and after reinforcement learning, one row per run recorded by scripts/demo_robot.py."""
    lines = [
        "| environment, policy decides | seed | sampled, before | after | greedy, before | after | episodes | minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for file in sorted((ROOT / "assets" / "results").glob("demo_robot_*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        for run in found["runs"]:
            p = run["protocol"]
            where = f"{p['suite']} {', '.join(p['tasks'])}, {p['max_steps']} steps"
            if p["assets"] == "stand-in":
                where += ", stand-ins"
            cells = [
                _interval(run["held_out"][mode]["success_once"][when])
                for mode in ("sampled", "greedy")
                for when in ("before", "after")
            ]
            lines.append(
                f"| {where} | {run['seed']} | {cells[0]} | **{cells[1]}** | {cells[2]} | **{cells[3]}** | "
                f"{run['episodes']:,} | {run['wall_s'] / 60:.1f} |"
            )
            gains = run.get("gains")  # older records have none
            if gains:
                cells = [_gain(gains["held_out"][mode]) for mode in ("sampled", "greedy")]
                lines.append(
                    f"| gain over the same states | {run['seed']} | | {cells[0]} | | {cells[1]} | | |"
                )
            tasks = run.get("tasks", {}) if len(p["tasks"]) > 1 else {}
            for task, row in tasks.items():
                cells = [
                    _interval(row[mode][when])
                    for mode in ("sampled", "greedy")
                    for when in ("before", "after")
                ]
                lines.append(
                    f"| of these {task} | {run['seed']} | {cells[0]} | **{cells[1]}** | {cells[2]} | **{cells[3]}** | | |"
                )
    return "\n".join(lines)


@_recorded("bench_robot_learning")
def robot_algorithms(found: dict[str, Any]) -> str:
    """Success of the tiny robot by other methods than GRPO, and by a control with shuffled rewards."""
    lines = [
        "| tiny reach, method | seed | sampled, before | after | greedy, before | after |",
        "|---|---|---|---|---|---|",
    ]
    for run in found["runs"]:
        cells = [
            _interval(run["held_out"][mode]["success_once"][when])
            for mode in ("sampled", "greedy")
            for when in ("before", "after")
        ]
        lines.append(f"| {run['variant']} | {run['seed']} | {' | '.join(cells)} |")
    where = f"{found['steps']} steps each on {found['machine']['cpu']}{_beside(found)}"
    return "\n".join(
        [
            *lines,
            f"\n{where}; shuffled: the rewards of a group's episodes are dealt anew among them. Rewarded is success, for gdpo "
            "{success: 1.0, brevity: 0.2}: it differs in its reward, too.",
        ]
    )


def experts() -> str:
    """How often scripted experts solve their tasks: a row for each suite of LIBERO and of MetaWorld, the other simulators' tasks
    one by one."""
    lines = [
        "| scripted expert, evaluation states | solved | control steps, median (lowest to highest) | assets |",
        "|---|---|---|---|",
    ]
    for name in ("libero", "maniskill", "robosuite", "metaworld", "tiny"):
        file = ROOT / "assets" / "results" / f"experts_{name}.json"
        found = json.loads(file.read_text(encoding="utf-8"))["tasks"] if file.exists() else []
        suites: dict[str, list[Any]] = {}
        for row in found:
            suite, numbered, _ = row["task"].partition("/")
            suites.setdefault(suite if numbered else f"{name} {row['task']}", []).append(row)
        if name == "metaworld":  # too many for a row each
            ten = [row for row in found if row["task"] in GROUPS["MT10"]]
            suites = {"MetaWorld MT10": ten, "MetaWorld MT50": found} if found else {}
        parts = [
            (label, rows)
            if " " in label and name != "metaworld"
            else (f"{label}, {len(rows)} tasks", rows)
            for label, rows in suites.items()
        ]
        for label, rows in parts:
            known = [r["steps"] for r in rows if r["steps"]]
            steps = (
                (
                    f"{statistics.median(s['median'] for s in known):.3g} ({min(s['min'] for s in known):g} to "
                    f"{max(s['max'] for s in known):g})"
                )
                if known
                else "-"
            )
            lines.append(
                f"| {label} | {sum(r['solved'] for r in rows)}/{sum(r['episodes'] for r in rows)} | {steps} | "
                f"{', '.join(dict.fromkeys(r['assets'] for r in rows))} |"
            )
    return (
        "\n".join(lines)
        if len(lines) > 2
        else ("No number has been recorded yet; `python -m scripts.check_experts libero` measures.")
    )


@_recorded("bench_schedule")
def schedule(found: dict[str, Any]) -> str:
    """Serial, pipelined and async runs, at set costs."""
    names = {
        "pipelined_2": "pipelined, 2 stages",
        "pipelined_4": "pipelined, 4 stages",
        "async_4": "async, 4 stages",
    }
    lines = [
        f"| render : infer : train | {' | '.join(names.values())} | bound | share of the bound, 4 stages |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["costed"]:
        s = row["systems"]
        lines.append(
            f"| {':'.join(f'{x:g}' for x in row['ratio'])}, {row['groups']} groups | "
            f"{' | '.join(format(s[name]['of_serial'], '.2f') for name in names)} | "
            f"{s['pipelined_4']['bound']:.2f} | {s['pipelined_4']['share']:.0%} |"
        )
    if beside := _beside(found):
        lines += ["", f"Measured{beside}."]
    return "\n".join(lines)


@_recorded("bench_schedule_passes", " --parts passes", script="bench_schedule")
def passes(found: dict[str, Any]) -> str:
    """Serial and async runs with several passes over a step's groups."""
    lines = [
        "| render : infer : train | serial | async, 4 stages | bound | share of the bound |",
        "|---|---|---|---|---|",
    ]
    for row in found["costed"]:
        serial, ours = (row["systems"][name] for name in ("serial", "async_4"))
        lines.append(
            f"| {':'.join(f'{x:g}' for x in row['ratio'])}, {row['groups']} groups | {serial['step_s']['median']:.1f} s | "
            f"{ours['step_s']['median']:.1f} s ({ours['of_serial']:.2f}) | {ours['bound']:.2f} | {ours['share']:.0%} |"
        )
    if beside := _beside(found):
        lines += ["", f"Measured{beside}."]
    return "\n".join(lines)


@_recorded("bench_schedule_real", " --parts real", script="bench_schedule")
def simulated(found: dict[str, Any]) -> str:
    """Serial and pipelined runs on real simulators."""
    lines = [
        "| simulator | pipelined | bound | render, inference, training idle when pipelined |",
        "|---|---|---|---|",
    ]
    for name, row in found["real"].items():
        s = row["systems"]
        idle = ", ".join(f"{s['streaming']['bubble'][k]:.0%}" for k in ("render", "infer", "train"))
        render, infer, train = (1 - s["serial"]["bubble"][k] for k in ("render", "infer", "train"))
        lines.append(
            f"| {name}, {row['episodes_per_step']} episodes | {s['streaming']['of_serial']:.2f} | "
            f"{max(render, infer + train) / (render + infer + train):.2f} | {idle} |"
        )
    machine = found["machine"]
    # of the script before it ran the trainer
    other = any("stage_overlap" in row["systems"] for row in found["real"].values())
    cores = _beside(found) or f" on {machine['cores']} cores"
    lines += [
        "",
        f"Measured on {found['date']}, {machine['cpu']}{cores}"
        + (", by the pipeline of a run without its trainer." if other else "."),
    ]
    return "\n".join(lines)


@_recorded("torture_pool", " --record")
def bridge(found: dict[str, Any]) -> str:
    """The simulator pool under faults."""
    errors = ", ".join(f"{count} {cause}" for cause, count in sorted(found["errors"].items()))
    return (
        f"`scripts/torture_pool.py`: {found['what']}. {found['requested']} episodes asked = {found['finished']} finished + "
        f"{sum(found['errors'].values())} recorded errors ({errors}); {found['respawns']} workers respawned; of the finished "
        f"ones {found['replays_wrong']} differ from their replay, {len(found['left_behind'])} processes or files left behind."
    )


@_recorded("torture_robot")
def killed(found: dict[str, Any]) -> str:
    """Embodied runs under SIGKILL."""
    when = ", ".join(f"{count} in {phase}" for phase, count in sorted(found["phases"].items()))
    return (
        f"`scripts/torture_robot.py`: {found['what']}: {found['num_kills']} kills ({when}), "
        f"{'every check passed' if found['passed'] else 'CHECKS FAILED'}; workers were gone "
        f"{found['longest_until_workers_gone_s']:.1f} s after their parent at the latest."
    )


@_recorded("bench_render")
def rendering(found: dict[str, Any]) -> str:
    """Chunks that render their last step only."""
    lines = [
        f"| simulator, chunk of {found['chunk']} control steps | last rendered | every one | ratio |",
        "|---|---|---|---|",
    ]
    for name, row in found["simulators"].items():
        ms = {mode: f"{cell['median']:g} ms" for mode, cell in row["ms_per_chunk"].items()}
        stand_ins = ", stand-ins" if row["options"].get("assets") == "stand-in" else ""
        lines.append(
            f"| {name} {row['task']}, {row['image_size']} px{stand_ins} | {ms['last step']} | {ms['every step']} | "
            f"{row['ratio']:g} |"
        )
    return "\n".join(lines)


def _both(cells: dict[str, str]) -> str:
    """A row's number in mmrl and in robosuite."""
    return f"{cells['mmrl']} / {cells['robosuite']}"


@_recorded("bench_robosuite")
def robosuite(found: dict[str, Any]) -> str:
    """Resets and steps of robosuite's scenes, in mmrl and as robosuite runs them."""
    lines = [
        "| processor time, mmrl / robosuite alone | reset with its picture | ratio | control step | ratio | "
        f"steps a second in episodes of {found['steps']} |",
        "|---|---|---|---|---|---|",
    ]
    for task, row in found["tasks"].items():
        seconds = {mode: f"{cell['median']:.2f}" for mode, cell in row["reset_cpu_s"].items()}
        steps = {mode: f"{cell['median']:.1f}" for mode, cell in row["step_cpu_ms"].items()}
        rates = {mode: f"{cell['median']:.0f}" for mode, cell in row["steps_per_cpu_s"].items()}
        stand_ins = ", stand-ins" if row.get("options", {}).get("assets") == "stand-in" else ""
        lines.append(
            f"| {row['suite']} {task}{stand_ins} | {_both(seconds)} s | {row['ratio']:g} | {_both(steps)} ms | "
            f"{row['step_ratio']:g} | {_both(rates)} |"
        )
    equal = sum(row["equal"] for row in found["tasks"].values())
    return "\n".join(
        [
            *lines,
            f"\nOne thread of {found['machine']['cpu']}{_beside(found)}; chunks of {found['chunk']} control steps with two "
            f"pictures each. Both play equal episodes, bit for bit ({equal} of {len(found['tasks'])} tasks).",
        ]
    )


@_recorded("bench_batched")
def batched(found: dict[str, Any]) -> str:
    """Environments in a batch."""
    lines = [
        f"| control steps per second, chunks of {found['chunk']} | rows | one by one | batch | ratio |",
        "|---|---|---|---|---|",
    ]
    for name, row in found["cases"].items():
        rates = {system: f"{r['median']:.0f}" for system, r in row["control_steps_per_s"].items()}
        lines.append(
            f"| {name}, {row['task']}, {row['image_size']} px | {row['rows']} | {rates['one by one']} | {rates['batch']} | "
            f"{row['ratio']:g} |"
        )
    return "\n".join(lines)


@_recorded("bench_browser")
def browsers(found: dict[str, Any]) -> str:
    """A browser without windows beside the whole one."""
    rows = {
        "start and first page": ("start_s", "processor seconds"),
        f"each further page, {found['size'][0]} x {found['size'][1]}": (
            "page_s",
            "processor seconds",
        ),
        "a screenshot more": ("screenshot_s", "processor seconds"),
        f"memory with {found['pages']} pages": ("memory_mib", "MiB"),
    }
    lines = [
        "| | "
        + " | ".join(f"`{program}`" for program in found["programs"].values())
        + " | ratio |",
        "|---|---|---|---|",
    ]
    for what, (name, unit) in rows.items():
        cells = [found["browsers"][kind][name]["median"] for kind in found["programs"]]
        lines.append(
            f"| {what}, {unit} | {' | '.join(f'{cell:.3g}' for cell in cells)} | {found['ratio'][name]:g} |"
        )
    return "\n".join(lines)


BLOCKS: dict[str, Callable[[], str]] = {
    "demo": demo,
    "mixed": mixed,
    "learning": learning,
    "trl": trl,
    "gui": gui,
    "fuzz": fuzz,
    "hacks": hacks,
    "rewards": rewards,
    "same_answers": _recorded("bench_same_answers")(same_answers),
    "cache": cache,
    "torture": torture,
    "video": video,
    "tgrpo": tgrpo,
    "robots": robots,
    "robot_algorithms": robot_algorithms,
    "flow_policies": flow_policies,
    "experts": experts,
    "schedule": schedule,
    "passes": passes,
    "simulated": simulated,
    "bridge": bridge,
    "killed": killed,
    "rendering": rendering,
    "robosuite": robosuite,
    "batched": batched,
    "browsers": browsers,
    "turns": _recorded("demo_turns", " --record")(turns),
    "zoom": _recorded("zoom", script="bench_zoom")(zoom),
    "browser": _recorded("demo_browser", " --record")(browser),
    "turns_cost": _recorded("bench_turns")(turns_cost),
    "trees": _recorded("bench_trees", " --trees", "bench_turns")(turns_cost),
    "turns_trl": _recorded("bench_turns_trl")(turns_trl),
    "turns_killed": _recorded("torture_turns")(turns_killed),
    "engines": _recorded("bench_engines")(engines),
    "gap": _recorded("vllm_gap", script="bench_vllm_gap")(gap),
    "staleness": _recorded("bench_staleness")(staleness),
    "decoupled": _recorded("bench_decoupled")(decoupled),
    "efficiency": _recorded("bench_efficiency")(efficiency),
    "viewer": _recorded("bench_view")(viewer),
    "sequence": _recorded("bench_sequence_parallel")(sequence),
    "balance": _recorded("bench_balance")(balance),
    "syncs": _recorded("weight_sync", script="bench_weight_sync")(syncs),
    "judges": _recorded("bench_judges")(judges),
    "devices": _recorded("device_matrix")(devices),
    "memory": _recorded("bench_memory")(memory),
    "gpu": _recorded("bench_gpu")(gpu),
    "sizes": _recorded("presets", script="estimate_presets")(sizes),
    "presets": _recorded("presets", script="estimate_presets")(presets),
    "install": _recorded("install", " --record", script="measure_install")(install),
    "users": _recorded("users", " --record", script="play_users")(users),
    **{f"peer_{peer.lower()}": peer_table(peer) for peer in PEERS},
}


def pages() -> list[Path]:
    """The files that hold blocks, or may: the README and every page of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rendered(text: str) -> str:
    """A page's text with every results block renewed."""
    return _BLOCK.sub(lambda m: f"{m.group(1)}{BLOCKS[m.group(2)]()}\n{m.group(3)}", text)


def main() -> int:
    """Command line."""
    stale = []
    for page in pages():
        old = page.read_text(encoding="utf-8")
        if (new := rendered(old)) != old:
            stale.append(page.relative_to(ROOT).as_posix())
            if "--check" not in sys.argv[1:]:
                page.write_text(new, encoding="utf-8")
    if "--check" in sys.argv[1:] and stale:
        print(
            f"out of date with assets/results: {', '.join(stale)}; run python -m scripts.update_readme",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
