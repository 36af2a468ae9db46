"""What the tests of LeRobot data sets share: episodes with pictures like a simulator's, and the set made of them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np

from mmrl.robotics.datasets import RecordedEpisode
from mmrl.robotics.datasets.writer import LeRobotWriter


def picture(rng: np.random.Generator, t: int, size: int = 48) -> np.ndarray:
    """A scene like a simulator's: a gradient, coloured things two pixels wide, some noise."""
    y, x = np.mgrid[:size, :size]
    frame = np.stack([x * 4, y * 4, np.full_like(x, 90)], axis=-1)
    frame[10:20, (2 * t) % (size - 12) : (2 * t) % (size - 12) + 8] = [255, 0, 0]
    frame[30:32, 4:40] = [0, 0, 255]
    frame[6:40, 44:46] = [0, 255, 0]
    return np.clip(frame + rng.integers(-2, 3, frame.shape), 0, 255).astype(np.uint8)


def episode(
    number: int,
    steps: int,
    every: int = 1,
    instruction: str = "push the cube",
    size: int = 48,
    success: bool = True,
) -> RecordedEpisode:
    rng = np.random.default_rng(number)
    shown = np.arange(0, steps, every)
    images = {
        camera: np.stack([picture(rng, int(t) + offset, size) for t in shown])
        for camera, offset in (("base", 0), ("wrist", 9))
    }
    actions = rng.uniform(-1, 1, (steps, 3)).astype(np.float32)
    solved = np.zeros(steps, bool)
    solved[-1] = success
    return RecordedEpisode(
        instruction,
        images,
        shown,
        rng.normal(size=(len(shown), 2)).astype(np.float32),
        actions,
        actions + np.float32(0.1),
        solved.astype(np.float32),
        solved,
        seed=number,
        state=f"train-{number}",
    )


EPISODES = [
    episode(0, 7),
    episode(1, 5, every=2),
    episode(2, 9, instruction="lift it", success=False),
]


def write_set(out: Path) -> Path:
    """The data set of EPISODES at `out`."""
    with LeRobotWriter(
        out, fps=20, robot="tiny", action_names=["x", "y", "grip"], notes={"by": "a test"}
    ) as writer:
        for item in EPISODES:
            writer.add(item)
    return out


def as_v21(source: Path, out: Path, images: bool = False) -> None:
    """Rewrite a v3.0 set by hand as v2.1: one parquet and one mp4 per episode, jsonl meta; or with pictures as png columns."""
    import av
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    info = json.loads((source / "meta/info.json").read_text())
    info |= {
        "codebase_version": "v2.1",
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    }
    (out / "meta").mkdir(parents=True)
    table = pq.read_table(source / "data/chunk-000/file-000.parquet")
    rows, tasks = [], {"push the cube": 0, "lift it": 1}
    for number, item in enumerate(EPISODES):
        part = table.filter(pa.compute.equal(table["episode_index"], number))
        shown = np.searchsorted(item.steps_P, np.arange(len(item.actions_TA)), side="right") - 1
        for camera in ("base", "wrist"):
            key = f"observation.images.{camera}"
            if images:
                cells = []
                for frame in item.images[camera][shown]:
                    buffer = io.BytesIO()
                    Image.fromarray(frame).save(buffer, "png")
                    cells.append({"bytes": buffer.getvalue(), "path": None})
                part = part.append_column(key, pa.array(cells))
                info["features"][key]["dtype"] = "image"
                continue
            path = out / "videos/chunk-000" / key / f"episode_{number:06d}.mp4"
            path.parent.mkdir(parents=True, exist_ok=True)
            with av.open(str(path), "w") as container:
                stream = container.add_stream("libx264rgb", rate=20, options={"qp": "0"})
                stream.width = stream.height = 48
                stream.pix_fmt = "rgb24"
                for frame in item.images[camera][shown]:
                    container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
                container.mux(stream.encode())
        (out / "data/chunk-000").mkdir(parents=True, exist_ok=True)
        pq.write_table(part, out / f"data/chunk-000/episode_{number:06d}.parquet")
        rows.append(
            {"episode_index": number, "tasks": [item.instruction], "length": len(item.actions_TA)}
        )
    (out / "meta/info.json").write_text(json.dumps(info))
    (out / "meta/episodes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (out / "meta/tasks.jsonl").write_text(
        "\n".join(json.dumps({"task_index": i, "task": t}) for t, i in tasks.items())
    )
