"""The pages' tables of rollouts of several turns; scripts/update_readme.py puts them in their places."""

from __future__ import annotations

import statistics
from typing import Any

__all__ = ["browser", "turns", "turns_cost", "turns_killed", "turns_trl", "zoom"]


def turns(found: dict[str, Any]) -> str:
    """What two turns learned with their rewards, and with permuted ones."""
    lines = [
        "| rewards | right name, before | after | right quarter, before | after |",
        "|---|---|---|---|---|",
    ]
    for name, words in (("real", "as they are"), ("shuffled", "permuted within each group")):
        run = found[name]
        cells = [
            "{:.2f} [{:.2f}, {:.2f}]".format(*run[when][metric])
            for metric in ("correct", "found")
            for when in ("before", "after")
        ]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(
        [
            *lines,
            "",
            (
                f"{found['steps']} steps of {found['prompts_per_step']} prompts x {found['group_size']} rollouts, {found['held_out']} "  # noqa: E501
                f"held-out pictures, sampled, brackets of 95 %, seed {found['seed']}; {found['real']['seconds']:.0f} s beside other "  # noqa: E501
                "work."
            ),
        ]
    )


def zoom(found: dict[str, Any]) -> str:
    """What looking again earned, beside the start, the same model without the tool, and permuted rewards."""
    words = {
        "real": "with the tool",
        "without": "without it, as many seconds or more",
        "shuffled": "with it, rewards permuted",
    }
    lines = [
        "| seed | run | right, sampled: start | after | right, greedy: start | after | looked | at the right place | steps |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found["seeds"]:
        for name, what in words.items():
            run = row[name]
            cells = [
                "{:.2f} [{:.2f}, {:.2f}]".format(*run[when][mode]["correct"])
                for mode in ("sampled", "greedy")
                for when in ("before", "after")
            ]
            seen = [
                f"{run['after']['sampled'].get(metric, [0.0])[0]:.2f}"
                for metric in ("looked", "found")
            ]
            cells += [*seen, str(run["steps"])]
            lines.append(f"| {row['seed']} | {what} | {' | '.join(cells)} |")
    seconds = [row["real"]["seconds"] for row in found["seeds"]]
    return "\n".join(
        [
            *lines,
            "",
            f"{found['held_out']} held-out pictures a seed, brackets of 95 %; {found['prompts_per_step']} prompts x "
            f"{found['group_size']} rollouts a step, {min(seconds):.0f} to {max(seconds):.0f} s of processor time with the tool, "
            f"after a cold start of {max(row['start_seconds'] for row in found['seeds']):.0f} s.",
        ]
    )


def browser(found: dict[str, Any]) -> str:
    """Success on held-out pages before and after, by rewards and by permuted ones."""
    lines = [
        "| pages | sampled, before | after | greedy, before | after | sampled, rewards permuted |",
        "|---|---|---|---|---|---|",
    ]
    for kind in found["kinds"]:
        cells = [
            "{:.2f} [{:.2f}, {:.2f}]".format(*found[run][when][kind][mode])
            for run, when, mode in (
                ("real", "before", "sampled"),
                ("real", "after", "sampled"),
                ("real", "before", "greedy"),
                ("real", "after", "greedy"),
                ("shuffled", "after", "sampled"),
            )
        ]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(
        [
            *lines,
            "",
            f"{found['held_out']} held-out pages of each kind, {found['samples']} rollouts of at most 2 clicks each, brackets of "
            f"95 %, seed {found['seed']}; {found['real']['steps']} steps of {found['prompts_per_step']} prompts x 8 rollouts in "
            f"{found['real']['steps_s'] / 60:.0f} minutes on 2 cores of {found['machine']['cpu']}, "
            f"{found['real']['seconds'] / 60:.0f} with both evaluations, after a start of {found['start_steps']} steps of "
            "`mmrl sft`. Learned: "
            f"{_learned(found['real'])}; by permuted rewards: {_learned(found['shuffled'])}.",
        ]
    )


def _learned(run: dict[str, Any]) -> str:
    from scripts.demo_browser import learned

    return ", ".join(learned(run)) or "none"


def turns_cost(found: dict[str, Any]) -> str:
    """Turns packed against a row per rollout and turns encoded anew; also those of trees."""
    words = {
        "packed": "packed",
        "branches": "packed, a copy per branch",
        "rollouts": "a row per rollout",
        "turns": "every turn anew",
        "rows": "a row per turn",
    }
    ways = [way for way in words if way in found["rows"][0]["tokens"]]
    lines = [
        f"| turns, vision tower | {' | '.join(words[way] for way in ways)} |",
        "|---" * (len(ways) + 1) + "|",
    ]
    for row in found["rows"]:
        cells = [
            f"{row['cpu_s'][way]['median']:.2f} s, {row['peak_mib'][way]:,.0f} MiB" for way in ways
        ]
        cells[1:] = [
            f"{cell} ({row['ratio'][way]:.1f} x, {row['peak_mib'][way] / row['peak_mib']['packed']:.1f} x)"
            for cell, way in zip(cells[1:], ways[1:], strict=True)
        ]
        lines.append(f"| {row['turns']}, {row['vision']} | {' | '.join(cells)} |")
    worst = max(row["largest_difference"] for row in found["rows"])
    return "\n".join(
        [
            *lines,
            "",
            (
                f"CPU seconds of forward and backward of one group of {found['settings']['group_size']}"
                f"{', two trees of a root and three branches' * ('roots' in found['settings'])}, one thread of "
                f"{found['machine']['cpu']}, and the memory that they add at their peak; log-probs differ by at most {worst:.0e}."
            ),
        ]
    )


def turns_killed(found: dict[str, Any]) -> str:
    """Runs of several turns under SIGKILL."""
    when = ", ".join(
        f"{count} in {_PHASES.get(phase, phase)}"
        for phase, count in sorted(found["phases"].items())
    )
    return (
        f"`scripts/torture_turns.py`: {found['what']}: {found['num_kills']} kills ({when}), "
        f"{'every check passed' if found['passed'] else 'CHECKS FAILED'}; of up to {found['most_processes']} browser and worker "
        f"processes none was left {found['longest_until_workers_gone_s']:.1f} s after the trainer's end at the latest."
    )


_PHASES = {
    "later turn": "later turns",
    "first turn": "first turns",
    "first look": "the opening of pages",
    "rollout": "other moments of rollouts",
}


def turns_trl(found: dict[str, Any]) -> str:
    """Rollouts of several turns beside TRL's."""
    lines = [
        "| rollouts | mmrl | TRL | speed | peak memory, TRL / mmrl |",
        "|---|---|---|---|---|",
    ]
    for row in found["settings"]:
        seconds = {
            side: statistics.median(r["step_s"] for r in rounds)
            for side, rounds in row["rounds"].items()
        }
        speed = row["speed_ratio"]
        lines.append(
            f"| {row['name']} | {seconds['mmrl']:.2f} s | {seconds['trl']:.2f} s | {speed['median']:.2f} x "
            f"({speed['min']:.2f} to {speed['max']:.2f}) | {row['peak_memory_ratio']['median']:.2f} x |"
        )
    return "\n".join(
        [
            *lines,
            "",
            (
                f"Seconds of a step of one group of {found['group_size']} rollouts, TRL {found['versions']['trl']} with its "
                "`environment_factory`; both play the same turns and write as many tokens."
            ),
        ]
    )
