"""The table families x checks: `mmrl families check` on every family, into assets/results/families.json and docs/families.md.

python -m scripts.family_table             # a quarter of an hour at most on two cores
python -m scripts.family_table --only internvl gemma3      # these anew, the others as they are recorded
python -m scripts.family_table --check vllm                # this check anew, the others as they are recorded
python -m scripts.family_table --page      # the page alone, from the recorded results
python -m scripts.family_table --release   # all families with the transformers that is installed, into families_releases.json
"""

from __future__ import annotations

import argparse
import html
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from scripts._bench import ROOT, machine

if TYPE_CHECKING:
    from mmrl.policy.families.native import NativeAnswer

RESULTS = ROOT / "assets" / "results" / "families.json"
RELEASES = RESULTS.with_name("families_releases.json")
LEARNING = RESULTS.with_name("bench_families.json")
BESIDE_TRL = RESULTS.with_name("bench_families_trl.json")
PAGE = ROOT / "docs" / "families.md"
_HEAD = """# Model families

One record per family (`mmrl/policy/families/`) holds all that mmrl must know of it. `mmrl families list` names them,
`mmrl families check NAME` holds one against transformers on a tiny random model of the family's own classes, and
`mmrl families check FOLDER` does so with a model of yours; NAME:TEXT is a family with another of
its text models. This page is written by `python -m scripts.family_table`.

| check | what is compared |
|---|---|
| prompt | token ids and pixels with the processor's own call: text, 1 and 3 pictures (1 where a prompt has one) |
| logp | a group packed behind one prompt with transformers' forward of separate rows, at most 1e-5 apart; another picture counts |
| gradient | gradients of all weights, packed and separate, at most 1e-5 of their norm apart: text, pictures, a clip, two turns |
| video | as prompt and logp, behind a clip |
| audio | as prompt, logp, gradient, rollout and features, behind two sounds and a picture |
| turns | as logp, two turns with a picture in each |
| rollout | greedy answers with those of transformers' `generate`, log-probs with the trainer's; the same cases |
| features | cached features of a frozen tower with the pixels' way, in the same cases; each picture and clip is encoded once |
| freeze | each part frozen alone: nothing of it has a gradient, the others have; saved after a step, it is bit for bit as it was |
| lora | two steps, also on a mixture's experts: merged tensors are peft's merge, the others as before, bit for bit; answers |
| save | after a step, read by transformers: every tensor bit for bit |
| value | a critic's values from what transformers gives to the output layer, at most 1e-5 apart; which weights they reach |
| memory | bytes of weights and gradients, also with an adapter, with those held; of activations with autograd's, to a tenth |
| sharded | two processes that share the weights out (FSDP2), one with a picture, one with text alone: gradients and log-probs |
| vllm | vLLM's engine beside the trainer: digests of weights, greedy tokens, log-probs 1e-5 (GPU: 1e-3) apart, after a step too |

"""
_ANSWERS = """## Answers in the checkpoints' own spelling

What released checkpoints write for a phrase's box (grounding), a phrase's point (pointing) and a click on a screenshot (GUI), the
coordinate frame of the numbers, and who says so. [`answers: native`](rewards.md) reads every example to its value. Where no source
was found, the last column says where one was sought: such a frame is not guessed.

All prompts of a run ask for the frame of boxes, unless `model.frame` or a task says another. InternVL writes boxes within 0..1000
and clicks within 0..1: give its GUI tasks `params: {frame: rel1}`, since the frame does not follow the task by itself. SmolVLM
needs `model.frame` anyway. `mmrl families list` names kinds of answers whose frame is not that of boxes.

| family | answer | spelling | frame | source, or where one was sought |
|---|---|---|---|---|
"""
_LEARNING = """## Learning

    python -m scripts.bench_families

One family of each kind learns grounding: a tiny model of random weights is warm-started by `mmrl sft` on loose boxes (steps
below), then trained by `mmrl train configs/demo.yaml` with scenes of one object and a KL penalty. Held-out mIoU, sampled, with 95 %
intervals, of two seeds. The last column is with rewards shuffled within each group, everything else equal.

| family | kind | warm start | GRPO steps | seed | before | after | after, rewards shuffled |
|---|---|---|---|---|---|---|---|
"""
_RELEASES = """## Releases of transformers

    python -m scripts.family_table --release

The same checks of all families, in an environment of each release; what was refused is of the day of the run. pip is asked
for 5.18 to 5.24; CI runs with 5.19, and the test suite has run with 5.24 in the parts that use transformers, vLLM apart. SmolVLM
under 5.20.2: transformers cuts a tile's tokens into pieces of `patch_size` (14 in the tiny model, whose tiles have four tokens),
and raises. Kimi's clips are taken from 5.24 on, and refused before; MiniCPM-V is refused under 5.18, whose tower takes views of
one size alone.

| transformers | families | cells ok | refused, with the reason | failed |
|---|---|---|---|---|
"""
_BESIDE_TRL = """## Speed beside TRL

    python -m scripts.bench_families_trl

Seconds per step of `mmrl train` and of TRL's GRPOTrainer on the same tiny model of each family, the same pictures and the same
questions (8 prompts of 8 rollouts of 24 tokens), fp32, one thread; both in processes of their own that alternate. Medians; the
ratio is the median of those of the three rounds, with the least and the largest: beside other work they vary.

| family | mmrl, s | TRL, s | TRL / mmrl |
|---|---|---|---|
"""
_OWN = """## Add a family

1. A record in `mmrl/policy/families/`: a subclass of `GridFamily`, `TileFamily` or `ModelFamily`, whose members say what to
   tell. Pictures, clips and sounds are read by a reader (`video/pictures.py`, `video/clips.py`, `video/audio.py`), an existing
   one or your own. A model whose towers lie beside its text model says so in `body` and `forward`. The frame is what the
   family's checkpoints were trained to write, with the source; `None` where none says so. `vllm` names the class that vLLM
   answers with, `vllm_input` what it is given for a picture; leave both out to sample with mmrl's own engine. `answers` says how
   boxes, points and clicks are spelled (`mmrl/policy/families/native.py`). A mixture
   of experts names its `router`, and says in `gate_weights` what chosen experts weigh, for `algorithm.router_replay`; the two
   usual kinds are in `mmrl/policy/families/experts.py`, as is where their weights are (`experts`), for `model.lora.experts`. A
   critic's value head (`algorithm.advantage: gae`, `vla.value_head`) reads the last hidden states, beside the output layer;
   `hidden_width` says how wide they are. Plain rotary positions, a forward that is given features and an area without a lower
   bound are in `mmrl/policy/families/plain.py`.
2. Its instance in `BUILT_IN` of `mmrl/policy/families/__init__.py`, or, in a package of yours, an entry point in the group
   `mmrl.families`.
3. `mmrl families check NAME` until nothing fails. What cannot work is named in `refused`, with the reason that users are told.

Mistral 3 was added last, to see what that takes: `mmrl/policy/families/mistral.py` and its line in `BUILT_IN`, a reader of its
processor's pictures, which no other family had (`video/pictures.py`), and `tests/policy/test_mistral.py`; 21 minutes lie between
its commit and the one before it. `tests/plugin_package` is a package that adds a family in 50 lines.
"""


def measure(only: Sequence[str], checks: Sequence[str] = ()) -> list[dict[str, str]]:
    """The cells of these families: all, or those of `checks`."""
    from dataclasses import asdict

    from mmrl.diagnostics.families import check_family

    cells = []
    for name in only:
        for cell in check_family(name, checks):
            print(f"{cell.family:14s} {cell.check:10s} {cell.verdict:8s} {cell.found}", flush=True)
            cells.append(asdict(cell))
    return cells


def page(cells: Sequence[Mapping[str, str]]) -> str:
    """docs/families.md."""
    from mmrl.policy.families import BUILT_IN, all_variants, family_and_text

    checks = list(dict.fromkeys(c["check"] for c in cells))
    verdicts = {(c["family"], c["check"]): c["verdict"] for c in cells}
    lines = [f"| family | {' | '.join(checks)} |", "|---" * (len(checks) + 1) + "|"]
    for name in all_variants():
        row = [verdicts[name, check] for check in checks]
        lines.append(f"| {name} | {' | '.join(row)} |")
    lines += ["", "| family | coordinates of its answers | says who |", "|---|---|---|"]
    for family in BUILT_IN:
        frame = "set model.frame" if family.frame is None else family.frame.value
        lines.append(f"| {family.name} | {frame} | {family.source} |")
    lines += ["", "What is not plainly ok, and why:", ""]
    deaf = [name for name in all_variants() if family_and_text(name)[0].no_audio]
    lines.append(f"- audio: refused by those that do not hear: {', '.join(deaf)}.")
    for c in cells:
        if c["verdict"] != "ok" and (c["check"] != "audio" or c["family"] not in deaf):
            lines.append(f"- {c['family']}, {c['check']}: {c['verdict']}. {c['found']}.")
    lines += [
        "",
        "Kimi-VL and LLaVA-OneVision-1.5 are not here: transformers 5.19 has no class for them, and a checkpoint's own code is not",
        "run. `kimi_k25` is Kimi K2.5, `llava_onevision` the first LLaVA-OneVision.",
    ]
    return (
        _HEAD
        + "\n".join(lines)
        + "\n\n"
        + answers()
        + releases()
        + learning()
        + beside_trl()
        + _OWN
    )


def answers() -> str:
    """The part on native answers: a row per kind for families that answer alike."""
    from mmrl.policy.families import BUILT_IN
    from mmrl.policy.families.native import KINDS

    alike: dict[tuple[NativeAnswer, ...], list[str]] = {}
    for family in BUILT_IN:
        alike.setdefault(tuple(family.answers[kind] for kind in KINDS), []).append(family.name)
    lines = [
        f"| {', '.join(names)} | {kind} | {_told(answer)} |"
        for told, names in alike.items()
        for kind, answer in zip(("grounding", "pointing", "GUI"), told, strict=True)
    ]
    return _ANSWERS + "\n".join(lines) + "\n\n"


def _told(answer: NativeAnswer) -> str:
    """Three cells: spelling, frame, source. HTML, for a | within backquotes ends a cell of Markdown."""
    if answer.frame is None:
        return f"no source found | - | {_plain(answer.missing)}"
    lines = "<br>".join(_plain(line.strip("\t")) for line in answer.example.split("\n"))
    of = f" ({_plain(answer.of)})" if answer.of else ""
    name = answer.source.removeprefix("https://").removeprefix("github.com/")
    short = name if len(name) <= 60 else f"{'/'.join(name.split('/')[:2])}: {name.split('/')[-1]}"
    return f"<code>{lines}</code> | {answer.frame.value} | [{short}]({answer.source}){of}"


def _plain(text: str) -> str:
    """`text` as it is, in a cell of a table."""
    text = html.escape(text, quote=False)
    return "".join(f"&#{ord(char)};" if char in "|[`" else char for char in text)


def record_release(cells: Sequence[Mapping[str, str]]) -> None:
    """Write what the checks found with the installed transformers beside what they found with others."""
    from collections import Counter

    import transformers

    known = json.loads(RELEASES.read_text(encoding="utf-8")) if RELEASES.exists() else {}
    known[transformers.__version__] = {
        "families": len({c["family"] for c in cells}),
        "verdicts": dict(sorted(Counter(c["verdict"] for c in cells).items())),
        "failed": [
            f"{c['family']}, {c['check']}: {c['found']}" for c in cells if c["verdict"] == "failed"
        ],
    }
    RELEASES.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")


def releases() -> str:
    """The part on releases of transformers, from what `--release` recorded in each environment."""
    if not RELEASES.exists():
        return ""
    lines = []
    for release, found in json.loads(RELEASES.read_text(encoding="utf-8")).items():
        v = found["verdicts"]
        broken = list(dict.fromkeys(cell.partition(",")[0] for cell in found["failed"]))
        said = f"{', '.join(broken)}: {v.get('failed', 0)}" if broken else "none"
        counts = (v.get("ok", 0), v.get("refused", 0), said)
        lines.append(f"| {release} | {found['families']} | {' | '.join(map(str, counts))} |")
    return _RELEASES + "\n".join(lines) + "\n\n"


def learning() -> str:
    """The part on learning, from what scripts/bench_families.py recorded."""
    if not LEARNING.exists():
        return ""
    rows = json.loads(LEARNING.read_text(encoding="utf-8"))["table"]

    def cell(found: Mapping[str, float]) -> str:
        return f"{found['mean']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"

    lines = [
        f"| {r['family']} | {r['kind']} | {r['warm_steps']} | {r['steps']} | {r['seed']} | {cell(r['rewards']['before'])} | "
        f"{cell(r['rewards']['after'])} | {cell(r['shuffled']['after'])} |"
        for r in rows
    ]
    return _LEARNING + "\n".join(lines) + "\n\n"


def beside_trl() -> str:
    """The part on speed, from what scripts/bench_families_trl.py recorded."""
    if not BESIDE_TRL.exists():
        return ""

    def median(rounds: Sequence[Mapping[str, float]]) -> str:
        return f"{statistics.median(r['step_s'] for r in rounds):.2f}"

    lines = []
    found = json.loads(BESIDE_TRL.read_text(encoding="utf-8"))
    for r in found["families"]:
        ours, theirs = (
            median(r["rounds"][s]) if s not in r["failed"] else f"fails: {r['failed'][s]}"
            for s in ("mmrl", "trl")
        )
        ratio = (
            "{median:.1f}x ({min:.1f} to {max:.1f})".format(**r["speed_ratio"] or {})
            if r["speed_ratio"]
            else "-"
        )
        lines.append(f"| {r['family']} | {ours} | {theirs} | {ratio} |")
    told, machines = found["versions"], defaultdict(list)
    for r in found["families"]:
        machine = r.get("machine", found["machine"])
        load = f"{machine['load_1min']:.0f}"
        machines[f"{machine['cores']} cores of {machine['cpu']}, load {load}"].append(r["family"])
    most = max(machines, key=lambda m: len(machines[m]))
    others = "".join(f"; {', '.join(names)}: {m}" for m, names in machines.items() if m != most)
    where = (
        f"Measured with TRL {told['trl']} and transformers {told['transformers']} on {most}, beside other work{others}. Where TRL "
        "fails, the last line of its error stands there."
    )
    return _BESIDE_TRL + "\n".join(lines) + f"\n\n{where}\n\n"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", action="store_true", help="write the page alone")
    parser.add_argument(
        "--release", action="store_true", help="record the counts of the installed transformers"
    )
    from mmrl.diagnostics.families import check_names
    from mmrl.policy.families import BUILT_IN, all_variants

    names = all_variants()
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--check", nargs="*", choices=check_names(), default=[])
    options = parser.parse_args()
    if options.release and (options.page or options.check or options.only != names):
        parser.error("expected --release by itself: it records all families, and writes no page")
    if options.release:
        record_release(cells := measure([f.name for f in BUILT_IN]))
        failures = [c for c in cells if c["verdict"] == "failed"]
        raise SystemExit(f"{len(failures)} checks failed" if failures else 0)
    if not options.page:
        kept = json.loads(RESULTS.read_text(encoding="utf-8"))["cells"]
        fresh = measure(options.only, options.check)
        if lost := [c["found"] for c in fresh if c["verdict"] == "not run"]:
            raise SystemExit(f"nothing recorded: {len(lost)} cells were not run ({lost[0]})")
        anew = {(c["family"], c["check"]) for c in fresh}
        cells = fresh + [c for c in kept if (c["family"], c["check"]) not in anew]
        order = check_names()
        cells.sort(key=lambda c: (names.index(c["family"]), order.index(c["check"])))
        record = {"machine": machine(), "cells": cells}
        RESULTS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(page(found["cells"]), encoding="utf-8")
    failed = [c for c in found["cells"] if c["verdict"] == "failed"]
    raise SystemExit(f"{len(failed)} checks failed" if failed else 0)


if __name__ == "__main__":
    main()
