"""Drivers for scripts.official_times: each runs one official program, unchanged, in a process of its own.

A driver gets the folder of a checkout and of the files mmrl wrote, and prints one JSON object. What a program imports for its
model, its storage or its terminal is a stand-in; a model's stand-in answers with the recorded text. No line of a program is here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["PROGRAMS", "run_program"]

_MOMENT_DETR = """
import json, subprocess, sys
program, files = sys.argv[1:]
command = [sys.executable, "-m", "standalone_eval.eval", "--submission_path", f"{files}/hl_submission.jsonl",
           "--gt_path", f"{files}/truth.jsonl", "--save_path", f"{files}/official.json", "--not_verbose"]
subprocess.run(command, cwd=program, check=True, stdout=sys.stderr)
print(json.dumps(json.load(open(f"{files}/official.json"))["brief"]))
"""

_NEXT_GQA = """
import contextlib, io, json, sys
program, files = sys.argv[1:]
sys.path.insert(0, f"{program}/code/TempGQA")
from eval_ground import eval_ground
read = lambda name: json.load(open(f"{files}/{name}"))
kept = {}
def hook(frame, event, value):
    if event == "return" and frame.f_code.co_name == "eval_ground":
        kept.update({k: v for k, v in frame.f_locals.items() if isinstance(v, (int, float))})
with contextlib.redirect_stdout(io.StringIO()):
    sys.setprofile(hook)
    eval_ground(read("truth.json"), read("nextgqa_ground.json"), read("nextgqa_res.json"))
    sys.setprofile(None)
count = kept["cnt"]
share = lambda name: 100 * kept[name] / count
print(json.dumps({"Acc@GQA": share("cqt"), "mIoP": float(kept["mIoP"]), "IoP@0.3": share("crtp3"), "IoP@0.5": share("crtp5"),
                  "mIoU": float(kept["mIoU"]), "IoU@0.3": share("crt3"), "IoU@0.5": share("crt5")}))
"""

_VIDEOCHAT_R1 = """
import contextlib, io, json, os, sys, tempfile, types
program, files = sys.argv[1:]
sys.path.insert(0, f"{program}/src_eval")
for name, things in (("petrel_client", {}), ("petrel_client.client", {"Client": lambda *a: None}),
                     ("my_qwen_utils", {"process_vision_info": None})):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(things)
import evaluate_grounding as program_module
rows = [json.loads(line) for line in open(f"{files}/answers.jsonl")]
items = [{"vid": r["vid"], "sentence_idx": 0,
          "ann": {"duration": r["duration"], "timestamps": [r["truth"]], "sentences": [r["sentence"]]}} for r in rows]
answers = iter(r["text"] for r in rows)
program_module.setup_model = lambda *a: (None, None)
program_module.inference = lambda *a, **k: next(answers)
program_module.tqdm = type("bar", (list,), {"set_postfix": lambda *a: None})
os.chdir(tempfile.mkdtemp())
with contextlib.redirect_stdout(io.StringIO()):
    ious, recall = program_module.process_work_items(items, "videos", "model", "cpu", "out")
print(json.dumps({"mIoU": sum(ious) / len(ious), **{f"R1@{t}": int(n) / len(ious) for t, n in zip((0.3, 0.5, 0.7), recall)}}))
"""

_FUNCTION = """
import json, re, sys
def function(path, name):  # its lines alone: the file may be Python 2
    space = {"np": __import__("numpy")}
    exec(re.search(rf"^def {name}\\(.*?(?=^\\S)", open(path).read(), re.M | re.S)[0], space)
    return space[name]
program, files = sys.argv[1:]
def shares(ious, above=lambda a, b: a >= b):
    return {"mIoU": sum(ious) / len(ious), **{f"R1@{t}": sum(above(v, t) for v in ious) / len(ious) for t in (0.3, 0.5, 0.7)}}
truths = [json.loads(line)["truth"] for line in open(f"{files}/answers.jsonl")]
"""

_TALL = (
    _FUNCTION
    + """
iou = function(f"{program}/main.py", "calculate_IoU")
lines = [line.split("##")[0].split()[1:] for line in open(f"{files}/temporal_grounding.txt")]
print(json.dumps(shares([max(0.0, iou(truth, [float(v) for v in line])) for truth, line in zip(truths, lines, strict=True)])))
"""
)

_2D_TAN = (
    _FUNCTION
    + """
iou = function(f"{program}/2D-TAN/lib/core/eval.py", "iou")
lines = [line.split("##")[0].split()[1:] for line in open(f"{files}/temporal_grounding.txt")]
ious = [float(iou([float(v) for v in line], list(truth))) for truth, line in zip(truths, lines, strict=True)]
print(json.dumps(shares(ious, lambda a, b: a > b)))
"""
)

_LMMS_EVAL = """
import json, sys, types
program, files = sys.argv[1:]
quiet = types.SimpleNamespace(info=lambda *a: None, warning=lambda *a: None)
for name, things in (("loguru", {"logger": quiet}), ("lmms_eval", {}), ("lmms_eval.tasks", {}), ("lmms_eval.tasks._task_utils", {}),
                     ("lmms_eval.tasks._task_utils.file_utils", {})):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(things)
sys.path.insert(0, f"{program}/lmms_eval/tasks/charades_sta")
import utils
rows = [json.loads(line) for line in open(f"{files}/answers.jsonl")]
results = []
for number, r in enumerate(rows):
    doc = {"video": f"{r['vid']}#{number}", "caption": r["sentence"], "timestamp": r["truth"]}
    results.append(utils.temporal_grounding_process_results_generation(doc, [r["said"]])["charades_sta_mIOU"])
names = {"mIoU": "miou", "R1@0.3": "iou3", "R1@0.5": "iou5", "R1@0.7": "iou7"}
print(json.dumps({name: getattr(utils, f"temporal_grounding_aggregate_{end}")(results, None) / 100 for name, end in names.items()}))
"""

PROGRAMS: Mapping[str, tuple[str, str, str]] = {
    "moment_detr": (
        "jayleicn/moment_detr",
        "standalone_eval/eval.py, whole, on hl_submission.jsonl",
        _MOMENT_DETR,
    ),
    "NExT-GQA": (
        "doc-doc/NExT-GQA",
        "code/TempGQA/eval_ground.py, eval_ground, on nextgqa_ground.json and nextgqa_res.json",
        _NEXT_GQA,
    ),
    "VideoChat-R1": (
        "OpenGVLab/VideoChat-R1",
        "src_eval/evaluate_grounding.py, process_work_items, on the answers' texts",
        _VIDEOCHAT_R1,
    ),
    "TALL": (
        "jiyanggao/TALL",
        "main.py, calculate_IoU (the authors of Charades-STA), on temporal_grounding.txt",
        _TALL,
    ),
    "VideoX": (
        "microsoft/VideoX",
        "2D-TAN/lib/core/eval.py, iou with > (not >=), on temporal_grounding.txt",
        _2D_TAN,
    ),
    "lmms-eval": (
        "EvolvingLMMs-Lab/lmms-eval",
        "lmms_eval/tasks/charades_sta/utils.py, on the text inside <answer>",
        _LMMS_EVAL,
    ),
}
"""Name of a checkout -> repository, what is run, its driver."""


def run_program(name: str, programs: Path, files: Path) -> dict[str, Any]:
    """{repository, commit, what, numbers} of one program on the files in `files`. The commit is git's, or that in a file COMMIT.

    Raises RuntimeError with the program's last words when it fails.
    """
    repository, what, driver = PROGRAMS[name]
    folder = programs / name
    mark = folder / "COMMIT"
    commit = (
        mark.read_text().strip()
        if mark.is_file()
        else subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    )
    done = subprocess.run(
        [sys.executable, "-c", driver, str(folder.resolve()), str(files.resolve())],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"{repository} {what}: exit status {done.returncode}\n{done.stderr[-2000:]}"
        )
    return {
        "repository": repository,
        "commit": commit,
        "what": what,
        "numbers": json.loads(done.stdout.splitlines()[-1]),
    }
