"""The pages' tables of generation beside training, long rows and weights on their way; scripts/update_readme.py places them."""

from __future__ import annotations

from typing import Any

__all__ = ["balance", "decoupled", "judges", "sequence", "staleness", "syncs", "viewer"]


def staleness(found: dict[str, Any]) -> str:
    """What old weights cost in learning, with and without correction."""
    lines = ["| rollouts | mean gain of held-out IoU | lowest, highest seed |", "|---|---|---|"]
    for row in found["table"]:
        iou = row["sampled/iou"]
        lines.append(
            f"| {row['variant']} | {iou['gain']:.3f} | {iou['lowest_gain']:.3f}, {iou['highest_gain']:.3f} |"
        )
    seeds = found["table"][0]["seeds"]
    return "\n".join([*lines, "", f"{found['steps']} steps, {seeds} seeds, sampled answers."])


def decoupled(found: dict[str, Any]) -> str:
    """Steps of decoupled runs beside serial ones."""
    lines = [
        "| run | stages of a serial step | serial | decoupled | faster | most possible | longest stage / step |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["cases"]:
        stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in row["stages_s"].items())
        serial, apart = (row["step_s"][s]["median"] for s in ("serial", "decoupled"))
        lines.append(
            f"| {row['case']} | {stages} | {serial:.2f} s | {apart:.2f} s | {row['faster']:.2f} x | {row['bound']:.2f} x | "
            f"{row['share']:.2f} |"
        )
    return "\n".join(
        [
            *lines,
            "",
            (
                "`mmrl train` itself, both systems in alternation, staleness 1. Runs with a ratio sleep so long in their stages; "
                f"real ones do not, one thread for each process on {found['machine']['cpu']}."
            ),
        ]
    )


def viewer(found: dict[str, Any]) -> str:
    """What the viewer costs by rows, and beside a run."""
    lines = [
        "| rows | first page | every row indexed | memory |",
        "|---|---|---|---|",
    ]
    for row in found["rows"]:
        lines.append(
            f"| {row['rows']:,} | {row['start_s'] + row['first_page_s']:.1f} s | {row['start_s'] + row['all_rows_s']:.1f} s | "
            f"{row['resident_mib']:.0f} MiB |"
        )
    beside = found["beside_a_run"]
    ratio = beside["ratio_on_to_off"]
    return "\n".join(
        [
            *lines,
            "",
            (
                "From the command to what is asked for. Beside a training run on two cores, with a page open that asks every two "
                f"seconds, a step takes {ratio['mean']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}] of its time without a viewer "
                f"({beside['steps']:,} steps, each compared with the same step of a run of the same seed)."
            ),
        ]
    )


def sequence(found: dict[str, Any]) -> str:
    """One row in two processes against one process."""
    lines = [
        "| a clip of | activations | one process | each of two | share | gradients apart |",
        "|---|---|---|---|---|---|",
    ]
    for key, words in (("plain", "kept"), ("checkpointing", "computed again")):
        one, two = found[key]["rows"]
        lines.append(
            f"| {found[key]['prompt_tokens']:,} tokens | {words} | {max(one['peak_mib']):,.0f} MiB | "
            f"{max(two['peak_mib']):,.0f} MiB | {two['share_of_one']:.3f} | {two['gradient_apart']:.1e} |"
        )
    return "\n".join(lines)


def balance(found: dict[str, Any]) -> str:
    """Largest load over mean load of the processes."""
    lines = [
        "| prompts | processes | groups where they were made | dealt by tokens | tokens moved |",
        "|---|---|---|---|---|",
    ]
    for kind in ("pictures", "half clips", "clips"):
        lines += [
            f"| {kind} | {row['processes']} | {row['by_place']:.3f} | {row['by_length']:.3f} | {row['moved']:.0%} |"
            for row in found[kind]
        ]
    return "\n".join([*lines, "", "Largest load of a process over the mean; 1 is no waiting."])


def syncs(found: dict[str, Any]) -> str:
    """Seconds per GB of weights to a rollout server."""
    lines = ["| way | CPU s per GB, run and server | s per GB |", "|---|---|---|"]
    for name, way in found["ways"].items():
        lines.append(
            f"| {name.replace('_', ' ')} | {way['cpu_s_per_gb']['median']:.2f} | {way['seconds_per_gb']['median']:.1f} |"
        )
    load = found["machine"]["load_1min"]
    return "\n".join([*lines, "", f"{found['gb']} GB, medians, under a load of {load} on 2 cores."])


def judges(found: dict[str, Any]) -> str:
    """Seconds to judge completions."""
    lines = [
        "| requests at once | median, s | least, most |",
        "|---|---|---|",
    ]
    for count, row in found["seconds_by_requests_at_once"].items():
        lines.append(f"| {count} | {row['median']:.2f} | {row['min']:.2f}, {row['max']:.2f} |")
    return "\n".join(
        [
            *lines,
            "",
            f"{found['completions']} completions, a judge that takes {found['judge_s']} s, {found['rounds']} rounds, under a load "
            f"of {found['machine']['load_1min']} on 2 cores.",
        ]
    )
