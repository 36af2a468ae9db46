"""The rubric that routes rewards: which count how much, per task, per data source and per sample.

A rubric has named parts with weights; the total is always the weighted sum of its logged parts, weights normalised to
sum to 1 (unless normalise is off, for papers that add parts up). Settings come from three layers, later ones win: the
task's, `per_source[sample.source]`, and `sample.params["reward"]`. A part that raises is a recorded zero with a reason,
never a crash and never a silent zero.

    rubric = Rubric({"accuracy": make_accuracy, "format": make_format}, {"accuracy": 0.9, "format": 0.1},
                    {"accuracy": {"mode": "dynamic"}}, per_source={"sketches": {"accuracy": {"mode": "iou"}}})
    score = rubric.score(prediction, sample, ctx)

Layer form: {"weights": {part: number}, part: {parameter: value}}. A layer that names other values of `mode` starts from
that mode's defaults, because the parameters of two modes differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from mmrl.errors import ConfigError, MMRLError, did_you_mean
from mmrl.types import RewardContext, Sample, Score

__all__ = ["Part", "PartFactory", "Rubric", "SAMPLE_KEY"]

Part = Callable[[Any, Sample, RewardContext], float]
"""part(prediction, sample, ctx) -> value in [0, 1], or in [part.low, part.high] where a paper's rule leaves it."""
PartFactory = Callable[..., Part]
"""factory(**parameters) -> part; raises ConfigError for wrong parameters."""

SAMPLE_KEY = "reward"
"""Key of Sample.params that holds the per-sample layer."""

_MAX_VARIANTS = 4096  # distinct parameter sets kept built; per-sample numbers in every row would otherwise pile up


class _Built(NamedTuple):
    """The parts that hold for a set of layers, with their weights and ranges."""

    parts: dict[str, Part]
    weights: dict[str, float]
    ranges: dict[str, tuple[float, float]]

    @property
    def span(self) -> tuple[float, float]:
        """Lowest and highest weighted sum of the parts."""
        ends = [(self.weights[name], *self.ranges[name]) for name in self.parts]
        return math.fsum(weight * low for weight, low, _ in ends), math.fsum(
            weight * high for weight, _, high in ends
        )


def _check_weights(
    weights: Mapping[str, Any], names: Iterable[str], normalise: bool
) -> dict[str, float]:
    known = list(names)
    for name, weight in weights.items():
        if name not in known:
            raise ConfigError(
                f"weight for unknown reward part {name!r}; expected {', '.join(known)}."
                f"{did_you_mean(name, known)}"
            )
        if (
            isinstance(weight, bool)
            or not isinstance(weight, (int, float))
            or not 0 <= weight < float("inf")
        ):
            raise ConfigError(
                f"expected the weight of {name!r} to be a number >= 0, found {weight!r}"
            )
    total = sum(weights.values())
    if total <= 0:
        raise ConfigError(f"expected at least one positive reward weight, found {dict(weights)}")
    return {name: weights.get(name, 0.0) / (total if normalise else 1.0) for name in known}


class Rubric:
    """Named reward parts with weights and layered parameters. Thread-safe; picklable when its factories are.

    Raises ConfigError at construction for unknown parts, weights or parameters, in every layer given here.
    """

    def __init__(
        self,
        factories: Mapping[str, PartFactory],
        weights: Mapping[str, float],
        params: Mapping[str, Mapping[str, Any]] | None = None,
        per_source: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        normalise: bool = True,
    ) -> None:
        if not factories:
            raise ConfigError("expected at least one reward part, found none")
        self._factories, self._normalise = dict(factories), bool(normalise)
        self._base: dict[str, Any] = {
            **{k: dict(v) for k, v in (params or {}).items()},
            "weights": dict(weights),
        }
        self._sources = {source: dict(layer) for source, layer in (per_source or {}).items()}
        self._built: dict[str, _Built] = {}
        self._build([])
        for layer in self._sources.values():
            self._build([layer])
        spans = [built.span for built in self._built.values()]
        self.value_range = (
            min(0.0, *(low for low, _ in spans)),
            max(1.0, *(high for _, high in spans)),
        )
        """Lowest and highest total over all layers given at construction: (0, 1) unless a paper's rule leaves it."""
        ranges = {
            name: [built.ranges[name] for built in self._built.values()] for name in self._factories
        }
        self.part_ranges = {
            name: (min(low for low, _ in ends), max(high for _, high in ends))
            for name, ends in ranges.items()
        }
        """Lowest and highest value of each part over the same layers."""

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the parts, in the order given."""
        return tuple(self._factories)

    def __getstate__(self) -> dict[str, Any]:
        # built parts hold closures; they are rebuilt on demand
        return {**self.__dict__, "_built": {}}

    def _merge(self, layers: list[Mapping[str, Any]]) -> dict[str, Any]:
        merged: dict[str, Any] = {k: dict(v) for k, v in self._base.items()}
        for layer in layers:
            if not isinstance(layer, Mapping):
                raise ConfigError(
                    f"expected reward settings as a mapping, found {layer!r}; for example "
                    "{'accuracy': {'mode': 'iou'}}"
                )
            for name, values in layer.items():
                if not isinstance(values, Mapping):
                    raise ConfigError(
                        f"expected settings of reward part {name!r} as a mapping, found {values!r}"
                    )
                old = merged.get(name, {})
                fresh_mode = "mode" in values and values["mode"] != old.get("mode")
                merged[name] = dict(values) if fresh_mode else {**old, **values}
        return merged

    def _build(self, layers: list[Mapping[str, Any]]) -> _Built:
        key = json.dumps(layers, sort_keys=True, default=str) if layers else ""
        if key in self._built:
            return self._built[key]
        merged = self._merge(layers)
        weights = _check_weights(merged.pop("weights"), self._factories, self._normalise)
        for name in merged:
            if name not in self._factories:
                raise ConfigError(
                    f"settings for unknown reward part {name!r}; expected weights or one of "
                    f"{', '.join(self._factories)}.{did_you_mean(name, [*self._factories, 'weights'])}"
                )
        parts = {name: factory(**merged.get(name, {})) for name, factory in self._factories.items()}
        ranges = {
            name: (getattr(part, "low", 0.0), getattr(part, "high", 1.0))
            for name, part in parts.items()
        }
        built = _Built(parts, weights, ranges)
        if len(self._built) < _MAX_VARIANTS:
            self._built[key] = built
        return built

    def _for(self, sample: Sample) -> _Built:
        source, own = self._sources.get(sample.source), sample.params.get(SAMPLE_KEY)
        if not source and not own:
            return self._built.get("") or self._build([])
        return self._build([layer for layer in (source, own) if layer])

    def check(self, sample: Sample) -> None:
        """Raise ConfigError when the sample's own layer is wrong; readers call it, so that training never meets one.

        A layer whose total could leave `value_range` is wrong too: a task declares one range for all of its samples.
        """
        low, high = self._for(sample).span
        if low < self.value_range[0] - 1e-9 or high > self.value_range[1] + 1e-9:
            raise ConfigError(
                f"expected reward settings of a sample whose total stays within {list(self.value_range)}, found a "
                f"rule that reaches [{low:g}, {high:g}]; set it for the task or in per_source instead"
            )

    def weights(self, sample: Sample) -> dict[str, float]:
        """Normalised weights that hold for this sample."""
        return dict(self._for(sample).weights)

    def score(
        self,
        prediction: Any,
        sample: Sample,
        ctx: RewardContext,
        *,
        metrics: Mapping[str, float] | None = None,
        detail: Mapping[str, Any] | None = None,
    ) -> Score:
        """The weighted sum of all parts of a parsed `prediction`; a part that raises gives a 'reward_error' zero."""
        name, weights = "settings", dict.fromkeys(self._factories, 0.0)
        try:
            parts, weights, ranges = self._for(sample)
            values = {}
            for name, part in parts.items():
                values[name] = value = float(part(prediction, sample, ctx))
                low, high = ranges[name]
                if not low <= value <= high:  # also False for nan
                    raise ValueError(f"expected a value in [{low:g}, {high:g}], found {value!r}")
        except Exception as err:  # a broken reward is recorded on its sample and counted; the run decides when to stop
            text = str(err) if isinstance(err, MMRLError) else f"{type(err).__name__}: {err}"
            return self.failure(
                f"reward_error: {name}: {text}",
                sample,
                metrics=metrics,
                detail=detail,
                weights=weights,
            )
        return Score.combine(
            values, weights, parsed=True, metrics=metrics or {}, detail=detail or {}
        )

    def failure(
        self,
        reason: str,
        sample: Sample,
        *,
        metrics: Mapping[str, float] | None = None,
        detail: Mapping[str, Any] | None = None,
        weights: Mapping[str, float] | None = None,
        earned: Mapping[str, float] | None = None,
    ) -> Score:
        """A recorded failure with metrics that count it as zero. `earned`: parts that the text is paid all the same.

        A text that could not be parsed gets the least each part can pay: 0, or less where a part can punish, so that being
        unreadable never pays better than being wrong. A broken reward (reason 'reward_...') is 0: the text is not to blame.
        """
        shares, lows = dict(weights or {}), dict.fromkeys(self._factories, 0.0)
        if weights is None:
            _, shares, ranges = self._for(sample)
            if not reason.startswith("reward_"):
                lows = {name: min(0.0, low) for name, (low, _) in ranges.items()}
        if earned:
            lows.update((name, value) for name, value in earned.items() if name in lows)
        return Score.combine(
            lows, shares, parsed=False, reason=reason, metrics=metrics or {}, detail=detail or {}
        )
