"""The VLA policy: what it chose is what training evaluates, chunks are decoded together, checkpoints act alike."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.errors import CheckpointError, ConfigError, DataError
from mmrl.robotics.actions import ActionStatistics
from mmrl.robotics.contract import EnvSpec, Observation, make_simulator
from mmrl.robotics.load import load_vla
from mmrl.rollout.slots import SlotCache
from tests.kits.robot_kit import config_of, make_model, make_vla, observations


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("decode", ["parallel", "autoregressive"])
def test_behaviour_log_probs_are_those_of_training(model: Path, decode: str) -> None:
    vla = make_vla(model, f"vla.decode={decode}", "vla.value_head=true")
    seen = observations(3)
    choices = vla.act(seen, [(1, i) for i in range(3)], temperature=0.7)
    out = vla.evaluate([c.prompt for c in choices], [c.tokens for c in choices], 0.7)
    assert torch.allclose(
        out.logp_N, torch.tensor([x for c in choices for x in c.logprobs]), atol=1e-5
    )
    assert torch.allclose(
        out.values_M, torch.tensor([v for c in choices for v in c.values_V]), atol=1e-6
    )
    assert (out.entropy_N > 0).all() and (out.entropy_N <= np.log(9) + 1e-5).all()
    assert all(0 <= t < 9 for c in choices for t in c.tokens) and len(choices[0].tokens) == 2 * 2


@pytest.mark.parametrize("decode", ["parallel", "autoregressive"])
def test_a_choice_depends_on_its_own_noise_alone(model: Path, decode: str) -> None:
    vla = make_vla(model, f"vla.decode={decode}")
    seen = observations(4)
    together = vla.act(seen, [(7, i) for i in range(4)])
    alone = [vla.act([o], [(7, i)])[0] for i, o in enumerate(seen)]
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    same = vla.act([seen[0]] * 8, [(9, i) for i in range(8)])
    assert len({c.tokens for c in same}) > 1  # equal pictures, other noise
    greedy = vla.act([seen[0]] * 2, [(1,), (2,)], greedy=True)
    assert greedy[0].tokens == greedy[1].tokens


def test_the_kv_cache_of_a_written_chunk_is_bounded(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rollout.batch_tokens, also of the copy that acts while this policy's weights are sharded; choices do not depend on it."""
    seen, keys = observations(3), [(7, i) for i in range(3)]
    free = make_vla(model, "vla.decode=autoregressive").act(seen, keys)
    bounded = make_vla(model, "vla.decode=autoregressive", "rollout.batch_tokens=1")
    held: list[int] = []
    init = SlotCache.__init__

    def counted(cache: Any, size: int, width: int, device: Any) -> None:
        held.append(size)
        init(cache, size, width, device)

    monkeypatch.setattr(SlotCache, "__init__", counted)
    for vla in (bounded, bounded.full_replica()):
        assert [c.tokens for c in vla.act(seen, keys)] == [c.tokens for c in free]
    assert held and set(held) == {1}


@pytest.mark.parametrize("decode", ["parallel", "autoregressive"])
def test_a_copy_that_acts_stores_products_in_bf16_and_chooses_the_same(
    model: Path, decode: str
) -> None:
    """The head that values what was seen stays fp32."""
    vla = make_vla(model, f"vla.decode={decode}", "model.dtype=bf16")
    seen, keys = observations(3), [(7, i) for i in range(3)]
    copy = vla.full_replica(stored="products")
    expected = vla.act(seen, keys)
    for mine, theirs in zip(copy.act(seen, keys), expected, strict=True):
        assert mine.tokens == theirs.tokens and mine.logprobs == theirs.logprobs
        assert mine.values_V == theirs.values_V
    sizes = [sum(p.nbytes for p in v.model.parameters()) for v in (copy, vla)]
    assert sizes[0] < 0.8 * sizes[1]
    assert all(p.dtype == torch.float32 for h in copy.heads.values() for p in h.parameters())


@pytest.mark.parametrize("decode", ["parallel", "autoregressive"])
def test_equal_prompts_share_their_forward_pass_without_changing_it(
    model: Path, decode: str
) -> None:
    vla = make_vla(model, f"vla.decode={decode}")
    a, b = (vla.prompt(o) for o in observations(2))
    tokens = np.random.default_rng(0).integers(0, 9, (5, 4)).tolist()
    prompts = [a, b, a, a, b]
    shared = vla.evaluate(prompts, tokens)
    single = torch.cat(
        [vla.evaluate([p], [t]).logp_N for p, t in zip(prompts, tokens, strict=True)]
    )
    assert torch.allclose(shared.logp_N, single, atol=1e-5)
    shared.logp_N.sum().backward()
    gradient = {n: p.grad.clone() for n, p in vla.trainable() if p.grad is not None}
    for _, p in vla.trainable():
        p.grad = None
    single.sum().backward()
    for name, p in vla.trainable():
        if p.grad is not None:
            assert torch.allclose(p.grad, gradient[name], atol=1e-4, rtol=1e-3), name


def test_a_parallel_chunk_looks_both_ways_and_an_autoregressive_one_back_only(model: Path) -> None:
    """The distribution of the first action: of a parallel chunk it depends on later queries, of a written one on nothing after."""
    vla = make_vla(model)
    prompt = vla.prompt(observations(1)[0])
    before = vla.evaluate([prompt], [(0, 0, 0, 0)]).logp_N[0].item()
    vla.query_ids = (*vla.query_ids[:3], vla.query_ids[0])  # another last query
    assert abs(vla.evaluate([prompt], [(0, 0, 0, 0)]).logp_N[0].item() - before) > 1e-6
    written = make_vla(model, "vla.decode=autoregressive")
    first = [written.evaluate([prompt], [(0, 0, 0, last)]).logp_N for last in (0, 8)]
    assert torch.equal(first[0][:3], first[1][:3])


def test_a_frame_is_the_picture_a_file_would_be(model: Path, tmp_path: Path) -> None:
    vla = make_vla(model)
    visuals = vla.core.encoder.visuals
    # resized by the processor
    rgb = np.random.default_rng(0).integers(0, 256, (48, 40, 3), dtype=np.uint8)
    Image.fromarray(rgb).save(tmp_path / "a.png")
    frame, file = visuals.frame(rgb), visuals.image(str(tmp_path / "a.png"))
    assert frame.grid_thw == file.grid_thw and frame.identity == file.identity
    assert torch.equal(visuals.pixels(frame), visuals.pixels(file))
    assert visuals.frame(rgb.copy()) == frame and visuals.frame(255 - rgb) != frame


def test_wrist_camera_and_proprioception_enter_the_prompt(model: Path) -> None:
    vla = make_vla(
        model, "env.cameras=[base, wrist]", "vla.cameras=[base, wrist]", "vla.proprio=true"
    )
    seen = observations(1, cameras=("base", "wrist"))[0]
    prompt = vla.prompt(seen)
    assert len(prompt.visuals) == 2
    moved = vla.prompt(dataclasses.replace(seen, proprio=np.array([1.0, -1.0], np.float32)))
    changed = (moved.ids_P != prompt.ids_P).nonzero()[:, 0]
    assert moved.fingerprint != prompt.fingerprint and 1 <= len(changed) <= 2
    assert moved.ids_P[changed].tolist()[0] == int(vla.action_ids[8])  # the highest bin
    with pytest.raises(ConfigError, match="expected pictures of cameras base, wrist, found base"):
        vla.prompt(Observation({"base": seen.images["base"]}, seen.proprio, seen.instruction))
    with pytest.raises(ConfigError, match="expected 2 proprioception values, found 3"):
        vla.prompt(dataclasses.replace(seen, proprio=np.zeros(3, np.float32)))


@pytest.mark.parametrize("decode", ["parallel", "autoregressive"])
def test_a_saved_policy_acts_alike(model: Path, tmp_path: Path, decode: str) -> None:
    vla = make_vla(model, f"vla.decode={decode}", "vla.value_head=true", "vla.proprio=true")
    torch.nn.init.normal_(vla.value_head[2].weight)  # type: ignore[index]
    vla.save(tmp_path / "saved")
    again = load_vla(
        config_of(
            tmp_path / "saved", "vla.value_head=true", f"vla.decode={decode}", "vla.proprio=true"
        )
    )
    seen = observations(2)
    keys = [(3, 1), (3, 2)]
    for one, other in zip(vla.act(seen, keys), again.act(seen, keys), strict=True):
        assert one.tokens == other.tokens and one.values_V == pytest.approx(
            other.values_V, abs=1e-6
        )
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-6)
    assert json.loads((tmp_path / "saved" / "vla.json").read_text())["action"]["bins"] == 9


@pytest.mark.parametrize("arch", ["qwen2_vl", "qwen3_vl"])
def test_other_qwen_families_act_too(tmp_path: Path, arch: str) -> None:
    vla = make_vla(make_model(tmp_path / arch, arch))
    choices = vla.act(observations(2), [(1,), (2,)])
    out = vla.evaluate([c.prompt for c in choices], [c.tokens for c in choices])
    assert torch.allclose(
        out.logp_N, torch.tensor([x for c in choices for x in c.logprobs]), atol=1e-5
    )


def test_lora_trains_adapters_and_action_logits_follow(model: Path, tmp_path: Path) -> None:
    make_vla(model).save(tmp_path / "full")
    config = config_of(tmp_path / "full", "model.lora={r: 4, target_modules: [q_proj, v_proj]}")
    vla = load_vla(config)
    assert vla.trainable() and all("lora" in name for name, _ in vla.trainable())
    choice = vla.act(observations(1), [(1,)])[0]
    vla.evaluate([choice.prompt], [choice.tokens]).logp_N.sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for _, p in vla.trainable())


def untied(model: Path, folder: Path) -> Path:
    """The model with an output layer of its own."""
    # after mmrl, which fixes torchvision
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    config = AutoConfig.from_pretrained(model)
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_pretrained(model, config=config).save_pretrained(folder)
    AutoProcessor.from_pretrained(model).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("decode", ["parallel", "autoregressive"])
def test_lora_trains_the_rows_of_new_action_tokens_and_saves_them(
    model: Path, tmp_path: Path, tied: bool, decode: str
) -> None:
    """Rows of action and query tokens change, no other; the merged folder and base + adapter both act like the live policy."""
    base = model if tied else untied(model, tmp_path / "untied")
    # one pairing with a base in 4 bits
    quantize = ", quantize: nf4" if tied == (decode == "parallel") else ""
    lora = (
        f"model.lora={{r: 4, target_modules: [q_proj, v_proj]{quantize}}}",
        f"vla.decode={decode}",
    )
    vla = make_vla(base, *lora)
    layers = vla.core.base.get_input_embeddings(), vla.core.base.lm_head
    before = [layer.weight.detach().clone() for layer in layers]
    assert torch.equal(*before) == tied
    rows = [n for n, _ in vla.trainable() if "lora_" not in n]
    assert len(rows) == (1 if tied else 2) and all("trainable_tokens_delta" in n for n in rows)
    optimizer = torch.optim.AdamW([p for _, p in vla.trainable()], lr=1e-2)
    prompts = [vla.prompt(o) for o in observations(4)]
    targets = [(1, 2, 3, 4), (8, 7, 6, 5), (0, 0, 8, 8), (4, 4, 4, 4)]
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = -vla.evaluate(prompts, targets).logp_N.mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    vocabulary = vla.core.processor.tokenizer.get_vocab()
    new = torch.tensor([i for t, i in vocabulary.items() if t.startswith("<|action_")])
    changed = [(layer.weight != old).any(1) for layer, old in zip(layers, before, strict=True)]
    for touched in changed:
        assert not touched.index_fill(0, new, False).any()
    assert changed[1][vla.action_ids].all()
    live = {n: p.detach().clone() for n, p in vla.core.model.named_parameters()}
    vla.save(tmp_path / "saved")
    assert all(torch.equal(p, live[n]) for n, p in vla.core.model.named_parameters()), (
        "saving leaves the live policy as it was"
    )
    seen, keys = observations(3), [(5, i) for i in range(3)]
    merged = load_vla(config_of(tmp_path / "saved"))
    assert not merged.core.has_adapter and merged.core.base.config.tie_word_embeddings == tied
    simulator = make_simulator(EnvSpec("tiny", "reach", 12))
    resumed = load_vla(
        config_of(base, *lora), space=simulator.action_space, weights=tmp_path / "saved"
    )
    for other in (merged, resumed):
        for one, two in zip(vla.act(seen, keys), other.act(seen, keys), strict=True):
            assert one.tokens == two.tokens and one.logprobs == pytest.approx(
                two.logprobs, abs=1e-4
            )
    # its tokens are known: the adapter alone is trained
    again = load_vla(config_of(tmp_path / "saved", *lora))
    assert all("lora_" in n for n, _ in again.trainable())
    size = sum(f.stat().st_size for f in (tmp_path / "saved" / "adapter").glob("*.safetensors"))
    assert size < before[0].numel() * 4, "the adapter holds the new rows, not the whole table"


def test_what_a_checkpoint_was_made_with_holds_where_the_configuration_says_nothing(
    model: Path, tmp_path: Path
) -> None:
    """Bounds from statistics, the gripper's convention and the critic's width: a contradiction is named, silence agrees."""
    seen = np.random.default_rng(0).uniform(-0.5, 0.7, (200, 3))
    ActionStatistics.of(seen, mask=(True, True, False)).write(tmp_path / "made.json", "demos")
    ActionStatistics.of(2 * seen, mask=(True, True, False)).write(tmp_path / "other.json", "demos")
    pick = ("env.tasks=[pick]", "env.options={}")
    space = make_simulator(EnvSpec("tiny", "pick", 12)).action_space
    made = (
        f"action.statistics={tmp_path / 'made.json'}",
        "action.gripper=binary_sign",
        "vla.value_head=true",
        "vla.value_hidden=32",
    )
    load_vla(config_of(model, *pick, *made), space=space).save(tmp_path / "saved")
    for silent in (made, ()):
        again = load_vla(config_of(tmp_path / "saved", *pick, *silent))
        assert again.codec.low == tuple(np.quantile(seen, 0.01, axis=0)) and again.codec.mask == (
            True,
            True,
            False,
        )
        assert again.codec.gripper_convention == "binary_sign"
        assert again.value_head is not None and again.value_head[0].weight.shape[0] == 32
    for asked, words in (
        (
            f"action.statistics={tmp_path / 'other.json'}",
            r"action bounds low \[.*\] \(vla\.json\).*asks for \[",
        ),
        (
            "action.gripper=raw",
            r"gripper 'binary_sign' \(vla\.json\), the configuration asks for 'raw': rem",
        ),
        ("vla.value_hidden=64", r"value_hidden 32 \(vla\.json\), the configuration asks for 64"),
    ):
        with pytest.raises(ConfigError, match=rf"was made with {words}"):
            load_vla(config_of(tmp_path / "saved", *pick, asked))
    nowhere = config_of(tmp_path / "saved", *pick, f"action.statistics={tmp_path / 'gone.json'}")
    with pytest.raises(DataError, match=r"expected a dataset_statistics\.json"):
        load_vla(nowhere)
    # a policy that only acts has its numbers in vla.json
    assert load_vla(nowhere, trainable=False).codec == again.codec
    make_vla(model).save(tmp_path / "plain")
    # made without a critic
    wide = load_vla(config_of(tmp_path / "plain", "vla.value_head=true", "vla.value_hidden=48"))
    assert wide.value_head is not None and wide.value_head[0].weight.shape[0] == 48


def test_mistakes_are_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"expected a VLA checkpoint \(a folder with vla.json\) as model.path.*mmrl sft",
    ):
        load_vla(config_of(model))
    make_vla(model).save(tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"was made with chunk 2 \(vla.json\).*asks for 3"):
        load_vla(config_of(tmp_path / "saved", "action.chunk=3"))
    (tmp_path / "saved" / "vla.json").write_text("{")
    with pytest.raises(CheckpointError, match="expected the action settings of a VLA checkpoint"):
        load_vla(config_of(tmp_path / "saved"))
    with pytest.raises(
        ConfigError,
        match=r"algorithm\.contrast means nothing to an embodied run: there is no changed view",
    ):
        config_of(model, "algorithm.contrast.kind=shuffle")
    with pytest.raises(
        ConfigError, match=r"rl\.success at_end needs episodes that go on after a success"
    ):
        config_of(model, "rl.success=at_end")
    with pytest.raises(ConfigError, match=r"vla\.cameras needs wrist"):
        config_of(model, "vla.cameras=[base, wrist]")
    with pytest.raises(ConfigError, match="needs a critic"):
        config_of(model, "algorithm.advantage=gae")
    with pytest.raises(ConfigError, match=r"unknown key 'env.horizn'.*horizon"):
        config_of(model, "env.horizn=3")
