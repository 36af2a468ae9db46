"""One file, several tasks: each sample goes to the task its row names, with that task's prompt, reward and metrics.

    {"id": "1", "task": "counting", "image": "1.png", "question": "red circles", "answer": 3}
    {"id": "2", "task": "choice", "image": "2.png", "question": "Which colour?", "answer": "B", "params": {"options": [...]}}

Formats that name a problem type per row (Video-R1, EasyR1, MathVista, Orsta ...) are read the same way. Members are made
when a row asks for them; a type that is no task is an error when the file is read.

    mmrl tasks check mixed --data my.jsonl
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, RegistryError, did_you_mean
from mmrl.registry import BUILT_IN, register, task_from_spec
from mmrl.task import Task, Template
from mmrl.types import RewardContext, Sample, Score

__all__ = ["Mixed"]

_EXAMPLES = ("grounding", "counting", "choice", "boolean", "ocr")
TASK_KEY = "task"
"""Key of Score.detail that says which member gave the score."""


@register("mixed")
class Mixed(Task):
    """Several tasks in one data source. Parameters, all optional:

    tasks   {name: parameters} of members; names are built-in tasks or any form of mmrl's registry. A built-in task
            that is not listed takes its defaults; a task that is not built in must be listed to be used.
    shared  parameters of every member, under its own ones; for example {answer_format: think}
    reader  options of mmrl.tasks.readers.read_any (format, image_root, only_mine, types, images_only ...)

    `members` maps names to tasks: those listed, and those some row asked for.
    """

    headline: ClassVar[str] = "correct"

    def __init__(
        self,
        *,
        tasks: Mapping[str, Mapping[str, Any]] | None = None,
        shared: Mapping[str, Any] | None = None,
        reader: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(tasks=tasks or {}, shared=shared or {}, reader=reader or {})
        for key, value in self.params.items():
            if not isinstance(value, Mapping):
                raise ConfigError(f"expected mixed.{key} as a mapping, found {value!r}")
        for name, params in self.params["tasks"].items():
            if not isinstance(params, Mapping):
                raise ConfigError(
                    f"expected mixed.tasks.{name} as a mapping of the task's parameters, found {params!r}"
                )
        self.members: dict[str, Task] = {}
        self.rejected: list[Any] = []
        self.skipped: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.places: dict[str, tuple[str, int]] = {}
        for name in self.params["tasks"]:
            self._make(name)

    @property
    def known(self) -> list[str]:
        """Names of the tasks a row may ask for."""
        return [
            name for name in dict.fromkeys([*self.params["tasks"], *BUILT_IN]) if name != self.name
        ]

    def _make(self, name: str) -> Task:
        if name == self.name:
            raise ConfigError(
                "expected members other than mixed itself in mixed.tasks; name the tasks"
            )
        try:
            made = task_from_spec(
                name, {**self.params["shared"], **self.params["tasks"].get(name, {})}
            )
        except (ConfigError, RegistryError) as err:
            raise ConfigError(f"mixed.tasks.{name}: {err}") from err
        self.members[name] = made
        all_of_them = list(self.members.values())
        self.value_range = (
            min(t.value_range[0] for t in all_of_them),
            max(t.value_range[1] for t in all_of_them),
        )
        self.in_group = any(t.in_group for t in all_of_them)  # type: ignore[misc]  # a class attribute of other tasks
        names = {t.part_names for t in all_of_them}
        self.part_names = all_of_them[0].part_names if len(names) == 1 else ()
        return made

    def member(self, name: str) -> Task:
        """The task called `name`, made on demand. Raises ConfigError naming the known ones."""
        if name in self.members:
            return self.members[name]
        if name not in self.known:  # never resolved: a data file must not name code to import
            raise ConfigError(
                f"unknown task type {name!r}; expected one of {', '.join(self.known)} (a task of your own must "
                f"be listed in params.tasks).{did_you_mean(name, self.known)}"
            )
        return self._make(name)

    def _check_row(
        self,
        task: str,
        value: Any,
        frame: CoordFrame,
        sizes: Sequence[tuple[int, int]],
        params: Mapping[str, Any],
    ) -> Any:
        from mmrl.tasks.readers.common import RowError

        if task not in self.known:
            raise RowError(
                f"a task type of {', '.join(self.known)}",
                repr(task)[:60],
                "correct 'task', or list a task of your own in params.tasks."
                + did_you_mean(task, self.known),
            )
        member = self.member(task)
        check = getattr(member, "_check_row", None)
        return value if check is None else check(task, value, frame, sizes, params)

    def _check_sample(self, sample: Sample) -> None:
        rubric = getattr(self.member(sample.task), "rubric", None)
        if rubric is not None:
            rubric.check(sample)

    def load(self, path: str) -> Iterable[Sample]:
        """Samples of every task in file order. Unusable rows: `self.rejected` with on_error 'record'; rows left out on
        request: counted by reason in `self.skipped`."""
        from mmrl.tasks.readers import read_any

        options = {
            "on_error": self.on_error,
            "orientation": self.orientation,
            **self.params["reader"],
        }
        readout = read_any(path, task=self.name, check=self._check_row, **options)
        readout.verify(self._check_sample, path, options["on_error"])
        self.rejected, self.skipped, self.notes = readout.rejected, readout.skipped, readout.notes
        self.places = readout.places
        return readout.samples

    def messages(self, sample: Sample, template: Template) -> list[dict[str, Any]]:
        """The member's prompt."""
        return self.member(sample.task).messages(sample, template)

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Any:
        """The member's score, an awaitable where that is an `async def`; its detail says which member, under 'task'."""
        return self._marked(sample, self.member(sample.task).score(sample, text, ctx))

    def _marked(self, sample: Sample, score: Any) -> Any:
        async def later() -> Score:
            return marked(await score)

        def marked(found: Score) -> Score:
            return replace(found, detail={**found.detail, TASK_KEY: sample.task})

        return marked(score) if isinstance(score, Score) else later()

    def score_in_group(self, sample: Sample, scores: Sequence[Score], index: int) -> Any:
        """The member's; unchanged where the member judges every completion by itself."""
        member = self.member(sample.task)
        return (
            self._marked(sample, member.score_in_group(sample, scores, index))
            if member.in_group
            else scores[index]
        )

    def gold(self, sample: Sample, ctx: RewardContext) -> str:
        """The member's right answer."""
        return self.member(sample.task).gold(sample, ctx)

    def wrong(self, sample: Sample, ctx: RewardContext) -> str:
        """The member's wrong answer."""
        return self.member(sample.task).wrong(sample, ctx)

    def benchmark(self, pairs: Sequence[tuple[Sample, Score]], folder: Path) -> Mapping[str, float]:
        """Official numbers of each task, named 'task/number'; each task's files in a folder of its own."""
        numbers: dict[str, float] = {}
        for name in sorted({sample.task for sample, _ in pairs}):
            place = folder / "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
            place.mkdir(parents=True, exist_ok=True)
            found = self.member(name).benchmark(
                [pair for pair in pairs if pair[0].task == name], place
            )
            numbers.update({f"{name}/{key}": value for key, value in found.items()})
            if not any(place.iterdir()):
                place.rmdir()
        return numbers

    def summarize(self, rows: Sequence[Score]) -> Mapping[str, float]:
        """Each member's summary, named 'task/metric'. Scores that no member gave (a reward that hung) are `no_task`."""
        groups: dict[str, list[Score]] = {}
        for row in rows:
            groups.setdefault(str(row.detail.get(TASK_KEY, "")), []).append(row)
        lost = len(groups.pop("", []))
        found = {
            f"{name}/{key}": value
            for name in sorted(groups)
            for key, value in self.member(name).summarize(groups[name]).items()
        }
        return {**found, "no_task": lost / len(rows)} if lost else found

    def example_data(self, folder: str) -> str:
        """Six generated pictures of each of five tasks; returns their data.jsonl."""
        from mmrl.tasks.playground import make_playground

        rows = []
        for name in _EXAMPLES:
            place = Path(folder) / name
            for line in (
                Path(make_playground(place, name, 6, 7)).read_text(encoding="utf-8").splitlines()
            ):
                row = json.loads(line)
                rows.append(
                    {
                        **row,
                        "id": f"{name}-{row['id']}",
                        "task": name,
                        "image": f"{name}/{row['image']}",
                    }
                )
        path = Path(folder) / "data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)
