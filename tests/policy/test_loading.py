"""Loading and saving: what is frozen stays frozen, what was saved is what transformers loads, mistakes are named."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.config import LoraSettings, ModelConfig, RunConfig
from mmrl.coords import CoordFrame
from mmrl.distributed.engines import held_back
from mmrl.errors import CheckpointError, ConfigError, DataError, MediaError, MismatchError
from mmrl.operations.versions import TRANSFORMERS
from mmrl.policy import loading
from mmrl.policy.encode import fingerprint
from mmrl.policy.families import families
from mmrl.policy.loading import load_policy
from mmrl.policy.pack import PackItem, pack
from mmrl.policy.policy import Policy
from mmrl.policy.tiny import TinySpec, build_tiny
from mmrl.rollout.prompt_rollouter import PromptRollouter
from mmrl.training.optim import build_optimizer
from mmrl.training.trainer import Trainer
from tests.kits.engine_kit import (
    ARCHITECTURES,
    REPO,
    Album,
    album_data,
    config_file,
    fresh_policy,
    picture,
    sample_with,
    small_run,
    tiny_folder,
    weights_of,
)

pytestmark = pytest.mark.slow  # real models of three architectures are saved and loaded

TASK = Album()


def part_of(name: str) -> str:
    """Which part a parameter belongs to, by the names transformers gives."""
    if "visual" not in name:
        return "language"
    return "projector" if "merger" in name else "vision"


def some_batch(p: Policy) -> Any:
    prompt = p.encoder(sample_with([picture((112, 84)), picture((56, 56))]), TASK)
    return pack([PackItem(prompt, ((5, 6, 7), (80,)))])


def randomize_adapter(p: Policy) -> None:
    """A fresh adapter changes nothing (B = 0): give it values."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in p.trainable():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))


@pytest.mark.parametrize(
    "parts",
    [[], ["vision"], ["projector"], ["language"], ["vision", "projector"], ["vision", "language"]],
)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_frozen_parts_and_only_they_get_no_gradient(arch: str, parts: list[str]) -> None:
    p = fresh_policy(arch, freeze=parts)
    p.logp(some_batch(p)).logp_N.sum().backward()
    parameters = dict(p.model.named_parameters())
    assert {part_of(n) for n in parameters} == {"vision", "projector", "language"}
    without = {part_of(n) for n, q in parameters.items() if q.grad is None}
    assert without == set(parts)
    for name, parameter in parameters.items():
        assert (parameter.grad is None) == (part_of(name) in parts), name
    assert [n for n, _ in p.trainable()] == [n for n in parameters if part_of(n) not in parts]


@pytest.mark.parametrize(
    ("vision", "freeze", "reached"),
    [
        (False, [], {"language"}),
        (True, [], {"language", "vision"}),
        (True, ["vision"], {"language"}),
        (True, ["language"], {"vision"}),
    ],
)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_lora_adapts_what_was_asked(
    arch: str, vision: bool, freeze: list[str], reached: set[str]
) -> None:
    modules = ["q_proj", "v_proj", "qkv", "gate_proj"]
    p = fresh_policy(
        arch, lora=LoraSettings(r=2, vision=vision, target_modules=modules), freeze=freeze
    )
    names = [n for n, _ in p.trainable()]
    assert names and all("lora_" in n for n in names)
    assert {part_of(n) for n in names} == reached
    p.logp(some_batch(p)).logp_N.sum().backward()
    assert all((q.grad is not None) == q.requires_grad for q in p.model.parameters())


def test_lora_starts_equal_to_the_base_and_depends_on_its_seed_only() -> None:
    plain = fresh_policy()
    torch.manual_seed(1)
    first = fresh_policy(lora=LoraSettings(r=4))
    torch.manual_seed(2)
    second, third = (
        fresh_policy(lora=LoraSettings(r=4)),
        fresh_policy(lora=LoraSettings(r=4, seed=9)),
    )
    batch = some_batch(plain)
    assert torch.equal(first.logp(batch).logp_N, plain.logp(batch).logp_N)
    same = [
        torch.equal(a, b)
        for (_, a), (_, b) in zip(first.trainable(), second.trainable(), strict=True)
    ]
    other = [
        torch.equal(a, b)
        for (_, a), (_, b) in zip(first.trainable(), third.trainable(), strict=True)
    ]
    assert all(same) and not all(other)


@pytest.mark.parametrize("lora", [None, LoraSettings(r=4)], ids=["full", "lora"])
def test_reference_is_the_policy_as_loaded(lora: LoraSettings | None) -> None:
    p = fresh_policy(needs_reference=True, lora=lora)
    batch = some_batch(p)
    start = p.logp(batch).logp_N.detach()
    with torch.no_grad():
        for _, parameter in p.trainable():
            parameter.add_(0.05)
    moved = p.logp(batch).logp_N.detach()
    assert (moved - start).abs().max() > 1e-3
    with torch.no_grad(), p.reference() as reference:
        assert torch.equal(reference.logp(batch).logp_N, start)
    assert torch.equal(p.logp(batch).logp_N.detach(), moved), "and back again"


def test_reference_must_be_asked_for_and_survives_errors() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.coef"), fresh_policy().reference():
        pass
    p = fresh_policy(needs_reference=True)
    model = p.model
    with pytest.raises(RuntimeError, match="inside"), p.reference():
        raise RuntimeError("inside")
    assert p.model is model


def _all_logits(model: Any, processor: Any, path: str) -> torch.Tensor:
    text = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "red"}]}],
        add_generation_prompt=True,
        tokenize=False,
    )
    inputs = processor(text=[text], images=[Image.open(path).convert("RGB")], return_tensors="pt")
    with torch.no_grad():
        return model(**inputs).logits


def _digest(model: Any) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(
    "lora",
    [
        None,
        LoraSettings(r=4, vision=True, target_modules=["q_proj", "o_proj", "qkv", "down_proj"]),
        LoraSettings(r=4, target_modules=["q_proj", "down_proj"], quantize="nf4"),
    ],
    ids=["full", "lora", "nf4"],
)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_saved_model_is_what_transformers_loads(
    arch: str, lora: LoraSettings | None, tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    p = fresh_policy(arch, lora=lora)
    with torch.no_grad():
        for _, parameter in p.trainable():
            parameter.add_(0.01 * torch.sin(torch.arange(parameter.numel())).view_as(parameter))
    before, live = _digest(p.model), p.logp(some_batch(p)).logp_N.detach()
    p.save(tmp_path)
    assert _digest(p.model) == before, "saving must not touch the live weights"
    assert torch.equal(p.logp(some_batch(p)).logp_N.detach(), live)
    assert "mmrl" not in (tmp_path / "config.json").read_text(), "loads without mmrl"
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(tmp_path)
    p.model.eval()
    ours = _all_logits(p.model, p.processor, picture((112, 84)))
    theirs = _all_logits(model, processor, picture((112, 84)))
    if lora is None:
        assert torch.equal(ours, theirs)
        assert dict(model.state_dict()).keys() == dict(p.model.state_dict()).keys()
    else:  # x (W + BA) against x W + (x A) B: the same to rounding
        assert (ours - theirs).abs().max() < 1e-4 and (
            ours - theirs
        ).abs().max() < 1e-5 * ours.abs().max()
        assert not any("lora" in n or "base_layer" in n for n, _ in weights_of(tmp_path))
        again = load_policy(
            ModelConfig(path=tiny_folder(arch), device="cpu", lora=lora), weights=tmp_path
        )
        assert torch.equal(again.logp(some_batch(again)).logp_N, live), (
            "continuing an adapter is exact"
        )
    assert model.generation_config.eos_token_id == p.base.generation_config.eos_token_id


@pytest.mark.parametrize(
    ("arch", "frame", "system"),
    [
        ("qwen2_vl", CoordFrame.REL1000, True),
        ("qwen2_5_vl", CoordFrame.ABS_RESIZED, True),
        ("qwen3_vl", CoordFrame.REL1000, False),
    ],
)
def test_templates(arch: str, frame: CoordFrame, system: bool) -> None:
    p = fresh_policy(arch)
    assert (p.template.name, p.template.frame, bool(p.template.system)) == (arch, frame, system)
    text = p.encoder.text(sample_with([picture((56, 56))]), TASK)
    assert ("<|im_start|>system" in text) == system
    other = fresh_policy(arch, frame=CoordFrame.REL1, system="Be brief.", template="qwen3_vl")
    assert (other.template.name, other.template.frame) == ("qwen3_vl", CoordFrame.REL1)
    assert "Be brief." in other.encoder.text(sample_with([]), TASK)
    assert "system" not in fresh_policy(arch, system="").encoder.text(sample_with([]), TASK)


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path.*nowhere"):
        fresh_policy(path=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"'visoin'\. Did you mean 'vision'\?"):
        fresh_policy(freeze=["visoin"])
    with pytest.raises(ConfigError, match="every part"):
        fresh_policy(freeze=["vision", "projector", "language"])
    with pytest.raises(ConfigError, match="lora"):
        fresh_policy(freeze=["language"], lora=LoraSettings())
    bert = tmp_path / "bert"
    bert.mkdir()
    (bert / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ConfigError, match=r"qwen2_5_vl.*'bert'"):
        fresh_policy(path=str(bert))
    with pytest.raises(ConfigError, match=r"'qwen2\.5_vl'\. Did you mean 'qwen2_5_vl'"):
        load_policy(
            ModelConfig.model_construct(
                **{**dict(ModelConfig(path=tiny_folder())), "template": "qwen2.5_vl"}
            )
        )
    with pytest.raises(ConfigError, match="Did you mean 'qwen3_vl'"):
        build_tiny(TinySpec(arch="qwen3vl"))
    assert set(families()) >= set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("asks", "found"),
    [("", "json"), ("<function=name>", "function"), ("<arg_key>name</arg_key>", "arg_key")],
)
def test_the_chat_template_says_how_calls_of_tools_are_spelled(
    asks: str, found: str, tmp_path: Path
) -> None:
    shutil.copytree(tiny_folder("qwen2_5_vl"), tmp_path / "model")
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text(f"{template.read_text()}{{# {asks} #}}")
    assert fresh_policy(path=str(tmp_path / "model")).template.calls == found


@pytest.mark.parametrize("arch", ["qwen2_5_vl", "internvl", "glm4v"])
def test_the_default_adapter_reaches_every_layer_of_a_dense_transformer(arch: str) -> None:
    """GLM-4.1V has one layer for gate_proj and up_proj, which their names do not find."""
    p = fresh_policy(arch, lora=LoraSettings(r=2))
    decoder = p.family.parts.decoder(p.family.body(p.base))
    linear = {
        name.removesuffix(".base_layer")
        for name, module in decoder.named_modules()
        if isinstance(module, torch.nn.Linear) and ".lora_" not in name
    }
    adapted = {name for name, module in decoder.named_modules() if hasattr(module, "lora_A")}
    assert len(linear) >= 12 and linear == adapted


def test_adapters_that_no_layer_takes_are_named(tmp_path: Path) -> None:
    """Of experts where there are none or they are frozen, and of a saved adapter that is of other layers."""
    experts = LoraSettings(r=2, experts=True)
    with pytest.raises(ConfigError, match=r"lora\.experts adapts .*, found none .*qwen2_5_vl; set"):
        fresh_policy(lora=experts)
    with pytest.raises(ConfigError, match=r"lora\.experts .*found model\.freeze = \['language'\]"):
        lora = experts.model_copy(update={"vision": True})
        fresh_policy("glm4v_moe", freeze=["language"], lora=lora)
    with pytest.raises(ConfigError, match=r"none of which peft reaches in glm4v_moe \(not gate, "):
        fresh_policy("glm4v_moe", lora=LoraSettings(target_modules=["gate_proj"]))
    fresh_policy("glm4v_moe", lora=experts).save(tmp_path)
    for update, found in (
        ({"experts": False}, r"other layers: missing none, unknown \['base_model.*experts"),
        ({"target_modules": ["o_proj"]}, "other layers: missing none, unknown"),
        ({"target_modules": ["o_proj", "proj"], "vision": True}, "other layers: missing"),
        ({"r": 4}, r"other shapes; set r, [\s\S]*size mismatch"),
    ):
        lora = experts.model_copy(update=update)
        settings = ModelConfig(path=tiny_folder("glm4v_moe"), device="cpu", lora=lora)
        with pytest.raises(CheckpointError, match=f"expected the adapter that .*one of {found}"):
            load_policy(settings, weights=tmp_path)


@pytest.mark.parametrize("experts", [False, True])
def test_of_glm_peft_takes_no_mlp_for_an_expert(experts: bool) -> None:
    """Its dense layer and shared expert have the names by which older adapters meant experts; its tower, too."""
    lora = LoraSettings(r=2, experts=experts, target_modules=["q_proj", "qkv", "gate_proj"])
    adapted = {n.split(".lora_")[0] for n, _ in fresh_policy("glm4v_moe", lora=lora).trainable()}
    layers = {n.removeprefix("base_model.model.model.") for n in adapted}
    queries = {f"language_model.layers.{n}.self_attn.q_proj" for n in (0, 1)}
    mixture = "language_model.layers.1.mlp.experts"
    assert layers == queries | ({mixture, f"{mixture}.base_layer"} if experts else set())


def test_fingerprint_changes_with_a_pixel_a_position_or_an_id(tmp_path: Path) -> None:
    p = fresh_policy()
    path = tmp_path / "a.png"
    pixels = np.random.default_rng(0).integers(0, 256, (56, 56, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    prompt = p.encoder(sample_with([str(path)]), TASK)
    media = [v.identity for v in prompt.visuals]
    seen = fingerprint(prompt.ids_P, prompt.positions_3P, media)
    assert (
        seen
        == prompt.fingerprint
        == fingerprint(prompt.ids_P.clone(), prompt.positions_3P.clone(), tuple(media))
    )
    ids, positions = prompt.ids_P.clone(), prompt.positions_3P.clone()
    ids[-1] += 1
    positions[2, 5] += 1
    assert fingerprint(ids, prompt.positions_3P, media) != seen
    assert fingerprint(prompt.ids_P, positions, media) != seen
    pixels[10, 10, 1] ^= 1  # one bit of one colour of one pixel
    Image.fromarray(pixels).save(path)
    changed = fresh_policy().encoder(sample_with([str(path)]), TASK)
    assert changed.visuals[0].digest != prompt.visuals[0].digest and changed.fingerprint != seen
    mirrored = p.encoder.visuals.changed(prompt.visuals[0], "mirror")
    assert replace(prompt, visuals=(mirrored,)).fingerprint != seen, (
        "another view of the same pixels is another input"
    )


def test_encoder_recalls_only_the_same_question_of_the_same_task() -> None:
    p = fresh_policy()
    first = sample_with([picture((56, 56))], "red?", 1)
    prompt = p.encoder(first, TASK)
    assert p.encoder(replace(first), TASK) is prompt and p.encoder.hits == 1
    for other in (replace(first, question="blue?"), replace(first, images=(picture((112, 84)),))):
        assert p.encoder(other, TASK) is not prompt, "the same id in another file is another sample"
    assert p.encoder(first, Album()) is not prompt, "another task may ask differently"
    p.encoder._cache_bytes = 3 * prompt.nbytes
    for number in range(9):
        p.encoder(replace(first, id=f"x{number}"), TASK)
        assert (
            p.encoder._used_bytes
            == sum(e[0].nbytes for e in p.encoder._cache.values())
            <= 3 * prompt.nbytes
        )


def test_prompts_are_never_cut() -> None:
    p = fresh_policy(max_prompt_tokens=20)
    with pytest.raises(
        DataError, match=r"at most 20 prompt tokens, found .*of them media.*max_pixels"
    ):
        p.encoder(sample_with([picture((640, 427))]), TASK)

    class Forgetful(Album):
        def messages(self, sample: Any, template: Any) -> list[dict[str, Any]]:
            return [{"role": "user", "content": [{"type": "text", "text": "no picture here"}]}]

    with pytest.raises(
        DataError, match=r"one image item per picture, found 0 items for 1 pictures.*Forgetful"
    ):
        p.encoder(sample_with([picture((56, 56))]), Forgetful())


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("question", "pictures"),
    [("What is <|image_pad|>?", 0), ("What is <|image_pad|>?", 1), ("<|video_pad|>", 1)],
)
def test_media_tokens_in_a_question_are_a_data_error(
    arch: str, question: str, pictures: int
) -> None:
    with pytest.raises(
        DataError, match=r"expected \d times <\|(image|video)_pad\|> in the prompt.*remove it"
    ):
        fresh_policy(arch).encoder(sample_with([picture((56, 56))] * pictures, question), TASK)


@pytest.mark.parametrize("change", ["pixels", "removed"])
def test_a_picture_changed_between_rollout_and_update_is_noticed(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmrl.config import load_config

    paths = []
    for i in range(3):
        paths.append(str(tmp_path / f"{i}.png"))
        Image.open(picture((112, 84), i)).save(paths[-1])
    data = album_data(tmp_path, [[path] for path in paths])
    tree = small_run(
        tmp_path / "runs",
        data,
        data={"prompt_cache_gib": 0},
        train={"steps": 1, "prompts_per_step": 3},
    )
    trainer = Trainer(load_config(config_file(tmp_path / "c.yaml", tree)))
    rollout = PromptRollouter.groups

    def then_change(self: PromptRollouter, step: int) -> Any:
        yield from rollout(self, step)  # the groups are closed; now someone touches the data folder
        for path in paths:
            if change == "removed":
                Path(path).unlink()
            else:
                Image.open(picture((112, 84), 9)).save(path)

    monkeypatch.setattr(PromptRollouter, "groups", then_change)
    expected, message = (
        (MismatchError, "changed during the run")
        if change == "pixels"
        else (MediaError, "found none at")
    )
    with pytest.raises(expected, match=message):
        trainer.fit()
    assert json.loads((tmp_path / "runs" / "run" / "run.json").read_text())["status"] == "failed"


def test_what_is_shared_out_waits_in_host_memory() -> None:
    """On the device are a frozen tower and the buffers; torch and DeepSpeed take the rest there as they share it out."""
    settings = ModelConfig(path=tiny_folder(), freeze=["vision", "projector"])
    config = RunConfig.model_validate({"engine": {"train": "fsdp2"}})
    assert held_back(config, 2) == {"model": "file", "reference": "file"}
    policy = load_policy(
        settings,
        needs_reference=True,
        device=torch.device("meta"),
        hold=held_back(config, 2),
    )
    for model in (policy.model, policy.reference_model):
        assert model is not None
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            moved = ".visual." in name or name in dict(model.named_buffers())
            assert tensor.device.type == ("meta" if moved else "cpu"), name
    optimizer = build_optimizer(policy.trainable(), config.optim, torch.device("cuda"))
    assert all(group["fused"] for group in optimizer.param_groups)
    assert held_back(RunConfig(), 2) == {}


def test_a_frozen_parameter_of_no_module_goes_to_the_device_with_the_tower() -> None:
    """LLaVA's image_newline is the model's own: with a tower on a GPU it stayed on the CPU under the engines that share out."""
    settings = ModelConfig(
        path=tiny_folder("llava_onevision"), frame="rel1", freeze=["vision", "projector"]
    )
    config = RunConfig.model_validate({"engine": {"train": "fsdp2"}})
    policy = load_policy(settings, device=torch.device("meta"), hold=held_back(config, 2))
    where = {
        name: p.device.type
        for name, p in policy.model.named_parameters()
        if "language" not in name and "lm_head" not in name
    }
    assert any(name.endswith("image_newline") for name in where)
    assert set(where.values()) == {"meta"}, where


def test_a_transformers_that_shows_no_features_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """5.17 takes the features of a frozen tower as one more keyword and drops them: a run would learn without pictures."""
    monkeypatch.setattr(loading, "version", lambda name: "5.17.0")
    with pytest.raises(ConfigError, match=r"expected transformers 5\.18 or later, found 5\.17\.0"):
        fresh_policy()


def test_a_forward_that_would_drop_features_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the version says: the argument has to be named."""
    p = fresh_policy()
    monkeypatch.setattr(type(p.body), "forward", lambda self, input_ids=None, **kwargs: None)
    with pytest.raises(ConfigError, match=r"takes a tower's features \(mm_encoder_outputs\)"):
        loading.check_takes_features(p.base)
    (asked,) = re.findall(r'"(transformers>[^"]*)"', (REPO / "pyproject.toml").read_text("utf-8"))
    assert asked == TRANSFORMERS, "pip is asked for one range everywhere"


@pytest.mark.parametrize("arch", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_the_models_take_features(arch: str) -> None:
    """Named, not as one of any keywords, which would be dropped."""
    p = fresh_policy(arch)
    assert "mm_encoder_outputs" in inspect.signature(p.body.forward).parameters
