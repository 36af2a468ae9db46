"""MetaWorld's 50 tasks in words, and its groups of tasks. Imports nothing of MetaWorld.

    python -c "from mmrl.robotics.metaworld_tasks import expand; print(expand(['MT10']))"

MetaWorld has no instructions; these sentences are ours. A policy trained on other ones (lerobot's, say) gets them with
`env.options.instructions: {reach-v3: ...}`.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["GROUPS", "INSTRUCTIONS", "expand"]

INSTRUCTIONS: dict[str, str] = {
    "assembly-v3": "pick up the ring by its handle and put it over the peg",
    "basketball-v3": "put the ball through the hoop",
    "bin-picking-v3": "move the cube from one bin to the other",
    "box-close-v3": "put the lid on the box",
    "button-press-topdown-v3": "press the button down from above",
    "button-press-topdown-wall-v3": "reach over the wall and press the button down from above",
    "button-press-v3": "press the button on the front of the box",
    "button-press-wall-v3": "reach around the wall and press the button",
    "coffee-button-v3": "press the button of the coffee machine",
    "coffee-pull-v3": "pull the mug away from the coffee machine to the goal",
    "coffee-push-v3": "push the mug under the coffee machine",
    "dial-turn-v3": "turn the dial half way round",
    "disassemble-v3": "lift the ring off the peg",
    "door-close-v3": "close the door",
    "door-lock-v3": "turn the lock of the door to lock it",
    "door-open-v3": "open the door",
    "door-unlock-v3": "turn the lock of the door to unlock it",
    "drawer-close-v3": "close the drawer",
    "drawer-open-v3": "open the drawer",
    "faucet-close-v3": "turn the faucet clockwise",
    "faucet-open-v3": "turn the faucet counter-clockwise",
    "hammer-v3": "hit the nail into the wall with the hammer",
    "hand-insert-v3": "put the gripper into the hole",
    "handle-press-side-v3": "press the handle down from the side",
    "handle-press-v3": "press the handle down",
    "handle-pull-side-v3": "pull the handle up from the side",
    "handle-pull-v3": "pull the handle up",
    "lever-pull-v3": "push the lever up",
    "peg-insert-side-v3": "put the peg into the hole in the side of the box",
    "peg-unplug-side-v3": "pull the peg out of the side of the box",
    "pick-out-of-hole-v3": "lift the puck out of the hole and bring it to the goal",
    "pick-place-v3": "pick up the puck and bring it to the goal",
    "pick-place-wall-v3": "pick up the puck and bring it over the wall to the goal",
    "plate-slide-back-side-v3": "slide the plate out of the cabinet to the side",
    "plate-slide-back-v3": "slide the plate out of the cabinet",
    "plate-slide-side-v3": "slide the plate into the cabinet from the side",
    "plate-slide-v3": "slide the plate into the cabinet",
    "push-back-v3": "pull the puck back to the goal",
    "push-v3": "push the puck to the goal",
    "push-wall-v3": "push the puck around the wall to the goal",
    "reach-v3": "move the gripper to the goal",
    "reach-wall-v3": "move the gripper over the wall to the goal",
    "shelf-place-v3": "put the puck on the shelf",
    "soccer-v3": "push the ball into the net",
    "stick-pull-v3": "pick up the stick and pull the box with it",
    "stick-push-v3": "pick up the stick and push the box with it",
    "sweep-into-v3": "sweep the cube into the hole",
    "sweep-v3": "sweep the cube off the table",
    "window-close-v3": "slide the window closed",
    "window-open-v3": "slide the window open",
}
"""Task -> what to do, in words."""

_MT10 = [
    "reach-v3",
    "push-v3",
    "pick-place-v3",
    "door-open-v3",
    "drawer-open-v3",
    "drawer-close-v3",
    "button-press-topdown-v3",
    "peg-insert-side-v3",
    "window-open-v3",
    "window-close-v3",
]
_ML45_TEST = ["bin-picking-v3", "box-close-v3", "hand-insert-v3", "door-lock-v3", "door-unlock-v3"]
_MEDIUM = [
    "basketball-v3",
    "bin-picking-v3",
    "box-close-v3",
    "coffee-pull-v3",
    "coffee-push-v3",
    "hammer-v3",
    "peg-insert-side-v3",
    "push-wall-v3",
    "soccer-v3",
    "sweep-v3",
    "sweep-into-v3",
]
_HARD = [
    "assembly-v3",
    "hand-insert-v3",
    "pick-out-of-hole-v3",
    "pick-place-v3",
    "push-v3",
    "push-back-v3",
]
_VERY_HARD = [
    "shelf-place-v3",
    "disassemble-v3",
    "stick-pull-v3",
    "stick-push-v3",
    "pick-place-wall-v3",
]

GROUPS: dict[str, list[str]] = {
    "MT10": _MT10,
    "MT50": list(INSTRUCTIONS),
    "ML10-train": [
        *(task for task in _MT10 if task not in ("drawer-open-v3", "window-close-v3")),
        "sweep-v3",
        "basketball-v3",
    ],
    "ML10-test": [
        "drawer-open-v3",
        "door-close-v3",
        "shelf-place-v3",
        "sweep-into-v3",
        "lever-pull-v3",
    ],
    "ML45-train": [task for task in INSTRUCTIONS if task not in _ML45_TEST],
    "ML45-test": _ML45_TEST,
    "easy": [t for t in INSTRUCTIONS if t not in (*_MEDIUM, *_HARD, *_VERY_HARD)],
    "medium": _MEDIUM,
    "hard": _HARD,
    "very-hard": _VERY_HARD,
}
"""MetaWorld's own benchmarks, and the four difficulties of Seo et al. 2022 (Masked World Models, arXiv 2206.14244) by which
lerobot reports SmolVLA."""


def expand(tasks: Sequence[str]) -> list[str]:
    """Tasks with groups replaced by theirs, each once; other names stay as they are."""
    return list(dict.fromkeys(t for name in tasks for t in GROUPS.get(name, [name])))
