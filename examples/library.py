"""A model, a reward and data make a training run: python examples/library.py, two minutes on a CPU; with pictures: library.ipynb"""

import json
import re
from pathlib import Path

import mmrl
from mmrl.tasks.scenes import make_scenes


@mmrl.reward
def overlap(completion: str, sample: mmrl.Sample) -> float:
    """Intersection over union of the box in the completion and the true one."""
    said, true = [float(number) for number in re.findall(r"\d+", completion)], sample.answer
    if len(said) != 4 or said[2] <= said[0] or said[3] <= said[1]:
        return 0.0
    shared = max(0, min(said[2], true[2]) - max(said[0], true[0])) * max(
        0, min(said[3], true[3]) - max(said[1], true[1])
    )
    return shared / (
        (said[2] - said[0]) * (said[3] - said[1])
        + (true[2] - true[0]) * (true[3] - true[1])
        - shared
    )


# colored shapes: "red circle" and its box
scenes = Path(make_scenes("runs/scenes", 160, seed=7, background="graded"))
rows = [
    {**row, "image": scenes.parent / row["image"]}
    for row in map(json.loads, scenes.read_text().splitlines())
]
trainer = mmrl.Trainer(
    model="assets/tiny_vlm",
    reward=overlap,
    train_data=rows[:128],
    eval_data=rows[128:],
    overwrite=True,
    config={
        "name": "library",
        "model.system": "",
        "train.steps": 12,
        "train.prompts_per_step": 8,
        "optim.lr": 1e-4,
        "rollout.max_new_tokens": 24,
    },
)
trainer.fit()
print(
    mmrl.evaluate(trainer.checkpoint, reward=overlap, data=rows[128:]).results["greedy"]["reward"]
)
