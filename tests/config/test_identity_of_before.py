"""A run whose checkpoint was written before a key existed can be resumed: the key has a value that means what held then."""

import json
from pathlib import Path

import pytest

from mmrl.config import load_config
from mmrl.errors import ConfigError
from mmrl.training.identity import check_identity, run_identity

# scripts: run_identity of load_config(None, THESE) at that commit
BEFORE = Path(__file__).parent / "identity_6dd7341.json"
THESE = ["model.path=x", "data.train=[{task: grounding, path: a}]"]


def test_new_keys_keep_old_checkpoints():
    """Fails when a key is added that neither may change nor has a value for runs of before (mmrl/training/identity.py)."""
    now = run_identity(load_config(None, THESE).model_dump(mode="json"))
    check_identity(json.loads(BEFORE.read_text()), now)


def test_an_adapter_from_before_had_no_experts():
    """A key that there is with model.lora alone, which THESE lack."""
    plain, more = (
        run_identity(load_config(None, [*THESE, lora]).model_dump(mode="json"))
        for lora in ("model.lora={r: 8}", "model.lora={r: 8, experts: true}")
    )
    old = {k: v for k, v in plain.items() if k != "model.lora.experts"}
    assert len(old) == len(plain) - 1
    check_identity(old, plain)
    with pytest.raises(ConfigError, match=r"lora\.experts was False, now True"):
        check_identity(old, more)
