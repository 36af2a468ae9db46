"""The checks of `mmrl families check`: what mmrl computes for a family, held against transformers' own processor, forward,
generation and files. Each returns what it found, and raises AssertionError where the two differ. Part of
mmrl.diagnostics.families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from mmrl.config import LoraSettings, ModelConfig, RunConfig
from mmrl.diagnostics._family_subject import (
    GRADIENT,
    LOGP,
    QUESTION,
    Subject,
    naive,
    near,
    sounds,
)
from mmrl.diagnostics._family_vllm import check_vllm
from mmrl.diagnostics._family_weights import check_freeze, check_lora, check_save, check_value
from mmrl.policy.encode import Prompt
from mmrl.policy.policy import Policy
from mmrl.video.pictures import SliceReader

__all__ = ["CHECKS"]


def _group(
    s: Subject, policy: Policy, prompt: Prompt, media: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of a group: packed behind one prompt, and each in a row of its own by transformers alone."""
    answers = s.answers(policy)
    packed = policy.evaluate([prompt] * len(answers), answers).logp_N
    ids = prompt.ids_P.tolist()
    alone = [naive(policy, media, [*ids, *a], prompt.kinds_P, len(a)) for a in answers]
    return packed, torch.cat(alone)


def _counted(s: Subject) -> str:
    return "text, 1 and 3 pictures" if len(s.counts) > 2 else "text and 1 picture"


def check_prompt(s: Subject) -> str:
    """Ids and pixels of text alone, one picture and three."""
    policy = s.plain
    for count in s.counts:
        prompt, wanted = s.prompt(policy, count), s.processed(policy, count)
        assert prompt.ids_P.tolist() == wanted["input_ids"][0].tolist(), (
            f"{count} pictures: other token ids than the processor's call"
        )
        if count:
            pixels = torch.cat([policy.encoder.visuals.pixels(v) for v in prompt.visuals])
            theirs, reader = wanted["pixel_values"], policy.encoder.visuals.reader
            if isinstance(
                reader, SliceReader
            ):  # its processor lays patches along the last dimension
                theirs = reader.rows(theirs)
            theirs = theirs.reshape(pixels.shape)
            assert torch.equal(pixels, theirs), f"{count} pictures: other pixels"
    return f"{_counted(s)}: ids and pixels equal"


def check_logp(s: Subject) -> str:
    """A packed group against separate rows: text alone, one picture, three."""
    with torch.no_grad():
        apart = [
            near(
                *_group(s, s.plain, s.prompt(s.plain, n), s.processed(s.plain, n)), f"{n} pictures"
            )
            for n in s.counts
        ]
        seen = [
            s.plain.evaluate([p], [s.answers(s.plain)[1]]).logp_N
            for p in (
                s.plain.encoder.prompt_of(s.messages(1), s.frames(s.plain, [i]), "check")
                for i in (1, 2)
            )
        ]
    moved = float((seen[0] - seen[1]).abs().max())
    assert moved > 100 * LOGP, f"another picture moves no log-prob: {moved:.2g}"
    return f"{_counted(s)}: {max(apart):.1g} apart"


def check_gradient(s: Subject) -> str:
    """Gradients of all weights from a packed group against separate rows."""
    policy = s.policy()
    count = min(2, s.counts[-1])
    apart = _gradients(s, policy, s.prompt(policy, count), s.processed(policy, count))
    return f"{count} picture{'s' * (count > 1)}: {apart:.1g} of the norm apart"


def _gradients(s: Subject, policy: Policy, prompt: Prompt, media: Mapping[str, Any]) -> float:
    """How far the gradients of a packed group are from those of separate rows, in parts of their norm."""
    found = []
    for logp in _group(s, policy, prompt, media):
        policy.model.zero_grad()
        (logp * torch.linspace(-1, 1, len(logp))).sum().backward()
        found.append({n: p.grad.clone() for n, p in policy.trainable() if p.grad is not None})
    packed, alone = found
    assert packed.keys() == alone.keys(), f"other weights learn: {packed.keys() ^ alone.keys()}"
    norm = torch.stack([g.norm() for g in alone.values()]).norm()
    apart = float(torch.stack([(packed[n] - g).norm() for n, g in alone.items()]).norm() / norm)
    assert apart <= GRADIENT, f"expected at most {GRADIENT:g} of the norm apart, found {apart:.2g}"
    return apart


def check_clip(s: Subject) -> str:
    """A packed group behind a clip against separate rows."""
    from mmrl.video.clips import ChunkClips
    from mmrl.video.decode import read_clip
    from mmrl.video.encode import write_video

    rng, path = np.random.default_rng(1), s.folder / "clip.mp4"
    write_video(path, rng.integers(0, 256, (12, 64, 96, 3), dtype=np.uint8), fps=4)
    policy = s.plain
    visuals = policy.encoder.visuals
    visual = visuals.video(str(path))
    text = {"type": "text", "text": QUESTION}
    messages = [{"role": "user", "content": [{"type": "video"}, text]}]
    prompt = policy.encoder.prompt_of(messages, [visual], "check")
    clip = read_clip(
        str(path),
        visuals.settings.sampling,
        size=lambda *shape: visuals.clips.frame_size(visuals.settings, *shape),
    )
    seconds = list(visual.timestamps_s)
    known = {"fps": 1.0, "frames_indices": seconds, "total_num_frames": len(seconds)}
    known["duration"] = visual.duration_s
    written = policy.processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, **policy.family.chat_options()
    )
    begin = policy.processor.tokenizer.bos_token
    media = policy.processor(
        text=[written],
        # as apply_chat_template does
        add_special_tokens=begin is None or not written.startswith(begin),
        videos=[[torch.from_numpy(clip.rgb_THWC).permute(0, 3, 1, 2)]],
        video_metadata=[known],
        do_sample_frames=False,
        # their size is its own already, and a processor that pads them does so where it resizes
        do_resize=isinstance(visuals.clips, ChunkClips),
        return_tensors="pt",
    )
    assert prompt.ids_P.tolist() == media["input_ids"][0].tolist(), "clip: other token ids"
    pixels = media["pixel_values_videos" if "pixel_values_videos" in media else "pixel_values"]
    ours = visuals.pixels(visual)
    assert torch.equal(ours, pixels.reshape(ours.shape)), "clip: other pixels"
    for name in {"second_per_grid_ts", "video_second_per_grid"} & set(media):
        pair = policy.processor.video_processor.temporal_patch_size
        media[name] = torch.tensor([pair / visual.sample_fps])
    with torch.no_grad():
        apart = near(*_group(s, policy, prompt, media), "clip")
    return f"grid {visual.grid_thw}: {apart:.1g} apart"


def check_audio(s: Subject) -> str:
    """Two sounds and a picture: ids, frames, positions, log-probs, greedy answers and cached features."""
    from mmrl.rollout.engine import PrefillOnceEngine, Request, SamplingSettings

    policy = s.plain
    seen, heard = sounds(s, policy)
    kinds = ("audio", "image", "audio")
    text = {"type": "text", "text": "Which tone is higher?"}
    messages = [{"role": "user", "content": [*({"type": kind} for kind in kinds), text]}]
    (picture,) = s.frames(policy, [0])
    prompt = policy.encoder.prompt_of(messages, [picture, *seen], "check")
    written = policy.processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, **policy.family.chat_options()
    )
    media = dict(
        policy.processor(text=[written], images=[s.pictures[0]], audio=heard, return_tensors="pt")
    )
    assert prompt.ids_P.tolist() == media["input_ids"][0].tolist(), "sounds: other token ids"
    ours = torch.cat([policy.encoder.visuals.pixels(v) for v in seen])
    mask_RT = media["feature_attention_mask"].bool()
    theirs = media["input_features"].transpose(1, 2)[mask_RT]
    assert torch.equal(ours, theirs), "sounds: other frames"
    with torch.no_grad():
        apart = near(*_group(s, policy, prompt, media), "sounds")
        turned = policy.encoder.prompt_of(messages, [picture, *seen[::-1]], "check")
        moved = [policy.evaluate([p], [s.answers(policy)[1]]).logp_N for p in (prompt, turned)]
        whole = policy.base.generate(
            **media, do_sample=False, max_new_tokens=12, suppress_tokens=policy.banned.tolist()
        )
    far = float((moved[0] - moved[1]).abs().max())
    assert far > 100 * LOGP, f"another sound moves no log-prob: {far:.2g}"
    request = Request(prompt, 1, greedy=True)
    ((turn,),) = PrefillOnceEngine(policy).generate([request], SamplingSettings(max_new_tokens=12))
    found = whole[0, prompt.length :].tolist()
    assert list(turn.token_ids) == found, f"sounds: {turn.token_ids}, not {found}"
    frozen = s.policy(freeze=["audio"])
    assert frozen.tower("audio") is not None, "the audio tower does not count as frozen"
    seen, _ = sounds(s, frozen)
    (picture,) = s.frames(frozen, [0])
    prompt = frozen.encoder.prompt_of(messages, [picture, *seen], "check")
    with torch.no_grad():
        cached = near(*_group(s, frozen, prompt, media), "features of sounds")
        frozen.evaluate([prompt], [s.answers(frozen)[0]])
    encoded = frozen.encoder.visuals.stats.encoded
    assert encoded == 2, f"expected 2 sounds encoded once, found {encoded}"
    free = s.policy()
    seen, _ = sounds(s, free)
    prompt = free.encoder.prompt_of(messages, [*s.frames(free, [0]), *seen], "check")
    learned = _gradients(s, free, prompt, media)
    return (
        f"2 sounds and a picture: ids and frames equal, log-probs {apart:.1g} apart, gradients {learned:.1g}; generate's own "
        f"tokens; features {cached:.1g} apart, each sound encoded once"
    )


def check_turns(s: Subject) -> str:
    """Two turns packed behind each other, a picture in each, and another answer that branches from the second, against rows of
    transformers' forward."""
    policy, encoder = s.plain, s.plain.encoder
    first, written = s.prompt(policy, 1), (*s.words(policy, "the red circle"), policy.eos_ids[0])
    second = encoder.extended(
        first, written, s.messages(1, "yes or no"), s.frames(policy, [1]), "check"
    )
    answers = [s.words(policy, text) for text in ("yes", "no or yes")]

    def alone(prompt: Prompt, pictures: int, tokens: tuple[int, ...]) -> torch.Tensor:
        ids = [*prompt.ids_P.tolist(), *tokens]
        return naive(policy, s.processed(policy, pictures), ids, prompt.kinds_P, len(tokens))

    with torch.no_grad():
        tokens = [t for answer in answers for t in (written, answer)]
        found = policy.evaluate([first, second] * 2, tokens)
        early = alone(first, 1, written)
        wanted = [x for answer in answers for x in (early, alone(second, 2, answer))]
        apart = near(found.logp_N, torch.cat(wanted), "two turns and a branch")
    length = second.length + sum(map(len, answers))
    assert found.num_tokens == length, f"{found.num_tokens} tokens were computed, not {length}"
    return f"a picture in each: {apart:.1g} apart"


def check_rollout(s: Subject) -> str:
    """Greedy answers of mmrl's engine against model.generate, and their log-probs against the trainer's."""
    from mmrl.rollout.engine import PrefillOnceEngine, Request, SamplingSettings

    policy, tokens = s.plain, 12
    prompts = [s.prompt(policy, n) for n in s.counts]
    settings = SamplingSettings(max_new_tokens=tokens)
    turns = PrefillOnceEngine(policy).generate(
        [Request(p, 1, greedy=True) for p in prompts], settings
    )
    apart = 0.0
    for n, prompt, (turn,) in zip(s.counts, prompts, turns, strict=True):
        with torch.no_grad():
            whole = policy.base.generate(
                **s.processed(policy, n),
                do_sample=False,
                max_new_tokens=tokens,
                suppress_tokens=policy.banned.tolist(),
            )
            logp = policy.evaluate([prompt], [turn.token_ids]).logp_N
        theirs = whole[0, prompt.length :].tolist()
        assert list(turn.token_ids) == theirs, f"{n} pictures: {turn.token_ids}, not {theirs}"
        apart = max(apart, near(torch.tensor(turn.logprobs), logp, "rollout's log-probs"))
    return f"generate's own tokens; log-probs {apart:.1g} apart"


def check_features(s: Subject) -> str:
    """Cached features of a frozen tower against the pixels' way, and encoded once."""
    policy = s.policy(freeze=["vision", "projector"])
    assert policy.tower() is not None, "the tower does not count as frozen"
    count = s.counts[-1]
    with torch.no_grad():
        found, wanted = _group(s, policy, s.prompt(policy, count), s.processed(policy, count))
        again = policy.evaluate([s.prompt(policy, count)], [s.answers(policy)[0]]).logp_N
    apart = near(found, wanted, "features")
    near(again, found[: len(again)], "features taken from the cache")
    encoded = policy.encoder.visuals.stats.encoded
    assert encoded == count, f"expected {count} pictures encoded once, found {encoded}"
    return f"{apart:.1g} apart; {count} picture{'s' * (count > 1)} encoded once"


def check_memory(s: Subject) -> str:
    """The estimate's bytes of weights and gradients against those of the loaded model, and that the whole estimate can be made."""
    from mmrl.diagnostics.memory import estimate
    from mmrl.diagnostics.memory_parameters import parameter_bytes

    said = []
    for lora in (None, LoraSettings(r=4, experts=bool(s.family.experts))):
        policy = s.policy(lora=lora)
        config = RunConfig(model=ModelConfig(path=s.path, device="cpu", lora=lora))
        found = parameter_bytes(config, policy.base.config, "cpu")
        held, learning = (
            sum(p.numel() * p.element_size() for p in {id(p): p for p in some}.values())
            for some in (policy.model.parameters(), (p for _, p in policy.trainable()))
        )
        assert (found.weights, found.gradients) == (held, learning), (
            f"estimated {found.weights:,} and {found.gradients:,} bytes, held {held:,} and {learning:,}"
        )
        assert estimate(config, kind="cpu").total > found.weights, "less than its weights"
        said.append(f"{held:,} bytes of weights and {learning:,} of gradients")
    return f"{said[0]}; with an adapter {said[1]}"


CHECKS: dict[str, Callable[[Subject], str]] = {
    "prompt": check_prompt,
    "logp": check_logp,
    "gradient": check_gradient,
    "video": check_clip,
    "audio": check_audio,
    "turns": check_turns,
    "rollout": check_rollout,
    "features": check_features,
    "freeze": check_freeze,
    "lora": check_lora,
    "save": check_save,
    "value": check_value,
    "memory": check_memory,
    "vllm": check_vllm,
}
"""Name -> check, in the order of the table; a name in `ModelFamily.refused` is not run and says why instead."""
