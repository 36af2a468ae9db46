"""The checks of `mmrl families check`: what mmrl computes for a family, held against transformers' own processor, forward,
generation and files. Each returns what it found, and raises AssertionError where the two differ. Part of
mmrl.diagnostics.families."""

from __future__ import annotations

import wave
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mmrl.config import LoraSettings, ModelConfig, RunConfig
from mmrl.coords import CoordFrame
from mmrl.diagnostics._family_memory import language_apart, tower_apart
from mmrl.diagnostics._family_vllm import check_vllm
from mmrl.policy.encode import Prompt
from mmrl.policy.families import ModelFamily
from mmrl.policy.loading import load_policy
from mmrl.policy.policy import Policy
from mmrl.video.pictures import SliceReader

__all__ = ["CHECKS", "Subject"]

LOGP = GRADIENT = 1e-5
_SIZES = ((112, 84), (320, 180), (37, 90))
_QUESTION = "Where is the red circle?"


@dataclass(frozen=True)
class Subject:
    """A family's model on disk, and a folder for what the checks write."""

    family: ModelFamily
    path: str
    folder: Path

    def policy(self, **options: Any) -> Policy:
        """A newly loaded policy on the CPU; `options` are fields of ModelConfig."""
        frame = None if self.family.frame is not None else CoordFrame.REL1
        return load_policy(ModelConfig(path=self.path, device="cpu", frame=frame, **options))

    @cached_property
    def plain(self) -> Policy:
        """A policy that the checks leave as it is."""
        return self.policy()

    @cached_property
    def pictures(self) -> list[Image.Image]:
        """Pictures of smooth noise: every patch differs."""
        coarse = np.random.default_rng(0).integers(0, 256, (len(_SIZES), 6, 6, 3), dtype=np.uint8)
        return [
            Image.fromarray(c).resize(size, Image.Resampling.BICUBIC)
            for c, size in zip(coarse, _SIZES, strict=True)
        ]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many pictures the checks' prompts have."""
        most = self.family.most_pictures
        return tuple(n for n in (0, 1, 3) if most is None or n <= most)

    def messages(self, count: int, question: str = _QUESTION) -> list[dict[str, Any]]:
        """A question about `count` pictures."""
        items = [{"type": "image"}] * count
        return [{"role": "user", "content": [*items, {"type": "text", "text": question}]}]

    def frames(self, policy: Policy, chosen: Sequence[int]) -> list[Any]:
        """The pictures of these numbers as visuals of the policy's cache."""
        return [policy.encoder.visuals.frame(np.array(self.pictures[i])) for i in chosen]

    def prompt(self, policy: Policy, count: int) -> Prompt:
        """The question about the first `count` pictures."""
        return policy.encoder.prompt_of(
            self.messages(count), self.frames(policy, range(count)), "check"
        )

    def words(self, policy: Policy, text: str) -> tuple[int, ...]:
        """Tokens of a text."""
        return tuple(policy.processor.tokenizer(text, add_special_tokens=False)["input_ids"])

    def answers(self, policy: Policy) -> list[tuple[int, ...]]:
        """A group of completions of several lengths."""
        texts = ("yes", "the red circle left of the blue square", "[0, 1, 2, 3]")
        return [self.words(policy, text) for text in texts]

    def step(self, policy: Policy) -> None:
        """One step that makes an answer less likely, on all that the policy trains."""
        policy.evaluate([self.prompt(policy, 1)], [self.answers(policy)[1]]).logp_N.sum().backward()
        with torch.no_grad():
            for _, p in policy.trainable():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=1e-3)

    def processed(self, policy: Policy, count: int) -> dict[str, Any]:
        """What the processor itself makes of the question about the first `count` pictures."""
        (message,) = self.messages(count)
        shown = [{"type": "image", "image": picture} for picture in self.pictures[:count]]
        message["content"] = [*shown, message["content"][-1]]
        return dict(
            policy.processor.apply_chat_template(
                [message],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                **policy.family.chat_options(),
            )
        )


def _naive(
    policy: Policy, media: Mapping[str, Any], ids: Sequence[int], kinds: torch.Tensor, last: int
) -> torch.Tensor:
    """Log-probs of the last `last` tokens by transformers' own forward of one row, with positions and masks of its making."""
    inputs = {"input_ids": torch.tensor([list(ids)])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    known = ["input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"]
    taken = policy.family.text_inputs(torch.zeros(3, 1, 1), kinds[None])
    for name in set(known[2:]) & set(taken):
        inputs[name] = torch.nn.functional.pad(kinds, (0, len(ids) - len(kinds)))[None]
    inputs |= {k: v for k, v in media.items() if k not in known}
    logits = policy.base(**inputs).logits[0, -last - 1 : -1].float()
    logits = logits.index_fill(-1, policy.banned, float("-inf"))
    targets = torch.tensor(list(ids[-last:]))
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def _group(
    s: Subject, policy: Policy, prompt: Prompt, media: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of a group: packed behind one prompt, and each in a row of its own by transformers alone."""
    answers = s.answers(policy)
    packed = policy.evaluate([prompt] * len(answers), answers).logp_N
    ids = prompt.ids_P.tolist()
    alone = [_naive(policy, media, [*ids, *a], prompt.kinds_P, len(a)) for a in answers]
    return packed, torch.cat(alone)


def _near(found: torch.Tensor, wanted: torch.Tensor, what: str, most: float = LOGP) -> float:
    apart = float((found - wanted).detach().abs().max())
    assert apart <= most, f"{what}: expected at most {most:g} apart, found {apart:.2g}"
    return apart


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
            _near(
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
    text = {"type": "text", "text": _QUESTION}
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
        apart = _near(*_group(s, policy, prompt, media), "clip")
    return f"grid {visual.grid_thw}: {apart:.1g} apart"


def _sounds(s: Subject, policy: Policy) -> tuple[list[Any], list[np.ndarray]]:
    """Two sounds of different files, lengths, rates and channels as visuals, and their samples."""
    from mmrl.video.audio import read_audio

    cache, rng = policy.encoder.visuals, np.random.default_rng(2)
    seen, heard = [], []
    for name, rate, channels, seconds in (("a.wav", 16000, 1, 0.81), ("b.wav", 22050, 2, 1.3)):
        times = np.arange(int(seconds * rate)) / rate
        tones = np.sin(2 * np.pi * np.outer(rng.uniform(200, 3000, channels), times**1.5))
        values = 0.4 * tones + 0.02 * rng.standard_normal(tones.shape)
        path = s.folder / name
        with wave.open(str(path), "wb") as file:
            file.setnchannels(channels)
            file.setsampwidth(2)
            file.setframerate(rate)
            file.writeframes((values.T * 32767).astype("<i2").tobytes())
        seen.append(cache.audio(str(path)))
        most = cache.most_seconds
        heard.append(read_audio(path, rate=cache.hears.rate, max_seconds=most))
    return seen, heard


def check_audio(s: Subject) -> str:
    """Two sounds and a picture: ids, frames, positions, log-probs, greedy answers and cached features."""
    from mmrl.rollout.engine import PrefillOnceEngine, Request, SamplingSettings

    policy = s.plain
    seen, heard = _sounds(s, policy)
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
        apart = _near(*_group(s, policy, prompt, media), "sounds")
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
    seen, _ = _sounds(s, frozen)
    (picture,) = s.frames(frozen, [0])
    prompt = frozen.encoder.prompt_of(messages, [picture, *seen], "check")
    with torch.no_grad():
        cached = _near(*_group(s, frozen, prompt, media), "features of sounds")
        frozen.evaluate([prompt], [s.answers(frozen)[0]])
    encoded = frozen.encoder.visuals.stats.encoded
    assert encoded == 2, f"expected 2 sounds encoded once, found {encoded}"
    free = s.policy()
    seen, _ = _sounds(s, free)
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
        return _naive(policy, s.processed(policy, pictures), ids, prompt.kinds_P, len(tokens))

    with torch.no_grad():
        tokens = [t for answer in answers for t in (written, answer)]
        found = policy.evaluate([first, second] * 2, tokens)
        early = alone(first, 1, written)
        wanted = [x for answer in answers for x in (early, alone(second, 2, answer))]
        apart = _near(found.logp_N, torch.cat(wanted), "two turns and a branch")
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
        apart = max(apart, _near(torch.tensor(turn.logprobs), logp, "rollout's log-probs"))
    return f"generate's own tokens; log-probs {apart:.1g} apart"


def check_features(s: Subject) -> str:
    """Cached features of a frozen tower against the pixels' way, and encoded once."""
    policy = s.policy(freeze=["vision", "projector"])
    assert policy.tower() is not None, "the tower does not count as frozen"
    count = s.counts[-1]
    with torch.no_grad():
        found, wanted = _group(s, policy, s.prompt(policy, count), s.processed(policy, count))
        again = policy.evaluate([s.prompt(policy, count)], [s.answers(policy)[0]]).logp_N
    apart = _near(found, wanted, "features")
    _near(again, found[: len(again)], "features taken from the cache")
    encoded = policy.encoder.visuals.stats.encoded
    assert encoded == count, f"expected {count} pictures encoded once, found {encoded}"
    return f"{apart:.1g} apart; {count} picture{'s' * (count > 1)} encoded once"


def check_freeze(s: Subject) -> str:
    """Each part alone is frozen: nothing of it learns, the others do."""
    counts, parts = [], s.family.parts.names
    for part in parts:
        policy = s.policy(freeze=[part])
        prompt = s.prompt(policy, 1)
        if "audio" in parts:
            items = [{"type": "audio"}, *s.messages(1)[0]["content"]]
            media = [*s.frames(policy, [0]), _sounds(s, policy)[0][0]]
            prompt = policy.encoder.prompt_of([{"role": "user", "content": items}], media, "check")
        policy.evaluate([prompt], [s.answers(policy)[1]]).logp_N.sum().backward()
        where = s.family.parts.part_of
        learns = {where(n) for n, p in policy.named_parameters() if p.grad is not None}
        assert learns == set(parts) - {part}, f"{part} frozen: gradients in {sorted(learns)}"
        counts.append(sum(p.numel() for n, p in policy.named_parameters() if where(n) == part))
    return ", ".join(f"{p} {n:,}" for p, n in zip(parts, counts, strict=True)) + " weights"


def _reloaded(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    ).eval()


def check_lora(s: Subject) -> str:
    """An adapter on the language model learns; merged and saved, transformers computes with it."""
    policy = s.policy(lora=LoraSettings(r=4))
    s.step(policy)
    s.step(policy)  # B begins at zero: A moves in the second step
    prompt, answer = s.prompt(policy, 1), s.answers(policy)[1]
    parts = {s.family.parts.part_of(n) for n, _ in policy.trainable()}
    assert parts == {"language"}, f"expected adapters in the language model, found {parts}"
    layers = {n.split(".lora_")[0].rsplit(".", 1)[-1] for n, _ in policy.trainable()}
    with torch.no_grad():
        ours = policy.evaluate([prompt], [answer]).logp_N
        policy.save(s.folder / "lora")
        policy.model = _reloaded(s.folder / "lora")
        ids = [*prompt.ids_P.tolist(), *answer]
        wanted = _naive(policy, s.processed(policy, 1), ids, prompt.kinds_P, len(answer))
    return f"{', '.join(sorted(layers))}: merged {_near(ours, wanted, 'merged'):.1g} apart"


def check_save(s: Subject) -> str:
    """After a step, saved and read by transformers: every tensor bit for bit, and the processor's ids."""
    from transformers import AutoProcessor

    policy = s.policy()
    s.step(policy)
    policy.save(s.folder / "saved")
    theirs, ours = _reloaded(s.folder / "saved").state_dict(), policy.base.state_dict()
    assert theirs.keys() == ours.keys(), f"other names: {sorted(theirs.keys() ^ ours.keys())[:3]}"
    changed = [n for n in ours if not torch.equal(ours[n], theirs[n])]
    assert not changed, f"other numbers: {changed[:3]}"
    wanted = s.processed(policy, 1)["input_ids"]
    policy.processor = AutoProcessor.from_pretrained(s.folder / "saved", trust_remote_code=False)
    assert torch.equal(s.processed(policy, 1)["input_ids"], wanted), "another processor"
    return f"{len(ours)} tensors bit-equal"


def check_memory(s: Subject) -> str:
    """The estimate's bytes of weights and gradients against those of the loaded model, its activations against what autograd keeps,
    and that the whole estimate can be made."""
    from mmrl.diagnostics.memory import estimate
    from mmrl.diagnostics.memory_parameters import parameter_bytes

    policy = s.plain
    config = RunConfig(model=ModelConfig(path=s.path, device="cpu"))
    found = parameter_bytes(config, policy.base.config, "cpu")
    held = {id(p): p.numel() * p.element_size() for p in policy.model.parameters()}
    assert found.weights == found.gradients == sum(held.values()), (
        f"estimated {found.weights:,} and {found.gradients:,} bytes, held {sum(held.values()):,}"
    )
    assert estimate(config, kind="cpu").total > found.weights, "less than its weights"
    language, tower = language_apart(policy), tower_apart(policy)
    return f"{found.weights:,} bytes of weights and of gradients; activations {language:+.0%}, the tower's {tower:+.0%} apart"


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
    "memory": check_memory,
    "vllm": check_vllm,
}
"""Name -> check, in the order of the table; a name in `ModelFamily.refused` is not run and says why instead."""
