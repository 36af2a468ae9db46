"""Video benchmarks, all of them: recognised, read by the built-in tasks, every bad row named, whatever stands in it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from assets.make_video_task_fixtures import FRAMES, MAKERS, SIZE, make_all
from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError
from mmrl.registry import BUILT_IN, task_from_spec
from mmrl.tasks.readers import detect_format, read_any, reader_of
from mmrl.types import RewardContext
from tests.tasks.video_sets_kit import COMMITTED, COUNTS, FORMATS, READ

_FRAME = CoordFrame.ABS_ORIG


# all of them
@pytest.mark.parametrize("name", MAKERS)
def test_every_fixture_is_recognised_and_read_by_the_built_in_tasks(
    fixtures: dict[str, str], name: str
) -> None:
    assert set(MAKERS) == set(COUNTS)
    assert detect_format(fixtures[name]) == FORMATS[name]
    readout = read_any(fixtures[name], task="mixed")
    assert len(readout) == COUNTS[name] == len({s.id for s in readout}) and not readout.rejected
    for sample in readout:
        assert (
            sample.task in BUILT_IN and len(sample.videos) == 1 and Path(sample.videos[0]).exists()
        )
        assert (sample.params["width"], sample.params["height"]) == SIZE and 0 < sample.params[
            "duration"
        ] <= 3.0
        json.dumps([sample.answer, dict(sample.params)])
        task = task_from_spec(sample.task)
        ctx = RewardContext(1, 1, _FRAME)
        score = task.score(sample, task.gold(sample, ctx), ctx)
        assert score.parsed and score.value > 0.99, (sample.id, score)
        assert task.score(sample, task.wrong(sample, ctx), ctx).value < 0.5


@pytest.mark.parametrize(
    "name", [n for n in MAKERS if n not in ("got10k", "videochat_got", "video_rows")]
)
def test_a_missing_video_names_the_option_and_rows_are_recorded(own: Any, name: str) -> None:
    path = own(name)
    for clip in (path if path.is_dir() else path.parent).parent.rglob("*.mp4"):
        clip.unlink()
    if name == "mvbench":
        shutil.rmtree(path / "video")
    with pytest.raises(
        DataError,
        match=r"expected the video '.+' in .*found none there; .*params\.reader\.video_root=FOLDER",
    ):
        read_any(path, task="mixed", on_error="raise")
    readout = read_any(path, task="mixed", on_error="record")
    assert len(readout) == 0 and len(readout.rejected) == COUNTS[name]


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in MAKERS
        if n not in ("mvbench", "got10k", "videochat_got", "video_rows", "charades_sta")
    ],
)
def test_without_probing_no_video_is_opened(own: Any, name: str) -> None:
    path = own(name)
    probed = read_any(path, task="mixed").samples
    for clip in (path if path.is_dir() else path.parent).parent.rglob("*.mp4"):
        clip.write_bytes(b"no video")
    samples = read_any(path, task="mixed", probe=False).samples
    assert [(s.id, s.question, s.answer, s.videos) for s in samples] == [
        (s.id, s.question, s.answer, s.videos) for s in probed
    ]
    with pytest.raises(ConfigError, match=r"reader\.probe true or false"):
        read_any(path, task="mixed", probe="no")


def test_sampling_settings_reach_every_sample_and_are_checked(fixtures: dict[str, str]) -> None:
    readout = read_any(fixtures["mvbench"], video={"num_frames": 8, "kind": "uniform"})
    settings = [s.params["video"] for s in readout]
    assert all(v["num_frames"] == 8 and v["kind"] == "uniform" for v in settings)
    assert settings[0] == {"num_frames": 8, "kind": "uniform", "start": 0.5, "end": 2.5}
    with pytest.raises(
        ConfigError,
        match=r"unknown setting 'max_frame' in reader\.video.*Did you mean 'max_frames'",
    ):
        read_any(fixtures["videomme"], video={"max_frame": 8})
    with pytest.raises(ConfigError, match=r"no 'start' in reader\.video, because the rows say"):
        read_any(fixtures["videomme"], video={"start": 1})
    with pytest.raises(ConfigError, match=r"reader\.video as a mapping"):
        read_any(fixtures["videomme"], video=8)


def test_the_committed_fixtures_are_what_the_generator_writes(tmp_path: Path) -> None:
    """Regenerate with: python -m assets.make_video_task_fixtures assets/fixtures"""
    made, size = make_all(tmp_path), 0
    assert {name: str(Path(path).relative_to(tmp_path / name)) for name, path in made.items()} == {
        name: path or "." for name, path in READ.items()
    }
    for name in MAKERS:
        kept, fresh = (
            {
                p.relative_to(root / name): p
                for p in (root / name).rglob("*")
                if p.is_file() and ".media" not in str(p)
            }
            for root in (COMMITTED, tmp_path)
        )
        assert set(kept) == set(fresh), name
        for relative, path in fresh.items():
            size += kept[relative].stat().st_size
            if relative.suffix in (".json", ".jsonl", ".txt", ".csv", ".srt", ".label", ".ini"):
                assert kept[relative].read_bytes() == path.read_bytes(), relative
            if relative.suffix == ".parquet":
                assert pq.read_schema(kept[relative]).equals(pq.read_schema(path)), relative
    assert size < 70_000


# whatever stands in a row, reading ends
JUNK: tuple[Any, ...] = (
    None,
    0,
    -1,
    1.5,
    10**12,
    float("nan"),
    True,
    "",
    " ",
    "x",
    "a\0b",
    "\ud800",
    "<image>",
    [],
    {},
    [None],
    {"a": 1},
    "../../etc/passwd",
    "https://example.org/a.mp4",
    "9" * 5000,
)


@pytest.mark.parametrize(
    "name",
    [
        "qvhighlights",
        "vsibench",
        "longvideobench",
        "mlvu_test",
        "videochat_got",
        "videomme",
        "videommmu",
        "video_rows",
        "mvbench",
        "activitynet",
        "tempcompass",
    ],
)
def test_no_row_breaks_a_reader(own: Any, name: str) -> None:
    path = own(name)
    file = {"mvbench": "json/action_sequence.json", "tempcompass": "multi-choice.json"}.get(name)
    path = path / file if file else path
    if path.is_dir():
        parquet = next(iter(sorted(path.rglob("*.parquet"))))
        rows = [
            {k: v for k, v in row.items() if k != "image"}
            for row in pq.read_table(parquet).to_pylist()
        ]
        path = parquet.with_name("rows.json")
    else:
        text = path.read_text()
        rows = (
            [json.loads(line) for line in text.splitlines()]
            if path.suffix == ".jsonl"
            else json.loads(text)
        )
    if isinstance(rows, dict):
        ((vid, entry),) = rows.items()
        changed = [{vid: {**entry, key: junk}} for key in entry for junk in JUNK] + [
            {vid: junk} for junk in JUNK
        ]
        for number, value in enumerate(changed):
            path.write_text(json.dumps(value))
            readout = read_any(path, FORMATS[name], task="mixed", on_error="record")
            assert len(readout.rows) == len(readout), number
        return
    bad = [{**row, key: junk} for row in rows[:8] for key in row for junk in JUNK]
    bad += [{k: v for k, v in row.items() if k != key} for row in rows[:8] for key in row]
    path.write_text("\n".join(map(json.dumps, bad)) if path.suffix == ".jsonl" else json.dumps(bad))
    readout = read_any(path, FORMATS[name], task="mixed", on_error="record")
    assert (
        len(readout) + len(readout.rejected) + sum(readout.skipped.values()) == len(bad)
        and len(readout.rejected) > 50
    )
    assert all("expected" in r.reason or "picture" in r.reason for r in readout.rejected)


def test_every_reader_says_which_task_it_holds(fixtures: dict[str, str]) -> None:
    for name in (
        "charades_sta",
        "activitynet",
        "qvhighlights",
        "nextgqa",
        "videomme",
        "mvbench",
        "longvideobench",
        "mlvu",
        "got10k",
    ):
        with pytest.raises(ConfigError, match=r"holds task \w+, found task ocr; use task"):
            read_any(fixtures[name], task="ocr")
    for name in sorted({FORMATS[n] for n in MAKERS}):
        with pytest.raises(DataError, match="expected"):
            reader_of(name)(Path(fixtures["got10k"]) / "none.json")


def test_frames_of_the_fixture_are_true(fixtures: dict[str, str]) -> None:
    from mmrl.video.decode import probe

    info = probe(next(Path(fixtures["videomme"]).parent.rglob("*.mp4")))
    assert (info.frames, info.width, info.height, info.duration_s) == (FRAMES, *SIZE, 3.0)
