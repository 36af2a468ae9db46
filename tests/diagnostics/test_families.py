"""Every family keeps its contract against transformers, and a record that tells something else is found out."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.modeling_outputs import BaseModelOutputWithPooling
from typer.testing import CliRunner

from mmrl.cli.main import app
from mmrl.config import DataConfig, VideoConfig
from mmrl.coords import CoordFrame
from mmrl.diagnostics._family_subject import Subject
from mmrl.diagnostics.families import check_family, check_names
from mmrl.distributed.engines.root import Root
from mmrl.errors import ConfigError, DataError, MismatchError, MissingExtraError
from mmrl.policy import families as registry
from mmrl.policy import policy as policy_module
from mmrl.policy.attention import check_attention, choose_attention
from mmrl.policy.attention_layout import PrefixLayout
from mmrl.policy.families import (
    all_variants,
    contract,
    families,
    family_and_text,
    family_of,
    family_of_processor,
)
from mmrl.policy.families.gemma import Gemma3
from mmrl.policy.families.glm import Glm4VMoe
from mmrl.policy.families.kimi import KimiK25
from mmrl.policy.families.minicpm import MiniCPMV46
from mmrl.policy.families.qwen import Qwen25VL
from mmrl.policy.families.tiles import InternVL
from mmrl.policy.loading import build_visuals, load_processor
from mmrl.policy.policy import Policy
from mmrl.video.decode import read_clip
from mmrl.video.encode import write_video
from mmrl.video.pictures import CanvasReader, PaddedReader, fitted
from mmrl.video.pixels import TileLayout
from mmrl.video.references import Change, VideoSettings, Visual
from tests.kits.engine_kit import fresh_policy, tiny_folder

NAMES = tuple(all_variants())
_TEXTS = ("yes", "the red circle left of the blue square")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_family_keeps_its_contract(name: str) -> None:
    """What fails is named with its numbers; what is refused gives the family's own reason."""
    family, _ = family_and_text(name)
    # an engine of vLLM per family takes half a minute, and two processes as long: tests/rollout/test_vllm*.py and
    # test_family_sharded.py ask each of them more than the checks do, without starting anew for each
    asked = [c for c in check_names() if c != "sharded" and (c != "vllm" or not family.vllm)]
    cells = list(check_family(name, asked))
    assert [c.check for c in cells] == asked
    assert not [c for c in cells if c.verdict == "failed"]
    refused = {c.check: c.found for c in cells if c.verdict == "refused"}
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


def _left_out(**wrong: Any) -> Any:
    """A record of GLM-4.5V that says something else."""
    return lambda patch: [patch.setattr(Glm4VMoe, name, value) for name, value in wrong.items()]


def _rounded(patch: pytest.MonkeyPatch) -> None:
    """A merge that rounds."""
    true = policy_module._merged_state
    patch.setattr(
        policy_module,
        "_merged_state",
        lambda base: {n: t.bfloat16().to(t.dtype) for n, t in true(base).items()},
    )


def _all_moved(patch: pytest.MonkeyPatch) -> None:
    """A step that changes frozen weights, too."""
    true = Subject.descend

    def descend(self: Subject, policy: Policy, rate: float) -> None:
        true(self, policy, rate)
        with torch.no_grad():
            for _, parameter in policy.named_parameters():
                parameter.mul_(1 if parameter.requires_grad else 1 + rate)

    patch.setattr(Subject, "descend", descend)


def _one_late(patch: pytest.MonkeyPatch) -> None:
    """Values of the tokens behind."""
    true = Policy._values
    patch.setattr(
        Policy, "_values", lambda self, hidden, *rest: true(self, hidden.roll(-1, 0), *rest)
    )


@pytest.mark.parametrize(
    ("check", "spoil", "said"),
    [
        ("lora", _left_out(experts=("mlp.experts.down_proj",)), "adapted experts: "),
        ("lora", _left_out(experts=()), "routers without experts"),
        ("lora", _rounded, "peft's own merge: other numbers"),
        ("freeze", _all_moved, "vision frozen: a step has changed weights of"),
        ("value", _one_late, "values: expected at most 1e-05 apart"),
        ("value", _left_out(hidden_width=lambda self, config: 32), "64 wide, not 32"),
    ],
)
def test_wrong_weights_are_found_out(
    check: str, spoil: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch)
    (cell,) = check_family("glm4v_moe", [check])
    assert cell.verdict == "failed" and re.search(said, cell.found), cell.found


def test_without_vllm_its_check_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell that is neither ok nor failed, with the command."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    (cell,) = check_family("internvl", ["vllm"])
    assert cell.verdict == "not run" and "pip install" in cell.found and "vllm" in cell.found


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
    with pytest.raises(ConfigError, match=r"internvl.*found 'kimi_vl'"):
        family_of(SimpleNamespace(model_type="kimi_vl"))
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
    with pytest.raises(
        ConfigError, match=r"image_newline of llava_onevision.*projector to model.freeze"
    ):
        Root(policy.model)
    newline.requires_grad_(False)
    Root(policy.model)


@pytest.mark.parametrize("name", sorted(families()))
def test_sharded_engines_reach_every_trained_parameter(name: str) -> None:
    policy = fresh_policy(name, frame=CoordFrame.REL1)
    for loose in policy.family.parts.loose:
        getattr(policy.base.model, loose).requires_grad_(False)  # refused, see above
    within = {id(p) for p in Root(policy.model).parameters()}
    outside = [
        n for n, p in policy.model.named_parameters() if p.requires_grad and id(p) not in within
    ]
    assert not outside, "neither sharded nor summed up over the processes"


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


def test_kimi_keeps_pictures_with_their_padding_within_their_budget() -> None:
    """data.max_pixels bounds all that is shown, and what is shown ends before the padding; what cannot act is refused."""
    from transformers.models.kimi_k25.image_processing_kimi_k25 import navit_resize

    encoder = fresh_policy("kimi_k25").encoder
    processor, family = encoder.processor, encoder.family
    reader, high = family.reader(processor), 56 * 56
    options, bounds = family.image_options(processor, None, high)
    assert bounds == (0, high)
    for height, width in ((27, 27), (30, 57), (180, 320), (211, 37), (640, 427)):
        picture = torch.randint(0, 256, (3, height, width), dtype=torch.uint8)
        _, grid, (shown_width, shown_height) = reader.read(picture, options)
        padded = [-(-side // 28) * 28 for side in (shown_height, shown_width)]
        assert [14 * grid[1], 14 * grid[2]] == padded and padded[0] * padded[1] <= high
        assert reader.tokens(height, width, options) == reader.layout.tokens(grid)
        # with one patch more it would be too large
        allowed, shown, _ = fitted(reader.part, height, width, high)
        assert shown == (shown_height, shown_width)
        most, side = reader.part.max_patches, reader.part.size["max_height"]
        _, (rows, columns) = navit_resize(height, width, 14, 2, allowed + 1, side)
        assert rows * columns > high or (allowed == most and shown == (height, width))
    with pytest.raises(ConfigError, match=r"expected no data\.min_pixels"):
        family.image_options(processor, 1000, None)
    with pytest.raises(ConfigError, match=r"expected no data\.video\.min_pixels"):
        family.clips(processor).check(VideoSettings(min_pixels=1000))


def test_a_mirrored_picture_keeps_its_padding_on_the_right() -> None:
    reader = PaddedReader(fresh_policy("kimi_k25").processor.image_processor)
    picture = torch.randint(0, 256, (3, 40, 60), dtype=torch.uint8)
    rows, grid, shown = reader.read(picture, {})
    assert grid == (1, 4, 6) and shown == (60, 40)
    wanted, _, _ = reader.read(picture.flip(2), {})
    assert torch.equal(reader.layout.mirrored(rows, grid, shown[0]), wanted)


@pytest.fixture
def kimi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Policy, Visual, torch.Tensor]:
    """A Kimi that takes clips with any release of transformers, a clip of chunks of 4, 4 and 2 frames, and its frames; before
    transformers 5.24, whose tower then takes equal chunks alone, without the last chunk."""
    count = 8 if "video" in KimiK25().refused else 10
    monkeypatch.setattr(KimiK25, "refused", {})
    policy = fresh_policy("kimi_k25", freeze=["vision", "projector"])
    frames = np.random.default_rng(1).integers(0, 256, (count, 48, 60, 3), dtype=np.uint8)
    write_video(tmp_path / "clip.mp4", frames, fps=2)
    cache = policy.encoder.visuals
    visual = cache.video(str(tmp_path / "clip.mp4"))
    clip = read_clip(visual.path, cache.settings.sampling)
    return policy, visual, torch.from_numpy(clip.rgb_THWC).permute(0, 3, 1, 2)


def test_kimi_reads_a_clip_in_chunks(kimi: tuple[Policy, Visual, torch.Tensor]) -> None:
    """Ids and pixels are the processor's own, and log-probs those of transformers' forward, which is given what its tower and
    projector make of each chunk: before 5.24 it does not put them together itself."""
    policy, visual, frames_TCHW = kimi
    encoder, base = policy.encoder, policy.base.model
    text = {"type": "text", "text": "yes or no"}
    messages = [{"role": "user", "content": [{"type": "video"}, text]}]
    prompt = encoder.prompt_of(messages, [visual])
    seconds = list(visual.timestamps_s)
    known = {"fps": 1.0, "frames_indices": seconds, "total_num_frames": len(seconds)}
    own = policy.processor(
        text=[policy.processor.apply_chat_template(messages, add_generation_prompt=True)],
        videos=[[frames_TCHW]],
        video_metadata=[known],
        do_sample_frames=False,
        return_tensors="pt",
    )
    chunks, count = own["video_grid_thw"], len(frames_TCHW)
    assert chunks.tolist() == [[4, 4, 6], [4, 4, 6], [2, 4, 6]][: -(-count // 4)]
    assert visual.grid_thw == (count, 4, 6)
    assert prompt.ids_P.tolist() == own["input_ids"][0].tolist()
    pixels = own["pixel_values_videos"]
    assert torch.equal(encoder.visuals.pixels(visual), pixels.flatten(1))
    assert int((prompt.kinds_P == 2).sum()) == visual.tokens == 6 * len(chunks)
    assert encoder.visuals.cost("video", visual.path)[1] == visual.tokens
    answers = [policy.processor.tokenizer(t, add_special_tokens=False)["input_ids"] for t in _TEXTS]
    with torch.no_grad():
        found = policy.evaluate([prompt] * 2, [tuple(a) for a in answers]).logp_N
        pieces = pixels.split(chunks.prod(1).tolist())
        seen = [
            base.mm_projector(base.vision_tower(piece, chunk[None]).pooler_output).squeeze(1)
            for piece, chunk in zip(pieces, chunks, strict=True)
        ]
        wanted = []
        for answer in answers:
            ids_1T = torch.tensor([[*prompt.ids_P.tolist(), *answer]])
            video = {"video": BaseModelOutputWithPooling(pooler_output=tuple(seen))}
            logits = policy.base(input_ids=ids_1T, mm_encoder_outputs=video).logits[0]
            logits = logits[-len(answer) - 1 : -1].index_fill(-1, policy.banned, float("-inf"))
            wanted.append(logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0])
    torch.testing.assert_close(found, torch.cat(wanted), atol=1e-5, rtol=0)


def test_features_of_a_chunk_move_with_it(kimi: tuple[Policy, Visual, torch.Tensor]) -> None:
    """A shuffle of whole chunks takes the features that there are; one within a chunk, whose frames know their places, does not."""
    policy, visual, _ = kimi
    cache, tower = policy.encoder.visuals, policy.tower()
    assert tower is not None
    rest = tuple(range(8, visual.frames))
    for first, encoded in (((4, 5, 6, 7, 0, 1, 2, 3), 1), ((1, 0, *range(2, 8)), 2)):
        shuffled = replace(visual, change=Change("shuffle", (*first, *rest)))
        (found,) = cache.features([shuffled], tower)
        assert cache.stats.encoded == encoded
        (wanted,) = tower("video", cache.pixels(shuffled), [visual.grid_thw])
        torch.testing.assert_close(found.main, wanted.main, atol=1e-6, rtol=1e-5)
        assert not torch.allclose(wanted.main, cache.features([visual], tower)[0].main, atol=1e-3)


_SHAPES = ((56, 56), (112, 84), (37, 90), (180, 320), (320, 180), (100, 101), (640, 427), (60, 900))


@pytest.mark.parametrize("most", [1, 2, 4, 9])
def test_minicpm_cuts_pictures_as_its_processor_says(most: int) -> None:
    """A grid tells every view's size without the setting that led to it, to the processor's reader and to the model alike."""
    policy = fresh_policy("minicpmv4_6")
    processor = policy.processor
    part, reader = processor.image_processor, policy.family.reader(processor)
    part.max_slice_nums = most
    for height, width in _SHAPES:
        picture = torch.randint(0, 256, (3, height, width), dtype=torch.uint8)
        rows, grid, _ = reader.read(picture, {})
        own = part(images=[picture], return_tensors="pt")
        views = reader.layout.views(grid)
        assert [list(size) for size in views.sizes] == own["target_sizes"].tolist()
        assert list(views.slices) == list(own["grids"][0])
        assert reader.tokens(height, width, {}) == reader.layout.tokens(grid)
        (found,) = policy.family.features(policy.base.model, "image", rows, [grid])
        assert len(found.main) == reader.layout.tokens(grid)


def test_minicpm_needs_a_tower_for_views_of_several_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With transformers 5.18 every check but those that are refused anyway says why, and so does loading."""
    path = tiny_folder("minicpmv4_6")
    monkeypatch.setattr(contract, "version", lambda name: "5.18.0")
    cells = list(check_family("minicpmv4_6"))
    assert {c.verdict for c in cells} == {"refused"}
    assert sum("views of several sizes" in c.found for c in cells) == len(check_names()) - 3
    with pytest.raises(ConfigError, match=r"expected transformers 5\.19 or later"):
        load_processor(path)


def test_minicpm_keeps_pictures_within_their_budget() -> None:
    """data.max_pixels bounds all views together; of slices that fit there are as many as there may be."""
    processor = fresh_policy("minicpmv4_6").processor
    family, most = MiniCPMV46(), processor.image_processor.max_slice_nums
    reader, high = family.reader(processor), 4 * 112 * 112
    options, bounds = family.image_options(processor, None, high)
    assert bounds == (0, high)
    found = {}
    for height, width in _SHAPES:
        picture = torch.randint(0, 256, (3, height, width), dtype=torch.uint8)
        rows, grid, _ = reader.read(picture, options)
        assert len(rows) * 14 * 14 <= high
        assert reader.tokens(height, width, options) == reader.layout.tokens(grid)
        found[height, width] = grid[0]
    assert most == 4 and found[640, 427] == 3 and found[56, 56] == 1
    with pytest.raises(ConfigError, match=r"expected no data\.min_pixels"):
        family.image_options(processor, 1000, None)
    with pytest.raises(MismatchError, match="scale_resolution must be equal"):
        family.features(fresh_policy("minicpmv4_6").base.model, "image", rows[1:], [grid])


def test_mirrored_slices_are_those_of_the_mirrored_picture() -> None:
    """They change places within their row, and the whole view stays before them."""
    reader = MiniCPMV46().reader(fresh_policy("minicpmv4_6").processor)
    # its shape is that of its slices: nothing of it is resized
    picture = torch.randint(0, 256, (3, 112, 224), dtype=torch.uint8)
    rows, grid, shown = reader.read(picture, {})
    assert grid == (3, 112, 224) and shown == (224, 112)
    wanted, _, _ = reader.read(picture.flip(2), {})
    first = len(rows) - 2 * 64
    found = reader.layout.mirrored(rows, grid, shown[0])
    assert torch.equal(found[first:], wanted[first:])
    # the whole view is resized in 8 bits, to either side alike
    torch.testing.assert_close(found[:first], wanted[:first], atol=2 / 127, rtol=0)


def test_pictures_are_numbered_over_all_turns() -> None:
    """As the processor numbers those of the whole chat."""
    policy = fresh_policy("minicpmv4_6")
    encoder, tokenizer = policy.encoder, policy.processor.tokenizer
    pictures = [np.full((60, 80, 3), shade, np.uint8) for shade in (20, 90, 160)]
    text = {"type": "text", "text": "yes or no"}

    def asked(count: int) -> dict[str, Any]:
        return {"role": "user", "content": [*([{"type": "image"}] * count), text]}

    first = encoder.prompt_of([asked(2)], [encoder.visuals.frame(x) for x in pictures[:2]])
    written = (*tokenizer("yes", add_special_tokens=False)["input_ids"], policy.eos_ids[0])
    second = encoder.extended(first, written, [asked(1)], [encoder.visuals.frame(pictures[2])])
    chat = [asked(2), {"role": "assistant", "content": "yes"}, asked(1)]
    own = policy.processor(
        text=[policy.processor.apply_chat_template(chat, add_generation_prompt=True)],
        images=[Image.fromarray(x) for x in pictures],
        return_tensors="pt",
    )
    assert second.ids_P.tolist() == own["input_ids"][0].tolist()
    assert "<image_id>2</image_id>" in tokenizer.decode(second.ids_P)


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
