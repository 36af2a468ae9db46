"""SmolVLA as lerobot computes it (recorded by scripts/record_smolvla.py), and as a policy that acts and learns."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from mmrl.errors import CheckpointError, ConfigError
from mmrl.robotics.acting import ActingPolicy
from mmrl.robotics.config import EmbodiedConfig, load_embodied
from mmrl.robotics.contract import ActionSpace, EnvSpec, Observation, initial_states, make_simulator
from mmrl.robotics.flow_policy import FlowPolicy
from mmrl.robotics.learning import _check_entropies
from mmrl.robotics.load import load_vla
from mmrl.robotics.smolvla import SmolVLA, SmolVLAShape
from mmrl.robotics.tiny_smolvla import build_tiny_smolvla
from scripts import record_smolvla as recorded

SPACE = ActionSpace((-1.0, -1.0), (1.0, 1.0), ("dx", "dy"), None)


def test_outputs_and_names_are_lerobots() -> None:
    shape = dataclasses.replace(
        SmolVLAShape(), **{**recorded.SETTINGS, "resize_imgs_with_padding": (64, 64)}
    )
    model = SmolVLA(shape, recorded.vlm_config())
    recorded.fill(model, "model.")
    with safe_open(str(recorded.FIXTURE), "pt") as file:
        names = json.loads(file.metadata()["names"])
        chunk, losses = file.get_tensor("chunk"), file.get_tensor("losses")
    assert {f"model.{n}": list(t.shape) for n, t in model.state_dict().items()} == names
    x = recorded.inputs()
    pixels = torch.nn.functional.pad(x["pictures"] / 255, (0, 0, 16, 0)) * 2 - 1  # black above
    state = torch.nn.functional.pad(x["state"], (0, recorded.STATE - 5))
    with torch.no_grad():
        seen = model.see(pixels, x["ids"], x["words"], state)
        at, steps = x["noise"], recorded.STEPS
        for s in range(steps):
            at = at - model.velocity(seen, at, torch.full((len(at),), 1 - s / steps)) / steps
        t = x["time"][:, None, None]
        noisy = t * x["noise"] + (1 - t) * x["actions"]
        error = x["noise"] - x["actions"] - model.velocity(seen, noisy, x["time"])
    torch.testing.assert_close(at, chunk, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(error.square(), losses, atol=1e-4, rtol=1e-4)
    # later actions are not seen: fewer of them give the same
    few = model.velocity(seen, noisy[:, :2], x["time"])
    torch.testing.assert_close(few, model.velocity(seen, noisy, x["time"])[:, :2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_smolvla(tmp_path_factory.mktemp("smolvla") / "tiny", chunk=3)


def _config(folder: Path, *overrides: str) -> EmbodiedConfig:
    return load_embodied(
        None,
        [
            f"model.path={folder}",
            "env.tasks=[reach]",
            "action.chunk=3",
            "vla.proprio=true",
            *overrides,
        ],
    )


def _policy(folder: Path, *overrides: str) -> ActingPolicy:
    return load_vla(_config(folder, *overrides), space=SPACE, proprio=([-1.0, -1.0], [1.0, 1.0]))


def _observations(count: int) -> list[Observation]:
    simulator = make_simulator(EnvSpec("tiny", "reach", 10, 84))
    found = []
    for state in initial_states("eval", count):
        simulator.reset(state)
        found.append(simulator.observe())
    return found


@pytest.mark.parametrize(
    "noise",
    [(), ("vla.flow.noisy_steps=all",), ("vla.flow.noise=learned", "vla.flow.logprob=mean")],
)
def test_what_acts_is_what_trains(folder: Path, noise: tuple[str, ...]) -> None:
    policy = _policy(folder, "vla.value_head=true", *noise)
    seen, keys = _observations(3), [(1, n) for n in range(3)]
    outputs = policy.act(seen, keys)
    found = policy.evaluate([o.prompt for o in outputs], [o.decision for o in outputs])
    written = torch.tensor([o.logprobs for o in outputs]).flatten()
    torch.testing.assert_close(found.logp_N.detach(), written, atol=2e-5, rtol=1e-5)
    assert found.values_M.numel() == 3
    # neither neighbours nor their number change a decision
    alone = policy.act(seen[2:], keys[2:])[0]
    np.testing.assert_allclose(alone.decision.chain, outputs[2].decision.chain, atol=1e-5)
    # an action of two numbers: padding has no log-prob and moves nothing by chance
    assert policy.actions(alone).shape == (6, 2)
    assert len(alone.logprobs) == policy.tokens_per_decision == 6
    greedy = policy.act(seen, keys, greedy=True)
    assert all(o.decision.noisy == () and not any(o.logprobs) for o in greedy)


def test_a_step_along_the_gradient_makes_a_decision_likelier(folder: Path) -> None:
    policy = _policy(folder, "vla.flow.noisy_steps=all")
    outputs = policy.act(_observations(2), [(0, 0), (0, 1)])

    def total() -> torch.Tensor:
        return policy.evaluate(
            [o.prompt for o in outputs], [o.decision for o in outputs]
        ).logp_N.sum()

    before = total()
    before.backward()
    missing = [n for n, p in policy.trainable() if p.grad is None]
    assert missing == []
    with torch.no_grad():
        norm2 = sum(
            float(p.grad.square().sum()) for _, p in policy.trainable() if p.grad is not None
        )
        for _, p in policy.trainable():
            assert p.grad is not None
            p.add_(p.grad, alpha=1e-2 / norm2)
    # first order: the gain is the step's length times the gradient's norm
    assert float((total() - before).detach()) == pytest.approx(1e-2, rel=0.1)


def test_a_saved_policy_acts_the_same(folder: Path, tmp_path: Path) -> None:
    policy = _policy(folder, "vla.flow.noise=learned")
    policy.save(tmp_path)
    again = load_vla(_config(tmp_path, "vla.flow.noise=learned"))
    assert isinstance(again, FlowPolicy)
    seen = _observations(1)
    first, second = (p.act(seen, [(5,)])[0] for p in (policy, again))
    assert np.array_equal(first.decision.chain, second.decision.chain)
    assert first.logprobs == second.logprobs


def test_what_a_flow_cannot_do_is_refused(folder: Path, tmp_path: Path) -> None:
    for override, words in (
        ("rollout.temperature=1.5", "vla.flow.noise_level"),
        ("engine.train=fsdp2", "use ddp"),
        ("vla.flow.denoising_steps=0", "denoising_steps"),
        ("action.chunk=9", "chunk_size 3"),
    ):
        with pytest.raises(ConfigError, match=words):
            _policy(folder, override)
    with pytest.raises(ConfigError, match="has none"):
        load_vla(load_embodied(None, ["model.path=assets/tiny_vla", "vla.flow.denoising_steps=3"]))
    other = build_tiny_smolvla(tmp_path / "other", chunk=3)
    known = json.loads((other / "config.json").read_text(encoding="utf-8"))
    (other / "config.json").write_text(json.dumps({**known, "num_vlm_layers": 3}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="unknown"):
        _policy(other)
    (other / "config.json").write_text(
        json.dumps({**known, "attention_mode": "self_attn"}), encoding="utf-8"
    )
    with pytest.raises(ConfigError, match="attention_mode cross_attn"):
        _policy(other)


def test_the_entropy_of_noise_chooses_no_decisions(folder: Path) -> None:
    """algorithm.turns.keep_entropy: with Flow-SDE each decision's entropy is that of its schedule, whatever was seen."""
    choice = "algorithm.turns.keep_entropy=0.8"
    policy = _policy(folder)
    with pytest.raises(ConfigError, match=r"noise of their steps.*vla\.flow\.noise: learned"):
        _check_entropies(_config(folder, choice), policy)
    _check_entropies(_config(folder), policy)
    _check_entropies(_config(folder, choice, "vla.flow.noise=learned"), policy)
