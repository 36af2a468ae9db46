"""Behaviour cloning of a VLA policy: the chunk a demonstrator chose, as action tokens.

    mmrl sft configs/maniskill.yaml
    torchrun --nproc_per_node 8 -m mmrl.cli.main sft configs/maniskill.yaml engine.train=fsdp2

Every control step of a demonstration is a training example: the picture there, and the chunk that follows as the target. Steps
beyond the end of an episode are not learned. The loop is that of mmrl.training.sft; demonstrations that are not there yet are
recorded by the main process, and all must see their folder.

Legend: N tokens of a decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from mmrl.distributed.engines import TrainEngine, held_back
from mmrl.distributed.world import World
from mmrl.errors import ConfigError
from mmrl.policy.encode import Prompt
from mmrl.robotics.acting import ActingPolicy
from mmrl.robotics.config import EmbodiedConfig
from mmrl.robotics.contract import ActionSpace, Observation
from mmrl.robotics.demonstrations import DemoEpisode, demo_folder, load_demos, record_demos
from mmrl.robotics.flow_load import is_flow
from mmrl.robotics.load import load_vla
from mmrl.robotics.oft_load import is_oft
from mmrl.robotics.source import env_specs
from mmrl.robotics.vector import make_playing
from mmrl.training.sft import Failed, SupervisedSource

__all__ = ["DemoSteps", "Demonstrations", "save_policy"]


class DemoSteps:
    """The examples of several demonstrations."""

    def __init__(self, episodes: Sequence[DemoEpisode], vla: ActingPolicy) -> None:
        self.episodes, self.vla = episodes, vla
        self.index = [
            (e, p) for e, episode in enumerate(episodes) for p in range(len(episode.steps))
        ]
        if not self.index:
            raise ConfigError(
                "expected demonstrations to learn from, found none: record or name some (demos.path)"
            )

    def __len__(self) -> int:
        return len(self.index)

    def example(self, number: int) -> tuple[Observation, np.ndarray, np.ndarray]:
        """The observation, what is to be chosen (N,), and which of it are real actions (N,)."""
        e, p = self.index[number]
        episode = self.episodes[e]
        targets_N, mask_N = self.vla.targets(episode.actions, int(episode.steps[p]))
        pictures = {name: frames[p] for name, frames in episode.images.items()}
        return (
            Observation(pictures, episode.proprio[p], episode.instruction),
            targets_N,
            mask_N,
        )


@dataclass(frozen=True)
class _Decision:
    """An encoded control step: its prompt, what is to be chosen (N,), which of that are real actions (N,), and the seed of what
    is drawn for it."""

    prompt: Prompt
    targets: list[Any]
    mask_N: np.ndarray
    key: tuple[int, ...]


class Demonstrations:
    """A SupervisedSource (mmrl.training.sft): control steps, drawn in a seeded order that never repeats within an epoch."""

    lr_key = "demos.optim.lr"
    measures: Sequence[str] = (
        "sure",
    )  # share of the numbers that it is sure of (mmrl.robotics.acting.Cloned)

    def __init__(self, config: EmbodiedConfig, world: World) -> None:
        self.config, self.world = config, world
        self.steps, self.batch = config.demos.steps, config.demos.batch
        self.save_every = config.demos.save_every

    @cached_property
    def episodes(self) -> list[DemoEpisode]:
        """All that were recorded, in memory."""
        c = self.config
        given = {"action_key": c.demos.action_key, "state_key": c.demos.state_key}
        return load_demos(
            demo_folder(c),
            c.vla.cameras,
            executed=c.demos.labels == "executed",
            names=c.demos.cameras,
            **{name: key for name, key in given.items() if key is not None},
        )

    def load_policy(self, say: Callable[[str], None], weights: Path | None = None) -> ActingPolicy:
        """See SupervisedSource. Records demonstrations where there are none."""
        self._record(say)
        with self.world.raise_on_all_ranks():
            vla = self._made_for(self.episodes, weights)
        self.world.barrier()
        return vla

    def _record(self, say: Callable[[str], None]) -> None:
        """In the main process, for which the others wait: from episode to episode, since a wait has a limit (World)."""
        if not self.world.is_main:
            while not any(self.world.gather([])):
                pass
            return

        def told(done: int, total: int) -> None:
            self.world.gather([False])
            if done * 10 // total > (done - 1) * 10 // total:
                say(f"recorded {done}/{total} demonstrations")

        with self.world.raise_on_all_ranks():
            record_demos(self.config, told)
        self.world.gather([True])

    def _made_for(self, episodes: Sequence[DemoEpisode], weights: Path | None) -> ActingPolicy:
        """The policy with the proprioception of these episodes, or that of a checkpoint. Collective."""
        proprio = None
        if self.config.vla.proprio:
            seen = np.concatenate([e.proprio for e in episodes])
            low, high = np.quantile(seen, [0.01, 0.99], axis=0)
            proprio = (low.tolist(), high.tolist())
        space, numbers = self._played()
        self._check_fits(episodes, space.dim, numbers)
        vla = load_vla(
            self.config,
            space=space,
            proprio=proprio,
            device=self.world.device,
            weights=weights,
            hold=held_back(self.config, self.world.size),
        )
        if space.dim != vla.codec.dim:
            raise ConfigError(
                f"expected a policy of {space.dim} action dimensions, as {self.config.env.suite} has, found {vla.codec.dim} in "
                f"{self.config.model.path} (vla.json); it was made for another robot"
            )
        return vla

    def _check_fits(self, episodes: Sequence[DemoEpisode], actions: int, numbers: int) -> None:
        """Raises ConfigError for demonstrations of another robot, or with other pictures, than those the policy will meet."""
        c = self.config
        side = c.env.image_size
        # policies of flow or of OpenVLA-OFT bring what they see to a size of their own
        resizes = is_flow(c.model.path) or is_oft(c.model.path)
        for episode in episodes:
            found: list[tuple[str, int, int, str]] = [
                (
                    "action dimensions",
                    actions,
                    episode.actions.shape[1],
                    "record them with this configuration's env.options, or name their column with demos.action_key",
                )
            ]
            if c.vla.proprio:
                mend = "name their column with demos.state_key, or set vla.proprio: false"
                found.append(("proprioception values", numbers, episode.proprio.shape[1], mend))
            for camera, pictures in () if resizes else episode.images.items():
                mend = "set env.image_size, or resize them (pictures are square)"
                for what, pixels in zip(("height", "width"), pictures.shape[1:3], strict=True):
                    found.append((f"pixels of {what} (camera {camera})", side, pixels, mend))
            for what, wanted, has, mend in found:
                if has != wanted:
                    raise ConfigError(
                        f"expected demonstrations of {wanted} {what}, as {c.env.suite} has, found {has} in {demo_folder(c)}; {mend}"
                    )

    def _played(self) -> tuple[ActionSpace, int]:
        """Actions and numbers of proprioception of the run's simulator, which the main process alone opens. Collective."""
        found = []
        if self.world.is_main:
            simulator = make_playing(env_specs(self.config)[0])
            try:
                found.append((simulator.action_space, simulator.proprio_dim))
            finally:
                simulator.close()
        return self.world.gather(found)[0]

    @contextmanager
    def open(self, policy: ActingPolicy, engine: TrainEngine) -> Iterator[None]:
        """See SupervisedSource."""
        self.vla, self.engine, self.demos = policy, engine, DemoSteps(self.episodes, policy)
        self._rng = np.random.default_rng((self.config.seed, 31))
        self._order: list[int] = []
        yield

    def _next(self) -> list[int]:
        """Numbers of the examples of the next step, over all processes."""
        while len(self._order) < self.batch:
            self._order += self._rng.permutation(len(self.demos)).tolist()
        chosen, self._order = self._order[: self.batch], self._order[self.batch :]
        return chosen

    def skip(self, steps: int) -> None:
        """See SupervisedSource."""
        for _ in range(steps):
            self._next()

    def draw(self, step: int) -> tuple[list[_Decision], list[Failed]]:
        """See SupervisedSource."""
        mine = self._next()[self.world.rank :: self.world.size]
        found = [self.demos.example(number) for number in mine]
        return [
            _Decision(
                self.vla.prompt(o), targets.tolist(), mask, (self.config.seed, 43, step, number)
            )
            for number, (o, targets, mask) in zip(mine, found, strict=True)
        ], []

    def size(self, example: _Decision) -> tuple[int, int]:
        """See SupervisedSource."""
        return example.prompt.length + self.vla.tokens_per_decision, int(example.mask_N.sum())

    def idle(self) -> _Decision:
        """See SupervisedSource."""
        size = self.vla.tokens_per_decision
        return _Decision(self.vla.idle_turn()[0], [0] * size, np.zeros(size, bool), (0,))

    def loss(self, examples: Sequence[_Decision]) -> tuple[torch.Tensor, Sequence[float]]:
        """See SupervisedSource."""

        def forward() -> tuple[torch.Tensor, ...]:
            found = self.vla.clone(
                [e.prompt for e in examples],
                [e.targets for e in examples],
                [e.key for e in examples],
            )
            return found.loss_N, found.sure_N, found.values_M

        loss_N, sure_N, values_M = self.engine.run(forward)
        mask_N = torch.tensor(np.concatenate([e.mask_N for e in examples]), device=self.vla.device)
        # sharded, a critic takes part in every forward and so in every backward
        unused = values_M.sum() * 0.0 if self.engine.lockstep else 0.0
        return loss_N[mask_N].sum() + unused, [float(sure_N[mask_N].sum())]

    def save(self, policy: ActingPolicy, folder: Path) -> None:
        """See SupervisedSource."""
        save_policy(policy, self.config, folder)


def save_policy(vla: ActingPolicy, config: EmbodiedConfig, folder: Path) -> None:
    """The policy with the configuration it was made with, so that an evaluation sees what it was made for."""
    vla.save(folder)
    (folder / "trainer").mkdir(exist_ok=True)
    described = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    (folder / "trainer" / "config.yaml").write_text(described, encoding="utf-8")


# for type checkers: a configuration names this class by its text
_CHECKED: type[SupervisedSource[_Decision]] = Demonstrations
