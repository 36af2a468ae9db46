"""pi0 and pi0.5 as openpi computes them (recorded by scripts/record_pi0.py), and as policies that act and learn."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mmrl.diagnostics.shapes import config_of
from mmrl.errors import ConfigError
from mmrl.robotics.actions import ActionCodec
from mmrl.robotics.config import load_embodied
from mmrl.robotics.contract import ActionSpace, EnvSpec, Observation, initial_states, make_simulator
from mmrl.robotics.flow_policy import FlowPolicy
from mmrl.robotics.load import load_vla
from mmrl.robotics.pi0 import Pi0, Pi0Shape
from mmrl.robotics.tiny_pi0 import build_tiny_pi0
from scripts import record_pi0 as recorded

SPACE = ActionSpace((-1.0, -1.0), (1.0, 1.0), ("dx", "dy"), None)


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_outputs_and_names_are_openpis(kind: str) -> None:
    from transformers import PaliGemmaConfig

    shape = Pi0Shape(
        chunk_size=recorded.CHUNK,
        max_state_dim=recorded.WIDTH,
        max_action_dim=recorded.WIDTH,
        expert_width=recorded.EXPERT_WIDTH,
        expert_mlp_width=recorded.EXPERT_MLP,
        pi05=kind == "pi05",
        file_prefix="",
    )
    config = PaliGemmaConfig(
        vision_config=recorded.VISION,
        text_config=recorded.TEXT,
        projection_dim=64,
        image_token_index=recorded.VOCAB - 1,
    )
    model = Pi0(shape, config)
    recorded.fill(model.to_files())
    with safe_open(str(recorded.FIXTURE), "pt") as file:
        names = json.loads(file.metadata()["names"])[kind]
        chunk, losses = (file.get_tensor(f"{kind}.{n}") for n in ("chunk", "losses"))
    ours = {n: list(t.shape) for n, t in model.to_files().items()}
    for origin, prefix in (("openpi", ""), ("lerobot", "model.")):
        # output layers of words, which a policy never writes
        theirs = {n: s for n, s in names[origin].items() if "lm_head" not in n}
        assert {prefix + n: s for n, s in ours.items()} == theirs
    x = recorded.inputs()
    with torch.no_grad():
        seen = model.see(x["pixels"], x["ids"], x["words"], x["state"])
        at, steps = x["noise"], recorded.STEPS
        for s in range(steps):
            at = at - model.velocity(seen, at, torch.full((len(at),), 1 - s / steps)) / steps
        t = x["time"][:, None, None]
        noisy = t * x["noise"] + (1 - t) * x["actions"]
        error = x["noise"] - x["actions"] - model.velocity(seen, noisy, x["time"])
        # actions see later ones: with fewer of them they are others
        few = model.velocity(seen, noisy[:, :2], x["time"])
        assert not torch.allclose(few, model.velocity(seen, noisy, x["time"])[:, :2], atol=1e-3)
    torch.testing.assert_close(at, chunk, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(error.square(), losses, atol=1e-4, rtol=1e-4)


def _policy(folder: Path, *overrides: str, chunk: int = 3) -> FlowPolicy:
    settings = ["env.tasks=[reach]", f"action.chunk={chunk}", "vla.proprio=true", *overrides]
    config = load_embodied(None, [f"model.path={folder}", *settings])
    policy = load_vla(config, space=SPACE, proprio=([-1.0, -1.0], [1.0, 1.0]))
    assert isinstance(policy, FlowPolicy)
    return policy


def _observations(count: int) -> list[Observation]:
    simulator = make_simulator(EnvSpec("tiny", "reach", 10, 84))
    found = []
    for state in initial_states("eval", count):
        simulator.reset(state)
        found.append(simulator.observe())
    return found


@pytest.mark.parametrize("pi05", [False, True])
def test_it_acts_trains_and_is_saved(pi05: bool, tmp_path: Path) -> None:
    folder = build_tiny_pi0(tmp_path / "tiny", chunk=5, pi05=pi05)
    policy = _policy(folder, "vla.value_head=true", "vla.flow.noise=learned")
    seen, keys = _observations(3), [(1, n) for n in range(3)]
    outputs = policy.act(seen, keys)
    found = policy.evaluate([o.prompt for o in outputs], [o.decision for o in outputs])
    written = torch.tensor([o.logprobs for o in outputs]).flatten()
    torch.testing.assert_close(found.logp_N.detach(), written, atol=2e-5, rtol=1e-5)
    # five steps are computed, three executed: the others follow the ODE, without noise and log-prob
    chain = outputs[0].decision.chain
    assert chain.shape == (5, 5, 4) and len(outputs[0].logprobs) == 3 * 2
    assert policy.actions(outputs[0]).shape == (3 * 2, 2)
    # neither neighbours nor their number change a decision
    alone = policy.act(seen[2:], keys[2:])[0]
    np.testing.assert_allclose(alone.decision.chain, outputs[2].decision.chain, atol=1e-5)
    (found.logp_N.sum() + found.values_M.sum()).backward()
    assert [n for n, p in policy.trainable() if p.grad is None] == []
    policy.save(tmp_path / "saved")
    again = _policy(tmp_path / "saved", "vla.value_head=true", "vla.flow.noise=learned")
    same = again.act(seen[2:], keys[2:])[0]
    assert np.array_equal(same.decision.chain, alone.decision.chain)
    with pytest.raises(ConfigError, match="chunk_size 5 actions"):
        policy.clone([outputs[0].prompt], [np.zeros(6)], [(0,)])


def test_openpis_folder_is_read(tmp_path: Path) -> None:
    folder = build_tiny_pi0(tmp_path / "own", chunk=3, pi05=True)
    known = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = load_file(str(folder / "model.safetensors"))
    # as its converter writes them: no "model.", no kind, the output layer in the place of the tied embedding
    weights = {n.removeprefix("model."): t for n, t in weights.items()}
    tied = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
    weights["paligemma_with_expert.paligemma.lm_head.weight"] = weights.pop(tied)
    before = _policy(folder).act(_observations(1), [(0,)])[0]
    save_file(weights, str(folder / "model.safetensors"))
    kept = {n: v for n, v in known.items() if n.startswith(("expert_", "paligemma", "action_exp"))}
    theirs = {**kept, "action_dim": 4, "action_horizon": 3, "precision": "float32"}
    (folder / "config.json").write_text(json.dumps(theirs), encoding="utf-8")
    shape = Pi0Shape.read(folder)
    assert shape.pi05 and shape.chunk_size == 3 and not shape.pads_state
    policy = _policy(folder)
    after = policy.act(_observations(1), [(0,)])[0]
    # the state is written without its padding: other words, the same weights
    assert len(after.prompt.ids_P) < len(before.prompt.ids_P)
    policy.save(tmp_path / "saved")
    assert set(load_file(str(tmp_path / "saved" / "model.safetensors"))) == {
        tied,
        *(n for n in weights if "lm_head" not in n),
    }
    (folder / "config.json").write_text(
        json.dumps({**theirs, "paligemma_variant": "gemma_2b_lora"}), encoding="utf-8"
    )
    with pytest.raises(ConfigError, match="LoRA"):
        _policy(folder)


def test_memory_counts_what_transformers_does_not_know(tmp_path: Path) -> None:
    folder = build_tiny_pi0(tmp_path / "tiny")
    count = sum(p.numel() for p in load_file(str(folder / "model.safetensors")).values())
    with pytest.raises(ConfigError, match=f"{count / 1e6:.1f} M parameters"):
        config_of(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="to be a folder with a config"):
        config_of(str(folder))


def test_the_prompt_is_openpis() -> None:
    def text(pi05: bool, pads: bool, state: tuple[float, ...]) -> str:
        model = Pi0.__new__(Pi0)
        torch.nn.Module.__init__(model)
        model.shape = Pi0Shape(pi05=pi05, pads_state=pads, max_state_dim=4)
        return model.text("push_the block\n", state)

    assert text(False, True, (0.5,)) == text(True, True, ()) == "push the block\n"
    # np.digitize(state, linspace(-1, 1, 257)[:-1]) - 1: a half is bin 192 of 256
    assert text(True, False, (0.5, -1.0)) == "Task: push the block, State: 192 0;\nAction: "
    assert text(True, True, (1.0,)) == "Task: push the block, State: 255 128 128 128;\nAction: "


def test_cloning_learns(tmp_path: Path) -> None:
    policy = _policy(build_tiny_pi0(tmp_path, chunk=3))
    prompt = policy.prompt(_observations(1)[0])
    codec: ActionCodec = policy.codec
    target = np.linspace(-0.5, 0.5, codec.tokens)
    optimizer = torch.optim.Adam([p for _, p in policy.trainable()], 2e-3)
    losses = []
    for step in range(40):
        found = policy.clone([prompt] * 8, [target] * 8, [(step, n) for n in range(8)])
        losses.append(float(found.loss_N.mean().detach()))
        optimizer.zero_grad()
        found.loss_N.mean().backward()
        optimizer.step()
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])
