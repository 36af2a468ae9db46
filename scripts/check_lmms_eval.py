"""lmms-eval asks a served checkpoint, from an environment of its own with mmrl in it: are its answers those of `mmrl eval`?

    python -m scripts.check_lmms_eval                 # about five minutes and 3 GB of packages; needs a package index
    python -m scripts.check_lmms_eval --env FOLDER --record     # keeps the environment; writes assets/results/lmms_eval.json

scripts/setup.sh makes the environment (extra `serve`), then `pip install lmms-eval` goes on top of it. `mmrl serve` is started
there with the shipped tiny model, and lmms-eval runs a task of generated pictures against it, as `--model mmrl` (mmrl's entry
point) and as `--model openai_compatible` (which needs nothing of mmrl). Every greedy answer in lmms-eval's log is compared to the
text that `mmrl eval` writes for the same question. Exit status 1 where one differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmrl.coords import CoordFrame
from mmrl.registry import task_from_spec
from mmrl.task import Template
from scripts._bench import ROOT, parse, print_table, write_results
from scripts._beside import clean, free_port

_RELEASE = "lmms-eval==0.7.3"
_MODEL = ROOT / "assets" / "tiny_vlm"
_TOKENS = 32
_TASK = """\
task: mmrl_check
dataset_path: json
dataset_kwargs:
  data_files: {{test: {rows}}}
test_split: test
output_type: generate_until
doc_to_visual: !function asked.visual
doc_to_text: !function asked.text
doc_to_messages: !function asked.messages
doc_to_target: target
generation_kwargs: {{max_new_tokens: {tokens}, temperature: 0}}
process_results: !function asked.results
metric_list:
  - {{metric: answered, aggregation: mean, higher_is_better: true}}
"""
_ASKED = """\
from PIL import Image


def visual(doc):
    return [Image.open(doc["image"]).convert("RGB")]


def text(doc, *_, **__):
    return doc["question"]


def messages(doc, *_, **__):
    content = [{"type": "image", "url": visual(doc)[0]}, {"type": "text", "text": doc["question"]}]
    return [{"role": "user", "content": content}]


def results(doc, answers):
    return {"answered": float(bool(answers[0]))}
"""


def _clean() -> dict[str, str]:
    return {**clean(), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def _environment(place: Path) -> None:
    """Make the environment, unless it is there."""
    python = place / "bin" / "python"
    if (place / "bin" / "lmms-eval").exists():
        return
    setup = ["bash", str(ROOT / "scripts" / "setup.sh"), "serve"]
    subprocess.run(setup, env={**_clean(), "VENV": str(place)}, check=True)
    subprocess.run(
        [str(python), "-m", "pip", "install", "-q", _RELEASE], env=_clean(), check=True, cwd=place
    )
    if subprocess.run([str(python), "-c", "import torchvision"], capture_output=True).returncode:
        # the index's torchvision is built for CUDA's torch, and a torch for the CPU cannot load it
        subprocess.run(
            [str(python), "-m", "pip", "uninstall", "-q", "-y", "torchvision"], check=True
        )


def _rows(folder: Path, count: int) -> tuple[Path, list[str]]:
    """The data set that mmrl reads, and the ids of its rows; lmms-eval's rows and task stand beside it."""
    from mmrl.tasks.scenes import make_scenes

    data = make_scenes(str(folder / "scenes"), count=count, seed=5)
    task = task_from_spec("grounding", {})
    template = Template("qwen2_5_vl", CoordFrame.ABS_RESIZED)
    rows, ids = [], []
    for sample in list(task.load(data))[:count]:
        [message] = task.messages(sample, template)
        question = message["content"][-1]["text"]
        rows.append({"id": sample.id, "image": sample.images[0], "question": question})
        ids.append(sample.id)
    own = folder / "task"
    own.mkdir()
    listed = "".join(json.dumps({**row, "target": ""}) + "\n" for row in rows)
    (own / "rows.jsonl").write_text(listed, encoding="utf-8")
    (own / "check.yaml").write_text(
        _TASK.format(rows=own / "rows.jsonl", tokens=_TOKENS), encoding="utf-8"
    )
    (own / "asked.py").write_text(_ASKED, encoding="utf-8")
    return Path(data), ids


@contextmanager
def _serving(place: Path, folder: Path) -> Iterator[str]:
    """The address of `mmrl serve` in the environment."""
    port = free_port()
    log = folder / "serve.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [str(place / "bin" / "mmrl"), "serve", str(_MODEL), "--port", str(port)],
            env=_clean(),
            cwd=folder,
            stdout=out,
            stderr=out,
        )
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            except OSError:
                if server.poll() is not None:
                    raise SystemExit(f"mmrl serve ended:\n{log.read_text()}") from None
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(60)


def _asked(place: Path, folder: Path, name: str, arguments: str) -> list[str]:
    """The answers in lmms-eval's log of a run, in the order of the rows."""
    out = folder / name
    command = [str(place / "bin" / "python"), "-m", "lmms_eval", "--model", name]
    command += ["--model_args", arguments, "--include_path", str(folder / "task")]
    command += ["--tasks", "mmrl_check", "--batch_size", "1", "--log_samples"]
    ran = subprocess.run(
        [*command, "--output_path", str(out)],
        env={**_clean(), "HF_HOME": str(folder / "hf")},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    logs = sorted(out.rglob("*samples*.jsonl"))
    if ran.returncode or len(logs) != 1:
        raise SystemExit(
            f"lmms-eval --model {name} wrote {logs}:\n{(ran.stdout + ran.stderr)[-4000:]}"
        )
    rows = [json.loads(line) for line in logs[0].read_text(encoding="utf-8").splitlines()]
    rows.sort(key=lambda row: int(row["doc_id"]))
    answers = [row["filtered_resps"] for row in rows]
    return [answer if isinstance(answer, str) else answer[0] for answer in answers]


def _own(place: Path, folder: Path, data: Path, ids: list[str]) -> list[str]:
    """What `mmrl eval` writes down for the same rows, greedily."""
    out = folder / "own"
    command = [str(place / "bin" / "mmrl"), "eval", str(_MODEL), "--task", "grounding"]
    command += ["--data", str(data), "--out", str(out), f"rollout.max_new_tokens={_TOKENS}"]
    ran = subprocess.run(command, env=_clean(), cwd=folder, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"mmrl eval failed:\n{(ran.stdout + ran.stderr)[-4000:]}")
    [log] = out.rglob("predictions*.jsonl")
    said = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        said[row["id"]] = row["text"]
    return [said[name] for name in ids]


def check(place: Path, count: int) -> dict[str, Any]:
    """Rows by lmms-eval's model: how many of `count` answers are those of `mmrl eval`."""
    _environment(place)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        data, ids = _rows(folder, count)
        own = _own(place, folder, data, ids)
        with _serving(place, folder) as address:
            models = {
                "mmrl": f"base_url={address}",
                "openai_compatible": f"model_version={_MODEL},base_url={address},api_key=none",
            }
            said = {name: _asked(place, folder, name, args) for name, args in models.items()}
    listed = subprocess.run(
        [str(place / "bin" / "python"), "-m", "pip", "list", "--format=json"],
        env=_clean(),
        capture_output=True,
        text=True,
        check=True,
    )
    wanted = {"lmms-eval", "mmrl-rft", "torch", "transformers", "math-verify", "openai"}
    names = {
        one["name"].lower().replace("_", "-"): one["version"] for one in json.loads(listed.stdout)
    }
    return {
        "asked": count,
        "different_texts": len(set(own)),
        "equal_to_mmrl_eval": {
            name: sum(a.strip() == b.strip() for a, b in zip(texts, own, strict=True))
            for name, texts in said.items()
        },
        "first_difference": {
            name: pair
            for name, texts in said.items()
            for pair in [(a, b) for a, b in zip(own, texts, strict=True) if a.strip() != b.strip()][
                :1
            ]
        },
        "packages": {name: names[name] for name in sorted(wanted & set(names))},
        "torchvision_taken_out": "torchvision" not in names,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--env", type=Path, help="folder of the environment, made if it is not there"
    )
    parser.add_argument("--count", type=int, default=8, help="questions")
    parser.add_argument("--record", action="store_true", help="write assets/results/lmms_eval.json")
    o = parse(parser)
    with tempfile.TemporaryDirectory() as made:
        found = check((o.env or Path(made) / "env").absolute(), o.count)
    print_table(
        ("lmms-eval's model", "asked", "equal to mmrl eval"),
        [(name, found["asked"], equal) for name, equal in found["equal_to_mmrl_eval"].items()],
    )
    print(json.dumps(found["packages"]))
    if o.record:
        print(f"recorded in {write_results('lmms_eval', found)}")
    for name, (own, theirs) in found["first_difference"].items():
        print(f"{name}: mmrl eval {own!r}, lmms-eval {theirs!r}")
    raise SystemExit(any(n != found["asked"] for n in found["equal_to_mmrl_eval"].values()))


if __name__ == "__main__":
    main()
