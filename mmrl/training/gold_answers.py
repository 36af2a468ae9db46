"""Supervised examples of data sets: each sample's prompt with the task's own gold answer, and the end-of-turn token behind it.

Of a task that is played in an environment they are the turns of its scripted player (mmrl.Environment.scripted), shown what the
policy would be shown; they may be wrong as often as the player is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from mmrl.config import RunConfig
from mmrl.data.sources import load_sources, prompt_stream, stop_at_broken_media
from mmrl.distributed.engines import TrainEngine, held_back
from mmrl.distributed.world import World
from mmrl.errors import DataError, MediaError
from mmrl.files import check_text
from mmrl.policy.loading import load_policy
from mmrl.policy.pack import PackItem, idle_item, pack, pack_turns, packed_length
from mmrl.policy.policy import Policy
from mmrl.rollout.episodes import Beginning, Episode, begin_groups, play_scripted
from mmrl.task import Task
from mmrl.training.sft import Failed, SupervisedSource
from mmrl.types import RewardContext, Sample
from mmrl.workers.prefetch import prefetching

__all__ = ["GoldAnswers", "context_for", "gold_ids"]


def context_for(
    policy: Policy, sample: Sample, task: Task, step: int = 1, total_steps: int = 1
) -> RewardContext:
    """The reward context of a sample's prompt before anything was generated."""
    prompt = policy.encoder(sample, task)
    return RewardContext(
        step,
        total_steps,
        policy.template.frame,
        prompt.images,
        videos=prompt.videos,
        audios=prompt.audios,
    )


def gold_ids(policy: Policy, sample: Sample, task: Task) -> tuple[int, ...]:
    """Token ids of the gold answer, ended by the model's end-of-turn token."""
    text = task.gold(sample, context_for(policy, sample, task))
    check_text(text, f"sample {sample.id}: its gold answer")
    ids = policy.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    return (*ids, policy.eos_ids[0])


def _row(step: int, sample: Sample, reason: str) -> dict[str, Any]:
    """An example that could not be made, as failures.jsonl has it."""
    return {"step": step, "source": sample.source, "id": sample.id, "reason": reason}


class GoldAnswers:
    """A SupervisedSource (mmrl.training.sft). data.workers prepare the media of this step and the next while one is taken."""

    lr_key = "optim.lr"
    measures: Sequence[str] = ()

    def __init__(self, config: RunConfig, world: World) -> None:
        self.config, self.world = config, world
        self.steps, self.batch = config.train.steps, config.train.prompts_per_step
        self.save_every = config.train.save_every
        data = config.data
        self.stream = prompt_stream(
            config,
            load_sources(data.train, on_error=data.on_error, orientation=data.image.orientation),
        )

    def load_policy(self, say: Callable[[str], None], weights: Path | None = None) -> Policy:
        """See SupervisedSource."""
        with self.world.raise_on_all_ranks():
            policy = load_policy(
                self.config.model,
                self.config.data,
                device=self.world.device,
                weights=weights,
                hold=held_back(self.config, self.world.size),
            )
        self.world.barrier()
        return policy

    @contextmanager
    def open(self, policy: Policy, engine: TrainEngine) -> Iterator[None]:
        """See SupervisedSource."""
        self.policy, self.engine, encoder = policy, engine, policy.encoder
        with prefetching(self.config.data, [encoder.visuals]) as [encoder.ahead]:
            self._coming = self._share()
            yield
        encoder.visuals.unpin()

    def _share(self) -> list[tuple[Sample, Task]]:
        """This process's samples of the next step: every world.size-th of all."""
        drawn = [self.stream.draw() for _ in range(self.batch)]
        return drawn[self.world.rank :: self.world.size]

    def skip(self, steps: int) -> None:
        """See SupervisedSource."""
        for _ in range(steps):
            self._coming = self._share()

    def draw(self, step: int) -> tuple[list[PackItem], list[Failed]]:
        """See SupervisedSource. Nothing can take away the media of the examples until the next step."""
        drawn, self._coming = self._coming, self._share() if step < self.steps else []
        encoder = self.policy.encoder
        if encoder.ahead is not None:
            encoder.ahead.forget()
            encoder.ahead.expect([sample for sample, _ in (*drawn, *self._coming)])
        encoder.visuals.unpin()
        items: list[PackItem] = []
        failed: list[Failed] = []
        acting: dict[int, Episode] = {}
        asked = [
            Beginning(sample, task, 1, self._key(step, place))
            for place, (sample, task) in enumerate(drawn)
        ]
        with ExitStack() as begun:
            found = begin_groups(self.policy, asked, begun=begun)
            for place, ((sample, task), episodes) in enumerate(zip(drawn, found, strict=True)):
                try:
                    if isinstance(episodes, Exception):
                        raise episodes
                    if episodes:
                        acting[place] = episodes[0]
                        continue
                    prompt = encoder(sample, task)
                    self.policy.pin(prompt.visuals)
                    items.append(PackItem(prompt, (gold_ids(self.policy, sample, task),)))
                except (MediaError, DataError) as error:
                    stop_at_broken_media(error, sample, self.config.data.on_error)
                    reason = f"{type(error).__name__}: {error}"
                    failed.append(Failed(place, _row(step, sample, reason)))
            keys = [self._key(step, place) for place in acting]
            played = play_scripted(self.policy, list(acting.values()), keys)
        for place, rollout in zip(acting, played, strict=True):
            if rollout.error is None:
                prompts, written = zip(
                    *((t.prompt, t.token_ids) for t in rollout.turns), strict=True
                )
                items += pack_turns(prompts, written)
            else:
                failed.append(Failed(place, _row(step, drawn[place][0], rollout.error)))
        return items, failed

    def _key(self, step: int, place: int) -> tuple[int, ...]:
        """What the scripted rollout at this process's `place` of a step is made of."""
        return self.config.seed, step, place * self.world.size + self.world.rank

    def size(self, example: PackItem) -> tuple[int, int]:
        """See SupervisedSource."""
        written = sum(len(tokens) for branch in example.branches for _, tokens in branch)
        return packed_length(example), written

    def idle(self) -> PackItem:
        """See SupervisedSource."""
        return idle_item(self.policy.eos_ids[0])

    def loss(self, examples: Sequence[PackItem]) -> tuple[torch.Tensor, Sequence[float]]:
        """See SupervisedSource."""
        batch = pack(examples)
        if self.engine.sequence is not None:
            batch = batch.in_slices(self.engine.sequence)
        (logp_N,) = self.engine.run(lambda: (self.policy.logp(batch).logp_N,))
        return -logp_N.sum(), ()

    def save(self, policy: Any, folder: Path) -> None:
        """See SupervisedSource."""
        policy.save(folder)


# for type checkers: a configuration names this class by its text
_CHECKED: type[SupervisedSource[PackItem]] = GoldAnswers
