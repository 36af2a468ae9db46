"""Adapters on a mixture's experts (model.lora.experts) in two processes make the run of one, also resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mmrl.config import load_config
from mmrl.training.trainer import Trainer
from tests.distributed.engines.deepspeed_worker import KINDS
from tests.distributed.engines.mixed_kit import mixed_run
from tests.distributed.test_distributed import compare, work
from tests.kits.engine_kit import config_file, tiny_folder

pytestmark = pytest.mark.slow
TRAIN = "tests.kits.process_worker:train"
# DeepSpeed last: accelerate tells whoever comes later of it, in variables
ENGINES = {
    "ddp": ["engine.train=ddp"],
    "fsdp2": ["engine.train=fsdp2"],
    **{kind: KINDS[kind] for kind in ("zero2", "zero3_sharded")},
}


def test_adapted_experts_are_shared_out(tmp_path: Path) -> None:
    """The base's experts are gathered where peft adds to them, in forward and in the computed-again one of checkpointing; the
    reference of the KL term is the model without adapters; a run of FSDP2 goes on from its adapter."""
    tree = mixed_run(
        tmp_path / "one",
        algorithm={"epochs": 2, "minibatches": 2},
        train={"steps": 2},
        model={
            "path": tiny_folder("glm4v_moe"),
            "lora": {"r": 4, "alpha": 8, "experts": True},
            "freeze": ["vision"],
            "gradient_checkpointing": True,
        },
    )
    path = config_file(tmp_path / "c.yaml", tree)
    one = Trainer(load_config(path))
    one.fit()
    jobs = [[TRAIN, path, [f"name={name}", *settings]] for name, settings in ENGINES.items()]
    jobs.insert(2, [TRAIN, path, ["name=resumed", *ENGINES["fsdp2"]], "fsdp2", 1])
    work(tmp_path, jobs)
    for name in (*ENGINES, "resumed"):
        run = one.folder.path.with_name(name)
        compare(one, run)
        adapter = run / "checkpoints" / "step_000002" / "adapter"
        told = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
        assert set(told["target_parameters"]) == {
            "mlp.experts.gate_up_proj",
            "mlp.experts.down_proj",
        }
        saved = load_file(adapter / "adapter_model.safetensors")
        trained = [t for name, t in saved.items() if ".experts." in name and "lora_B" in name]
        assert len(trained) == 2 and all(t.any() for t in trained)
