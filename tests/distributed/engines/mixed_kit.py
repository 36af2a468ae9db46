"""A small run in which processes differ in most that they can: text, pictures and clips, numbers of micro-batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.kits.clip_kit import clip
from tests.kits.engine_kit import merge, picture, read_jsonl, small_run

__all__ = ["mixed_run", "text_only_shares"]


def medley(folder: Path) -> str:
    """12 questions, half of them without media, the others about clips, pictures or both."""
    folder.mkdir(parents=True, exist_ok=True)
    media: tuple[dict[str, list[str]], ...] = (
        {},
        {"images": [picture((112, 84))]},
        {},
        {"videos": [clip(folder)]},
        {},
        {
            "videos": [clip(folder, 6, (56, 56), 1)],
            "images": [picture((56, 56)), picture((84, 112), 1)],
        },
    )
    questions = (
        "Where is the red circle?",
        "yes or no",
        "Describe the image, then the largest shape.",
        "How many?",
    )
    rows = [
        {"id": f"m{i}", "question": questions[i % 4], "images": [], "videos": [], **media[i % 6]}
        for i in range(12)
    ]
    path = folder / "medley.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def mixed_run(tmp_path: Path, **sections: Any) -> dict[str, Any]:
    """3 steps of 4 prompts, small micro-batches: their number differs between processes."""
    video = {"kind": "uniform", "num_frames": 4, "min_pixels": 28 * 28, "max_pixels": 84 * 56}
    path = medley(tmp_path / "data")
    tree = small_run(
        tmp_path / "runs",
        path,
        path,
        data={"video": video},
        optim={"lr": 0.001},
        algorithm={"kl": {"coef": 0.05}, "entropy": {"coef": 0.02, "target": 99.0, "delta": 0.01}},
        train={
            "steps": 3,
            "prompts_per_step": 4,
            "token_budget": 80,
            "log_rollouts": 99,
            "keep_last": 9,
        },
        eval={"limit": 4, "every": 3},
    )
    return merge(tree, sections)


def text_only_shares(run: Path) -> int:
    """(step, process) pairs whose prompts had neither pictures nor clips, while the other process had some."""
    kinds: dict[tuple[int, int], bool] = {}
    for step in (1, 2, 3):
        for row in read_jsonl(run / "rollouts" / f"step_{step:06d}.jsonl"):
            place = (step, row["key"][1] % 2)
            kinds[place] = kinds.get(place, False) or bool(
                row["sample"]["images"] or row["sample"]["videos"]
            )
    return sum(
        not seen and kinds[step, 1 - rank]
        for (step, rank), seen in kinds.items()
        if (step, 1 - rank) in kinds
    )
