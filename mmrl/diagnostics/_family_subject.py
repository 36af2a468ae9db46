"""What the checks of `mmrl families check` are made of: a family's model, what it is asked, and the same computed by transformers
alone. Part of mmrl.diagnostics.families."""

from __future__ import annotations

import wave
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mmrl.config import ModelConfig
from mmrl.config.rollout_engine import model_settings
from mmrl.coords import CoordFrame
from mmrl.policy.encode import Prompt
from mmrl.policy.families import ModelFamily
from mmrl.policy.loading import load_policy
from mmrl.policy.policy import Policy

__all__ = [
    "LOGP",
    "Subject",
    "cases",
    "clip_prompt",
    "gradients_near",
    "greedy",
    "group",
    "naive",
    "near",
    "pictures_of",
    "prompts",
    "turns_and_branch",
    "weighed",
    "sounds",
]

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
    def mixes_experts(self) -> bool:
        """Whether this model of the family has experts."""
        return self.family.mixes_experts(model_settings(self.path))

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
        self.descend(policy, 1e-3)

    @torch.no_grad()
    def descend(self, policy: Policy, rate: float) -> None:
        """Take `rate` times its gradient off each weight that has one."""
        for _, p in policy.trainable():
            if p.grad is not None:
                p.sub_(p.grad, alpha=rate)

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


def naive(
    policy: Policy, media: Mapping[str, Any], ids: Sequence[int], kinds: torch.Tensor, last: int
) -> torch.Tensor:
    """Log-probs of the last `last` tokens by transformers' own forward of one row, with positions and masks of its making."""
    logits = policy.base(**row_inputs(policy, media, ids, kinds)).logits[0, -last - 1 : -1].float()
    logits = logits.index_fill(-1, policy.banned, float("-inf"))
    targets = torch.tensor(list(ids[-last:]))
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def row_inputs(
    policy: Policy, media: Mapping[str, Any], ids: Sequence[int], kinds: torch.Tensor
) -> dict[str, Any]:
    """Arguments of transformers' forward and generate for one row: ids, and what the processor's call made of the media."""
    inputs = {"input_ids": torch.tensor([list(ids)])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    known = ["input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"]
    taken = policy.family.text_inputs(torch.zeros(3, 1, 1), kinds[None])
    for name in set(known[2:]) & set(taken):
        inputs[name] = torch.nn.functional.pad(kinds, (0, len(ids) - len(kinds)))[None]
    return inputs | {k: v for k, v in media.items() if k not in known}


def greedy(
    policy: Policy, prompt: Prompt, media: Mapping[str, Any], most: int = 12
) -> tuple[list[int], list[int], list[float]]:
    """Greedy tokens of mmrl's engine, those of transformers' generate, and the log-probs of the first."""
    from mmrl.rollout.engine import PrefillOnceEngine, Request, SamplingSettings

    request = Request(prompt, 1, greedy=True)
    ((turn,),) = PrefillOnceEngine(policy).generate(
        [request], SamplingSettings(max_new_tokens=most)
    )
    with torch.no_grad():
        whole = policy.base.generate(
            **row_inputs(policy, media, prompt.ids_P.tolist(), prompt.kinds_P),
            do_sample=False,
            max_new_tokens=most,
            suppress_tokens=policy.banned.tolist(),
        )
    return list(turn.token_ids), whole[0, prompt.length :].tolist(), list(turn.logprobs)


def pictures_of(count: int) -> str:
    return f"{count} picture{'s' * (count > 1)}" if count else "text"


Asked = tuple[str, Prompt, Mapping[str, Any]]
"""What it is, the prompt, and what the processor's own call makes of its media."""


def questions(s: Subject, policy: Policy) -> Iterator[Asked]:
    """Text alone, pictures, a clip where the family takes one."""
    for count in s.counts:
        yield pictures_of(count), s.prompt(policy, count), s.processed(policy, count)
    if "video" not in s.family.refused:
        yield ("a clip", *clip_prompt(s, policy))


def prompts(s: Subject, policy: Policy) -> Iterator[Asked]:
    """All that a policy can be asked: `questions`, and a second turn."""
    yield from questions(s, policy)
    if "turns" not in s.family.refused:
        yield "a second turn", second_turn(s, policy)[2], s.processed(policy, 2)


def cases(s: Subject, policy: Policy) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Log-probs of a group behind each of `questions`, and of two turns with a branch: packed, and in rows by transformers."""
    for what, prompt, media in questions(s, policy):
        yield what, group(s, policy, prompt, media)
    if "turns" not in s.family.refused:
        yield "two turns", turns_and_branch(s, policy)


def group(
    s: Subject, policy: Policy, prompt: Prompt, media: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of a group: packed behind one prompt, and each in a row of its own by transformers alone."""
    answers = s.answers(policy)
    packed = policy.evaluate([prompt] * len(answers), answers).logp_N
    ids = prompt.ids_P.tolist()
    alone = [naive(policy, media, [*ids, *a], prompt.kinds_P, len(a)) for a in answers]
    return packed, torch.cat(alone)


def weighed(logp_N: torch.Tensor) -> torch.Tensor:
    """A loss in which every token counts otherwise."""
    return (logp_N * torch.linspace(-1, 1, len(logp_N))).sum()


def gradients_near(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], what: str
) -> float:
    """How far gradients are from those of the same names, in parts of the norm of `wanted`. Raises AssertionError over GRADIENT."""
    norm = torch.stack([g.norm() for g in wanted.values()]).norm()
    far = torch.stack([(found[n] - g).norm() for n, g in wanted.items()]).norm()
    apart = float(far / norm)
    assert apart <= GRADIENT, (
        f"{what}: expected gradients at most {GRADIENT:g} of their norm apart, found {apart:.2g}"
    )
    return apart


def near(found: torch.Tensor, wanted: torch.Tensor, what: str, most: float = LOGP) -> float:
    apart = float((found - wanted).detach().abs().max())
    assert apart <= most, f"{what}: expected at most {most:g} apart, found {apart:.2g}"
    return apart


def clip_prompt(s: Subject, policy: Policy) -> tuple[Prompt, dict[str, Any]]:
    """The question about a clip, and what the processor itself makes of it. Raises AssertionError where ids or pixels differ."""
    from mmrl.video.clips import ChunkClips
    from mmrl.video.decode import read_clip
    from mmrl.video.encode import write_video

    rng, path = np.random.default_rng(1), s.folder / "clip.mp4"
    if not path.exists():
        write_video(path, rng.integers(0, 256, (12, 64, 96, 3), dtype=np.uint8), fps=4)
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
    media = dict(
        policy.processor(
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
    )
    assert prompt.ids_P.tolist() == media["input_ids"][0].tolist(), "clip: other token ids"
    pixels = media["pixel_values_videos" if "pixel_values_videos" in media else "pixel_values"]
    ours = visuals.pixels(visual)
    assert torch.equal(ours, pixels.reshape(ours.shape)), "clip: other pixels"
    for name in {"second_per_grid_ts", "video_second_per_grid"} & set(media):
        pair = policy.processor.video_processor.temporal_patch_size
        media[name] = torch.tensor([pair / visual.sample_fps])
    return prompt, media


def sounds(s: Subject, policy: Policy) -> tuple[list[Any], list[np.ndarray]]:
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


def second_turn(s: Subject, policy: Policy) -> tuple[Prompt, tuple[int, ...], Prompt]:
    """A question, an answer to it, and the question after that: a picture in each."""
    first, written = s.prompt(policy, 1), (*s.words(policy, "the red circle"), policy.eos_ids[0])
    shown = s.frames(policy, [1])
    second = policy.encoder.extended(first, written, s.messages(1, "yes or no"), shown, "check")
    return first, written, second


def turns_and_branch(s: Subject, policy: Policy) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of two turns and of another answer that branches from the second: packed behind each other, and in rows of
    transformers' forward."""
    first, written, second = second_turn(s, policy)
    answers = [s.words(policy, text) for text in ("yes", "no or yes")]
    found = policy.evaluate([first, second] * 2, [t for a in answers for t in (written, a)])
    length = second.length + sum(map(len, answers))
    assert found.num_tokens == length, f"{found.num_tokens} tokens were computed, not {length}"

    def alone(prompt: Prompt, pictures: int, tokens: tuple[int, ...]) -> torch.Tensor:
        ids = [*prompt.ids_P.tolist(), *tokens]
        return naive(policy, s.processed(policy, pictures), ids, prompt.kinds_P, len(tokens))

    early = alone(first, 1, written)
    return found.logp_N, torch.cat([x for a in answers for x in (early, alone(second, 2, a))])
