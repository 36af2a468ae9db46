"""Actions as tokens: continuous control steps to bin indices and back, with the conventions of OpenVLA's family.

    codec = ActionCodec.from_space(simulator.action_space, bins=33, chunk=4, repeat=2)
    indices_KA = codec.encode(actions_KA)            # what a policy learns to choose
    actions_CA = codec.decode(indices_KA)            # C = K * repeat control steps for the simulator

    python -c "from mmrl.robotics.actions import ActionCodec; print(ActionCodec((-1., -1.), (1., 1.), bins=5).decode([[0, 4]]))"

Two layouts of bins over [low, high]. "even" (default): `bins` cells of equal width, every index is its own action, an odd
number has a centre in the middle. "openvla" (openvla/openvla, prismatic/vla/action_tokenizer.py): `bins` edges
linspace(-1, 1, bins), so bins - 1 centres; index = digitize - 1; the last index comes up for the upper bound alone and is
decoded like the one before, clip(d - 1, 0, bins - 2). Indices grow with the action; OpenVLA's token ids fall:
id = vocabulary - (index + 1), see `openvla_token_ids`.

Legend: A action dimensions, K action steps of a decision, C = K * repeat control steps, T control steps of an episode,
N rows of a data set.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import numpy as np

from mmrl.errors import ConfigError, DataError, did_you_mean
from mmrl.robotics.contract import ActionError, ActionSpace

__all__ = [
    "OPENVLA_VOCABULARY",
    "ActionCodec",
    "ActionStatistics",
    "GripperConvention",
    "Layout",
    "openvla_indices",
    "openvla_logit_slice",
    "openvla_token_ids",
]

Layout = Literal["even", "openvla"]
GripperConvention = Literal["raw", "binary_sign", "openvla", "maniskill"]

OPENVLA_VOCABULARY = 32000  # Llama 2; the checkpoints' logits have 64 padding columns after it
_TINY_SPREAD = 1e-9  # a dimension whose bounds are closer than this part of their size is constant


def openvla_token_ids(indices: Any, *, vocabulary: int = OPENVLA_VOCABULARY) -> np.ndarray:
    """Bin indices (0 is the lowest action) to token ids: vocabulary - d with d = index + 1. 256 bins: 31999 down to 31744."""
    return vocabulary - 1 - np.asarray(indices, dtype=np.int64)


def openvla_indices(
    ids: Any, *, bins: int = 256, vocabulary: int = OPENVLA_VOCABULARY
) -> np.ndarray:
    """Token ids to bin indices. Raises ActionError for an id that is no action token."""
    found = np.asarray(ids, dtype=np.int64)
    indices = vocabulary - 1 - found
    wrong = (indices < 0) | (indices >= bins)
    if wrong.any():
        raise ActionError(
            f"expected action token ids {vocabulary - bins} to {vocabulary - 1}, found {int(found[wrong].flat[0])}; "
            "take the arg max or sample within openvla_logit_slice only"
        )
    return indices


def openvla_logit_slice(*, bins: int = 256, padding: int = 64) -> slice:
    """The columns of the logits that are action tokens: [-bins - padding, -padding). Column c of it is id vocabulary - bins + c,
    that is bin index bins - 1 - c. Source: SimpleVLA-RL, RLinf (robotics over OpenVLA's padded Llama vocabulary)."""
    return slice(-bins - padding, -padding if padding else None)


@dataclass(frozen=True)
class ActionStatistics:
    """Of a data set's actions, each field (A,): what OpenVLA's dataset_statistics.json holds under "action".

    q01 and q99 are the bounds of BOUNDS_Q99; `mask` is False for dimensions that are not rescaled (the gripper). std divides
    by N.
    """

    q01: tuple[float, ...]
    q99: tuple[float, ...]
    min: tuple[float, ...]
    max: tuple[float, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    mask: tuple[bool, ...]
    transitions: int = 0
    trajectories: int = 0

    @classmethod
    def of(
        cls, actions_NA: Any, *, mask: Sequence[bool] | None = None, trajectories: int = 0
    ) -> ActionStatistics:
        """Statistics of N actions. Raises DataError when there is none, or one is not finite."""
        actions = np.asarray(actions_NA, dtype=np.float64)
        if actions.ndim != 2 or len(actions) < 1:
            raise DataError(
                f"expected actions of shape (N, A) with N >= 1, found {tuple(actions.shape)}"
            )
        if not np.isfinite(actions).all():
            row = int(np.argwhere(~np.isfinite(actions))[0][0])
            raise DataError(
                f"expected finite actions, found {actions[row].tolist()} in row {row}; drop that episode"
            )
        keep = (True,) * actions.shape[1] if mask is None else tuple(bool(m) for m in mask)
        if len(keep) != actions.shape[1]:
            raise DataError(f"expected a mask of {actions.shape[1]} values, found {len(keep)}")
        q01, q99 = np.quantile(actions, [0.01, 0.99], axis=0)
        numbers = {
            "q01": q01,
            "q99": q99,
            "min": actions.min(axis=0),
            "max": actions.max(axis=0),
            "mean": actions.mean(axis=0),
            "std": actions.std(axis=0),
        }
        values = {key: tuple(float(v) for v in value) for key, value in numbers.items()}
        return cls(**values, mask=keep, transitions=len(actions), trajectories=trajectories)

    def write(self, path: str | os.PathLike[str], name: str) -> None:
        """dataset_statistics.json with one data set `name`; others that the file already holds stay."""
        known: dict[str, Any] = {}
        if os.path.exists(path):
            known = _read_json(path)
        action = {
            key: list(getattr(self, key))
            for key in ("mean", "std", "max", "min", "q01", "q99", "mask")
        }
        known[name] = {
            "action": action,
            "num_transitions": self.transitions,
            "num_trajectories": self.trajectories,
        }
        temporary = f"{os.fspath(path)}.{os.getpid()}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(known, file, indent=2)
        os.replace(temporary, path)

    @classmethod
    def read(cls, path: str | os.PathLike[str], name: str | None = None) -> ActionStatistics:
        """Of data set `name`, or of the only one; `name` + "_no_noops" is taken where only that exists, as in openvla-oft.
        Raises DataError."""
        known = _read_json(path)
        if name is not None and name not in known and f"{name}_no_noops" in known:
            name = f"{name}_no_noops"
        if name is None and len(known) == 1:
            name = next(iter(known))
        if name is None or name not in known:
            asked = "several and no name" if name is None else repr(name)
            raise DataError(
                f"{os.fspath(path)}: expected the name of one of {', '.join(sorted(known))}, found {asked}."
                f"{did_you_mean(name or '', known)}"
            )
        entry = known[name]
        action = entry.get("action") if isinstance(entry, Mapping) else None
        if not isinstance(action, Mapping):
            raise DataError(
                f"{os.fspath(path)}: expected statistics under {name!r} / 'action', found none"
            )
        return cls.of_entry(action, entry, f"{os.fspath(path)}, {name}")

    @classmethod
    def of_entry(
        cls, action: Mapping[str, Any], entry: Mapping[str, Any], where: str
    ) -> ActionStatistics:
        """From parsed JSON: lists `action`, counts `entry`. Older files lack some keys; q01 and q99 must be there.

        Raises DataError."""
        for key in ("q01", "q99"):
            if not isinstance(action.get(key), Sequence):
                raise DataError(
                    f"{where}: expected a list {key}, found {action.get(key)!r}; only BOUNDS_Q99 files can be used"
                )
        dim = len(action["q01"])
        values: dict[str, tuple[float, ...]] = {}
        for key, other in (
            ("q01", "q01"),
            ("q99", "q99"),
            ("min", "q01"),
            ("max", "q99"),
            ("mean", "q01"),
            ("std", "q01"),
        ):
            given = action.get(key, action[other])
            try:
                values[key] = tuple(float(v) for v in given)
            except (TypeError, ValueError, OverflowError) as error:
                raise DataError(
                    f"{where}: expected a list of numbers {key}, found {str(given)[:80]} ({error})"
                ) from error
            if not all(abs(v) < 1e30 for v in values[key]):  # NaN is not below anything either
                raise DataError(
                    f"{where}: expected finite numbers below 1e30 in {key}, found {given!r:.80}; compute them again"
                )
        mask = tuple(bool(m) for m in action.get("mask", [True] * dim))
        wrong = [key for key, value in {**values, "mask": mask}.items() if len(value) != dim]
        if wrong:
            raise DataError(
                f"{where}: expected {dim} values in each list, as in q01, found another number in {', '.join(wrong)}"
            )
        return cls(
            **values,
            mask=mask,
            transitions=int(entry.get("num_transitions", 0)),
            trajectories=int(entry.get("num_trajectories", 0)),
        )


def _read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except FileNotFoundError as error:
        raise DataError(
            f"expected a dataset_statistics.json at {os.fspath(path)}, found no file"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{os.fspath(path)}: expected JSON, found {error}") from error
    if not isinstance(data, dict):
        raise DataError(
            f"{os.fspath(path)}: expected an object by data set name, found {type(data).__name__}"
        )
    return data


@dataclass(frozen=True)
class ActionCodec:
    """Picklable, equal by value, JSON both ways (`to_json`, `from_json`).

    low, high (A,): bounds of a control step in the policy's units; dimensions with mask False use [-1, 1] instead (OpenVLA's
    mask). chunk: action steps K of one decision. repeat: control steps each of them is executed, so a decision is
    chunk * repeat control steps. gripper: its dimension. gripper_convention says how the policy's gripper value g becomes the
    simulator's: raw; binary_sign (+1 if g > 0 else -1); openvla (g in [0, 1], 1 opens: -sign(2g - 1), openvla-oft's
    normalize_gripper_action and invert_gripper_action); maniskill (2 * (g > 0.5) - 1, RLinf's wrapper).
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    bins: int = 256
    chunk: int = 1
    repeat: int = 1
    mask: tuple[bool, ...] = ()
    gripper: int | None = None
    gripper_convention: GripperConvention = "raw"
    layout: Layout = "even"

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            object.__setattr__(self, name, tuple(float(v) for v in getattr(self, name)))
        object.__setattr__(
            self, "mask", tuple(bool(m) for m in self.mask) or (True,) * len(self.low)
        )
        if not self.low or len({len(self.low), len(self.high), len(self.mask)}) != 1:
            raise ConfigError(
                "expected low, high and mask of the same length of at least 1, found "
                f"{len(self.low)}, {len(self.high)} and {len(self.mask)}"
            )
        if not np.isfinite([*self.low, *self.high]).all() or (np.array(self.high) < self.low).any():
            raise ConfigError(
                f"expected finite bounds with low <= high, found {list(self.low)} and {list(self.high)}"
            )
        least = {"bins": 3 if self.layout == "openvla" else 2, "chunk": 1, "repeat": 1}
        for name, limit in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < limit:
                raise ConfigError(
                    f"expected {name} as a whole number of at least {limit}, found {value!r}"
                )
        for name, known in (
            ("layout", get_args(Layout)),
            ("gripper_convention", get_args(GripperConvention)),
        ):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(
                    f"expected {name} as one of {', '.join(known)}, found {value!r}.{did_you_mean(value, known)}"
                )
        if self.gripper is not None and not 0 <= self.gripper < len(self.low):
            raise ConfigError(
                f"expected gripper as a dimension from 0 to {len(self.low) - 1} or none, found {self.gripper}"
            )
        if self.gripper is None and self.gripper_convention != "raw":
            raise ConfigError(
                f"gripper_convention {self.gripper_convention} needs gripper, the number of its dimension"
            )

    # -- making one -----------------------------------------------------------------------------------------------------------

    @classmethod
    def from_space(cls, space: ActionSpace, **settings: Any) -> ActionCodec:
        """Over the bounds of one simulator; settings: bins, chunk, repeat, layout, gripper_convention, mask."""
        return cls(space.low, space.high, **{"gripper": space.gripper, **settings})

    @classmethod
    def from_statistics(cls, statistics: ActionStatistics, **settings: Any) -> ActionCodec:
        """Over q01 to q99 of a data set (BOUNDS_Q99), its mask kept; settings as in the class."""
        return cls(statistics.q01, statistics.q99, **{"mask": statistics.mask, **settings})

    @classmethod
    def openvla(cls, statistics: ActionStatistics, *, chunk: int = 1) -> ActionCodec:
        """What OpenVLA (chunk 1) and OpenVLA-OFT (chunk 8) checkpoints for LIBERO expect: 256 edges, gripper last."""
        return cls.from_statistics(
            statistics,
            bins=256,
            chunk=chunk,
            layout="openvla",
            gripper=len(statistics.q01) - 1,
            gripper_convention="openvla",
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ActionCodec:
        """From `to_dict`. Raises ConfigError for an unknown or missing key."""
        known = [field.name for field in fields(cls)]
        for key in data:
            if key not in known:
                raise ConfigError(
                    f"expected codec keys {', '.join(known)}, found {key!r}.{did_you_mean(key, known)}"
                )
        if "low" not in data or "high" not in data:
            raise ConfigError(
                f"expected a codec with low and high, found {', '.join(data) or 'nothing'}"
            )
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in data.items()
        }
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self).items()
        }

    def to_json(self) -> str:
        """One line; floats are written so that they come back bit for bit."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> ActionCodec:
        """From `to_json`. Raises ConfigError."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"expected a codec as JSON, found {text[:60]!r} ({error})") from error
        if not isinstance(data, dict):
            raise ConfigError(f"expected a codec as a JSON object, found {text[:60]!r}")
        return cls.from_dict(data)

    # -- facts ----------------------------------------------------------------------------------------------------------------

    @property
    def dim(self) -> int:
        """A."""
        return len(self.low)

    @property
    def steps(self) -> int:
        """Control steps of one decision."""
        return self.chunk * self.repeat

    @property
    def tokens(self) -> int:
        """Tokens of one decision: chunk * A."""
        return self.chunk * self.dim

    @property
    def centers(self) -> np.ndarray:
        """Normalised action of every index, (bins,) in [-1, 1]."""
        if self.layout == "even":
            return (2.0 * np.arange(self.bins) + 1.0) / self.bins - 1.0
        edges = np.linspace(-1.0, 1.0, self.bins)
        middle = (edges[:-1] + edges[1:]) / 2.0
        return np.append(middle, middle[-1])

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """(A,) low and high that the bins span: [-1, 1] where the mask is False."""
        mask = np.array(self.mask)
        return np.where(mask, self.low, -1.0), np.where(mask, self.high, 1.0)

    def half_bins(self) -> np.ndarray:
        """(A,) the largest rounding error inside the bounds."""
        low, high = self.bounds()
        return (high - low) / (2 * (self.bins if self.layout == "even" else self.bins - 1))

    # -- there and back -------------------------------------------------------------------------------------------------------

    def encode(self, actions: Any, *, executed: bool = True) -> np.ndarray:
        """Actions (..., A) to int64 indices of the same shape, clipped to the bounds. `executed`: the gripper is in the
        simulator's convention; False: already in the policy's (data sets of OpenVLA's family). A dimension without spread
        gets the middle index. Raises ActionError for another shape, NaN and infinity."""
        values = self._checked(actions)
        if executed:
            values = self._policy_gripper(values)
        low, high = self.bounds()
        spread = high - low
        flat = spread <= _TINY_SPREAD * np.maximum(np.abs(low), np.abs(high))
        unit = np.clip((values - low) / np.where(flat, 1.0, spread), 0.0, 1.0)
        unit = np.where(flat, 0.5, unit)
        if self.layout == "even":
            return np.minimum((unit * self.bins).astype(np.int64), self.bins - 1)
        return np.digitize(2.0 * unit - 1.0, np.linspace(-1.0, 1.0, self.bins)).astype(np.int64) - 1

    def decode(self, indices: Any, *, executed: bool = True) -> np.ndarray:
        """Indices (..., K, A) to float64 actions (..., K * repeat, A), bin centres. `executed`: gripper in the simulator's
        convention. Raises ActionError for another shape or an index outside 0 to bins - 1."""
        found = np.asarray(indices)
        if found.ndim < 2 or found.shape[-1] != self.dim:
            raise ActionError(
                f"expected indices of shape (K, {self.dim}), found {tuple(found.shape)}"
            )
        if found.dtype.kind not in "iu":
            raise ActionError(f"expected whole-number indices, found {found.dtype}")
        if found.size and (found.min() < 0 or found.max() >= self.bins):
            raise ActionError(
                f"expected indices from 0 to {self.bins - 1}, found {int(found.min())} to {int(found.max())}"
            )
        return self.from_unit(self.centers[found], executed=executed)

    def from_unit(self, unit: Any, *, executed: bool = True) -> np.ndarray:
        """Numbers (..., K, A) in units of the bounds, -1 to 1 and beyond, to actions (..., K * repeat, A), as `decode` makes them
        of bins: for policies whose actions are numbers."""
        low, high = self.bounds()
        values = 0.5 * (np.asarray(unit, np.float64) + 1.0) * (high - low) + low
        if executed:
            values = self._simulator_gripper(values)
        return np.repeat(values, self.repeat, axis=-2)

    def targets(
        self, actions_TA: Any, start: int, *, executed: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """What the decision at control step `start` of a demonstration should choose: indices (K, A) and valid (K,). With
        repeat > 1 an action step is the mean of its control steps, the gripper that of the last one; steps after the end of
        the episode repeat the last action and are not valid."""
        rows, valid = self._steps(actions_TA, start)
        return self.encode(rows, executed=executed), valid

    def unit_targets(
        self, actions_TA: Any, start: int, *, executed: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """The same as numbers in units of the bounds, (K, A) float64, neither rounded nor clipped; 0 without spread."""
        values, valid = self._steps(actions_TA, start)
        if executed:
            values = self._policy_gripper(values)
        low, high = self.bounds()
        spread = high - low
        flat = spread <= _TINY_SPREAD * np.maximum(np.abs(low), np.abs(high))
        unit = 2.0 * (values - low) / np.where(flat, 1.0, spread) - 1.0
        return np.where(flat, 0.0, unit), valid

    def _steps(self, actions_TA: Any, start: int) -> tuple[np.ndarray, np.ndarray]:
        """The action steps (K, A) of the decision at control step `start`, and which are real (K,)."""
        actions = self._checked(actions_TA)
        if actions.ndim != 2 or not 0 <= start < len(actions):
            raise ActionError(
                f"expected actions (T, {self.dim}) and a start below T, found {tuple(actions.shape)} and {start}"
            )
        rows, valid = [], []
        for k in range(self.chunk):
            window = actions[start + k * self.repeat : start + (k + 1) * self.repeat]
            valid.append(len(window) > 0)
            row = (window if len(window) else actions[-1:]).mean(axis=0)
            if self.gripper is not None:
                row[self.gripper] = (window if len(window) else actions)[-1, self.gripper]
            rows.append(row)
        return np.stack(rows), np.array(valid)

    def _checked(self, actions: Any) -> np.ndarray:
        values = np.asarray(actions, dtype=np.float64)
        if values.ndim < 1 or values.shape[-1] != self.dim:
            raise ActionError(
                f"expected actions of {self.dim} dimensions, found shape {tuple(values.shape)}"
            )
        if not np.isfinite(values).all():
            raise ActionError(
                f"expected finite actions, found {values[~np.isfinite(values)].flat[0]}"
            )
        return values

    def _simulator_gripper(self, values: np.ndarray) -> np.ndarray:
        if self.gripper is None or self.gripper_convention == "raw":
            return values
        g = values[..., self.gripper]
        if self.gripper_convention == "binary_sign":
            g = np.where(g > 0, 1.0, -1.0)
        elif self.gripper_convention == "openvla":
            g = -np.sign(2.0 * g - 1.0)
        else:
            g = 2.0 * (g > 0.5) - 1.0
        values = values.copy()
        values[..., self.gripper] = g
        return values

    def _policy_gripper(self, values: np.ndarray) -> np.ndarray:
        """The policy's value that becomes the simulator's; binary conventions know two."""
        if self.gripper is None or self.gripper_convention == "raw":
            return values
        g = values[..., self.gripper]
        on = {"binary_sign": (1.0, -1.0), "openvla": (0.0, 1.0), "maniskill": (1.0, 0.0)}[
            self.gripper_convention
        ]
        values = values.copy()
        values[..., self.gripper] = np.where(g > 0, *on)
        return values
