"""A trained mixture of experts lies in its files as released ones do, and every reader finds the same weights there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

from mmrl.policy.policy import Policy
from mmrl.policy.released import as_released
from tests.kits.engine_kit import fresh_policy, tiny_folder

FAMILY = "qwen3_vl_moe"
EXPERTS = "model.language_model.layers.0.mlp.experts."


def written(folder: Path) -> dict[str, torch.Tensor]:
    """The weights in a saved folder."""
    return load_file(folder / "model.safetensors")


@pytest.fixture
def policy() -> Policy:
    return fresh_policy(FAMILY)


def test_experts_are_saved_input_first_as_qwen_released_them(
    policy: Policy, tmp_path: Path
) -> None:
    """Shapes (E, hidden, 2 x intermediate) and (E, intermediate, hidden): transformers issue 43201 shows those of Qwen's 30B."""
    text = policy.base.config.text_config
    E, H, wide = text.num_experts, text.hidden_size, text.moe_intermediate_size
    policy.save(tmp_path / "saved")
    saved = written(tmp_path / "saved")
    assert saved[f"{EXPERTS}gate_up_proj"].shape == (E, H, 2 * wide)
    assert saved[f"{EXPERTS}down_proj"].shape == (E, wide, H)
    again = fresh_policy(path=str(tmp_path / "saved"))
    for (name, ours), (_, theirs) in zip(
        policy.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    again.save(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "saved" / "model.safetensors"
    ).read_bytes()


def test_a_merged_adapter_and_a_sharded_checkpoint_have_that_order_too(
    policy: Policy, tmp_path: Path
) -> None:
    """Names and shapes of all three ways to save are the same."""
    policy.save(tmp_path / "whole")
    saved = written(tmp_path / "whole")
    adapted = fresh_policy(FAMILY, lora={"r": 2})
    adapted.save(tmp_path / "adapted")
    merged = written(tmp_path / "adapted")
    assert {n: t.shape for n, t in merged.items()} == {n: t.shape for n, t in saved.items()}
    shares = as_released(policy.family, policy.model, dict(policy.model.named_parameters()))
    assert shares.keys() == saved.keys()
    assert all(torch.equal(shares[name], saved[name]) for name in saved)


def test_a_square_weight_stays_as_transformers_reads_it(policy: Policy) -> None:
    """transformers tells the two orders by their shapes."""
    config = AutoConfig.from_pretrained(tiny_folder(FAMILY))
    config.text_config.moe_intermediate_size = config.text_config.hidden_size
    model = AutoModelForImageTextToText.from_config(config)
    weights = {name: torch.rand(p.shape) for name, p in model.named_parameters()}
    found = as_released(policy.family, model, weights)
    assert torch.equal(found[f"{EXPERTS}down_proj"], weights[f"{EXPERTS}down_proj"])
    wide = weights[f"{EXPERTS}gate_up_proj"]
    assert torch.equal(found[f"{EXPERTS}gate_up_proj"], wide.transpose(1, 2))
