"""Three users, literally: what each types in their first half hour, and whether they still stumble where a review saw them fall.

    python -m scripts.play_users                 # all three, about ten minutes on two cores; status 1 when one stumbles
    python -m scripts.play_users --only B        # one of them; records nothing
    python -m scripts.play_users --record        # assets/results/users.json

User A trains grounding on pictures of their own, user B writes a task, user C evaluates checkpoints. Each step is a command in an
empty folder of theirs, with the tiny models that are installed; what it must do or say is checked on what it printed and wrote. The
column `before` is what happened at the commit that was reviewed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from mmrl.config.shipped import SHIPPED
from scripts._bench import ROOT, parse, print_table, write_results

TINY = str((SHIPPED / "assets" / "tiny_vlm").resolve())
QUICK = (
    "train.steps=3",
    "train.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_new_tokens=24",
    "eval.samples=1",
    "eval.limit=4",
    "reward.workers=0",
)


@dataclass
class Said:
    """What a command did: exit status, standard output and error together, seconds."""

    status: int
    text: str
    seconds: float


@dataclass
class Desk:
    """A user's folder, and the commands typed in it."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *command: str, limit: float = 300, **environment: str) -> Said:
        """A program and its arguments; a status of -1 where it took longer than `limit` seconds."""
        began = time.perf_counter()
        try:
            done = subprocess.run(
                command,
                cwd=self.folder,
                env={**self.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            found = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else ""
            return Said(-1, found, time.perf_counter() - began)
        return Said(done.returncode, done.stdout, time.perf_counter() - began)

    def mmrl(self, *arguments: str, limit: float = 300, **environment: str) -> Said:
        """An `mmrl` command."""
        return self.run(
            sys.executable, "-m", "mmrl.cli.main", *arguments, limit=limit, **environment
        )

    def python(self, text: str) -> Said:
        """A script of the user's own, without a main guard."""
        (self.folder / "script.py").write_text(text, encoding="utf-8")
        return self.run(sys.executable, "script.py")

    def json(self, name: str) -> Any:
        """A file that a command wrote."""
        return json.loads((self.folder / name).read_text(encoding="utf-8"))


class Stumble(Exception):
    """What went otherwise than the user was entitled to expect."""


def expect(right: bool, words: str, said: Said | None = None) -> None:
    """Raise Stumble with `words` and the end of what was printed."""
    if not right:
        end = "" if said is None else f"; it printed: ...{said.text.strip()[-600:]}"
        raise Stumble(words + end)


def works(said: Said, *words: str) -> Said:
    """The command ended well and said so many things."""
    expect(said.status == 0, f"status {said.status}", said)
    for word in words:
        expect(word in said.text, f"nothing was said of {word!r}", said)
    return said


def refuses(said: Said, *words: str) -> Said:
    """The command ended with an error in words, without a traceback."""
    expect(said.status == 2, f"status {said.status}, expected an error", said)
    expect("Traceback" not in said.text, "a traceback", said)
    for word in words:
        expect(word in said.text, f"nothing was said of {word!r}", said)
    return said


# ---- what they have


def pictures(folder: Path, count: int) -> list[dict[str, Any]]:
    """Pictures of one rectangle each, drawn here; rows {image, box, name}."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        picture = Image.new("RGB", (112, 112), (200, 200, 200))
        box = [8 + number % 5 * 9, 10 + number % 7 * 6, 50 + number % 5 * 9, 58 + number % 7 * 6]
        ImageDraw.Draw(picture).rectangle(box, fill=((255, 0, 0), (0, 0, 255))[number % 2])
        picture.save(folder / f"{number:03d}.png")
        rows.append({"image": f"{number:03d}.png", "box": box, "name": ("red", "blue")[number % 2]})
    return rows


def grounding_file(desk: Desk, name: str, count: int) -> Path:
    """Rows as `mmrl tasks check grounding` documents them."""
    rows = pictures(desk.folder / "pictures", count)
    file = desk.folder / name
    file.write_text(
        "".join(
            json.dumps(
                {
                    "id": f"{name}-{i}",
                    "image": f"pictures/{r['image']}",
                    "question": f"{r['name']} square",
                    "answer": r["box"],
                }
            )
            + "\n"
            for i, r in enumerate(rows)
        ),
        encoding="utf-8",
    )
    return file


def coco_file(desk: Desk) -> Path:
    """The same pictures as COCO's instances."""
    rows = pictures(desk.folder / "pictures", 12)
    file = desk.folder / "instances_train.json"
    file.write_text(
        json.dumps(
            {
                "images": [
                    {"id": i, "file_name": r["image"], "width": 112, "height": 112}
                    for i, r in enumerate(rows)
                ],
                "categories": [{"id": 1, "name": "red"}, {"id": 2, "name": "blue"}],
                "annotations": [
                    {
                        "id": i,
                        "image_id": i,
                        "category_id": 1 if r["name"] == "red" else 2,
                        "bbox": [
                            r["box"][0],
                            r["box"][1],
                            r["box"][2] - r["box"][0],
                            r["box"][3] - r["box"][1],
                        ],
                        "area": 1.0,
                        "iscrowd": 0,
                    }
                    for i, r in enumerate(rows)
                ],
            }
        ),
        encoding="utf-8",
    )
    return file


def training(desk: Desk, name: str) -> list[str]:
    """A short run of the recipe for grounding on their own pictures, with a tiny model of theirs."""
    grounding_file(desk, "train.jsonl", 12)
    grounding_file(desk, "val.jsonl", 6)
    return [
        "grounding",
        f"model.path={TINY}",
        "data.train.0.path=train.jsonl",
        "data.eval.0.path=val.jsonl",
        f"name={name}",
        "model.device=cpu",
        *QUICK,
    ]


# ---- user A: grounding on pictures of their own


def a_check(desk: Desk) -> str:
    grounding_file(desk, "train.jsonl", 12)
    said = works(desk.mmrl("tasks", "check", "grounding", "--data", "train.jsonl"), "gold scores 1")
    return f"passed in {said.seconds:.0f} s"


def a_try(desk: Desk) -> str:
    said = desk.mmrl("try", *training(desk, "a_try"))
    expect(said.status == 1, f"status {said.status}: a model that never keeps the format", said)
    expect("parse_rate: 0%" in said.text, "no parse rate", said)
    expect(said.seconds < 60 * _slower(), f"{said.seconds:.0f} s", said)
    return f"says that it would learn nothing, in {said.seconds:.0f} s"


def a_dead_run(desk: Desk) -> str:
    said = desk.mmrl("train", *training(desk, "a_dead"), "train.steps=40")
    run = desk.folder / "runs" / "a_dead"
    steps = len((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    alarms = [
        json.loads(line) for line in (run / "alarms.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    expect(bool(alarms) and alarms[0]["step"] <= 5, f"no alarm in 5 of {steps} steps", said)
    expect(said.status != 0 and steps <= 10, f"it went on for {steps} steps", said)
    return f"alarm {alarms[0]['name']} at step {alarms[0]['step']}, stopped after {steps} steps"


def a_progress(desk: Desk) -> str:
    said = desk.mmrl("train", *training(desk, "a_lines"), "alarms.stop=[]")
    works(said)
    found = re.search(r"step 1/3.*", said.text)
    expect(found is not None and "parse" in said.text, "no line of step 1 off a terminal", said)
    return "a line per step with reward, parse rate and time left"


def a_unknown_names(desk: Desk) -> str:
    given = training(desk, "a_names")
    for typed, wanted in (
        ("learning_rate=1e-5", "optim.lr"),
        ("rollout.num_generations=8", "rollout.group_size"),
        ("algorithm.beta=0.01", "algorithm.kl.coef"),
        ("train.report_to=wandb", "train.wandb"),
        ("train.stepz=3", "steps"),
    ):
        refuses(desk.mmrl("train", *given, typed), wanted)
    return "TRL's and verl's names are answered with ours"


def a_tracker(desk: Desk) -> str:
    broken = desk.folder / "site" / "wandb"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("import a_dependency_of_wandb\n", encoding="utf-8")
    path = os.pathsep.join([str(broken.parent), desk.environment["PYTHONPATH"]])
    given = training(desk, "a_tracker")
    said = refuses(
        desk.mmrl("train", *given, "train.wandb=true", PYTHONPATH=path), "a_dependency_of_wandb"
    )
    works(desk.mmrl("train", *given, "alarms.stop=[]"))
    return (
        f"refused in {said.seconds:.0f} s with the import's own error; the corrected command runs"
    )


def a_best_metric(desk: Desk) -> str:
    given = training(desk, "a_metric")
    said = refuses(desk.mmrl("train", *given, "eval.best_metric=sampled/iuo"), "iou")
    expect("Loading weights" not in said.text, "the model was loaded first", said)
    works(desk.mmrl("train", *given, "alarms.stop=[]"))
    return f"refused in {said.seconds:.0f} s; the corrected command runs"


def a_longer(desk: Desk) -> str:
    works(desk.mmrl("train", *training(desk, "a_longer"), "alarms.stop=[]"))
    works(desk.mmrl("resume", "runs/a_longer", "train.steps=+2"))
    steps = desk.json("runs/a_longer/run.json")["total_steps"]
    expect(steps == 5, f"{steps} steps")
    return "mmrl resume RUN train.steps=+2 needs nothing else"


def a_terminated(desk: Desk) -> str:
    given = [*training(desk, "a_term"), "train.steps=500", "train.save_every=0", "alarms.stop=[]"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mmrl.cli.main", "train", *given],
        cwd=desk.folder,
        env=desk.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics = desk.folder / "runs" / "a_term" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=240)
    said = Said(process.returncode, text, 0.0)
    expect(process.returncode == 143, f"status {process.returncode}", said)
    expect("resume" in text, "nothing says how to go on", said)
    expect((metrics.parent / "report.html").exists(), "no report", said)
    expect(any((metrics.parent / "checkpoints").glob("step_*")), "no checkpoint", said)
    return "checkpoint and report are there, and the command to go on"


def a_coco(desk: Desk) -> str:
    coco_file(desk)
    images = "reader.image_root=pictures"
    works(
        desk.mmrl(
            "tasks", "check", "detection", "--data", "instances_train.json", "--param", images
        )
    )
    said = refuses_check(
        desk.mmrl(
            "tasks", "check", "grounding", "--data", "instances_train.json", "--param", images
        )
    )
    hint = re.search(r"reader\.types=(\{[^}]*\})", re.sub(r"\s+", " ", said.text))
    expect(hint is not None, "no hint", said)
    assert hint is not None
    works(
        desk.mmrl(
            "tasks",
            *("check", "grounding", "--data", "instances_train.json"),
            *("--param", images, "--param", f"reader.types={hint.group(1)}"),
        )
    )
    return "detection passes; what the error of grounding proposes works"


def refuses_check(said: Said) -> Said:
    """A check that failed, in words."""
    expect(said.status == 1 and "Traceback" not in said.text, f"status {said.status}", said)
    return said


def a_trl_rows(desk: Desk) -> str:
    rows = pictures(desk.folder / "pictures", 6)
    (desk.folder / "trl.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    "image": f"pictures/{r['image']}",
                    "prompt": f"{r['name']} square",
                    "solution": r["box"],
                }
            )
            + "\n"
            for r in rows
        ),
        encoding="utf-8",
    )
    said = refuses_check(desk.mmrl("tasks", "check", "grounding", "--data", "trl.jsonl"))
    expect("columns" in said.text, "the mapping of columns is not named", said)
    columns = "reader.columns={image: image, question: prompt, answer: solution}"
    works(desk.mmrl("tasks", "check", "grounding", "--data", "trl.jsonl", "--param", columns))
    return "the error names the mapping of columns, which works"


# ---- user B: a task of their own


def b_new_task(desk: Desk) -> str:
    works(desk.mmrl("new", "task", "blue-cars"))
    works(
        desk.mmrl("tasks", "check", "blue-cars/blue_cars.py:BlueCars", "--out", "check"),
        "gold scores 1",
    )
    return "one command, and its checks pass"


def b_train(desk: Desk) -> str:
    works(desk.mmrl("new", "task", "red-cars"))
    folder = Desk(desk.folder / "red-cars", desk.environment)
    works(folder.python("from red_cars import RedCars; RedCars().example_data('.')"))
    (folder.folder / "rows.jsonl").rename(folder.folder / "train.jsonl")
    (folder.folder / "val.jsonl").write_text(
        (folder.folder / "train.jsonl").read_text(encoding="utf-8"), encoding="utf-8"
    )
    said = folder.mmrl("train", "recipe.yaml", f"model.path={TINY}", "alarms.stop=[]", *QUICK)
    works(said)
    expect(folder.json("runs/red-cars/run.json")["best_metric"] == "sampled/exact", "best metric")
    return "its recipe trains, judged by its own metric"


def b_library(desk: Desk) -> str:
    grounding_file(desk, "train.jsonl", 8)
    said = desk.python(
        f"""
import mmrl

@mmrl.reward
def short(completion, sample):
    return 1.0 / (1 + len(completion))

trainer = mmrl.Trainer(
    model={TINY!r},
    reward=short,
    train_data=[{{"image": "pictures/000.png", "question": "What is it?", "answer": "square"}}] * 4,
    config={{"train": {{"steps": 2, "prompts_per_step": 2}}, "rollout": {{"group_size": 4, "max_new_tokens": 8}}}},
)
print(sorted(trainer.fit())[:3])
"""
    )
    works(said)
    return "a reward function and a list of rows, in a script without a main guard"


# ---- user C: evaluates checkpoints


def c_suites(desk: Desk) -> str:
    works(desk.mmrl("eval", "--list-suites"), "refcoco_val", "libero_spatial")
    refuses(desk.mmrl("eval", TINY, "--suite", "refcoco_val"), "refcoco", "MMRL_DATA")
    works(desk.mmrl("memory", "grounding", f"model.path={TINY}", "--preset", "gpu_24g"))
    return "suites, presets and recipes are known in any folder; missing files are named"


def c_plain_transformers(desk: Desk) -> str:
    works(desk.mmrl("train", *training(desk, "c_lora"), "model.lora={r: 2}", "alarms.stop=[]"))
    said = desk.python(
        """
import sys
from transformers import AutoModelForImageTextToText, AutoProcessor
from peft import PeftModel
folder = "runs/c_lora/checkpoints/best"
AutoProcessor.from_pretrained(folder)
model = AutoModelForImageTextToText.from_pretrained(folder)
import json, os
base = json.load(open(folder + "/adapter/adapter_config.json"))["base_model_name_or_path"]
assert os.path.isabs(base), base
PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), folder + "/adapter")
assert "mmrl" not in sys.modules
print("loaded")
"""
    )
    works(said, "loaded")
    return "weights and adapter load without importing mmrl"


def c_card(desk: Desk) -> str:
    works(desk.mmrl("train", *training(desk, "c_card"), "alarms.stop=[]"))
    works(desk.mmrl("push", "runs/c_card/checkpoints/best", "me/boxes", "--out", "card"))
    card = (desk.folder / "card" / "README.md").read_text(encoding="utf-8")
    expect("| metric | mode | before | after | gain |" in card, "no results in the card")
    return "a model card with intervals from the run's files"


def c_version(desk: Desk) -> str:
    said = works(desk.mmrl("--version"), "mmrl 0.")
    expect(said.seconds < 5 * _slower(), f"{said.seconds:.1f} s", said)
    return said.text.split("(")[0].strip()


def _slower() -> float:
    """What a time limit is stretched by where other work runs on the machine."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@dataclass(frozen=True)
class Step:
    """One thing a user does."""

    user: str
    what: str
    before: str
    play: Callable[[Desk], str]


STEPS = (
    Step("A", "check my data", "passed", a_check),
    Step("A", "try the model", "no such command", a_try),
    Step("A", "train a model that never answers in the form", "16 silent minutes of zeros", a_dead_run),
    Step("A", "watch a run off a terminal", "a line per 5 % of the run", a_progress),
    Step("A", "type the names of TRL and verl", "a list of keys, no suggestion", a_unknown_names),
    Step("A", "track with a broken wandb", "fails after loading, folder blocked", a_tracker),
    Step("A", "misspell the best metric", "fails after an evaluation, folder blocked", a_best_metric),
    Step("A", "train longer", "refused: another run", a_longer),
    Step("A", "end a run with SIGTERM", "no report", a_terminated),
    Step("A", "bring COCO to grounding and detection", "a hint that cannot work; healthy data fails", a_coco),
    Step("A", "bring rows in TRL's form", "guessed another format", a_trl_rows),
    Step("B", "start a task", "no scaffold", b_new_task),
    Step("B", "train my task", "fails on another task's metric", b_train),
    Step("B", "use it as a library", "no reward function as an argument; dies without a main guard", b_library),
    Step("C", "evaluate on suites from an empty folder", "no suites, no presets", c_suites),
    Step("C", "load checkpoints in plain transformers", "fails: torchvision::nms; adapter path relative", c_plain_transformers),
    Step("C", "publish a checkpoint", "no card, no push", c_card),
    Step("C", "ask for the version", "no --version", c_version),
)  # fmt: skip


def play(step: Step, parent: Path) -> dict[str, Any]:
    """One step in an empty folder of its own."""
    folder = parent / f"{step.user}-{step.play.__name__}"
    folder.mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "COLUMNS": "120",
    }
    began = time.perf_counter()
    try:
        words, ok = step.play(Desk(folder, environment)), True
    except Stumble as error:
        words, ok = str(error), False
    return {
        "user": step.user,
        "step": step.what,
        "before": step.before,
        "now": words,
        "ok": ok,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a user, or words of a step")
    parser.add_argument("--record", action="store_true", help="write assets/results/users.json")
    options = parse(parser)
    wanted = options.only.split(",")
    chosen = [s for s in STEPS if any(w in ("", s.user) or w in s.what for w in wanted)]
    if not chosen:
        parser.error(f"expected a user (A, B, C) or words of a step, found {options.only!r}")
    rows: list[Mapping[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mmrl-users-") as parent:
        for step in chosen:
            rows.append(play(step, Path(parent)))
            row = rows[-1]
            print(
                f"{row['user']} {row['step']}: {row['now'] if row['ok'] else 'STUMBLES: ' + row['now']}",
                flush=True,
            )
    print_table(
        ("user", "step", "before", "now", "s"),
        [
            (
                r["user"],
                r["step"],
                r["before"],
                r["now"][:70] if r["ok"] else "STUMBLES",
                r["seconds"],
            )
            for r in rows
        ],
    )
    if options.record and not options.only:
        print(f"written to {write_results('users', {'steps': rows}, 'torch', 'transformers')}")
    if any(not r["ok"] for r in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
