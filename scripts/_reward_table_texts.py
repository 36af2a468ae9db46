"""Rows of the reward table about words and numbers: text, choice, numbers, mathematics, charts, form, safety, combination."""
from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mmrl.errors import ConfigError
from mmrl.registry import resolve_task, task_from_spec
from rewards.format import format_reward
from rewards.lengths import cosine_value, overlong_penalty
from rewards.numeric import mra
from rewards.process import dtw_similarity
from scripts import _peer_rules as peer
from scripts._reward_table_kit import Case, Run, Table, call, run_task, score

__all__ = ["text_cases"]

_EASY, _GRPO, _VLM = "video_reward.py", "grpo.py", "grpo_jsonl.py"
_PATIENT: dict[str, Any] = {"deadline_s": 30.0}  # on a busy machine two seconds may not do


def texts() -> Table:
    """OCR and free text."""
    t = Table("text")
    truth = "OPEN CAFE ROOM 12"
    for what, said in (("equal", truth), ("one word wrong", "OPEN CAFE DOOR 12"), ("one word left out", "OPEN CAFE 12"),
                       ("twice the words", f"{truth} {truth}"), ("three times the words", " ".join([truth] * 3)),
                       ("small letters", truth.lower())):
        t.equal(score("ocr", said, truth, preset="video_r1"), "Video-R1", f"{_GRPO} OCR", f"{what}: clip(1 - WER)",
                peer.one_minus_wer(said, truth))
        t.equal(score("ocr", said, truth, "total", preset="easyvideo_r1"), "EasyVideoR1", _EASY, f"{what}: lower case, 0.9 + 0.1",
                0.9 * peer.one_minus_wer(said.lower(), truth.lower()) + 0.1)
    t.equal(score("ocr", "OPEN CAFE DOOR 12", truth, "total", preset="video_r1"), "Video-R1", _GRPO, "one word wrong, plus format",
            peer.one_minus_wer("OPEN CAFE DOOR 12", truth) + 1)
    for said in ("OPEN CAFE ROOM 12", "OPEN CAFE R00M 12", "xyz", truth * 2):
        t.equal(score("ocr", said, truth, "metric:ned"), "PageOCR (Fox)", "edit_distance / max(len)", f"{said!r:.24}, 1 - distance",
                1 - peer.page_ocr(said, truth))
        t.equal(score("ocr", said, truth, mode="ratio"), "VLM-R1", f"{_VLM} default", f"{said!r:.24}, Levenshtein ratio",
                peer.levenshtein_ratio(said, truth))
        t.equal(score("ocr", said, truth, mode="anls", normalise_text=[]), "DocVQA", "ANLS, threshold 0.5", f"{said!r:.24}",
                peer.anls(said, truth))
    t.equal(score("ocr", "it says ROOM 12 here", "ROOM 12", mode="contains"), "OCRBench", "substring", "the truth in a sentence",
            1.0)
    t.defect("H", score("ocr", "ROOM 12 " + "ROOM 13 " * 40, "ROOM 12", mode="contains"), "OCRBench", "substring",
             "the truth in a flood of others", 1.0, 0.0)
    t.defect("17", score("ocr", "x = a / b", "x = a/b", mode="exact", normalise_text=[]), "EasyVideoR1", "normalize_response",
             "code with other spaces, compared exactly",
             float(peer.easy_video_r1_normalised("x = a / b") == peer.easy_video_r1_normalised("x = a/b")), 0.0)
    sentence = "a red circle left of a blue square"
    for said in (sentence, "a blue square right of a red circle", "a red circle", "nothing", "Red! circle? left, of"):
        t.equal(score("open_text", said, sentence, preset="video_r1"), "Video-R1", f"{_GRPO} free-form", f"{said!r}: ROUGE mean",
                peer.rouge_mean(said, sentence))
    t.equal(score("open_text", "a red circle", sentence, "total", preset="easyvideo_r1"), "EasyVideoR1", _EASY,
            "'a red circle', 0.9 + 0.1", 0.9 * peer.rouge_mean("a red circle", sentence) + 0.1)
    t.equal(score("open_text", "cat", "cat", preset="video_r1"), "Video-R1", f"{_GRPO} free-form", "one right word: no ROUGE-2",
            peer.rouge_mean("cat", "cat"))
    t.design(score("open_text", "cat", "cat"), "Video-R1", f"{_GRPO} free-form", "one right word, our default", 2 / 3, 1.0,
             "ROUGE-2 is left out of the mean where the truth is one word, so that a right answer earns 1")
    t.equal(score("open_text", "dog", "dogs", preset="video_r1"), "Video-R1", f"{_GRPO} free-form",
            "'dog' for 'dogs': its scorer stems", 2 / 3)
    weak = "the blue bus on the road"
    t.defect("E", score("open_text", weak, "a blue car", "metric:correct"), "Video-R1", "grpo_trainer.py T-GRPO",
             f"{weak!r} for 'a blue car', ROUGE {peer.rouge_mean(weak, 'a blue car'):.2f} > 0.1",
             float(peer.rouge_mean(weak, "a blue car") > 0.1), 0.0)
    return t


def choices() -> Table:
    """Letters, words and labels."""
    t = Table("choice and yes/no")
    about = {"options": ["dog", "red cat", "bird"]}
    for said, expected in (("B", 1.0), ("(B)", 0.0), ("b", 0.0), ("A", 0.0)):
        t.equal(score("choice", said, "B", preset="video_r1", about=about), "Video-R1", f"{_GRPO} multiple choice",
                f"{said!r} for 'B'", expected)
    for said in ("B", "(B)", "B.", "A"):
        t.equal(score("choice", said, "B", "total", preset="easyvideo_r1", about=about), "EasyVideoR1", _EASY,
                f"{said!r} for 'B', 0.9 + 0.1", 0.9 * ("B" in said) + 0.1)
    t.equal(score("choice", "red cet", "B", "metric:mathvista_rule", preset="mathvista_rule", about=about), "MathVista",
            "nearest option by edit distance", "'red cet' for 'red cat'", 1.0)
    t.design(score("choice", "red cet", "B", preset="mathvista_rule", about=about), "MathVista", "nearest option by edit distance",
             "'red cet' for 'red cat', as a reward", 1.0, 0.0, "a rule for evaluation: as a reward it would pay for near misses")
    t.design(score("choice", "xog", "A", "metric:mathvista_rule", preset="mathvista_rule", about={"options": ["dog", "fog"]}),
             "MathVista", "nearest option by edit distance", "two options equally near: the first counts", 1.0, 0.0,
             "a tie names no option; the order of options must not decide")
    sentence = "It shows vitamin C."
    t.defect("D", score("choice", sentence, "C", about=about), "VLM-R1", f"{_VLM} mcq", f"{sentence!r} for 'C'",
             peer.vlm_r1_letter(sentence, "C"), 0.0)
    t.defect("A", score("choice", "E", "E", about={"num_options": 6}), "MLVU", "A-D extractor", "'E' of six options", 0.0, 1.0)
    t.defect("G", score("choice", "no idea", "B", about={"options": ["a", "b", "c", "d"]}), "MMMU", "official parser",
             "no option named: a random one, 1/4 expected", 0.25, 0.0)
    right, empty = (score("choice", said, "B", "metric:correct", about=about).value for said in ("B", ""))
    t.defect("6", Run("choice [mean of correct]", (right + empty) / 2), "lmms-eval", "MVBench", "one right, one empty answer", 1.0,
             0.5)
    for said, truth in (("yes", True), ("no", True), ("No", False)):
        t.equal(score("boolean", said, truth, "total", preset="easyvideo_r1"), "EasyVideoR1", f"{_EASY} boolean",
                f"{said!r}, truth {truth}", 0.9 * ((said.lower() == "yes") == truth) + 0.1)
    for said, truth in (("yes", True), ("yes", False)):
        t.equal(score("boolean", said, truth), "VLM-R1", f"{_VLM} yes_no", f"{said!r}, truth {truth}",
                peer.vlm_r1_yes_no(said, "yes" if truth else "no"))
    for said, truth in (("yesterday", True), ("I do not know", False), ("nothing", False)):
        t.defect("3", score("boolean", said, truth), "VLM-R1", f"{_VLM} yes_no", f"{said!r}, truth {truth}",
                 peer.vlm_r1_yes_no(said, "yes" if truth else "no"), 0.0)
    t.defect("3", score("classification", "a category", "cat", about={"labels": ["cat", "dog"]}, mode="mention"),
             "substring scorers", "OCRBench's rule", "'a category' for the label 'cat'", float("cat" in "a category"), 0.0)
    t.equal(score("spatial", "yes", True), "EasyVideoR1", f"{_EASY} boolean", "a spatial yes/no question", 1.0)
    return t


def numbers() -> Table:
    """Numeric rules."""
    t = Table("numbers")
    for said, truth in (("3.14", "3.141"), ("3", "3.0"), ("7", "7"), ("2.5", "2.51"), ("-4", "4")):
        t.equal(score("numeric", said, truth, preset="video_r1"), "Video-R1", f"{_GRPO} numerical", f"{said} for {truth}",
                peer.video_r1_number(said, truth))
    t.equal(score("numeric", "3.14", "3.141", "total", preset="video_r1"), "Video-R1", _GRPO, "3.14 for 3.141, plus format", 2.0)
    t.design(score("numeric", "1,234", "1234", preset="video_r1"), "Video-R1", f"{_GRPO} numerical", "1,234 for 1234",
             peer.video_r1_number("1,234", "1234"), 1.0, "a comma between thousands is no decimal point")
    for said, truth in (("3.14", "3.15"), ("3.14", "3.16"), ("3", "3.00004"), ("0", "0")):
        t.equal(score("numeric", said, truth, preset="easyvideo_r1"), "EasyVideoR1", f"{_EASY} numerical", f"{said} for {truth}",
                peer.easy_video_r1_number(float(said), float(truth)))
    t.equal(score("numeric", "3.14", "3.142", mode="rounded", accuracy={"decimals": 2, "same_form": False}), "EasyVideoR1",
            "unified_rl recipe", "3.14 for 3.142, equal after 2 decimals", float(round(3.14, 2) == round(3.142, 2)))
    for p, g in ((8, 10), (10, 10), (25, 10), (5, 0)):
        t.equal(score("numeric", str(p), g, preset="video_r1_regression"), "Video-R1", f"{_GRPO} regression", f"{p} for {g}",
                peer.regression(p, g))
    for p, g, official, theirs in ((1, 2, 0.1, 0.0), (3, 4, 0.6, 0.5), (3, 2, 0.1, 0.0)):
        assert abs(peer.mra(p, g) - official) < 1e-9
        t.equal(score("numeric", str(p), g, preset="vsi_bench"), "VSI-Bench", "vsibench/utils.py", f"{p} for {g}", official)
        t.equal(score("numeric", str(p), g, mode="mra", accuracy={"strict": True}), "Video-R1 (evaluation)",
                "float32 and <, strict: true", f"{p} for {g}", theirs)
    for p, g in ((0, 7), (7, 7), (13, 20), (40, 20)):
        t.equal(call(mra, p, g), "VSI-Bench", "vsibench/utils.py", f"{p} for {g}", peer.mra(p, g))
    t.equal(score("numeric", "3. metres or so", 4, preset="vsi_bench"), "VSI-Bench", "vsibench/utils.py",
            "'3. metres or so' for 4: first token", peer.mra(3, 4))
    t.equal(score("numeric", "about 3", 4, preset="vsi_bench"), "VSI-Bench", "vsibench/utils.py", "'about 3': no number first", 0.0)
    t.defect("19", call(mra, 0, 0), "VSI-Bench", "vsibench/utils.py", "0 for 0", None, 1.0)
    t.equal(score("numeric", "3", 4, mode="mra"), "EasyVideoR1", "video_rl: regression by MRA", "3 for 4", peer.mra(3, 4))
    t.equal(score("numeric", "3", 4, mode="exact"), "EasyVideoR1", "unified_rl: the same by equality", "3 for 4", 0.0)
    for said, expected in (("3.14", 1.0), ("3.16", 0.0)):
        t.equal(score("numeric", said, 3.1, preset="mathvista_rule", about={"precision": 1}), "MathVista", "rounding to precision",
                f"{said} for 3.1 with precision 1", expected)
    return t


def mathematics() -> Table:
    """Expressions."""
    t = Table("mathematics")
    pairs = ((r"\frac{1}{2}", "0.5", 1.0), ("3/4 + 1/2", r"\frac{5}{4}", 1.0), ("x(x + 2)", "x^2 + 2x", 1.0),
             ("x^2 + 2", "x^2 + 2x", 0.0))
    for said, truth, expected in pairs:
        t.equal(score("math", rf"\boxed{{{said}}}", truth, preset="v_triune", **_PATIENT), "V-Triune", "math_verify on \\boxed",
                f"boxed {said} for {truth}", expected)
        for preset, name in (("r1_v", "R1-V"), ("easyvideo_r1", "EasyVideoR1")):
            t.equal(score("math", said, truth, preset=preset, **_PATIENT), name, "math_verify" if preset == "r1_v" else "mathruler",
                    f"{said} for {truth}", expected)
    t.equal(score("math", "0.5", "0.5", preset="v_triune", **_PATIENT), "V-Triune", "math_verify on \\boxed",
            "right, but not boxed", 0.0)
    t.equal(score("math", r"\boxed{4}", "4", "total", preset="v_triune", **_PATIENT), "V-Triune", "verify.py",
            "accuracy 1.0 and format 0.1", 1.0)
    t.design(score("math", "3/4 + 1/2", r"\frac{5}{4}", **_PATIENT), "R1-V", "math_verify", "3/4 + 1/2 for 5/4, our default", 1.0,
             0.0, "a truth that is a number asks for a value: repeating the question's sum is no answer")
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(score, "math", "x(x + 2)", "x^2 + 2x", preset="easyvideo_r1", **_PATIENT).result()
    t.defect("15", found, "EasyVideoR1", "mathruler under SIGALRM", "x(x + 2) for x^2 + 2x, scored in a thread", None, 1.0)
    return t


def charts() -> Table:
    """Relaxed accuracy."""
    t = Table("charts")
    for said, truth in (("95", "100"), ("94.9", "100"), ("12%", "0.12"), ("red", "Red"), ("0.0", "0"), ("1,234", "1234"),
                        ("12%", "12")):
        t.equal(score("chart", said, truth, preset="chartqa"), "ChartQA", "relaxed_correctness", f"{said} for {truth}",
                peer.chartqa(said, truth))
    for said, truth, why in (("0.0", "0", "a true 0 is met by 0 in any spelling"),
                             ("1,234", "1234", "separators between thousands are read"),
                             ("12%", "12", "charts leave the unit out or not")):
        t.design(score("chart", said, truth), "ChartQA", "relaxed_correctness", f"{said} for {truth}, our default",
                 peer.chartqa(said, truth), 1.0, why)
    return t


def form() -> Table:
    """Envelope and tags."""
    t = Table("form")
    envelope = "<think>a</think>\n<answer>3</answer>"
    for what, text in (("right", envelope), ("words behind it", envelope + " ok"), ("no thoughts", "<answer>3</answer>"),
                       ("answer first", "<answer>3</answer><think>a</think>"),
                       ("empty thoughts", "<think></think><answer>3</answer>")):
        if what != "no thoughts":
            t.equal(call(format_reward, text, "think"), "Video-R1, UI-R1", "fullmatch of the envelope", what, peer.envelope(text))
    several = "<think>a</think><answer>3</answer><answer>4</answer>"
    t.defect("H", call(format_reward, several, "think"), "Video-R1, UI-R1", "fullmatch of the envelope", "two answers",
             peer.envelope(several), 0.0)
    for text in ("<garbage", "object_ref_start and more"):
        t.defect("4", call(format_reward, text, "answer"), "Perception-R1", "format reward", repr(text),
                 peer.perception_r1_format(text), 0.0)
    t.design(score("counting", "many", 3, "format"), "EasyVideoR1", _EASY, "tags, but no answer of the type", 0.5, 0.0,
             "a tag alone earns nothing: a text without a readable answer is 0 in every part")
    whole = "<think>\nI count.\n</think>\n\n<answer>\n3\n</answer>"
    lines: dict[str, Any] = {"weights": {"accuracy": 1.0, "tags": 1.0}, "parts": {"tags": {"lines": True}}, "raw": True}
    for what, text in (("all four", whole), ("answer tags only", "\n<answer>\n3\n</answer>"),
                       ("answer on one line", "<answer>3</answer>"), ("answer tags, one on no line of its own",
                                                                      "\n<answer>\n3</answer>")):
        t.equal(score("counting", text, 3, "tags", **lines), "V-Triune", "verify.py, 0.25 per tag", what, peer.triune_tags(text))
    return t


def lengths() -> Table:
    """Length, repetition, steps."""
    t = Table("length, repetition, steps")
    for length in (100, 16384, 18432, 20480, 30000):
        t.equal(call(overlong_penalty, length, 20480, 4096), "DAPO", "arXiv 2503.14476, eq. 13",
                f"{length} tokens of 20480, cache 4096", peer.overlong(length, 20480, 4096))
    t.equal(score("counting", "3", 3, "overlong", tokens=960, weights={"accuracy": 1.0, "overlong": 1.0},
                  parts={"overlong": {"max_length": 1024, "cache": 256, "penalty": True}}), "TRL", "soft overlong punishment",
            "960 tokens of 1024, cache 256", peer.overlong(960, 1024, 256))
    part: dict[str, Any] = {"weights": {"accuracy": 1.0, "cosine_length": 1.0}, "normalise": False}
    for length in (1, 512, 1024):
        t.equal(score("counting", "3", 3, "cosine_length", tokens=length, **part), "VLM-R1", "cosine reward",
                f"right, {length} tokens", peer.cosine(length, 1024, 1.0, 0.5))
        t.equal(call(cosine_value, length, 1024, 0.0, -0.5), "Demystifying Long CoT", "arXiv 2502.03373", f"wrong, {length} tokens",
                peer.cosine(length, 1024, 0.0, -0.5))
        t.defect("5", score("counting", "4", 3, "cosine_length", tokens=length, **part), "VLM-R1", "cosine reward",
                 f"wrong, {length} tokens", peer.cosine(length, 1024, 1.0, 0.5), peer.cosine(length, 1024, 0.0, -0.5))
    t.design(call(cosine_value, 2048, 1024, 1.0, 0.5), "Demystifying Long CoT", "arXiv 2502.03373", "right, twice the length limit",
             peer.cosine(2048, 1024, 1.0, 0.5), 0.5, "beyond the limit the value stays: the wave would pay for endless texts")
    bonus: dict[str, Any] = {"weights": {"accuracy": 1.0, "length_window": 0.2}, "normalise": False}
    for said, length in (("3", 319), ("3", 320), ("3", 512), ("3", 513), ("4", 400)):
        t.equal(score("counting", said, 3, "total", tokens=length, **bonus), "Video-R1", "length bonus",
                f"{said} for 3, {length} tokens", (said == "3") + 0.2 * (said == "3" and 320 <= length <= 512))
    t.design(score("counting", "3", 3, "total", tokens=400, **bonus), "Video-R1", "length bonus",
             "400 tokens, the only right one of its group", 1.0, 1.2,
             "each completion is judged by itself; Video-R1 wants a second right one in the group")
    varied, loop = "one two three four five six seven", "so it is so it is so it is so it is"
    grams: dict[str, Any] = {"weights": {"accuracy": 1.0, "repetition": 1.0}, "answer_format": "bare"}
    for text in (varied, loop, "one two"):
        t.equal(score("ocr", text, varied, "repetition", parts={"repetition": {"ngram": 6, "penalty": True}}, **grams), "VLM-R1",
                "repetition, 6-grams", repr(text), peer.repetition(text, 6))
    steps = (["look left", "count the red ones", "answer 3"], ["look left", "look right", "count the red ones", "answer 3"])
    for predicted, reference in (steps, steps[::-1], (steps[0], steps[0])):
        costs = [[peer.page_ocr(a, b) for b in reference] for a in predicted]
        t.equal(call(dtw_similarity, predicted, reference, "ned"), "dynamic time warping", "Sakoe and Chiba 1978",
                f"{len(predicted)} steps for {len(reference)}", max(0.0, 1 - peer.cheapest_alignment(costs) / len(reference)))
    thoughts = "<think>" + "\n".join(steps[0]) + "</think><answer>3</answer>"
    t.equal(score("counting", thoughts, 3, "process", raw=True, weights={"accuracy": 1.0, "process": 1.0},
                  about={"reference_steps": steps[0]}), "dynamic time warping", "Sakoe and Chiba 1978",
            "thoughts that are the reference", 1.0)
    return t


def safety() -> Table:
    """Text as data, recorded failures, routing."""
    t = Table("safety and routing")
    with tempfile.TemporaryDirectory() as folder:
        for task, preset, answer, name in (("gui_action", "gui_r1", {"action": "wait"}, "GUI-R1"),
                                           ("detection", "perception_r1", [], "Perception-R1"),
                                           ("gui_action", "odyssey", {"action": "wait"}, "GUI-Odyssey")):
            mark = Path(folder) / f"{task}-{preset}"
            run_name = run_task(task, f"__import__('pathlib').Path({str(mark)!r}).write_text('x')", answer, preset=preset)[0]
            t.defect("7", Run(f"{run_name} [file written]", float(mark.exists()), f"{task}:{preset}"), name, "eval() of the answer",
                     "__import__('pathlib').Path(..).write_text('x')", 1.0, 0.0)
    t.defect("14", score("grounding", "[1, 2, 3, 4]", "no box", "recorded", preset="v_triune"), "V-Triune", "reward server",
             "the truth is broken: is the failure recorded?", 0.0, 1.0)
    t.defect("I", Run("mixed [refuses]", _refuses("regresion")), "EasyVideoR1", "problem_type routing",
             "the task type is misspelt: is it refused?", 0.0, 1.0)
    t.equal(Run("mixed [total]", _mixed(), "mixed"), "V-Triune", "per-sample verifiers",
            "a row that names its task: that task's rule", 1.0)
    return t


def _refuses(name: str) -> float:
    mixed: Any = resolve_task("mixed")()
    try:
        mixed.member(name)
    except ConfigError:
        return 1.0
    return 0.0


def _mixed() -> float:
    from mmrl.coords import CoordFrame
    from mmrl.types import ImageSize, RewardContext, Sample

    ctx = RewardContext(1, 1, CoordFrame.ABS_ORIG, (ImageSize((9, 9), (9, 9)),))
    return task_from_spec("mixed").score(Sample("case", "counting", "table", "?", 3, ("0.png",)), "<answer>3</answer>", ctx).value


def text_cases() -> list[Case]:
    """All rows of this file."""
    tables = (texts(), choices(), numbers(), mathematics(), charts(), form(), lengths(), safety())
    return [case for table in tables for case in table.cases]
