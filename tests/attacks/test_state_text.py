"""Half a character (a lone surrogate) anywhere in a row, its params, a score or a metric costs that row, never the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mmrl.cli.offline import score_command
from mmrl.config import load_config
from mmrl.errors import DataError
from mmrl.files import json_line, printable
from mmrl.report import build_report
from mmrl.training.runlog import RunFolder
from mmrl.training.trainer import Trainer
from scripts.torture_resume import differences
from tests.kits.engine_kit import (
    cli,
    config_file,
    fresh_policy,
    picture,
    read_jsonl,
    sample_with,
    small_run,
)

HALF = "\ud800"
TASK = '''
from tests.kits.album_task import Album
from mmrl import Sample, Score

HALF = "\\ud800"


class Halves(Album):
    """The album's questions; scores that say half a character wherever a score can say something."""

    def load(self, path):
        for s in super().load(path):
            number = int(s.id.split("-")[1])
            extra = {0: {"question": "Where" + HALF}, 1: {"params": {"note": HALF}}, 2: {"id": "id" + HALF}, 3: {"answer": [HALF]},
                     4: {"source": "s" + HALF}, 5: {"images": ("/no/" + HALF + ".png",)}, 6: {"params": {HALF: 1.0}}}
            extra = extra.get(number, {})
            yield Sample(**{**vars(s), **extra})

    def score(self, sample, text, ctx):
        share = sum(c.isalpha() for c in text) / max(1, len(text))
        return Score.combine({"accuracy": share}, {"accuracy": 1.0}, parsed=True, reason="because" + HALF,
                             metrics={"m" + HALF: share}, detail={"of" + HALF: HALF})
'''


def run_of(tmp_path: Path, **sections: Any) -> Any:
    (tmp_path / "halves.py").write_text(TASK, encoding="utf-8")
    rows = [
        {"id": f"album-{i}", "images": [picture((56, 56), i)], "question": "Where?"}
        for i in range(9)
    ]
    for name, part in (("train", rows), ("held", rows[1:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    task = f"{tmp_path / 'halves.py'}:Halves"
    tree = small_run(
        tmp_path / "runs",
        "",
        train={
            "steps": 3,
            "prompts_per_step": 4,
            "keep_last": 9,
            "log_rollouts": 9,
            "tensorboard": True,
        },
        **sections,
    )
    tree["data"] = {
        "train": [{"task": task, "path": str(tmp_path / "train.jsonl")}],
        "eval": [{"task": task, "path": str(tmp_path / "held.jsonl")}],
        "on_error": "record",
    }
    tree["reward"] = {"workers": 1, "timeout_s": 60.0}
    return config_file(tmp_path / "c.yaml", tree)


@pytest.mark.slow
def test_a_run_on_rows_with_half_characters_goes_on_and_keeps_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_of(tmp_path)
    trainer = Trainer(load_config(path))
    trainer.fit()
    run = trainer.folder.path
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3] and f"train/m{HALF}" in rows[0], (
        "escaped, and read as what it was"
    )
    failures = read_jsonl(run / "failures.jsonl")
    reasons = {row["id"]: row["reason"] for row in failures}
    assert (
        "expected text, found half a character (a lone surrogate) at position" in reasons["album-0"]
    )
    assert all(row["id"] in ("album-0", "album-5") for row in failures), (
        "one row each, and no other"
    )
    logged = [row for file in sorted((run / "rollouts").iterdir()) for row in read_jsonl(file)]
    assert {f"id{HALF}"} <= {row["sample"]["id"] for row in logged} and logged[0]["score"][
        "reason"
    ] == f"because{HALF}"
    assert any(row["sample"]["params"] == {"note": HALF} for row in logged)
    assert len(read_jsonl(run / "eval" / "step_000003" / "predictions.jsonl")) == 8 * 3
    page = build_report(run).read_text(encoding="utf-8")
    assert "<h3>Training" in page and "\ud800" not in page
    score_command(
        sorted((run / "rollouts").iterdir())[0], None, [], tmp_path / "again.jsonl", trust_code=True
    )
    assert read_jsonl(tmp_path / "again.jsonl")[0]["score"]["detail"] == {f"of{HALF}": HALF}


@pytest.mark.slow
def test_the_command_prints_what_it_can_and_a_resume_reads_it_all(tmp_path: Path) -> None:
    path, runs = run_of(tmp_path), tmp_path / "runs"
    cli("train", path, "name=calm")
    shutil.copytree(runs / "calm", runs / "cut", symlinks=True)
    for step in (2, 3):
        shutil.rmtree(runs / "cut" / "checkpoints" / f"step_{step:06d}")
    Trainer(load_config(path, ["name=cut"]), resume=True).fit()
    assert all(differences(runs / "calm", runs / "cut").values())


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    class Silent:
        def __str__(self) -> str:
            raise RuntimeError("no words")

    rows: list[Any] = [
        {"a": HALF, HALF: [1, {"x": f"ü{HALF} \udfff"}]},
        {"plain": "日本 ü"},
        {"n": float("inf")},
    ]
    for row in rows:
        line = json_line(row)
        assert json.loads(line.encode("utf-8")) == row and "\n" not in line
    assert json_line(rows[1]) == '{"plain": "日本 ü"}', "readable where nothing is wrong"
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    odd = {"step": 3, "keys": {(1, 2): 3}, "silent": Silent(), "loop": loop, "path": Path("x")}
    kept = json.loads(json_line(odd))
    assert (
        kept["step"] == 3
        and kept["path"] == "x"
        and set(kept["left_out"]) == {"'keys'", "'silent'", "'loop'"}
    )
    folder = RunFolder(load_config(config_file(tmp_path / "c.yaml", small_run(tmp_path, ""))))
    folder.path.mkdir(parents=True)
    folder.append("metrics.jsonl", [odd, *rows])
    assert [r.get("step") for r in read_jsonl(folder.path / "metrics.jsonl")] == [
        3,
        None,
        None,
        None,
    ]
    assert printable(f"m{HALF}é") == "m\\ud800é"


def test_the_endpoint_for_prometheus_says_such_a_name() -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    from mmrl.operations.prometheus import RunCollector

    collector, registry = RunCollector(f"r{HALF}", 0), CollectorRegistry()
    registry.register(collector)
    collector.hear("step", {"step": 1, f"train/m{HALF}": 0.25})
    assert (
        r'key="train/m\\ud800"' in generate_latest(registry).decode()
        and r'run="r\\ud800"' in generate_latest(registry).decode()
    )


def test_a_prompt_that_is_no_text_is_named() -> None:
    import dataclasses

    p = fresh_policy()
    from tests.kits.album_task import Album

    sample = dataclasses.replace(sample_with([picture((56, 56))]), question=f"Is this {HALF} it?")
    said = (
        r"sample s0: expected text, found half a character .* position \d+: '.*\\ud800.*fix the row"
    )
    with pytest.raises(DataError, match=said):
        p.encoder(sample, Album())
