"""Rewards: pure functions (prediction, truth) -> score, and the rubric that composes them per task.

    from mmrl.rewards.iou import box_iou
    from mmrl.rewards.dynamic_iou import make_iou_reward
    from mmrl.rewards.parsing import extract_answer, parse_boxes
    from mmrl.rewards.router import Rubric

Nothing here runs model text, needs the main thread, or knows about models and trainers.
"""

if __name__ != "mmrl.rewards":  # the repository's root is on sys.path
    raise ImportError(
        f"expected `import mmrl.rewards`, found an import as `{__name__}`: it would make a second copy of every module in it. "
        "Write mmrl.rewards; for a package `rewards` of your own, take mmrl's repository off PYTHONPATH or put yours before it"
    )
