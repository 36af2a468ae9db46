"""Every family keeps its contract against transformers, and a record that tells something else is found out."""

from __future__ import annotations

import importlib.util
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from mmrl.cli.main import app
from mmrl.config import DataConfig, VideoConfig
from mmrl.coords import CoordFrame
from mmrl.diagnostics.families import check_family, check_names
from mmrl.errors import ConfigError, DataError, MissingExtraError
from mmrl.policy import families as registry
from mmrl.policy.attention import check_attention, choose_attention
from mmrl.policy.attention_layout import PrefixLayout
from mmrl.policy.families import BUILT_IN, families, family_of, family_of_processor
from mmrl.policy.families.gemma import Gemma3
from mmrl.policy.families.qwen import Qwen25VL
from mmrl.policy.families.tiles import InternVL
from mmrl.policy.loading import build_visuals, load_processor
from mmrl.video.encode import write_video
from mmrl.video.pictures import CanvasReader
from mmrl.video.pixels import TileLayout
from tests.kits.engine_kit import fresh_policy, tiny_folder

NAMES = tuple(f.name for f in BUILT_IN)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_family_keeps_its_contract(name: str) -> None:
    """What fails is named with its numbers; what is refused gives the family's own reason."""
    cells = list(check_family(name))
    assert [c.check for c in cells] == list(check_names())
    assert not [c for c in cells if c.verdict == "failed"]
    refused = {c.check: c.found for c in cells if c.verdict == "refused"}
    family = next(f for f in BUILT_IN if f.name == name)
    told = {**family.refused, **({"audio": family.no_audio} if family.no_audio else {})}
    assert (told.pop("pictures", None) is None) == ("3 pictures" in cells[0].found)
    assert refused == told


def test_a_wrong_record_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions, features and expansions of another kind fail the checks that they spoil."""
    true = InternVL.positions
    monkeypatch.setattr(InternVL, "positions", lambda *args: true(*args) * 2)
    (cell,) = check_family("internvl", ["logp"])
    assert cell.verdict == "failed" and "apart" in cell.found
    monkeypatch.undo()
    monkeypatch.setattr(InternVL, "expand", lambda self, processor, visual: "<IMG_CONTEXT>")
    (cell,) = check_family("internvl", ["prompt"])
    assert cell.verdict == "failed" and "token ids" in cell.found


@pytest.mark.parametrize("told", ["pictures_see_themselves", "step_mask", "window"])
def test_gemma_3_needs_what_its_record_tells(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the sight of a picture's tokens of each other, or of windows in decoding or packed rows, other numbers come out."""
    if told == "step_mask":
        monkeypatch.delattr(Gemma3, told)
    elif told == "window":
        true = PrefixLayout.visible
        monkeypatch.setattr(PrefixLayout, "visible", lambda self, window=None: true(self))
    else:
        monkeypatch.setattr(Gemma3, told, False)
    (cell,) = check_family("gemma3", ["rollout" if told == "step_mask" else "logp"])
    assert cell.verdict == "failed" and ("apart" in cell.found or "not [" in cell.found)


def test_gemma_3_refuses_what_cannot_act() -> None:
    """Kernels without its masks, and bounds on pictures of one size."""
    cpu = torch.device("cpu")
    for attn in ("flex", "flash_attention_2"):
        with pytest.raises(ConfigError, match=r"expected model\.attn of sdpa, eager or auto"):
            check_attention(attn, cpu, None, Gemma3())
    gpu = torch.device("cuda")
    assert choose_attention("auto", gpu, torch.bfloat16, Gemma3()) == "sdpa"
    processor = SimpleNamespace(image_processor=SimpleNamespace(size={"height": 896, "width": 896}))
    with pytest.raises(ConfigError, match="resizes every picture to 896 x 896"):
        Gemma3().image_options(processor, None, 1 << 16)


def test_a_package_adds_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entry point loads a record, found by model_type and by the processor's class; a taken name is refused."""

    class Mine(Qwen25VL):
        name = "mine"
        model_types = ("mine",)
        processors = ("MineProcessor",)

    def offered(record: Any) -> None:
        entry = EntryPoint("mine", "somewhere:Mine", registry.GROUP)
        monkeypatch.setattr(type(entry), "load", lambda self: record)
        monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
        families.cache_clear()

    try:
        offered(Mine)
        assert family_of(SimpleNamespace(model_type="mine")).name == "mine"
        assert family_of_processor(type("MineProcessor", (), {})()).name == "mine"
        offered(Qwen25VL)
        with pytest.raises(ConfigError, match="'qwen2_5_vl', which is taken"):
            families()
        offered(dict)
        with pytest.raises(ConfigError, match="expected a ModelFamily"):
            families()
    finally:
        monkeypatch.undo()
        families.cache_clear()


def test_an_unknown_model_and_an_unknown_frame_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the families; a frame is never guessed."""
    with pytest.raises(ConfigError, match=r"internvl.*found 'kimi_k25'"):
        family_of(SimpleNamespace(model_type="kimi_k25"))
    monkeypatch.setattr(InternVL, "frame", None)
    with pytest.raises(ConfigError, match=r"expected model\.frame"):
        fresh_policy("internvl")
    assert fresh_policy("internvl", frame=CoordFrame.REL1).template.frame is CoordFrame.REL1


def test_a_mirrored_picture_of_tiles_is_that_of_the_mirrored_picture() -> None:
    """Tiles change places within their row, and the thumbnail stays behind them."""
    layout = TileLayout(4, 1, 1, per_tile=1)

    def cut(picture_CHW: torch.Tensor) -> torch.Tensor:
        tiles = [picture_CHW[:, r : r + 4, c : c + 4] for r in (0, 4) for c in (0, 4, 8)]
        return torch.stack([*tiles, picture_CHW[:, ::2, ::3]]).flatten(1)

    # so that every second row and third column mirrors onto itself
    picture = torch.rand(3, 8, 4).repeat_interleave(3, 2)
    found = layout.mirrored(cut(picture), (7, 2, 3))
    assert torch.equal(found, cut(picture.flip(2)))


def test_llava_onevision_takes_one_picture_per_prompt() -> None:
    """A second one, in the same question or in a later turn, is refused with the reason; its newline is the projector's."""
    policy = fresh_policy("llava_onevision", frame=CoordFrame.REL1)
    encoder = policy.encoder
    picture = encoder.visuals.frame(np.zeros((40, 60, 3), np.uint8))

    def asked(count: int) -> list[dict[str, Any]]:
        items = [{"type": "image"}] * count + [{"type": "text", "text": "yes or no"}]
        return [{"role": "user", "content": items}]

    with pytest.raises(DataError, match=r"at most 1 picture in a prompt, found 2: .*tiles"):
        encoder.prompt_of(asked(2), [picture, picture])
    first = encoder.prompt_of(asked(1), [picture])
    with pytest.raises(DataError, match="found 2"):
        encoder.extended(first, policy.eos_ids[:1], asked(1), [picture])
    assert encoder.extended(first, policy.eos_ids[:1], asked(0)).length > first.length
    newline = policy.base.model.image_newline
    assert any(p is newline for p in policy.family.parts.vision_parameters(policy.base.model))
    assert policy.family.parts.part_of("model.image_newline") == "projector"


def test_a_mirrored_canvas_is_that_of_the_mirrored_picture() -> None:
    """The whole view stays before the tiles, which change places within their row."""
    processor = fresh_policy("llava_onevision", frame=CoordFrame.REL1).processor
    reader = CanvasReader(processor)
    # its shape is a canvas's: nothing is resized or padded, and the whole view is resized evenly
    side = reader.layout.patch
    picture = torch.randint(0, 256, (3, side, 2 * side), dtype=torch.uint8)
    tiles, grid, shown = reader.read(picture, {})
    assert grid == (3, side, 2 * side) and shown == (2 * side, side)
    wanted, _, _ = reader.read(picture.flip(2), {})
    assert torch.equal(reader.layout.mirrored(tiles, grid), wanted)


def test_idefics_keeps_pictures_within_their_budget() -> None:
    """data.max_pixels says how many tiles the longer side becomes; what cannot act is refused."""
    encoder = fresh_policy("idefics3", frame=CoordFrame.REL1).encoder
    processor, family = encoder.processor, encoder.family
    tile = processor.image_processor.max_image_size["longest_edge"]
    options, (low, high) = family.image_options(processor, None, tile * tile * 9)
    assert (low, high) == (0, tile * tile * 9)
    reader = family.reader(processor)
    _, grid, shown = reader.read(torch.zeros(3, 200, 100, dtype=torch.uint8), options)
    assert grid == (7, 3, 2) and shown == (2 * tile, 3 * tile)
    assert reader.tokens(200, 100, options) == reader.layout.tokens(grid)
    with pytest.raises(ConfigError, match=r"expected no data\.min_pixels"):
        family.image_options(processor, 1000, None)


@pytest.mark.parametrize("name", ["internvl", "glm4v", "smolvlm"])
def test_a_clip_and_a_picture_share_a_batch(name: str, tmp_path: Path) -> None:
    """Both are the pictures' token to these models: packed beside each other they have the numbers that they have alone."""
    write_video(
        tmp_path / "clip.mp4",
        np.random.default_rng(1).integers(0, 256, (4, 48, 48, 3), dtype=np.uint8),
        fps=2,
    )
    policy = fresh_policy(name, frame=CoordFrame.REL1)
    cache = policy.encoder.visuals
    shown = [cache.video(str(tmp_path / "clip.mp4")), cache.frame(np.zeros((60, 60, 3), np.uint8))]
    text = {"type": "text", "text": "yes or no"}
    prompts = [
        policy.encoder.prompt_of([{"role": "user", "content": [{"type": v.kind}, text]}], [v])
        for v in shown
    ]
    for prompt, visual in zip(prompts, shown, strict=True):
        assert int((prompt.kinds_P > 0).sum()) == visual.tokens
    answer = tuple(policy.processor.tokenizer("yes", add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        alone = torch.cat([policy.evaluate([p], [answer]).logp_N for p in prompts])
        both = policy.evaluate(prompts, [answer, answer]).logp_N
        policy.lockstep = True
        joint = policy.evaluate(prompts, [answer, answer]).logp_N
    torch.testing.assert_close(both, alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(joint, alone, atol=1e-5, rtol=0)


def test_contents_that_a_chat_template_drops_are_shown() -> None:
    """SmolVLM's templates show items alone: a content that is a string reaches the prompt as the item that it stands for."""
    encoder = fresh_policy("smolvlm", frame=CoordFrame.REL1).encoder
    tokenizer, picture = encoder.processor.tokenizer, np.zeros((40, 60, 3), np.uint8)
    question = {"type": "text", "text": "yes or no"}
    asked = {
        "role": "user",
        "content": [{"type": "image", "image": Image.fromarray(picture)}, question],
    }
    brief = {"role": "system", "content": "be brief"}
    seen = [brief, {"role": "user", "content": [{"type": "image"}, question]}]
    found = encoder.prompt_of(seen, [encoder.visuals.frame(picture)])
    said = {**brief, "content": [{"type": "text", "text": "be brief"}]}
    wanted = encoder.processor.apply_chat_template(
        [said, asked], add_generation_prompt=True, tokenize=True, return_dict=True
    )
    assert found.ids_P.tolist() == wanted["input_ids"][0]
    assert "System: be brief" in tokenizer.decode(found.ids_P)


def test_smolvlm_says_what_its_processor_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before transformers tells of a package alone: the extra that brings it."""
    path = tiny_folder("smolvlm")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "num2words" else find(name)
    )
    with pytest.raises(MissingExtraError, match=r"num2words for .*family smolvlm.*\[smolvlm\]"):
        load_processor(path)


@pytest.mark.parametrize("name", ["internvl", "smolvlm"])
def test_bounds_on_frames_of_one_size_are_refused(name: str) -> None:
    """Every frame is resized to a square: no bound of data.video can act."""
    processor = fresh_policy(name, frame=CoordFrame.REL1).processor
    video = VideoConfig(max_pixels=1 << 16)
    with pytest.raises(ConfigError, match="resizes every frame to 56 x 56, found max_pixels 65536"):
        build_visuals(processor, DataConfig(video=video))


def test_the_commands_list_and_check() -> None:
    """list names all families with their refusals; check ends with status 0 and refuses an unknown name."""
    run = CliRunner().invoke
    listed = run(app, ["families", "list"]).output
    assert all(name in listed for name in NAMES) and "vLLM has no such model any more" in listed
    found = run(app, ["families", "check", "glm4v", "--only", "prompt"])
    assert found.exit_code == 0 and "ids and pixels equal" in found.output
    assert isinstance(run(app, ["families", "check", "glm5v"]).exception, ConfigError)
