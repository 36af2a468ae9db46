"""The task around an environment that is named by itself: rows of JSON in, rollouts in the environment, their rewards as the score.

    data.train=[{task: my_env.py:MyEnv, path: rows.jsonl}]      # or PACKAGE/NAME, by an entry point of the group mmrl.tasks
    mmrl env check my_env.py:MyEnv --data rows.jsonl

A row is one episode's beginning: `id`, `question`, `answer`, `images` and `source` become the sample's own, all other keys its
`params`; none is needed. Parameters of the source (`params: {...}`) go to the environment's constructor, which is given the model's
template, too, where it takes `template` (it says in which coordinates the model points).
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from mmrl.data.json_lines import json_rows
from mmrl.environment import Environment
from mmrl.errors import ConfigError, DataError, did_you_mean
from mmrl.files import write_text
from mmrl.task import Task, Template
from mmrl.types import RewardContext, Sample, Score

__all__ = ["EnvironmentTask", "task_around"]

_OWN_KEYS = ("id", "question", "answer", "images", "source")


class EnvironmentTask(Task):
    """Made by `task_around`; see the module."""

    environment_class: ClassVar[type[Environment]]
    part_names = ("reward",)

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        cls = self.environment_class
        if missing := sorted(getattr(cls, "__abstractmethods__", ())):
            raise ConfigError(
                f"environment '{cls.__name__}': expected every method of an environment, found it without {', '.join(missing)}; "
                "write them (see mmrl.Environment for what each returns)"
            )
        known = inspect.signature(cls).parameters
        self._asks = "template" in known
        template = {"template": None} if self._asks else {}
        try:
            inspect.signature(cls).bind(**params, **template)
        except TypeError as error:
            names = [name for name in known if name != "template"]
            close = "".join(did_you_mean(name, names) for name in params if name not in names)
            raise ConfigError(
                f"environment '{cls.__name__}': {error}, found params {sorted(params)}.{close} "
                f"It takes: {', '.join(names) or 'none'}"
            ) from error

    def environment(self, template: Template) -> Environment:
        """A new one, of the source's parameters."""
        given = {"template": template} if self._asks else {}
        return self.environment_class(**self.params, **given)

    def load(self, path: str) -> Iterable[Sample]:
        """Rows of JSON lines; pictures are relative to their file. Raises DataError."""
        file = Path(path)
        for number, row in json_rows(file):
            yield self._sample(row, file, number)

    def _sample(self, row: Mapping[str, Any], file: Path, number: int) -> Sample:
        images = row.get("images", [])
        if not isinstance(images, list) or not all(isinstance(i, str) for i in images):
            raise DataError(
                f'{file}:{number}: expected an object such as {{"id": "1", "question": "...", "images": ["a.png"]}}, found '
                f"{str(row)[:80]}"
            )
        return Sample(
            str(row.get("id", number)),
            self.name,
            str(row.get("source", self.name)),
            str(row.get("question", "")),
            row.get("answer"),
            images=tuple(str(file.parent / image) for image in images),
            params={k: v for k, v in row.items() if k not in _OWN_KEYS},
        )

    def messages(self, sample: Sample, template: Template) -> list[dict[str, Any]]:
        """The question alone: what the policy sees is the environment's."""
        return [{"role": "user", "content": [{"type": "text", "text": sample.question}]}]

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        """A recorded zero: the environment judges whole rollouts, never one answer."""
        return Score.failure("reward_error: an environment judges rollouts", self.part_names)

    def gold(self, sample: Sample, ctx: RewardContext) -> str:
        """Raises ConfigError: there is no such text."""
        raise ConfigError(
            f"expected a task with right and wrong answers, found the environment '{self.environment_class.__name__}', "
            "which judges whole rollouts; check it with `mmrl env check`"
        )

    def wrong(self, sample: Sample, ctx: RewardContext) -> str:
        """As `gold`."""
        return self.gold(sample, ctx)

    def example_data(self, folder: str) -> str:
        """Four rows that differ in their id and their `seed`."""
        path = Path(folder) / "rows.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(json.dumps({"id": str(n), "seed": n}) + "\n" for n in range(4)))
        return str(path)


@functools.cache
def task_around(cls: type[Environment]) -> type[Task]:
    """The task whose rollouts are played in `cls`; of the environment's name, headline and range of rewards."""
    own = {} if cls.headline == "reward" else {"metric_names": (cls.headline,)}
    return type(
        cls.__name__,
        (EnvironmentTask,),
        {
            "environment_class": cls,
            "headline": cls.headline,
            "value_range": cls.value_range,
            "__module__": cls.__module__,
            "__doc__": cls.__doc__,
            **own,
        },
    )
