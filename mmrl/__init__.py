"""mmrl: reinforcement fine-tuning of vision-language models and vision-language-action policies.

    from mmrl import Sample, Score, Task, register

Importing mmrl is light: torch and transformers are imported by the parts that need them.
"""
from mmrl import _torchvision_cpu
from mmrl.coords import CoordFrame
from mmrl.errors import DataError
from mmrl.registry import register
from mmrl.task import Task, Template
from mmrl.types import Completion, Group, ImageSize, RewardContext, Sample, Score, StopReason, Trajectory

_torchvision_cpu.install()  # before anything imports torchvision; does nothing on a CUDA build of torch

__version__ = "0.1.0"
__all__ = ["Completion", "CoordFrame", "DataError", "Group", "ImageSize", "RewardContext", "Sample", "Score", "StopReason", "Task",
           "Template", "Trajectory", "register"]
