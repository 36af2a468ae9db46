"""Blocks of pages that are no benchmarks: keys of peers, what an installation costs; scripts/update_readme.py places them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmrl.config.peers import PEERS

__all__ = ["install", "peer_table", "users"]


def peer_table(peer: str) -> Callable[[], str]:
    """The block with every key of `peer` and what it is here."""

    def text() -> str:
        lines = [f"| {peer} | mmrl | values |", "|---|---|---|"]
        lines += [
            f"| `{theirs}` | `{ours.key}` | {ours.values} |" for theirs, ours in PEERS[peer].items()
        ]
        return "\n".join(lines)

    return text


def install(found: dict[str, Any]) -> str:
    """Seconds, packages and disk of fresh environments."""
    lines = [
        "| fresh environment | packages | disk | seconds | OpenCV | largest |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["installs"].values():
        largest = ", ".join(
            f"{name} {mib} MiB" for name, mib in list(row["largest_mib"].items())[:3]
        )
        lines.append(
            f"| `{row['command']}` | {row['packages']} | {row['gb']:.1f} GB | {row['seconds']} | "
            f"{', '.join(row['opencv']) or 'none'} | {largest} |"
        )
    machine = found["machine"]
    lines.append(
        f"\n{found['date']}, CPU torch, {machine['cores']} cores beside other work (load {machine['load_1min']:.0f}), packages "
        "from a mirror; in each of them the demo was trained for two steps."
    )
    return "\n".join(lines)


def users(found: dict[str, Any]) -> str:
    """What three users meet in their first half hour, before and now."""
    lines = ["| user | step | before | now |", "|---|---|---|---|"]
    for row in found["steps"]:
        cells = (row["user"], row["step"], row["before"], row["now"])
        lines.append(
            "| " + " | ".join(" ".join(str(c).replace("|", "\\|").split()) for c in cells) + " |"
        )
    return "\n".join(lines)
