"""Suites: the shipped file agrees with tasks and readers, mistakes are named, and one command evaluates several."""

from __future__ import annotations

import inspect
import json
import math
import pickle
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from pydantic import ValidationError
from typer.testing import CliRunner, Result

from mmrl.cli.main import app
from mmrl.config import RunConfig
from mmrl.errors import ConfigError, DataError
from mmrl.evaluation.data_rows import suite_row
from mmrl.evaluation.suite_book import load_suites
from mmrl.evaluation.suite_table import markdown
from mmrl.evaluation.suites import DataSuite, SuiteSettings, check_files, configure, source_of
from mmrl.registry import BUILT_IN, task_from_spec
from mmrl.tasks.grounding import Grounding
from mmrl.tasks.scenes import make_scenes
from mmrl.types import Sample, Score
from tests.kits.engine_kit import read_jsonl, tiny_folder

SHIPPED = Path(__file__).resolve().parents[2] / "configs" / "suites.yaml"
FIXTURES = SHIPPED.parents[1] / "assets" / "fixtures"
BOOK = load_suites(SHIPPED)
NAMES = (
    "refcoco_val",
    "refcoco_testA",
    "refcoco_testB",
    "refcoco+_val",
    "refcoco+_testA",
    "refcoco+_testB",
    "refcocog_val",
    "refcocog_test",
    "coco_val2017",
    "odinw",
    "ovdeval",
    "lvis_minival",
    "pixmo_count",
    "pageocr_en",
    "ocrbench",
    "mathvista_rule",
    "mmmu_val",
    "screenspot",
    "screenspot_v2",
    "screenspot_pro",
    "android_control_low",
    "android_control_high",
    "gui_odyssey",
)


class Official(Grounding):
    """Its official scorer works, or fails when told to."""

    name, own_params = "official", {**Grounding.own_params, "broken": False}

    def benchmark(self, pairs: Sequence[tuple[Sample, Score]], folder: Path) -> Mapping[str, float]:
        (folder / "submission.json").write_text(
            json.dumps([s.id for s, _ in pairs]), encoding="utf-8"
        )
        if self.settings["broken"]:
            raise ValueError("expected 5000 pictures, found 3")
        return {"AP": 0.25}


OFFICIAL = f"{Path(__file__).resolve()}:Official"


def suite(**values: Any) -> dict[str, Any]:
    return {
        "task": "grounding",
        "path": "scenes/data.jsonl",
        "metric": "iou",
        "official": True,
        "download": "make_scenes writes it.",
        **values,
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data_root")
    make_scenes(folder / "scenes", count=4, seed=3)
    return folder


def written(path: Path, suites: Mapping[str, Any], **more: Any) -> str:
    path.write_text(yaml.safe_dump({"suites": dict(suites), **more}), encoding="utf-8")
    return str(path)


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def test_every_suite_that_is_promised_is_there() -> None:
    assert [n for n in NAMES if n not in BOOK.suites] == []
    assert (
        BOOK.files == [SHIPPED]
        and BOOK.select("rec,refcoco_val").keys() == BOOK.select("refcoco,refcoco+,refcocog").keys()
    )


@pytest.mark.parametrize("name", BOOK.suites)
def test_the_number_of_samples_that_a_split_names_is_known(name: str) -> None:
    found = BOOK.suites[name]
    one = r"\((\d+) (?:pages|rows|instructions|queries|sentences|questions)"
    for rule in (one, r"^(\d+) tasks of (\d+) questions"):
        if named := re.search(rule, found.split):
            assert found.count == math.prod(map(int, named.groups())), found.split
    # of PixMo-Count's addresses some answer no more: how many pictures there are differs
    assert not found.official or found.count or name == "pixmo_count"


@pytest.mark.parametrize("name", BOOK.suites)
def test_a_shipped_suite_fits_its_task_and_reader(name: str, tmp_path: Path) -> None:
    from mmrl.tasks.readers import reader_of

    found = BOOK.suites[name]
    assert (
        found.task in BUILT_IN
        and found.download
        and found.notes
        and found.split
        and found.settings.max_new_tokens
    )
    (tmp_path / found.path.replace("*", "x")).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / found.path.replace("*", "x")).touch()
    source = source_of(found, tmp_path, None)
    task = task_from_spec(found.task, source.params)
    reader = source.params["reader"]
    known = inspect.signature(reader_of(reader["format"])).parameters
    assert [k for k in reader if k != "format" and k not in known] == []
    assert all("{root}" not in str(v) for v in reader.values())
    kind, _, metric = found.metric.partition("/")
    if kind == "summary":
        assert metric in task.summarize([Score.failure("no_answer", task.part_names)])
    elif kind != "benchmark":
        assert found.metric == task.headline or found.metric in getattr(task, "metric_names", ())


def test_a_suite_reads_with_its_benchmarks_extractor_or_says_native(tmp_path: Path) -> None:
    """What --answers official means for a suite without one is written down as what it is: native."""
    (tmp_path / "a.json").touch()
    own = DataSuite.model_validate(
        suite(path="a.json", task="choice", answers="official", extractor="mmmu")
    )
    plain = DataSuite.model_validate(suite(path="a.json", task="choice", answers="native"))
    mixed = DataSuite.model_validate(
        suite(path="a.json", task="mixed", answers="official", extractor="mmmu")
    )
    assert (
        source_of(own, tmp_path, None).params.items()
        >= {"answers": "official", "extractor": "mmmu"}.items()
    )
    assert source_of(mixed, tmp_path, None).params["shared"] == {
        "answers": "official",
        "extractor": "mmmu",
    }
    assert source_of(own, tmp_path, None, answers="native").params["answers"] == "native"
    assert source_of(plain, tmp_path, None, answers="official").params["answers"] == "native"
    results = {"greedy": {"iou": {"mean": 0.5, "low": 0.4, "high": 0.6}}}
    rows = [
        suite_row("x", given, results, [], None, answers=asked)
        for given, asked in ((own, None), (own, "native"), (plain, "official"), (plain, "strict"))
    ]
    assert [(row.answers, row.extractor, row.official) for row in rows] == [
        ("official", "mmmu", True),
        ("native", "", False),
        ("native", "", True),
        ("strict", "", False),
    ]
    assert "answers: official (mmmu)" in markdown(rows[:1], {"x": own}, "c")
    with pytest.raises(ValidationError, match="answers: official needs extractor"):
        DataSuite.model_validate(suite(path="a.json", answers="official"))


def test_an_unknown_suite_is_answered_with_the_nearest_and_the_list() -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown suite 'screenspot_v3'\. Did you mean 'screenspot_v2'\?.* ovdeval.*groups: ",
    ):
        BOOK.select("refcoco_val, screenspot_v3")
    with pytest.raises(ConfigError, match="expected --suite NAME"):
        BOOK.select(" , ")


def test_missing_files_are_named_for_every_suite_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        check_files(BOOK.select("refcocog_test,screenspot_v2,mathvista_rule"), tmp_path)
    text = str(error.value)
    for words in (
        "suite 'refcocog_test'",
        "refcocog/refs(umd).p",
        "images/mscoco/images/train2014/",
        "REFER release",
        "screenspot_mobile_v2.json",
        "OS-Copilot/ScreenSpot-v2",
        "testmini-*.parquet",
        "--data-root",
        "MMRL_DATA",
    ):
        assert words in text, words
    for path in ("refcocog/instances.json", "refcocog/refs(umd).p"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    with pytest.raises(DataError) as error:
        check_files(BOOK.select("refcocog_test"), tmp_path)
    assert "refs(umd).p" not in str(error.value) and "train2014/" in str(error.value), (
        "only what is missing"
    )


def test_a_file_where_a_folder_is_expected_is_missing(tmp_path: Path) -> None:
    (tmp_path / "pictures").touch()
    odd = DataSuite.model_validate(suite(path="pictures", files=["pictures/"]))
    with pytest.raises(DataError, match="pictures/"):
        check_files({"odd": odd}, tmp_path)


def test_a_pattern_must_mean_one_file(tmp_path: Path) -> None:
    odd = DataSuite.model_validate(suite(path="part-*.parquet"))
    with pytest.raises(DataError, match="found 0"):
        source_of(odd, tmp_path, None)
    (tmp_path / "part-1.parquet").touch()
    assert source_of(odd, tmp_path, 7).path == str(tmp_path / "part-1.parquet")
    (tmp_path / "part-2.parquet").touch()
    with pytest.raises(DataError, match=r"found 2: part-1.parquet, part-2.parquet\. make_scenes"):
        source_of(odd, tmp_path, None)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (
            {"suites": {"a": suite(metrics="iou")}},
            r"suite 'a': unknown key 'metrics'\. Did you mean 'metric'\?",
        ),
        (
            {"suites": {"a": suite(settings={"max_new_token": 3})}},
            r"'settings.max_new_token'\. Did you mean 'max_new_tokens'\?",
        ),
        ({"suites": {"a": suite(settings={"max_pixels": 0})}}, "settings.max_pixels.*found 0"),
        ({"suites": {"a": {"task": "grounding"}}}, "suite 'a': path: Field required"),
        ({"suites": {"a": 3}}, "suite 'a'"),
        (
            {"suites": {"abc": suite()}, "groups": {"g": ["abd"]}},
            r"group 'g': unknown suite 'abd'\. Did you mean 'abc'\?",
        ),
        ({"suites": {"a": suite()}, "group": {}}, r"unknown key 'group'\. Did you mean 'groups'\?"),
        ({"suite": {}}, "expected a mapping 'suites'"),
        ([1], "expected a mapping 'suites'"),
        ("{", "expected YAML"),
    ],
)
def test_mistakes_in_a_suites_file_are_named(tree: Any, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "suites.yaml"
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree), encoding="utf-8")
    with pytest.raises(ConfigError, match=expected):
        load_suites(path)
    with pytest.raises(ConfigError, match="expected a suites file"):
        load_suites(tmp_path / "none.yaml")


def test_a_suites_settings_go_over_the_run_and_the_command_line_over_both() -> None:
    base = RunConfig.model_validate(
        {"data": {"min_pixels": 3136, "max_pixels": 50176}, "rollout": {"max_new_tokens": 9}}
    )
    wanted = DataSuite.model_validate(
        suite(settings={"max_new_tokens": 40, "max_pixels": 6272, "max_prompt_tokens": 99})
    )
    config = configure(base, wanted)
    assert (config.rollout.max_new_tokens, config.model.max_prompt_tokens) == (40, 99)
    assert (config.data.min_pixels, config.data.max_pixels) == (None, 6272)
    assert (base.rollout.max_new_tokens, base.data.max_pixels) == (9, 50176), (
        "the next suite starts from the run again"
    )
    given = configure(base, wanted, ["rollout.max_new_tokens=5", "data.max_pixels=3136"])
    assert (given.rollout.max_new_tokens, given.data.max_pixels, given.model.max_prompt_tokens) == (
        9,
        50176,
        99,
    )
    assert configure(base, DataSuite.model_validate(suite())).model_dump() == base.model_dump()


def test_a_model_is_asked_as_it_was_taught_unless_the_suite_says_otherwise(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    taught = {"prompt": "{question}", "mode": "dynamic", "answer_format": "think"}
    plain = DataSuite.model_validate(
        suite(path="a.jsonl", params={"reader": {"image_root": "{root}/x"}})
    )
    assert source_of(plain, tmp_path, None, taught).params == {
        "prompt": "{question}",
        "answer_format": "think",
        "reader": {"image_root": f"{tmp_path}/x"},
    }
    strict = DataSuite.model_validate(
        suite(path="a.jsonl", params={"prompt": "Where is {question}?"})
    )
    assert source_of(strict, tmp_path, None, taught).params["prompt"] == "Where is {question}?"


def row(
    value: float, parsed: bool = True, stop: str = "eos", mode: str = "greedy"
) -> dict[str, Any]:
    return {"mode": mode, "stop": stop, "score": {"value": value, "parsed": parsed}}


def test_the_line_of_a_suite_counts_failures_and_finds_its_metric_anywhere() -> None:
    rows = [row(1.0), row(0.0, False, "length"), row(0.0, False), row(0.5, mode="sampled")]
    results = {
        "greedy": {"iou": {"mean": 0.5, "low": 0.25, "high": 0.75}},
        "sampled": {"iou": {"mean": 0.4}},
        "summary": {"greedy": {"a.jsonl": {"edit": 0.3}}},
        "benchmark": {"a": {"AP": 0.2}, "b": {"AP": 0.4}},
    }

    def line(metric: str, **found: Any) -> Any:
        return suite_row(
            "s", DataSuite.model_validate(suite(metric=metric)), {**results, **found}, rows, None
        )

    plain = line("iou")
    assert (plain.n, plain.parse_failures, plain.truncated, plain.sampled) == (3, 2, 1, 0.4)
    assert plain.shown == "0.500 [0.250, 0.750]" and not plain.error and not plain.limited
    assert line("summary/edit").value == 0.3 and line("benchmark/AP").shown == "0.300"
    assert (
        "expected metric 'iuo'" in line("iuo").error and "Did you mean 'iou'" in line("iuo").error
    )
    assert line("iuo").shown == "-"
    assert (
        line("benchmark/AP", benchmark={"a": {"error": "ValueError: no"}}).error
        == "a: ValueError: no"
    )
    text = markdown(
        [plain, line("iuo")], {"s": DataSuite.model_validate(suite(notes="A note."))}, "model"
    )
    assert (
        "| s | 3 | iou | 0.500 [0.250, 0.750] | 2 | 1 | yes |" in text
        and "A note." in text
        and "error: expected" in text
    )
    for count, shown in ((3, "yes"), (5553, "no (3 of 5553)"), (2, "no (3 of 2)"), (None, "yes")):
        known = suite_row("s", DataSuite.model_validate(suite(count=count)), results, rows, None)
        assert known.cells(0)["official"] == shown and known.official is (shown == "yes")
    unread = [{**row, "score": {**row["score"], "reason": "input_error: no clip"}} for row in rows]
    lost = suite_row("s", DataSuite.model_validate(suite(count=3)), results, unread, None)
    assert lost.cells(0)["official"] == "no"
    own = DataSuite.model_validate(suite(count=3, official=False))
    assert suite_row("s", own, results, rows, None).cells(0)["official"] == "no"
    rows[1]["score"]["reason"] = "input_error: no picture"
    assert "  - 1 of 3 held-out samples could not be read and count as 0\n" in markdown(
        [line("iou")], {"s": DataSuite.model_validate(suite())}, "m"
    ), "a picture that is missing is no wrong answer"
    assert plain.remarks() == []
    some = suite_row("s", DataSuite.model_validate(suite()), results, rows, 3)
    assert some.limited and "| 3 (first n) |" in markdown(
        [some], {"s": DataSuite.model_validate(suite())}, "m"
    )


@pytest.mark.slow
def test_one_command_evaluates_several_suites_and_prints_one_table(
    root: Path, tmp_path: Path
) -> None:
    settings = {
        "wide": {"max_new_tokens": 7, "max_pixels": 12544},
        "small": {"max_new_tokens": 3, "max_pixels": 3136},
    }
    file = written(
        tmp_path / "s.yaml",
        {
            "wide": suite(params={"prompt": "{question}"}, settings=settings["wide"]),
            "small": suite(
                task=OFFICIAL, metric="benchmark/AP", official=False, settings=settings["small"]
            ),
        },
    )
    done = run(
        tiny_folder(),
        "--suite",
        "wide,small",
        "--suites",
        file,
        "--data-root",
        root,
        "--out",
        tmp_path / "out",
        "--limit",
        3,
        "--samples",
        2,
        "model.device=cpu",
        "reward.workers=0",
    )
    assert done.exit_code == 0, done.output
    out = tmp_path / "out"
    for name, length, pixels in (("wide", 7, 12544), ("small", 3, 3136)):
        rows = read_jsonl(out / name / "predictions.jsonl")
        assert len(rows) == 3 * (1 + 2) and {r["max_tokens"] for r in rows} == {length}
        assert all(
            s["resized_wh"][0] * s["resized_wh"][1] <= pixels
            for r in rows
            for s in r["image_sizes"]
        )
        results = json.loads((out / name / "results.json").read_text())
        protocol = results["protocol"]
        assert (protocol["max_new_tokens"], protocol["max_pixels"], protocol["suite"]["name"]) == (
            length,
            pixels,
            name,
        )
        assert "{question}" in protocol["prompt"]
    [submission] = (out / "small" / "submissions").rglob("submission.json")
    assert json.loads(submission.read_text()) == [
        r["id"] for r in read_jsonl(out / "small" / "predictions.jsonl") if r["mode"] == "greedy"
    ]
    table = json.loads((out / "suites.json").read_text())
    assert [(s["suite"], s["n"], s["limited"]) for s in table["suites"]] == [
        ("wide", 3, True),
        ("small", 3, True),
    ]
    assert table["suites"][1]["value"] == 0.25 and table["suites"][0]["parse_failures"] <= 3
    assert table["suites"][0]["settings"]["max_new_tokens"] == 7 and "torch" in table["versions"]
    assert table["protocols"]["small"]["task"] == OFFICIAL
    assert "| small | 3 (first n) | benchmark/AP | 0.250 |" in (out / "suites.md").read_text()
    assert all(
        words in done.output for words in ("suite", "parse failures", "truncated", "avg@2", "0.250")
    )


@pytest.mark.slow
def test_a_failing_official_scorer_is_printed_kept_and_ends_with_status_1(
    root: Path, tmp_path: Path
) -> None:
    file = written(
        tmp_path / "s.yaml",
        {
            "bad": suite(task=OFFICIAL, params={"broken": True}, metric="benchmark/AP"),
            "good": suite(),
        },
    )
    done = run(
        tiny_folder(),
        "--suite",
        "bad,good",
        "--suites",
        file,
        "--data-root",
        root,
        "--out",
        tmp_path / "out",
        "--limit",
        2,
        "model.device=cpu",
        "reward.workers=0",
        "rollout.max_new_tokens=3",
    )
    assert done.exit_code == 1 and "expected 5000 pictures, found 3" in done.output
    table = json.loads((tmp_path / "out" / "suites.json").read_text())["suites"]
    assert (
        "ValueError" in table[0]["error"] and table[0]["value"] is None and table[1]["error"] == ""
    ), "the next one still ran"
    assert list((tmp_path / "out" / "bad" / "submissions").rglob("submission.json")), (
        "what was written stays"
    )


@pytest.mark.slow
def test_plain_data_prints_rows_left_out_official_numbers_and_each_source(
    root: Path, tmp_path: Path
) -> None:
    data = tmp_path / "two.jsonl"
    rows = read_jsonl(root / "scenes" / "data.jsonl")
    for number, line in enumerate(rows):
        line |= {
            "image": str(root / "scenes" / line["image"]),
            "source": ("left", "right")[number % 2],
        }
    data.write_text("".join(json.dumps(r) + "\n" for r in rows) + "no json\n", encoding="utf-8")
    done = run(
        tiny_folder(),
        "--task",
        OFFICIAL,
        "--data",
        data,
        "--out",
        tmp_path / "out",
        "model.device=cpu",
        "reward.workers=0",
        "rollout.max_new_tokens=3",
        "data.on_error=record",
    )
    assert done.exit_code == 0, done.output
    assert "1 rows rejected" in done.output and "official, two: AP 0.25" in done.output
    assert "left" in done.output and "right" in done.output and "macro" in done.output
    assert json.loads((tmp_path / "out" / "results.json").read_text())["benchmark"] == {
        "two": {"AP": 0.25}
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--suite", "refcoco_val"], "expected a checkpoint"),
        (["model"], "expected --task NAME with --data FILE, or --suite"),
        (["model", "--task", "grounding"], "expected --task NAME with --data FILE"),
        (["model", "--suite", "a", "--task", "grounding"], "found both"),
    ],
)
def test_what_to_evaluate_must_be_said(arguments: list[str], expected: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 1 and expected in str(done.exception)


def test_the_list_names_every_suite() -> None:
    done = run("--list-suites", "--suites", SHIPPED)
    assert done.exit_code == 0 and all(
        name in done.output for name in (*NAMES, "official", "rec = ")
    )


def make_refcoco(root: Path) -> None:
    """The layout of the REFER release with one picture and a reference in val and in testA."""
    pictures = root / "images/mscoco/images/train2014"
    pictures.mkdir(parents=True)
    Image.new("RGB", (120, 90), (90, 120, 90)).save(pictures / "COCO_train2014_000000000009.jpg")
    refs = [
        {
            "ref_id": n,
            "ann_id": 5,
            "category_id": 1,
            "image_id": 9,
            "file_name": "COCO_train2014_000000000009_16.jpg",
            "split": split,
            "sent_ids": [n],
            "sentences": [{"sent_id": n, "sent": f"the thing {n}", "raw": "", "tokens": []}],
        }
        for n, split in enumerate(("val", "val", "testA", "testB"))
    ]
    (root / "refcoco").mkdir()
    (root / "refcoco" / "refs(unc).p").write_bytes(pickle.dumps(refs, protocol=2))
    (root / "refcoco" / "instances.json").write_text(
        json.dumps(
            {
                "images": [
                    {
                        "id": 9,
                        "file_name": "COCO_train2014_000000000009.jpg",
                        "width": 120,
                        "height": 90,
                    }
                ],
                "annotations": [
                    {"id": 5, "image_id": 9, "category_id": 1, "bbox": [10, 20, 50, 40]}
                ],
            }
        )
    )


@pytest.mark.slow
def test_a_shipped_suite_runs_on_the_official_layout(tmp_path: Path) -> None:
    make_refcoco(tmp_path / "data")
    done = run(
        tiny_folder(),
        "--suite",
        "refcoco",
        "--data-root",
        tmp_path / "data",
        "--out",
        tmp_path / "out",
        "--suites",
        SHIPPED,
        "model.device=cpu",
        "reward.workers=0",
        "rollout.max_new_tokens=4",
    )
    assert done.exit_code == 0, done.output
    table = json.loads((tmp_path / "out" / "suites.json").read_text())["suites"]
    assert [(s["suite"], s["n"], s["metric"]) for s in table] == [
        ("refcoco_val", 2, "acc@0.5"),
        ("refcoco_testA", 1, "acc@0.5"),
        ("refcoco_testB", 1, "acc@0.5"),
    ]


def make_every_suite(root: Path) -> None:
    """The fixtures of all formats under the names that the shipped suites expect."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    moves = {
        "coco": "coco",
        "lvis/val2017": "coco/val2017",
        "lvis/train2017": "coco/train2017",
        "ovdeval": "ovdeval",
        "coco/val2017": "odinw",
        "pixmo/pictures": "pixmo-count/images",
        "pageocr": "Fox",
        "mmmu": "MMMU",
        "screenspot": "ScreenSpot",
        "screenspot_v2": "ScreenSpot-v2",
        "screenspot_pro": "ScreenSpot-Pro",
        "android_control": "android_control",
        "gui_odyssey": "GUI-Odyssey",
        "lvis/lvis_v1_val.json": "lvis/lvis_v1_minival.json",
        "coco/annotations/instances_val2017.json": "odinw/_annotations.coco.json",
        "pixmo/validation-00000-of-00001.parquet": "pixmo-count/test-00000-of-00001.parquet",
        "ocrbench/test-00000-of-00001.parquet": "OCRBench/data/test-00000-of-00001.parquet",
        "screenspot_v2/screenspot_mobile_v2.json": "ScreenSpot-v2/screenspot_web_v2.json",
    }
    for old, new in moves.items():
        (root / new).parent.mkdir(parents=True, exist_ok=True)
        if (FIXTURES / old).is_dir():
            shutil.copytree(FIXTURES / old, root / new, dirs_exist_ok=True)
        else:
            shutil.copy(FIXTURES / old, root / new)
    shutil.copy(
        root / "ScreenSpot-v2/screenspot_web_v2.json",
        root / "ScreenSpot-v2/screenspot_desktop_v2.json",
    )
    rows = json.loads(
        (FIXTURES / "mathvista" / "testmini.json").read_text(encoding="utf-8")
    ).values()
    rows = [
        {
            **row,
            "decoded_image": {
                "bytes": (FIXTURES / "mathvista" / row["image"]).read_bytes(),
                "path": None,
            },
        }
        for row in rows
    ]
    (root / "MathVista" / "data").mkdir(parents=True)
    pq.write_table(
        pa.Table.from_pylist(rows), root / "MathVista" / "data" / "testmini-00000-of-00001.parquet"
    )
    make_refcoco(root)
    for name, split_by in (("refcoco+", "unc"), ("refcocog", "umd")):
        shutil.copytree(root / "refcoco", root / name)
        (root / name / "refs(unc).p").rename(root / name / f"refs({split_by}).p")


@pytest.mark.slow
def test_every_shipped_suite_gives_a_number_on_its_format(tmp_path: Path) -> None:
    make_every_suite(tmp_path / "data")
    names = [n for n in NAMES if not n.endswith(("testA", "testB", "g_test"))]
    done = run(
        tiny_folder(),
        "--suite",
        ",".join(names),
        "--data-root",
        tmp_path / "data",
        "--out",
        tmp_path / "out",
        "--suites",
        SHIPPED,
        "--limit",
        2,
        "model.device=cpu",
        "reward.workers=0",
        "rollout.max_new_tokens=2",
        "data.max_pixels=12544",
    )
    table = json.loads((tmp_path / "out" / "suites.json").read_text())["suites"]
    assert {s["suite"]: s["error"] for s in table if s["error"] or s["value"] is None} == {}
    assert [s["suite"] for s in table] == names and done.exit_code == 0
    for name in (
        "coco_val2017",
        "lvis_minival",
        "ovdeval",
        "ocrbench",
        "pageocr_en",
        "screenspot",
        "android_control_low",
    ):
        assert any((tmp_path / "out" / name / "submissions").rglob("*.json*")), (
            f"{name}: the official submission file"
        )


def test_settings_take_only_what_they_know() -> None:
    assert SuiteSettings(max_new_tokens=3).model_dump() == {
        "max_new_tokens": 3,
        "max_prompt_tokens": None,
        "min_pixels": None,
        "max_pixels": None,
        "video": {
            "fps": None,
            "num_frames": None,
            "min_frames": None,
            "max_frames": None,
            "min_pixels": None,
            "max_pixels": None,
            "total_pixels": None,
        },
    }
