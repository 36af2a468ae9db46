"""OpenVLA-OFT as its own code computes it (recorded by scripts/record_openvla_oft.py)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mmrl.errors import ConfigError
from mmrl.robotics.actions import ActionCodec
from mmrl.robotics.config import load_embodied
from mmrl.robotics.contract import ActionSpace, EnvSpec, Observation, initial_states, make_simulator
from mmrl.robotics.load import load_vla
from mmrl.robotics.oft import OFTShape, OpenVLAOFT, TowerShape
from mmrl.robotics.oft_policy import OFTPolicy
from mmrl.robotics.tiny_oft import build_tiny_oft
from scripts import record_openvla_oft as recorded


def _model(proprio: bool) -> OpenVLAOFT:
    towers = tuple(TowerShape(**t, side=recorded.SIDE) for t in recorded.TOWERS)
    text = {**recorded.TEXT, "pad_token_id": 32000}
    shape = OFTShape((towers[0], towers[1]), text, proprio_dim=recorded.PROPRIO if proprio else 0)
    model = OpenVLAOFT(shape)
    recorded.fill(dict(model.named_parameters()))
    return model


def test_outputs_names_and_actions_are_the_originals() -> None:
    x = recorded.inputs()
    words = torch.ones_like(x["ids"])
    statistics = recorded.STATISTICS
    codec = ActionCodec(
        statistics["q01"],  # type: ignore[arg-type]
        statistics["q99"],  # type: ignore[arg-type]
        bins=256,
        chunk=recorded.CHUNK,
        layout="openvla",
        mask=statistics["mask"],  # type: ignore[arg-type]
    )
    with safe_open(str(recorded.FIXTURE), "pt") as file:
        names = json.loads(file.metadata()["names"])
        for kind, cameras, proprio in (("both", 2, True), ("one", 1, False)):
            model = _model(proprio)
            state = x["proprio"][None] if proprio else None
            with torch.no_grad():
                hidden = model(
                    x["pixels"][:, :cameras], x["ids"], words, recorded.CHUNK * recorded.DIM, state
                )
                logits = model.logits(hidden)
            for ours, theirs in ((hidden, "hidden"), (logits.flip(-1), "logits")):
                want = file.get_tensor(f"{kind}.{theirs}")
                torch.testing.assert_close(ours, want, atol=1e-4, rtol=1e-4)
            bins = logits.argmax(-1)[0].view(recorded.CHUNK, recorded.DIM).numpy()
            actions = codec.decode(bins, executed=False)
            np.testing.assert_allclose(actions, file.get_tensor(f"{kind}.actions"), atol=1e-6)
    # a checkpoint's names are ours, but for what no output depends on
    model = _model(False)
    kept = model.from_files({n: torch.zeros(s) for n, s in names.items()})
    assert {n: list(t.shape) for n, t in kept.items()} == {
        n: list(t.shape) for n, t in model.state_dict().items()
    }


def test_a_shorter_prompt_beside_a_longer_one_changes_nothing() -> None:
    model, x = _model(True), recorded.inputs()
    ids = torch.cat((x["ids"], x["ids"]))
    words = torch.ones_like(ids)
    words[1, 5:] = 0
    pixels, state = x["pixels"].expand(2, -1, -1, -1, -1), x["proprio"].expand(2, -1)
    with torch.no_grad():
        both = model(pixels, ids, words, 6, state)
        alone = model(pixels[1:], ids[1:, :5], words[1:, :5], 6, state[1:])
    torch.testing.assert_close(both[1:], alone, atol=1e-5, rtol=1e-5)


SPACE = ActionSpace((-1.0, -1.0), (1.0, 1.0), ("dx", "dy"), None)


def _policy(folder: Path, *overrides: str) -> OFTPolicy:
    settings = ["env.tasks=[reach]", "action.chunk=3", "vla.proprio=true", *overrides]
    config = load_embodied(None, [f"model.path={folder}", *settings])
    policy = load_vla(config, space=SPACE, proprio=([-1.0, -1.0], [1.0, 1.0]))
    assert isinstance(policy, OFTPolicy)
    return policy


def _observations(count: int) -> list[Observation]:
    simulator = make_simulator(EnvSpec("tiny", "reach", 10, 84))
    found = []
    for state in initial_states("eval", count):
        simulator.reset(state)
        found.append(simulator.observe())
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_oft(tmp_path_factory.mktemp("oft") / "tiny", proprio=2)


def test_what_acts_is_what_trains_and_is_saved(folder: Path, tmp_path: Path) -> None:
    policy = _policy(folder, "vla.value_head=true")
    assert policy.codec.bins == 256 and policy.codec.layout == "openvla"
    seen, keys = _observations(3), [(1, n) for n in range(3)]
    outputs = policy.act(seen, keys, temperature=1.6)
    found = policy.evaluate([o.prompt for o in outputs], [o.tokens for o in outputs], 1.6)
    written = torch.tensor([o.logprobs for o in outputs]).flatten()
    torch.testing.assert_close(found.logp_N.detach(), written, atol=2e-5, rtol=1e-5)
    # neither neighbours nor their number change a decision
    alone = policy.act(seen[2:], keys[2:], temperature=1.6)[0]
    assert alone.tokens == outputs[2].tokens and policy.actions(alone).shape == (6, 2)
    (found.logp_N.sum() + found.values_M.sum()).backward()
    assert [n for n, p in policy.trainable() if p.grad is None] == []
    policy.save(tmp_path)
    again = _policy(tmp_path, "vla.value_head=true").act(seen[2:], keys[2:], temperature=1.6)[0]
    assert again.tokens == alone.tokens and again.logprobs == alone.logprobs


def test_cloning_learns(folder: Path) -> None:
    policy = _policy(folder)
    prompts = [policy.prompt(o) for o in _observations(2)]
    targets = [np.full(6, 40), np.full(6, 200)]
    optimizer = torch.optim.Adam([p for _, p in policy.trainable()], 1e-3)
    for _ in range(150):
        found = policy.clone(prompts, targets, [(0,), (1,)])
        if found.sure_N.all():
            break
        optimizer.zero_grad()
        found.loss_N.mean().backward()
        optimizer.step()
    assert found.sure_N.all()
    assert [o.tokens[0] for o in policy.act(_observations(2), [(0,), (1,)], greedy=True)] == [
        40,
        200,
    ]


def test_what_cannot_be_is_refused(folder: Path, tmp_path: Path) -> None:
    for override, words in (
        ("vla.decode=autoregressive", "openvla_server"),
        ("action.bins=33", "action.bins 256"),
        ("vla.proprio=false", "trained with 2 proprioception values"),
        ("engine.train=fsdp2", "use ddp"),
        ("vla.flow.denoising_steps=3", "has none"),
    ):
        with pytest.raises(ConfigError, match=words):
            _policy(folder, override)
    # a checkpoint as its authors write it: the projector in a file of its own, a tower's last block, which nothing reads
    other = build_tiny_oft(tmp_path / "other", proprio=2)
    file = other / "model.safetensors"
    weights = load_file(str(file))
    projector = {
        n.replace("proprio_projector.", "module."): weights.pop(n)
        for n in list(weights)
        if n.startswith("proprio_projector.")
    }
    torch.save(projector, other / "proprio_projector--1000_checkpoint.pt")
    weights["vision_backbone.featurizer.blocks.2.norm1.weight"] = torch.ones(64)
    save_file(weights, str(file))
    seen = _observations(1)
    ours, theirs = (_policy(f).act(seen, [(0,)], greedy=True)[0] for f in (folder, other))
    assert ours.tokens == theirs.tokens
    torch.save({"weight": torch.ones(1)}, other / "action_head--1000_checkpoint.pt")
    with pytest.raises(ConfigError, match="L1 head"):
        _policy(other)
