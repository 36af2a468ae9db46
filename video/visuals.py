"""See once: every picture, clip and sound is decoded once, processed once and, with a frozen vision tower, encoded once.

    visuals = VisualCache(processor, store=TensorStore("runs/cache"))
    seen = visuals.video("clip.mp4")          # a reference: grid, sizes, times, digest; no pixels
    visuals.pixels(seen)                      # float32 (n, D), exactly what the processor made
    visuals.features(seen, tower)             # what the vision tower (of sounds: the audio tower) made of them

Level 1 holds processed pixels as bytes, level 2 the tower's features; both are kept in memory (bounded) and, with a store,
on disk. Prompts carry references only. A reference knows the digest of its pixels: other pixels are an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mmrl.errors import CacheError, MediaError, MismatchError
from mmrl.video.audio import AudioReader, probe_audio, too_long
from mmrl.video.clips import ClipReader
from mmrl.video.decode import read_clip
from mmrl.video.media import Orientation, open_image
from mmrl.video.memory import Memory
from mmrl.video.pictures import PictureReader
from mmrl.video.pixels import permute_frames
from mmrl.video.processing import Built, Processing, pixel_digest
from mmrl.video.references import Change, Features, Frame, Tower, VideoSettings, Visual
from mmrl.video.sampling import FrameSampling
from mmrl.video.store import TensorStore, content_digest, make_key

if TYPE_CHECKING:
    import torch

__all__ = ["Change", "Features", "Tower", "VideoSettings", "Visual", "VisualCache", "VisualStats"]

SCHEMA = 2


@dataclass
class VisualStats:
    """What was asked of a cache in this process."""

    built: int = 0
    hits: int = 0
    encoded: int = 0
    feature_hits: int = 0
    uncached: int = 0


@dataclass(frozen=True)
class _Packed:
    tensor: torch.Tensor
    meta: Mapping[str, Any]
    entry: Any = None  # the store's, which keeps it from eviction

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def _same(visual: Visual, packed: _Packed) -> None:
    if packed.meta["digest"] != visual.digest:
        raise MismatchError(
            f"{visual.path}: expected pixels {visual.digest}, found {packed.meta['digest']}: the file, the "
            "processor or the decoder changed during the run; restore it, or resume"
        )


def _reordered(features: Features, order: Sequence[int]) -> Features:
    """Features whose temporal patch i is the old one order[i]."""

    def moved(x: torch.Tensor) -> torch.Tensor:
        return x.view(len(order), -1, x.shape[-1])[list(order)].flatten(0, 1)

    return Features(moved(features.main), tuple(moved(d) for d in features.deep))


class VisualCache(Processing):
    """Pictures, clips and sounds of one processor; see the module's text. `memory_bytes` bounds pixels and features each."""

    def __init__(
        self,
        processor: Any,
        *,
        image_options: Mapping[str, Any] | None = None,
        settings: VideoSettings | None = None,
        store: TensorStore | None = None,
        memory_bytes: int = 1 << 30,
        keep_features: bool = True,
        open_entries: int = 1024,
        reader: PictureReader | None = None,
        no_clips: str = "",
        clips: ClipReader | None = None,
        ears: AudioReader | None = None,
        no_audio: str = "",
        max_seconds: float | None = None,
    ) -> None:
        super().__init__(
            processor,
            image_options,
            settings,
            reader,
            no_clips,
            clips,
            ears,
            no_audio,
            max_seconds,
        )
        self.store, self.keep_features = store, keep_features
        # told of every file that was read: path, digest of its bytes
        self.witness: Callable[[str, str], None] | None = None
        self.stats = VisualStats()
        # entries of the store that are held cannot be evicted: they may not fill it, nor use up the process's open files
        held = 1 << 62 if store is None or store.limit_bytes is None else store.limit_bytes // 4
        self._pixels, self._features = (Memory(memory_bytes, open_entries, held) for _ in range(2))
        self._pinned: dict[Any, Any] = {}

    # references

    def image(self, path: str, overrides: Mapping[str, Any] | None = None) -> Visual:
        """The picture at `path`; `overrides` may hold its orientation (mmrl.video.media). Raises MediaError."""
        return self._reference(
            "image", path, None, (overrides or {}).get("orientation", "displayed")
        )

    def frame(self, rgb_HWC: Any) -> Frame:
        """A reference to a picture in memory, uint8 (H, W, 3); the same pixels always give an equal one. Raises MediaError."""
        import torch

        pixels = torch.as_tensor(rgb_HWC)
        if (
            pixels.ndim != 3
            or pixels.shape[2] != 3
            or pixels.dtype != torch.uint8
            or not pixels.numel()
        ):
            raise MediaError(
                f"expected a picture as uint8 (H, W, 3), found {pixels.dtype} {tuple(pixels.shape)}",
                kind="corrupt",
            )
        height, width, _ = pixels.shape
        packed, grid, resized_wh = self._patches(pixels.permute(2, 0, 1))
        digest = pixel_digest(packed)
        return Frame(
            "image",
            "",
            digest,
            "",
            digest,
            grid,
            self.codec("image").layout.tokens(grid),
            (width, height),
            resized_wh,
            packed=packed,
        )

    def video(self, path: str, overrides: Mapping[str, Any] | None = None) -> Visual:
        """The clip at `path`, sampled as configured with `overrides` of FrameSampling. Raises MediaError, ConfigError."""
        return self._reference("video", path, self.sample(overrides))

    def audio(self, path: str, overrides: Mapping[str, Any] | None = None) -> Visual:
        """The sound at `path`; there are no `overrides`. Raises MediaError, and ConfigError where the model does not hear."""
        self.hears  # noqa: B018 - says why it does not
        return self._reference("audio", path, None)

    def refer(self, kind: str, path: str, overrides: Mapping[str, Any] | None = None) -> Visual:
        """`image`, `video` or `audio`, by `kind`."""
        made: Visual = getattr(self, kind)(path, overrides)
        return made

    def _key(
        self,
        kind: str,
        path: str,
        sampling: FrameSampling | None,
        content: str,
        orientation: Orientation,
    ) -> str:
        turn = {} if orientation == "displayed" else {"orientation": orientation}
        part = {
            "kind": kind,
            "content": content,
            "processor": self._fingerprint(kind),
            "schema": SCHEMA,
            **turn,
        }
        if kind == "audio":
            return make_key(**part)
        if sampling is None:
            return make_key(**part, options=json.dumps(self.image_options, sort_keys=True))
        layout = self.codec(kind).layout
        bounds = self.settings.bounds(layout.patch * layout.merge)
        return make_key(
            **part, sampling=sampling.key(), bounds=list(bounds), decoder=self.settings.decoder
        )

    def _reference(
        self,
        kind: str,
        path: str,
        sampling: FrameSampling | None,
        orientation: Orientation = "displayed",
    ) -> Visual:
        if kind == "audio" and not os.path.isfile(path):  # said by the reader, with its fix
            probe_audio(path)
        elif sampling is None and not os.path.isfile(path):
            open_image(path)
        elif sampling is not None and not os.path.exists(path):
            read_clip(path, sampling)
        for attempt in (1, 2):
            content = content_digest(path, self.store)
            key = self._key(kind, path, sampling, content, orientation)
            try:
                meta = self._packed(key, kind, path, sampling, content, orientation).meta
                break
            except CacheError as err:  # edited while it was read: once more, as what it is now
                if attempt == 2:
                    raise MediaError(f"{path}: {err}", kind="corrupt", path=path) from err
        if kind == "audio" and (seconds := meta["duration_s"]) > self.most_seconds:
            # kept by a run that had a higher limit
            raise too_long(path, f"{seconds:.1f} s", self.most_seconds)
        if self.witness is not None:
            self.witness(path, content)
        t, h, w = meta["grid_thw"]
        return Visual(
            kind,
            path,
            key,
            content,
            meta["digest"],
            (t, h, w),
            self.codec(kind).layout.tokens((t, h, w)),
            tuple(meta["orig_wh"]),
            tuple(meta["resized_wh"]),
            meta.get("frames", 1),
            tuple(meta.get("timestamps_s", ())),
            meta.get("duration_s", 0.0),
            meta.get("sample_fps", 0.0),
            sampling,
            orientation=orientation,
        )

    # level 1

    def _packed(
        self,
        key: str,
        kind: str,
        path: str,
        sampling: FrameSampling | None,
        content: str,
        orientation: Orientation,
    ) -> _Packed:
        if (found := self._pinned.get(key) or self._pixels.get(key)) is not None:
            self.stats.hits += 1
            return found
        before = self.stats.built

        def build() -> Built:
            self.stats.built += 1
            if kind == "audio":
                return self._build_audio(path)
            return (
                self._build_image(path, orientation)
                if sampling is None
                else self._build_video(path, sampling)
            )

        if self.store is None:
            tensors, meta = build()
            packed = _Packed(tensors["pixels"], meta)
        else:
            # a file edited between its digest and its decoding must not be kept under the old key
            entry = self.store.get_or_build(key, build, sources={path: content})
            packed = _Packed(entry.tensors["pixels"], entry.meta, entry)
        self.stats.hits += self.stats.built == before
        self._pixels.put(
            key, packed, packed.nbytes, packed.entry is not None and packed.entry.cached
        )
        return packed

    def _packed_of(self, visual: Visual) -> _Packed:
        return self._packed(
            visual.key,
            visual.kind,
            visual.path,
            visual.sampling,
            visual.content,
            visual.orientation,
        )

    def pixels(self, visual: Visual, device: torch.device | None = None) -> torch.Tensor:
        """float32 patches (n, D) of `visual`, in its view. Raises MismatchError when they are no longer those referred to."""
        codec, tensor = self.codec(visual.kind), self._tensor(visual)
        if visual.change.name == "shuffle":
            tensor = permute_frames(tensor, codec.layout, visual.grid_thw, visual.change.order)
        elif visual.change.name == "mirror":
            tensor = codec.layout.mirrored(tensor, visual.grid_thw, visual.resized_wh[0])
        elif visual.change.name == "mask":
            tensor = codec.grey(tensor)
        return codec.unpack(tensor if device is None else tensor.to(device, non_blocking=True))

    def packed(self, visual: Visual) -> torch.Tensor:
        """The bytes of its pixels before any change of view, as a Frame carries them: what another process needs to see it."""
        return self._tensor(visual)

    def _tensor(self, visual: Visual) -> torch.Tensor:
        if isinstance(visual, Frame):
            assert visual.packed is not None
            return visual.packed
        packed = self._packed_of(visual)
        _same(visual, packed)
        return packed.tensor

    # level 2

    def features(
        self, visuals: Sequence[Visual], tower: Tower, device: torch.device | None = None
    ) -> list[Features]:
        """The tower's features of each visual, stored or computed once."""
        found: dict[tuple[Any, ...], Features] = {}
        missing: dict[tuple[Any, ...], Visual] = {}
        for visual in visuals:
            place = (tower.fingerprint, *visual.identity)
            if place in found or place in missing:
                continue
            stored = self._get_features(visual, tower, place)
            if stored is None:
                missing[place] = visual
            else:
                found[place] = stored
                self.stats.feature_hits += 1
        # one by one: features must not depend on what was asked for beside them
        for (
            place,
            visual,
        ) in missing.items():
            if (pairs := self._pairs(visual)) is not None:
                found[place] = _reordered(
                    self.features([replace(visual, change=Change())], tower, device)[0], pairs
                )
                continue
            self.stats.encoded += 1
            (made,) = tower(visual.kind, self.pixels(visual, device), [visual.grid_thw])
            found[place] = self._put_features(visual, tower, place, made)
        chosen = [found[(tower.fingerprint, *v.identity)] for v in visuals]
        return (
            chosen
            if device is None
            else [Features(f.main.to(device), tuple(d.to(device) for d in f.deep)) for f in chosen]
        )

    def _pairs(self, visual: Visual) -> list[int] | None:
        """The order of what the tower sees at once when a shuffle keeps its frames together, else None.

        Qwen-VL towers attend within one temporal patch and know only its rows and columns, so its features move with it; so do
        those of Kimi's chunks.
        """
        if visual.change.name != "shuffle":
            return None
        size, order = self.codec(visual.kind).layout.together, visual.change.order
        whole = len(order) // size * size
        runs = [order[i : i + size] for i in range(0, whole, size)]
        if any(run[0] % size or run != tuple(range(run[0], run[0] + size)) for run in runs) or (
            order[whole:] != tuple(range(whole, len(order)))
        ):
            return None
        return [run[0] // size for run in runs] + ([len(runs)] if len(order) > whole else [])

    def _feature_key(self, visual: Visual, tower: Tower) -> str:
        return make_key(
            pixels=visual.key,
            digest=visual.digest,
            tower=tower.fingerprint,
            change=visual.change.name,
            schema=SCHEMA,
        )

    def _get_features(
        self, visual: Visual, tower: Tower, place: tuple[Any, ...]
    ) -> Features | None:
        if (held := self._pinned.get(place) or self._features.get(place)) is not None:
            return held[0]
        if (
            self.store is None
            or not self.keep_features
            or visual.change.name == "shuffle"
            or isinstance(visual, Frame)
        ):
            return None
        entry = self.store.get(self._feature_key(visual, tower))
        if entry is None:
            return None
        deep = tuple(entry.tensors[f"deep_{i}"] for i in range(len(entry.tensors) - 1))
        features = Features(entry.tensors["main"], deep)
        self._features.put(place, (features, entry), features.nbytes, True)
        return features

    def _put_features(
        self, visual: Visual, tower: Tower, place: tuple[Any, ...], made: Features
    ) -> Features:
        # a new order every time: nobody asks for it again
        if visual.change.name == "shuffle" or not self.keep_features:
            return made
        kept = Features(made.main.cpu(), tuple(d.cpu() for d in made.deep))
        if self.store is not None and not isinstance(visual, Frame):
            tensors = {
                "main": kept.main.contiguous(),
                **{f"deep_{i}": d.contiguous() for i, d in enumerate(kept.deep)},
            }
            meta = {"kind": "features", "of": visual.kind, "path": visual.path}
            try:
                self.store.put(self._feature_key(visual, tower), tensors, meta)
            except CacheError:  # no room: that costs the cache, not the training
                self.stats.uncached += 1
        self._features.put(place, (kept, None), kept.nbytes, False)
        return kept

    def pin(self, visuals: Sequence[Visual], tower: Tower | None = None) -> None:
        """Keep what a step needs of `visuals` until `unpin`: features where they are known, else pixels.

        From here on nothing about them can fail. Raises MediaError or MismatchError where their pixels cannot be had any more.
        """
        for visual in visuals:
            if isinstance(visual, Frame):  # holds its own
                continue
            place = None if tower is None else (tower.fingerprint, *visual.identity)
            features = (
                None if tower is None or place is None else self._get_features(visual, tower, place)
            )
            if place is not None and features is not None:
                self._pinned[place] = (features, self._features.get(place))
            else:
                packed = self._packed_of(visual)
                _same(visual, packed)
                self._pinned[visual.key] = packed

    def unpin(self) -> None:
        """Let go of all that is pinned."""
        self._pinned.clear()

    def changed(self, visual: Visual, name: str, order: Sequence[int] = ()) -> Visual:
        """`visual` in another view; a shuffle of the frames is given by `order`."""
        return replace(visual, change=Change(name, tuple(order)))
