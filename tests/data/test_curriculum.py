"""What is drawn when: balance, stages, bounds; deterministic, resumable, and refused when it cannot work."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from mmrl.config import CurriculumStage, DataSource, load_config
from mmrl.data.sources import LoadedSource, PromptStream
from mmrl.errors import ConfigError, DataError
from mmrl.registry import task_from_spec
from mmrl.types import Sample

STEPS = 10


def source(
    name: str, count: int, weight: float = 1.0, task: str = "grounding", **params: Any
) -> LoadedSource:
    samples = tuple(
        Sample(f"{name}-{i}", task, name, "q", None, params={"difficulty": i / count, **params})
        for i in range(count)
    )
    return LoadedSource(
        DataSource(task="grounding", path=name, weight=weight), task_from_spec("grounding"), samples
    )


def joined(*parts: LoadedSource, weight: float = 1.0) -> LoadedSource:
    """One data file with the samples of several sources or tasks."""
    return replace(
        parts[0],
        config=DataSource(task="mixed", path="joined", weight=weight),
        samples=tuple(s for p in parts for s in p.samples),
    )


def stages(*items: dict[str, Any]) -> list[CurriculumStage]:
    return [CurriculumStage(**item) for item in items]


def draws(stream: PromptStream, count: int, key: str = "source") -> list[str]:
    return [getattr(stream.draw()[0], key) for _ in range(count)]


def shares(stream: PromptStream, key: str = "source", count: int = 6000) -> dict[str, float]:
    return {name: n / count for name, n in Counter(draws(stream, count, key)).items()}


def test_without_a_curriculum_the_stream_is_what_it_was() -> None:
    """Written down before curricula existed: old runs resume, old results repeat."""
    sources = [source("a", 5), source("b", 7, weight=2.0)]
    found = draws(PromptStream(sources, 3), 14, "id")
    assert found == [
        "b-5",
        "a-1",
        "b-1",
        "b-3",
        "b-2",
        "b-0",
        "b-4",
        "b-6",
        "b-6",
        "a-2",
        "b-5",
        "a-0",
        "b-0",
        "b-2",
    ]


def test_tasks_get_equal_shares_whatever_their_sources_and_sizes() -> None:
    sources = [source("a", 90), source("b", 10, weight=3.0), source("c", 2, task="counting")]
    found = shares(PromptStream(sources, 0, balance="tasks"))
    assert found["c"] == pytest.approx(0.5, abs=0.02)
    assert found["a"] == pytest.approx(0.125, abs=0.02) and found["b"] == pytest.approx(
        0.375, abs=0.02
    ), "weights act inside"


def test_a_file_of_several_tasks_is_balanced_by_its_samples_tasks() -> None:
    mixed = joined(source("x", 60), source("x2", 30, task="counting"), source("x3", 10, task="ocr"))
    found = shares(PromptStream([mixed, source("y", 5, task="ocr")], 0, balance="tasks"), "task")
    assert (
        all(share == pytest.approx(1 / 3, abs=0.02) for share in found.values()) and len(found) == 3
    )
    found = shares(PromptStream([mixed, source("y", 5, task="ocr")], 0, balance="sources"))
    assert (
        all(share == pytest.approx(0.25, abs=0.02) for share in found.values()) and len(found) == 4
    )
    found = shares(PromptStream([mixed, source("y", 5, task="ocr")], 0))
    assert found["y"] == pytest.approx(0.5, abs=0.02) and found["x"] == pytest.approx(
        0.3, abs=0.02
    ), "by weights: per file"


@pytest.mark.parametrize("balance", ["tasks", "sources"])
def test_every_sample_of_a_pool_comes_once_per_epoch(balance: str) -> None:
    stream = PromptStream([joined(source("x", 6), source("y", 9, task="ocr"))], 1, balance=balance)
    seen = [stream.draw()[0] for _ in range(200)]
    for name, size in (("x", 6), ("y", 9)):
        own = [s.id for s in seen if s.source == name]
        assert all(len(set(own[i : i + size])) == size for i in range(0, len(own) - size, size))


def test_stages_follow_the_progress_and_weights_may_be_named_or_numbered() -> None:
    sources = [source("a", 20), source("b", 20), source("c", 20)]
    stream = PromptStream(
        sources,
        0,
        curriculum=stages(
            {"until": 0.2, "weights": {"a": 1, "b": 0, 2: 0}},
            {"until": 0.7, "weights": {"c": 2, 0: 2}},
        ),
    )
    entered = [stream.begin_step(step, STEPS) for step in range(1, STEPS + 1)]
    assert [i + 1 for i, new in enumerate(entered) if new] == [3, 8]
    expected = {
        2: {"a": 1.0},
        3: {"a": 0.4, "b": 0.2, "c": 0.4},
        8: {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3},
    }
    for step, table in expected.items():
        stream.begin_step(step, STEPS)
        assert shares(stream) == {k: pytest.approx(v, abs=0.02) for k, v in table.items()}


def test_bounds_keep_easy_samples_first_and_say_what_they_allow() -> None:
    stream = PromptStream(
        [source("a", 10)],
        0,
        curriculum=stages(
            {"until": 0.5, "difficulty": [None, 0.3]}, {"until": 1, "difficulty": [0.2, 0.6]}
        ),
    )
    stream.begin_step(1, STEPS)
    assert set(draws(stream, 50, "id")) == {f"a-{i}" for i in range(4)}
    assert stream.allows("a", "a-3") and not stream.allows("a", "a-4")
    stream.begin_step(6, STEPS)
    assert set(draws(stream, 50, "id")) == {f"a-{i}" for i in range(2, 7)}
    assert stream.allows("a", "a-4") and not stream.allows("a", "a-0")
    assert [stage.used for stage in stream.plan.stages] == [(4,), (5,), (10,)]


def test_bounds_on_pass_rates_use_the_source_s_own_rates() -> None:
    rated = replace(source("a", 4), pass_rates={("a", f"a-{i}"): i / 4 for i in range(4)})
    stream = PromptStream([rated], 0, curriculum=stages({"until": 1, "pass_rate": [0.25, 0.5]}))
    assert set(draws(stream, 30, "id")) == {"a-1", "a-2"}


def test_epochs_of_an_unbounded_source_go_on_across_stages() -> None:
    stream = PromptStream(
        [source("a", 8)], 0, curriculum=stages({"until": 0.5, "difficulty": [0, 1]})
    )
    first = draws(stream, 5, "id")
    stream.begin_step(6, STEPS)
    assert len({*first, *draws(stream, 3, "id")}) == 8 and stream.epochs() == [1.0]


def test_samples_without_a_difficulty_are_an_error_kept_or_dropped() -> None:
    bare = replace(
        source("b", 3),
        samples=tuple(Sample(f"b-{i}", "grounding", "b", "q", None) for i in range(3)),
    )
    sources = [source("a", 4), bare]
    with pytest.raises(
        ConfigError,
        match=r"data\.curriculum\.0 bounds difficulty.*'b-0' of source 'b'.*missing: keep or drop",
    ):
        PromptStream(sources, 0, curriculum=stages({"until": 1, "difficulty": [0, 0.5]}))
    for missing, expected in (("keep", {"a", "b"}), ("drop", {"a"})):
        stream = PromptStream(
            sources, 0, curriculum=stages({"until": 1, "difficulty": [0, 0.5], "missing": missing})
        )
        assert set(draws(stream, 40)) == expected


def test_stages_that_cannot_be_drawn_from_are_config_errors() -> None:
    sources = [source("a", 4), source("b", 4)]
    with pytest.raises(ConfigError, match=r"data\.curriculum\.1 leaves no sample: of 8"):
        PromptStream(
            sources, 0, curriculum=stages({"until": 0.5}, {"until": 1, "difficulty": [2, 3]})
        )
    with pytest.raises(ConfigError, match="leaves no sample"):
        PromptStream(sources, 0, curriculum=stages({"until": 0.5, "weights": {"a": 0, "b": 0}}))
    with pytest.raises(ConfigError, match=r"curriculum\.0\.weights: .*found 'alpha'"):
        PromptStream(sources, 0, curriculum=stages({"until": 0.5, "weights": {"alpha": 1}}))
    with pytest.raises(ConfigError, match=r"0 to 1\), found '2'"):
        PromptStream(sources, 0, curriculum=stages({"until": 0.5, "weights": {2: 1}}))


def course(cut: int | None, balance: str) -> list[str]:
    """Three draws a step for ten steps; the state goes through JSON into a new stream before step `cut`."""

    def new() -> PromptStream:
        sources = [joined(source("x", 6), source("y", 9, task="ocr")), source("z", 5)]
        return PromptStream(
            sources,
            4,
            balance=balance,
            curriculum=stages(
                {"until": 0.3, "difficulty": [0, 0.5]}, {"until": 0.6, "weights": {"y": 4, "z": 1}}
            ),
        )

    stream, seen = new(), []
    for step in range(1, STEPS + 1):
        if step == cut:
            state = json.loads(json.dumps(stream.state_dict()))
            stream = new()
            stream.load_state_dict(state)
        stream.begin_step(step, STEPS)
        seen += draws(stream, 3, "id")
    return seen


@pytest.mark.parametrize("balance", ["weights", "tasks", "sources"])
def test_a_resumed_curriculum_equals_the_uninterrupted_one(balance: str) -> None:
    whole = course(None, balance)
    assert (
        all(course(cut, balance) == whole for cut in (1, 3, 4, 5, 8, 10)) and len(set(whole)) > 10
    )


def test_a_resume_with_other_pools_is_refused() -> None:
    plain = PromptStream([source("a", 8)], 0)
    other = PromptStream(
        [source("a", 8)], 0, curriculum=stages({"until": 0.5, "difficulty": [0, 0.5]})
    )
    with pytest.raises(DataError, match=r"1 pools of samples, now there are 2"):
        other.load_state_dict(plain.state_dict())


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.curriculum=[{until: 0}]", r"data\.curriculum\.0\.until"),
        ("data.curriculum=[{until: 0.5}, {until: 0.5}]", "ascending 'until', found 0.5, 0.5"),
        ("data.curriculum=[{until: 1, weights: {a: -1}}]", "greater than or equal to 0"),
        ("data.curriculum=[{until: 1, difficulty: [3, 1]}]", r"low <= high, found \[3, 1\]"),
        ("data.curriculum=[{until: 1, difficult: [0, 1]}]", "Did you mean 'difficulty'"),
        ("data.balance=task", "'weights', 'tasks' or 'sources'"),
    ],
)
def test_malformed_curricula_are_refused_on_load(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, [override])


def test_numbered_weights_survive_the_resolved_configuration() -> None:
    config = load_config(None, ["data.curriculum=[{until: 0.5, weights: {0: 2, coco: 1}}]"])
    assert config.data.curriculum[0].weights == {"0": 2.0, "coco": 1.0}
    assert type(config).model_validate(config.model_dump(mode="json")) == config
