"""Data sources and the prompt stream: nothing lost, nothing twice, the same after a resume."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mmrl.cli.configuration import recipe_lines
from mmrl.cli.demo import make_data
from mmrl.config import DataSource, load_config
from mmrl.config.shipped import recipe_file, recipes
from mmrl.data.sources import (
    LoadedSource,
    PromptStream,
    load_sources,
    skipped_report,
    write_rejected,
)
from mmrl.errors import DataError
from mmrl.registry import task_from_spec
from mmrl.tasks.scenes import make_scenes
from mmrl.types import Sample


def source(name: str, count: int, weight: float = 1.0) -> LoadedSource:
    samples = tuple(
        Sample(f"{i}", "grounding", name, "red circle", [0, 0, 1, 1]) for i in range(count)
    )
    return LoadedSource(
        DataSource(task="grounding", path=name, weight=weight), task_from_spec("grounding"), samples
    )


def draws(stream: PromptStream, count: int) -> list[tuple[str, str]]:
    return [(sample.source, sample.id) for sample, _ in (stream.draw() for _ in range(count))]


def test_every_sample_comes_once_per_epoch_in_a_new_order() -> None:
    stream = PromptStream([source("a", 37)], seed=3)
    epochs = [draws(stream, 37) for _ in range(4)]
    assert all(Counter(epoch) == Counter(epochs[0]) and len(set(epoch)) == 37 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert stream.epochs() == [4.0]


def test_epochs_of_mixed_sources_do_not_disturb_each_other() -> None:
    stream = PromptStream([source("a", 5), source("b", 11, weight=2.0)], seed=0)
    seen = draws(stream, 400)
    for name, size in (("a", 5), ("b", 11)):
        own = [i for s, i in seen if s == name]
        for start in range(0, len(own) - size, size):
            assert len(set(own[start : start + size])) == size


def test_the_same_seed_gives_the_same_draws_and_another_seed_others() -> None:
    sources = [source("a", 20), source("b", 30)]
    assert draws(PromptStream(sources, 5), 100) == draws(PromptStream(sources, 5), 100)
    assert draws(PromptStream(sources, 5), 100) != draws(PromptStream(sources, 6), 100)


def test_weights_are_shares_of_the_draws_whatever_the_sizes() -> None:
    stream = PromptStream(
        [source("small", 3, weight=3.0), source("large", 500, weight=1.0)], seed=1
    )
    share = sum(name == "small" for name, _ in draws(stream, 4000)) / 4000
    assert share == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize("cut", [0, 1, 7, 20, 63])
def test_a_resumed_stream_equals_the_uninterrupted_one(cut: int) -> None:
    sources = [source("a", 7), source("b", 13, weight=2.5)]
    whole = draws(PromptStream(sources, 9), 80)
    first = PromptStream(sources, 9)
    start = draws(first, cut)
    second = PromptStream(sources, 9)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert start + draws(second, 80 - cut) == whole


def test_a_resume_on_other_data_is_refused() -> None:
    stream = PromptStream([source("a", 8)], 0)
    with pytest.raises(DataError, match=r"was \['7 samples, rows \w+'\], now \['8 samples"):
        stream.load_state_dict(PromptStream([source("a", 7)], 0).state_dict())


def test_a_stream_finds_its_samples_again_with_their_task() -> None:
    sources = [source("a", 4), source("b", 4)]
    stream = PromptStream(sources, 0)
    for _ in range(16):
        sample, task = stream.draw()
        assert stream.find(sample.source, sample.id) == (sample, task)
        assert task is sources[sample.source == "b"].task


def test_a_stream_without_sources_names_the_key() -> None:
    with pytest.raises(DataError, match=r"data\.train"):
        PromptStream([], 0)


@pytest.fixture
def scenes(tmp_path: Path) -> str:
    return make_scenes(tmp_path / "scenes", count=6, seed=0)


def loaded(*paths: str, on_error: str = "raise", **options: Any) -> list[LoadedSource]:
    return load_sources(
        [DataSource(task="grounding", path=p, **options) for p in paths], on_error=on_error
    )


def test_sources_are_limited_to_their_first_samples(scenes: str) -> None:
    [whole], [part] = loaded(scenes), loaded(scenes, limit=4)
    assert part.samples == whole.samples[:4]


def test_what_was_read_is_counted_by_medium(tmp_path: Path) -> None:
    (tmp_path / "a.wav").touch()
    rows = [{"question": "?", "answer": "a", "audio": "a.wav"}, {"question": "?", "answer": "b"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_sources([DataSource(task="open_text", path=str(file))])
    (told,) = skipped_report(loaded)
    assert (told["kept"], told["pictures"], told["clips"], told["sounds"]) == (2, 0, 0, 1)


def test_duplicate_ids_name_the_sample_and_both_files(scenes: str, tmp_path: Path) -> None:
    copy = tmp_path / "scenes" / "copy.jsonl"
    copy.write_text(Path(scenes).read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(
        DataError, match=r"copy\.jsonl: sample id 'scene-0-000000' .* already used in .*data\.jsonl"
    ):
        loaded(scenes, str(copy))


def test_missing_and_empty_data_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"found nothing; check data\.train"):
        loaded(str(tmp_path / "nowhere.jsonl"))
    nowhere = [DataSource(task="grounding", path=str(tmp_path / "nowhere.jsonl"))]
    for where, key in (("data.eval", r"data\.eval\[\]\.path$"), ("--data", "--data$")):
        with pytest.raises(DataError, match=f"found nothing; check {key}"):
            load_sources(nowhere, where=where)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n", encoding="utf-8")
    with pytest.raises(DataError, match="at least one usable sample"):
        loaded(str(empty))


def test_the_demo_that_was_not_drawn_is_named_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = load_config(recipe_file("demo")).data.train[0]
    with pytest.raises(DataError, match=r"found nothing; `mmrl demo` draws it .*; or check data"):
        load_sources([source])


def test_the_demo_draws_anew_where_another_number_of_scenes_lies(tmp_path: Path) -> None:
    def rows(name: str) -> int:
        return len((tmp_path / name / "data.jsonl").read_text(encoding="utf-8").splitlines())

    for train, held_out in ((4, 2), (6, 3)):
        make_data(tmp_path, train=train, held_out=held_out)
        assert (rows("train"), rows("eval")) == (train, held_out)
    drawn = (tmp_path / "train" / "data.jsonl").stat().st_mtime_ns
    make_data(tmp_path, train=6, held_out=3)
    assert (tmp_path / "train" / "data.jsonl").stat().st_mtime_ns == drawn, "once"


def test_recipes_are_listed_with_commands_of_an_installation() -> None:
    *lines, hint = recipe_lines()
    assert {line.split()[0] for line in lines} == set(recipes()) and "data.train.0.path=" in hint
    assert not any(word in line for line in lines for word in ("bash", "scripts", "python -m"))
    by_name = {line.split()[0]: line for line in lines}
    assert "mmrl train grounding ..." in by_name["grounding"]
    assert "mmrl sft libero --out POLICY, then mmrl train libero" in by_name["libero"]


def test_broken_rows_stop_the_run_or_are_listed(scenes: str, tmp_path: Path) -> None:
    with Path(scenes).open("a", encoding="utf-8") as file:
        file.write(
            '{"id": "x", "image": "images/none.png", "question": "circle", "answer": [1, 2, 3, 4]}\nno json\n'
        )
    with pytest.raises(DataError, match=r"none\.png"):
        loaded(scenes)
    [recorded] = loaded(scenes, on_error="record")
    assert len(recorded.samples) == 6 and len(recorded.rejected) == 2
    assert write_rejected([recorded], tmp_path / "rejected.jsonl") == 2
    rows = [
        json.loads(line)
        for line in (tmp_path / "rejected.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [row["row"] for row in rows] == ["7", "8"] and "none.png" in rows[0]["reason"]


def test_the_reader_may_decide_otherwise_than_the_run(scenes: str) -> None:
    with Path(scenes).open("a", encoding="utf-8") as file:
        file.write("no json\n")
    [recorded] = loaded(scenes, params={"reader": {"on_error": "record"}})
    assert len(recorded.rejected) == 1
    with pytest.raises(DataError):
        loaded(scenes, on_error="record", params={"reader": {"on_error": "raise"}})
