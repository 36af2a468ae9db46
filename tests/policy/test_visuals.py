"""Pictures and clips as the policy sees them: the processor's own prompt, and the same log-probs from pixels or features."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.config import VideoConfig
from mmrl.errors import MediaError, MismatchError
from mmrl.policy.pack import PackItem, pack, pack_padded
from mmrl.policy.policy import Policy
from mmrl.video.decode import read_clip
from mmrl.video.media import open_image
from mmrl.video.sampling import FrameSampling
from tests.kits.clip_kit import TASK, clip, policy_of, sample
from tests.kits.engine_kit import ARCHITECTURES, fresh_policy, picture
from tests.kits.fast_kit import first_fast


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_prompts_are_those_of_the_processor_itself(arch: str, tmp_path: Path) -> None:
    p = policy_of(arch)
    paths, photos = (
        (clip(tmp_path), clip(tmp_path, 5, (84, 56), 1)),
        (picture((112, 84)), picture((56, 56))),
    )
    prompt = p.encoder(sample(paths, photos), TASK)
    text = p.encoder.text(sample(paths, photos), TASK)
    patch = p.processor.video_processor.patch_size
    from mmrl.video.budget import resize_frames

    frames = []
    for path, seen in zip(paths, prompt.videos, strict=True):
        rgb = read_clip(path, FrameSampling(kind="all")).rgb_THWC
        width, height = seen.resized_wh
        assert width % (2 * patch) == height % (2 * patch) == 0
        frames.append(torch.from_numpy(resize_frames(rgb, height, width)).permute(0, 3, 1, 2))
    own = p.processor(
        text=[text],
        images=[open_image(x) for x in photos],
        videos=frames,
        return_tensors="pt",
        videos_kwargs={
            "do_resize": False,
            "do_sample_frames": False,
            "video_metadata": [
                {"fps": 4.0, "total_num_frames": len(f), "frames_indices": list(range(len(f)))}
                for f in frames
            ],
        },
    )
    assert torch.equal(own["input_ids"][0], prompt.ids_P) and torch.equal(
        own["mm_token_type_ids"][0], prompt.kinds_P
    )
    media = p.media(prompt.visuals)
    for name in ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw"):
        assert torch.equal(own[name], media[name]), name
    rope = {
        k: own[k] for k in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts") if k in own
    }
    positions, _ = p.base.model.get_rope_index(
        input_ids=own["input_ids"],
        mm_token_type_ids=own["mm_token_type_ids"],
        attention_mask=own["attention_mask"],
        **rope,
    )
    assert torch.equal(positions[-3:, 0], prompt.positions_3P)
    assert [v.kind for v in prompt.visuals] == ["video", "video", "image", "image"]
    assert prompt.videos[0].duration_s == 2.0 and prompt.videos[0].timestamps_s == tuple(
        i / 4 for i in range(8)
    )
    assert pickle.loads(pickle.dumps(prompt)).fingerprint == prompt.fingerprint


def items_of(p: Policy, folder: Path) -> list[PackItem]:
    """Mixed lengths in one batch: a clip, a clip and a picture, a picture, text alone, a clip of odd length."""
    samples = [
        sample((clip(folder),)),
        sample((clip(folder, 4, (112, 84)),), (picture((56, 56)),), 1),
        sample((), (picture((112, 84)),), 2),
        sample((), (), 3),
        sample((clip(folder, 5, (84, 56), 1),), (), 4),
    ]
    return [PackItem(p.encoder(s, TASK), ((7, 8, 9), (10,), (11, 12))) for s in samples]


def logps_and_gradients(
    p: Policy, folder: Path, packer: Any = pack
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    p.model.zero_grad(set_to_none=True)
    logp_N = p.logp(packer(items_of(p, folder))).logp_N
    (logp_N * torch.sin(torch.arange(len(logp_N)) * 1.7)).sum().backward()
    return logp_N.detach(), {
        n: q.grad.clone() for n, q in p.model.named_parameters() if q.grad is not None
    }


@pytest.mark.parametrize("arch", first_fast(ARCHITECTURES[::-1]))
def test_features_give_the_log_probs_and_gradients_of_pixels(arch: str, tmp_path: Path) -> None:
    frozen = policy_of(arch, freeze=("vision", "projector"), cache=str(tmp_path / "cache"))
    free = policy_of(arch)
    assert frozen.tower() is not None and free.tower() is None
    logp, grads = logps_and_gradients(frozen, tmp_path)
    expected, all_grads = logps_and_gradients(free, tmp_path)
    assert torch.allclose(logp, expected, atol=1e-5)
    assert grads and all("visual" not in name for name in grads) and set(grads) < set(all_grads)
    norm = torch.stack([all_grads[n].double().norm() for n in grads]).norm()
    assert (
        torch.stack([(grads[n] - all_grads[n]).double().norm() for n in grads]).norm() < 1e-5 * norm
    )
    stats = frozen.encoder.visuals.stats
    assert stats.encoded == 5 and stats.built == 5, (
        "five different visuals, each processed and encoded once"
    )
    again, _ = logps_and_gradients(frozen, tmp_path, pack_padded)
    assert torch.allclose(again, expected, atol=1e-5) and stats.encoded == 5
    other = policy_of(arch, freeze=("vision", "projector"), cache=str(tmp_path / "cache"))
    again, _ = logps_and_gradients(other, tmp_path)
    assert torch.equal(again, logp), "read from disk: the same bits"
    seen = other.encoder.visuals.stats
    assert (seen.built, seen.encoded) == (0, 0) and seen.feature_hits >= 5
    with torch.no_grad():
        next(iter(other.base.model.visual.parameters())).mul_(-1)
    third = policy_of(arch, freeze=("vision", "projector"), cache=str(tmp_path / "cache"))
    third.model.load_state_dict(other.model.state_dict())
    moved, _ = logps_and_gradients(third, tmp_path)
    assert third.encoder.visuals.stats.encoded == 5 and not torch.allclose(
        moved, logp, atol=1e-4
    ), "another tower, other features"


@pytest.mark.parametrize("arch", first_fast(ARCHITECTURES[::-1]))
def test_rollout_and_training_agree_on_clips(arch: str, tmp_path: Path) -> None:
    from mmrl.rollout import PrefillOnceEngine, Request, SamplingSettings

    for freeze in ((), ("vision", "projector")):
        p = policy_of(arch, freeze=freeze)
        prompts = [i.prompt for i in items_of(p, tmp_path)]
        written = PrefillOnceEngine(p).generate(
            [Request(x, 3, (1, n)) for n, x in enumerate(prompts)],
            SamplingSettings(max_new_tokens=5),
        )
        items = [
            PackItem(x, tuple(c.token_ids for c in cs))
            for x, cs in zip(prompts, written, strict=True)
        ]
        with torch.no_grad():
            logp_N = p.logp(pack(items)).logp_N
        sampled = torch.tensor([lp for cs in written for c in cs for lp in c.logprobs])
        assert torch.allclose(logp_N, sampled, atol=2e-5)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_views_of_a_clip_are_what_the_processor_makes_of_changed_frames(
    arch: str, tmp_path: Path
) -> None:
    p = policy_of(arch)
    (visual,) = p.encoder(sample((clip(tmp_path, 5),)), TASK).visuals
    rgb = read_clip(visual.path, FrameSampling(kind="all")).rgb_THWC
    from mmrl.video.budget import resize_frames

    def processed(frames: np.ndarray) -> torch.Tensor:
        width, height = visual.resized_wh
        resized = torch.from_numpy(resize_frames(frames, height, width)).permute(0, 3, 1, 2)
        return p.processor.video_processor(
            videos=[resized], do_resize=False, do_sample_frames=False, return_tensors="pt"
        )["pixel_values_videos"]

    visuals, order = p.encoder.visuals, (3, 0, 4, 1, 2)
    assert torch.equal(visuals.pixels(visual), processed(rgb))
    assert torch.equal(
        visuals.pixels(visuals.changed(visual, "shuffle", order)), processed(rgb[list(order)])
    )
    mirrored = visuals.pixels(visuals.changed(visual, "mirror"))
    same_size = visual.resized_wh == visual.orig_wh
    assert torch.allclose(
        mirrored, processed(rgb[:, :, ::-1].copy()), atol=1e-6 if same_size else 0.05
    )
    assert visuals.pixels(visuals.changed(visual, "mask")).abs().max() < 0.02
    (photo,) = p.encoder(sample((), (picture((112, 84)),)), TASK).visuals
    twice = visuals.pixels(visuals.changed(photo, "mirror"))
    upright = visuals.pixels(photo)
    assert not torch.equal(twice, upright) and torch.equal(
        twice.flatten().sort().values, upright.flatten().sort().values
    )


def test_pixels_that_changed_are_refused_and_forgotten_ones_made_again(tmp_path: Path) -> None:
    p = policy_of("qwen2_5_vl", memory=0.0)  # nothing is kept in memory
    path = Path(clip(tmp_path))
    (visual,) = p.encoder(sample((str(path),)), TASK).visuals
    before = p.encoder.visuals.pixels(visual)
    assert (
        torch.equal(p.encoder.visuals.pixels(visual), before) and p.encoder.visuals.stats.built >= 2
    )
    other = Path(clip(tmp_path, seed=5, name="other.mp4"))
    other.replace(path)
    with pytest.raises(
        MismatchError, match=r"clip-8.*expected pixels .* found .*changed during the run"
    ):
        p.encoder.visuals.pixels(visual)
    assert p.encoder.visuals.video(str(path)).digest != visual.digest, (
        "asked anew, the new file is another clip"
    )


def test_a_clip_that_cannot_be_read_is_an_error_with_its_kind(tmp_path: Path) -> None:
    p = policy_of("qwen2_5_vl")
    (tmp_path / "broken.mp4").write_bytes(Path(clip(tmp_path)).read_bytes()[:300])
    for name, kind in (("nowhere.mp4", "missing"), ("broken.mp4", None)):
        with pytest.raises(MediaError) as caught:
            p.encoder(sample((str(tmp_path / name),)), TASK)
        assert caught.value.kind == kind or (
            kind is None and caught.value.kind in ("truncated", "corrupt", "unsupported")
        )


def test_sampling_is_configured_and_rows_override_it(tmp_path: Path) -> None:
    p = policy_of(
        "qwen2_5_vl",
        video=VideoConfig(kind="uniform", num_frames=4, min_pixels=784, max_pixels=784 * 6),
    )
    path = clip(tmp_path)
    four = p.encoder(sample((path,)), TASK)
    part = p.encoder(
        sample((path,), (), 1, video={"start": 0.5, "end": 1.5, "num_frames": 2}), TASK
    )
    assert [v.frames for v in four.visuals] == [4] and [v.frames for v in part.visuals] == [2]
    assert part.videos[0].duration_s == 1.0 and all(
        0 <= t <= 1 for t in part.videos[0].timestamps_s
    )
    assert four.visuals[0].key != part.visuals[0].key and part.length < four.length


def test_a_reference_model_with_the_same_tower_shares_its_features(tmp_path: Path) -> None:
    p = fresh_policy(freeze=["vision", "projector"], needs_reference=True)
    item = PackItem(p.encoder(sample((), (picture((112, 84)),)), TASK), ((5, 6),))
    first = p.logp(pack([item])).logp_N
    with p.reference() as reference, torch.no_grad():
        second = reference.logp(pack([item])).logp_N
    assert torch.equal(first, second) and p.encoder.visuals.stats.encoded == 1
    again = replace(
        item.prompt, visuals=(p.encoder.visuals.changed(item.prompt.visuals[0], "mask"),)
    )
    masked = p.logp(pack([PackItem(again, ((5, 6),))])).logp_N
    assert not torch.allclose(first, masked, atol=1e-4), "the policy reacts to its picture"
