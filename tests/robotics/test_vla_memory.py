"""The memory estimate of robot policies: decisions are prompts of their own, short and many, chosen from few tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmrl.diagnostics._family_memory import kept_bytes
from mmrl.diagnostics.memory import estimate, prompt_tokens_of
from mmrl.diagnostics.memory_parameters import parameters_of
from mmrl.diagnostics.memory_phases import activations_of
from mmrl.diagnostics.memory_run import TEXT_TOKENS, PlannedRun
from mmrl.robotics.config import load_embodied
from tests.kits.engine_kit import REPO
from tests.kits.robot_kit import config_of, make_model, make_vla, observations


@pytest.mark.parametrize("decode", ["parallel", "autoregressive"])
def test_an_update_of_decisions_keeps_what_is_estimated(decode: str, tmp_path: Path) -> None:
    """Against what autograd holds of the forward pass that the learner makes."""
    settings = ["model.freeze=[vision,projector]", f"vla.decode={decode}"]
    vla = make_vla(make_model(tmp_path / "model"), *settings)
    vla.save(tmp_path / "vla")
    seen = observations(8)
    outputs = vla.act(seen, [(0, n) for n in range(len(seen))])
    prompts, tokens = [o.prompt for o in outputs], [o.tokens for o in outputs]
    length = prompts[0].length
    budget = len(outputs) * (length + vla.tokens_per_decision)
    config = config_of(tmp_path / "vla", *settings, f"train.token_budget={budget}")
    assert config.rollout_shape.tokens == vla.tokens_per_decision == len(tokens[0])
    parameters = parameters_of(config.model.model_dump_json(), False, "cpu")
    run = PlannedRun(config, vla.core.base.config, parameters, "single", 1, "cpu", length)
    assert run.micro.groups == len(outputs) and run.micro.group_size == 1
    kept = kept_bytes(vla.core, lambda: vla.evaluate(prompts, tokens).logp_N)
    assert activations_of(run)[0] == pytest.approx(kept, rel=0.1)


def test_prompts_have_a_picture_of_each_camera_and_nothing_is_cached_of_one_pass(
    tmp_path: Path,
) -> None:
    cameras = ["env.cameras=[base,wrist]", "vla.cameras=[base,wrist]", "env.image_size=32"]
    vla = make_vla(make_model(tmp_path / "model"), *cameras)
    vla.save(tmp_path / "vla")
    (output,) = vla.act(observations(1, cameras=("base", "wrist"), size=32), [(0, 0)])
    config = config_of(tmp_path / "vla", *cameras)
    told = prompt_tokens_of(config, vla.core.base.config)
    pictures = int((output.prompt.kinds_P > 0).sum())
    assert told == pictures + TEXT_TOKENS and told > output.prompt.length
    found = estimate(config, kind="cpu")
    assert "KV cache" not in found.phases["rollout"] and found.phases["rollout"]


def test_a_recipe_needs_what_its_decisions_need() -> None:
    """Not groups of answers of rollout.max_new_tokens to pictures of the largest size."""
    config = load_embodied(REPO / "configs" / "libero.yaml", [])
    found = estimate(config, processes=8)
    shape = config.rollout_shape
    assert (shape.answers, shape.tokens, shape.classes) == (
        1,
        config.action.chunk * 7,
        config.action.bins,
    )
    assert (
        found.prompt_tokens
        == len(config.vla.cameras) * (-(-config.env.image_size // 28)) ** 2 + TEXT_TOKENS
    )
