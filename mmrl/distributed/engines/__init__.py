"""The existing engines that mmrl trains with: one process, DDP, DeepSpeed ZeRO, FSDP2 (config: engine.train)."""

from mmrl.distributed.engines.base import TrainEngine
from mmrl.distributed.engines.build import (
    accelerator_options,
    build_actor,
    build_saved,
    build_train_engine,
    held_back,
    stored_to_sample,
    train_engine_name,
)

__all__ = [
    "TrainEngine",
    "accelerator_options",
    "build_actor",
    "build_saved",
    "build_train_engine",
    "held_back",
    "stored_to_sample",
    "train_engine_name",
]
