"""Turn a Sample into what every later pass reads: token ids, rotary positions, references to its media, a fingerprint.

A prompt is encoded once. Rollout, old / reference log-probs and the update all receive the same `Prompt`; its
fingerprint travels with the Group: taken from the encoded prompt handed to rollout, and again from the encoded prompt
handed to packing. It covers these prompts, not what packing or the model then make of them. Pixels stay in the visual
cache (mmrl.video.visuals), which refuses to give others than a reference was made for.

Legend: P prompt tokens.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from mmrl.errors import ConfigError, DataError
from mmrl.files import check_text
from mmrl.policy.families import ModelFamily, family_of_processor
from mmrl.policy.tool_messages import CALL_TAG, PROBE, with_tools, without_tool_role
from mmrl.task import Task, Template
from mmrl.types import AudioSize, ImageSize, Sample, VideoSize
from mmrl.video.media import image_overrides, orientation_of
from mmrl.video.processing import CLIP_SOUND

if TYPE_CHECKING:
    from mmrl.workers.prefetch import Ahead

__all__ = ["Encoder", "Prompt", "fingerprint", "picture_options"]

_MEDIA = {"image": "picture", "video": "video", "audio": "sound"}
_ANSWER = "mmrl-was-here"  # stands for an answer where only what the chat template puts behind it is asked for


@dataclass(frozen=True, eq=False)
class Prompt:
    """One encoded prompt, on the CPU and picklable; equal to itself alone.

    ids_P, kinds_P (0 text, 1 image, 2 video, 3 audio) are int64; positions_3P are the rotary positions (temporal, height,
    width); `next_position` continues them after the prompt; `visuals` refer to its pictures, clips and sounds in order of
    their tokens.
    """

    ids_P: torch.Tensor
    kinds_P: torch.Tensor
    positions_3P: torch.Tensor
    next_position: int
    visuals: tuple[Any, ...] = ()

    @property
    def length(self) -> int:
        """Number of prompt tokens P, media tokens included."""
        return int(self.ids_P.numel())

    @property
    def nbytes(self) -> int:
        """Bytes held by all tensors."""
        return sum(
            t.numel() * t.element_size() for t in (self.ids_P, self.kinds_P, self.positions_3P)
        )

    @property
    def images(self) -> tuple[ImageSize, ...]:
        """Sizes of the pictures."""
        return tuple(v.size for v in self.visuals if v.kind == "image")

    @property
    def videos(self) -> tuple[VideoSize, ...]:
        """Sizes and times of the clips."""
        return tuple(v.size for v in self.visuals if v.kind == "video")

    @property
    def audios(self) -> tuple[AudioSize, ...]:
        """Lengths of the sounds."""
        return tuple(v.size for v in self.visuals if v.kind == "audio")

    @cached_property
    def fingerprint(self) -> str:
        """See the function of that name."""
        return fingerprint(self.ids_P, self.positions_3P, [v.identity for v in self.visuals])


def fingerprint(ids_P: torch.Tensor, positions_3P: torch.Tensor, media: Sequence[Any]) -> str:
    """BLAKE2b hash (32 hex digits) of token ids, rotary positions and the identity (digest, view, grid) of every visual."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in (("ids", ids_P), ("positions", positions_3P)):
        data = tensor.detach().to("cpu").contiguous()
        digest.update(f"{name}:{data.dtype}:{tuple(data.shape)};".encode())
        digest.update(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"")
    digest.update(repr(tuple(media)).encode())
    return digest.hexdigest()


def picture_options(
    processor: Any, min_pixels: int | None, max_pixels: int | None
) -> dict[str, Any]:
    """Options of an image processor: both bounds of the resized pictures' areas, or nothing for the processor's own.

    Raises ConfigError for bounds the wrong way round.
    """
    if min_pixels is None and max_pixels is None:
        return {}
    options, (low, high) = family_of_processor(processor).image_options(
        processor, min_pixels, max_pixels
    )
    if low > high:
        names = [
            f"{key} ({'the model' if value is None else 'configured'})"
            for key, value in (("data.min_pixels", min_pixels), ("data.max_pixels", max_pixels))
        ]
        raise ConfigError(
            f"expected data.min_pixels <= data.max_pixels, found {low} > {high}: {names[0]} against "
            f"{names[1]}; set both"
        )
    return options


def _standing_for(name: str, visuals: Sequence[Any]) -> Sample:
    """A sample with as many media as `visuals` are, for what is asked of them by number."""
    kinds = [v.kind for v in visuals]
    images, videos, audios = (("",) * kinds.count(kind) for kind in _MEDIA)
    return Sample(name, "", "", "", None, images=images, videos=videos, audios=audios)


class Encoder:
    """Sample -> Prompt through the model's own processor and the visual cache, with a least-recently-used memory.

    Raises MediaError for media that cannot be read and DataError for prompts that do not fit `max_prompt_tokens`:
    a prompt is never truncated, least of all through a media block. `visuals` is a mmrl.video.visuals.VisualCache, `base` the base
    model of `family` (of which rotary positions need the class and the configuration: it may lie on the meta device).
    """

    def __init__(
        self,
        processor: Any,
        family: ModelFamily,
        base: Any,
        template: Template,
        visuals: Any,
        *,
        max_prompt_tokens: int = 16384,
        max_pixels: int | None = None,
        min_pixels: int | None = None,
        cache_bytes: int = 1 << 30,
    ) -> None:
        self.processor, self.template, self.visuals = processor, template, visuals
        self.family, self._base = family, base
        self.max_prompt_tokens = max_prompt_tokens
        self._min_pixels, self._max_pixels = min_pixels, max_pixels
        self._cache: OrderedDict[tuple, tuple[Prompt, Task]] = OrderedDict()
        self._cache_bytes, self._used_bytes = cache_bytes, 0
        self.hits = self.misses = 0
        self.ahead: Ahead | None = None  # worker processes that prepare media

    def __call__(self, sample: Sample, task: Task) -> Prompt:
        """Encode (or recall) the prompt of `sample`."""
        # Ids are unique within one data set only, and two tasks may ask the same sample differently; the entry keeps its
        # task alive, so that no other object can get the same id().
        key = (
            id(task),
            sample.source,
            sample.id,
            sample.question,
            sample.images,
            sample.videos,
            sample.audios,
            repr(sample.params.get("video")),
            orientation_of(sample),
        )
        if key in self._cache:
            self.hits += 1
            self._cache.move_to_end(key)
            return self._cache[key][0]
        self.misses += 1
        prompt = self._encode(sample, task)
        if prompt.nbytes <= self._cache_bytes:
            self._cache[key] = (prompt, task)
            self._used_bytes += prompt.nbytes
            while self._used_bytes > self._cache_bytes:
                self._used_bytes -= self._cache.popitem(last=False)[1][0].nbytes
        return prompt

    def text(self, sample: Sample, task: Task) -> str:
        """The prompt as text, media still as one placeholder each."""
        messages = self._shown(task.messages(sample, self.template))
        return self._rendered(messages, add_generation_prompt=True)

    def _rendered(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """What the chat template makes of `messages`."""
        return self.processor.apply_chat_template(
            messages, tokenize=False, **self.family.chat_options(), **options
        )

    def without_media(self, sample: Sample, task: Task) -> Prompt:
        """The question alone: the same messages without their pictures, clips and sounds."""
        messages = [
            {
                **m,
                "content": m["content"]
                if isinstance(m["content"], str)
                else [item for item in m["content"] if item["type"] not in _MEDIA],
            }
            for m in task.messages(sample, self.template)
        ]
        return self._tokens(
            sample,
            self._chat(replace(sample, images=(), videos=(), audios=()), task, messages),
            (),
        )

    def prompt_of(
        self,
        messages: list[dict[str, Any]],
        visuals: Sequence[Any],
        name: str = "prompt",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Prompt:
        """The prompt of chat messages whose media items are `visuals`, in their order, with the `tools` that may be called
        (mmrl.environment.Observation). Raises DataError (`name` in its text)."""
        sample = _standing_for(name, visuals)
        if tools and not self._shows_tools:
            messages, tools = with_tools(messages, tools), ()
        return self._tokens(
            sample, self._checked_text(sample, "messages", messages, tools), visuals
        )

    @cached_property
    def _shows_tools(self) -> bool:
        """Whether the chat template has a place for tools, and asks for calls that are read (mmrl.tasks.tool_calls): Mistral's and
        Kimi's ask for signs of their own."""
        asked = [{"role": "user", "content": "?"}]
        told = [self._rendered(asked, tools=tools) for tools in (None, [PROBE])]
        return bool(told[0] != told[1] and CALL_TAG in told[1])

    @cached_property
    def _shows_strings(self) -> bool:
        """Whether the chat template shows contents that are strings; those of Idefics3 and SmolVLM show items alone."""
        text = {"type": "text", "text": "?"}
        asked: list[Any] = ["?"]
        if not self.family.refused.get("video"):
            # SmolVLM's processor has a template of its own for clips
            asked.append([{"type": "video"}, text])
        answer = {"role": "assistant", "content": _ANSWER}
        return all(
            _ANSWER in self._rendered([{"role": "user", "content": content}, answer])
            for content in asked
        )

    def _shown(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """`messages` with their strings as items of text where the chat template shows no strings."""
        if self._shows_strings:
            return messages
        return [
            {**m, "content": [{"type": "text", "text": m["content"]}]}
            if isinstance(m["content"], str)
            else m
            for m in messages
        ]

    def extended(
        self,
        prompt: Prompt,
        written: Sequence[int],
        messages: list[dict[str, Any]],
        visuals: Sequence[Any] = (),
        name: str = "prompt",
    ) -> Prompt:
        """The next turn's prompt: `prompt`, the tokens `written` after it, and the chat `messages` that answer them, whose media
        items are `visuals` in their order.

        The history is what the policy was shown and wrote, token by token: nothing of it is tokenised anew, nor does the chat
        template see it (some leave out what was thought). What the template puts between two messages comes with the observation:
        also the end of the policy's own message, where the length limit cut it. Rotary positions go on as in decoding.
        Raises DataError (`name` in its text), and ConfigError for a template that cannot show an answer in the middle of a chat.
        """
        sample = _standing_for(name, visuals)
        if not self._shows_tools:
            messages = [without_tool_role(m) for m in messages]
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        text = self._checked_text(sample, "messages", [*before, *messages])
        if _ANSWER not in text:
            raise ConfigError(
                "expected a chat template that shows the assistant's answers in the middle of a chat, found one that "
                "drops them; conversations of several turns need another"
            )
        shown = self._tokens(sample, text[text.index(_ANSWER) + len(_ANSWER) :], visuals, prompt)
        ended = int(shown.ids_P[0] == written[-1])  # the policy wrote the end of its message itself
        start = prompt.next_position + len(written)
        pieces = [
            prompt.positions_3P,
            (prompt.next_position + torch.arange(len(written))).expand(3, -1),
            shown.positions_3P[:, ended:] + (start - ended),
        ]
        ids_P = torch.cat([prompt.ids_P, torch.tensor(list(written)), shown.ids_P[ended:]])
        kinds_P = torch.cat(
            [prompt.kinds_P, torch.zeros(len(written), dtype=torch.long), shown.kinds_P[ended:]]
        )
        self._check_length(sample, kinds_P)
        self._check_pictures(sample, [*prompt.visuals, *visuals])
        positions_3P = torch.cat(pieces, 1)
        return Prompt(
            ids_P,
            kinds_P,
            positions_3P,
            int(positions_3P.max()) + 1,
            (*prompt.visuals, *shown.visuals),
        )

    def references(self, sample: Sample) -> tuple[Any, ...]:
        """References to the sample's clips, pictures and sounds, decoded and processed if nobody has done so yet. Raises
        MediaError, and DataError for sounds that the model cannot hear, a clip's own too."""
        self._check_hearing(sample)
        overrides = sample.params.get("video")
        if isinstance(overrides, Mapping) and overrides.get("use_audio_in_video"):
            raise DataError(f"sample {sample.id}: {CLIP_SOUND}")
        turn = image_overrides(sample)
        images = [self._visual("image", path, turn) for path in sample.images]
        self._check_budget(sample, [v.size for v in images])
        clips = [self._visual("video", path, overrides) for path in sample.videos]
        return (*clips, *images, *(self._visual("audio", path) for path in sample.audios))

    def _visual(self, kind: str, path: str, overrides: Mapping[str, Any] | None = None) -> Any:
        if self.ahead is not None:
            self.ahead.wait(kind, path, overrides)
        return self.visuals.refer(kind, path, overrides)

    def _chat(self, sample: Sample, task: Task, messages: list[dict[str, Any]]) -> str:
        return self._checked_text(sample, f"{type(task).__name__}.messages", messages)

    def _checked_text(
        self,
        sample: Sample,
        origin: str,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        expected = {
            "image": len(sample.images),
            "video": len(sample.videos),
            "audio": len(sample.audios),
        }
        items = [
            item["type"]
            for m in messages
            if not isinstance(m["content"], str)
            for item in m["content"]
        ]
        for kind, count in expected.items():
            if items.count(kind) != count:
                words = _MEDIA[kind]
                raise DataError(
                    f"sample {sample.id}: expected one {kind} item per {words}, found {items.count(kind)} items for "
                    f"{count} {words}s; fix {origin} or the row's {kind}s"
                )
        text = self._rendered(
            self._shown(messages),
            add_generation_prompt=True,
            **({"tools": [dict(tool) for tool in tools]} if tools else {}),
        )
        for token, kind in self.family.placeholders(self.processor).items():
            count = expected[kind]
            if text.count(token) != count:
                raise DataError(
                    f"sample {sample.id}: expected {count} times {token} in the prompt, found "
                    f"{text.count(token)}; the question must not contain it: remove it from the row"
                )
        self._check_reserved(sample, messages, tools)
        return text

    def _check_reserved(
        self,
        sample: Sample,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
    ) -> None:
        if not self.family.reserved:
            return
        texts = [repr(tools)]
        for message in messages:
            content = message["content"]
            items = [{"text": content}] if isinstance(content, str) else content
            texts += [str(item.get("text", "")) for item in items]
        for token in self.family.reserved:
            if any(token in text for text in texts):
                raise DataError(
                    f"sample {sample.id}: expected texts without the model's own signs for media, found {token}; remove it from "
                    "the row"
                )

    def _encode(self, sample: Sample, task: Task) -> Prompt:
        # said first: the template of a model that does not hear has no placeholder
        self._check_hearing(sample)
        text = self._chat(sample, task, task.messages(sample, self.template))
        return self._tokens(sample, text, self.references(sample))

    def _check_hearing(self, sample: Sample) -> None:
        if sample.audios and self.family.no_audio:
            raise DataError(
                f"sample {sample.id}: expected no audio files, found {len(sample.audios)}: {self.family.no_audio}"
            )

    def _expand(
        self, text: str, visuals: Sequence[Any], shown: Sequence[Any]
    ) -> tuple[str, list[Any]]:
        """`text` with every placeholder repeated as the processor would, and the visuals in order of their tokens. `shown` were in
        earlier turns."""
        tokens = self.family.placeholders(self.processor)
        waiting = {kind: iter([v for v in visuals if v.kind == kind]) for kind in tokens.values()}
        ordered, counts = [], Counter(v.kind for v in shown)

        def placeholder(match: re.Match[str]) -> str:
            visual = next(waiting[tokens[match.group()]])
            ordered.append(visual)
            number = counts[visual.kind]
            counts[visual.kind] += 1
            expanded = self.family.expand(self.processor, visual)
            return self.family.numbered(self.processor, visual.kind, number, expanded)

        return re.sub("|".join(map(re.escape, tokens)), placeholder, text), ordered

    def _tokens(
        self, sample: Sample, text: str, visuals: Sequence[Any], before: Prompt | None = None
    ) -> Prompt:
        """`text` and `visuals` as a prompt, or as what follows in the middle of one that begins with `before`."""
        check_text(text, f"sample {sample.id}")
        self._check_pictures(sample, visuals)
        text, visuals = self._expand(text, visuals, before.visuals if before is not None else ())
        tokenizer = self.processor.tokenizer
        # as apply_chat_template does: a template that writes the beginning itself is given no second one
        written = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        begins = before is None and not written
        ids_1P = tokenizer([text], return_tensors="pt", add_special_tokens=begins)["input_ids"]
        kinds_1P = self.family.kinds(self.processor, ids_1P)
        self._check_length(sample, kinds_1P[0])
        positions_3P = self.family.positions(self.processor, self._base, ids_1P, kinds_1P, visuals)
        return Prompt(
            ids_1P[0], kinds_1P[0], positions_3P, int(positions_3P.max()) + 1, tuple(visuals)
        )

    def _check_pictures(self, sample: Sample, visuals: Sequence[Any]) -> None:
        most, found = self.family.most_pictures, sum(v.kind == "image" for v in visuals)
        if most is not None and found > most:
            raise DataError(
                f"sample {sample.id}: expected at most {most} picture{'s' * (most > 1)} in a prompt, found {found}: "
                f"{self.family.refused['pictures']}"
            )

    def _check_length(self, sample: Sample, kinds_P: torch.Tensor) -> None:
        if len(kinds_P) > self.max_prompt_tokens:
            raise DataError(
                f"sample {sample.id}: expected at most {self.max_prompt_tokens} prompt tokens, found "
                f"{len(kinds_P)} ({int((kinds_P > 0).sum())} of them media); lower data.max_pixels (videos: "
                "data.video, sounds: data.audio) or raise model.max_prompt_tokens"
            )

    def _check_budget(self, sample: Sample, sizes: Sequence[ImageSize]) -> None:
        """A processor that ignores its budget, or a strip that whole patches cannot fit into it, must not pass unseen.

        Sides are whole patches, so a picture shrunk to the upper bound may end up to one patch per side below the lower
        one, and a picture enlarged to the lower bound that much above the upper one; both pass, as in a budget of one size.
        """
        layout = self.visuals.reader.layout
        cell = layout.patch * layout.merge
        for image in sizes:
            (width, height), (orig_width, orig_height) = image.resized_wh, image.orig_wh
            found = f"found {width} x {height} = {width * height} for a picture of {orig_width} x {orig_height}"
            if (high := self._max_pixels) is not None:
                # even after rounding its sides down
                shrunk = (orig_width - cell / 2) * (orig_height - cell / 2) > high
                slack = 0 if shrunk else cell
                if (width - slack) * (height - slack) > high:
                    raise DataError(
                        f"sample {sample.id}: expected at most data.max_pixels = {high} pixels after resizing "
                        f"to whole patches, {found}; raise data.max_pixels or remove the row"
                    )
            if (low := self._min_pixels) is not None and (width + cell) * (height + cell) < low:
                raise DataError(
                    f"sample {sample.id}: expected at least data.min_pixels = {low} pixels after resizing to "
                    f"whole patches, {found}; lower data.min_pixels or remove the row"
                )
