"""The configuration of a run: one YAML file, dotted overrides, every key described where it is defined and checked on load.

    cfg = load_config("configs/grounding.yaml", ["train.steps=50", "model.path=Qwen/Qwen2.5-VL-3B-Instruct"])

Unknown keys are errors with a did-you-mean. `mmrl config FILE` prints the resolved result, `mmrl config --explain KEY` what a
key means; docs/config.md lists them all. One module per group of sections:

    model       model, rollout                          engine    engine, operations
    data        data                                    run       all of them together
    algorithm   algorithm                               read      YAML, overrides and errors
    renamed     keys under their names of before              rollout_engine   what engine.rollout auto means here
    training    optim, reward, eval, alarms, train, schedule      reference   descriptions for people
"""

from __future__ import annotations

from pathlib import Path

from mmrl.config.algorithm import (
    ADVANTAGE_SCALES,
    GAE,
    GSPO,
    PROMPT_CRITIC,
    AlgorithmConfig,
    ContrastConfig,
    CriticConfig,
    EMAConfig,
    EntropyConfig,
    FilterConfig,
    KLConfig,
    OfflineConfig,
    ReplayConfig,
    RouterReplayConfig,
    TurnsConfig,
)
from mmrl.config.data import (
    AudioConfig,
    CacheConfig,
    CurriculumStage,
    DataConfig,
    DataSource,
    ImageConfig,
    PassRateConfig,
    SelectionConfig,
    VideoConfig,
)
from mmrl.config.engine import (
    DeepSpeedConfig,
    EngineConfig,
    OperationsConfig,
    RayConfig,
    VLLMConfig,
)
from mmrl.config.model import LoraSettings, ModelConfig, RolloutConfig
from mmrl.config.read import config_from, load_config_as, merge, parse_overrides, renamed
from mmrl.config.renamed import with_new_names
from mmrl.config.rollout_engine import RolloutChoice, rollout_engine, with_choice
from mmrl.config.run import RolloutShape, RunConfig, effective_threads
from mmrl.config.section import Section
from mmrl.config.training import (
    AlarmConfig,
    EvalConfig,
    OptimConfig,
    RewardConfig,
    ScheduleConfig,
    TrainConfig,
)

__all__ = [
    "AudioConfig",
    "ADVANTAGE_SCALES",
    "GAE",
    "GSPO",
    "PROMPT_CRITIC",
    "AlarmConfig",
    "AlgorithmConfig",
    "CacheConfig",
    "ContrastConfig",
    "CriticConfig",
    "CurriculumStage",
    "DataConfig",
    "DataSource",
    "DeepSpeedConfig",
    "EMAConfig",
    "EngineConfig",
    "EntropyConfig",
    "EvalConfig",
    "FilterConfig",
    "ImageConfig",
    "KLConfig",
    "LoraSettings",
    "ModelConfig",
    "OfflineConfig",
    "ReplayConfig",
    "RouterReplayConfig",
    "OperationsConfig",
    "OptimConfig",
    "PassRateConfig",
    "RayConfig",
    "RewardConfig",
    "RolloutChoice",
    "RolloutConfig",
    "RolloutShape",
    "RunConfig",
    "ScheduleConfig",
    "Section",
    "SelectionConfig",
    "TrainConfig",
    "TurnsConfig",
    "VLLMConfig",
    "VideoConfig",
    "config_from",
    "effective_threads",
    "load_config",
    "load_config_as",
    "merge",
    "parse_overrides",
    "renamed",
    "rollout_engine",
    "with_choice",
    "with_new_names",
]


def load_config(path: str | Path | None = None, overrides: list[str] | None = None) -> RunConfig:
    """Read a YAML file (or start from the defaults) and apply dotted overrides. Raises ConfigError listing every problem."""
    return load_config_as(RunConfig, path, overrides)
