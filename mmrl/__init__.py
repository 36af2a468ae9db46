"""mmrl: reinforcement fine-tuning of vision-language models and vision-language-action policies.

    from mmrl import Sample, Score, Task, register

Importing mmrl is light: torch and transformers are imported by the parts that need them.
"""
import os

from mmrl import _torchvision_cpu
from mmrl.coords import CoordFrame
from mmrl.errors import DataError
from mmrl.registry import register
from mmrl.task import Task, Template
from mmrl.types import Completion, Group, ImageSize, RewardContext, Sample, Score, StopReason, Trajectory

# On Intel CPUs MKL rounds a row of a matrix product differently in batches of different size, unless it is asked for strict
# reproducibility. A rollout's log-probs would then depend on which requests happened to be answered together, and a pipelined,
# resumed or served run would not equal the serial one bit for bit. Read by MKL at its first product; a value of yours stays.
# On AMD's processors MKL does not listen: mmrl/policy/batch_invariance.py.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
_torchvision_cpu.install()  # before anything imports torchvision; does nothing on a CUDA build of torch

__version__ = "0.1.0"
__all__ = ["Completion", "CoordFrame", "DataError", "Group", "ImageSize", "RewardContext", "Sample", "Score", "StopReason", "Task",
           "Template", "Trajectory", "register"]
