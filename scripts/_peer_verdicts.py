"""Why mmrl and a peer differ on a completion: a defect of the peer, or a choice of ours; by preset and by what is special about it.

A rule names presets by the start of 'task:preset' or by its end (`*:NAME`) and completions by their `what`. Where mmrl and the peer
agree, no rule is asked.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["DEFECT", "DESIGN", "verdict"]

DEFECT, DESIGN = "defect", "by design"
_ANY = ("",)
_GUI = ("gui_",)

_Rule = tuple[Sequence[str], Sequence[str], str, str]
_RULES: Sequence[_Rule] = (
    (
        _ANY,
        ("two answers, wrong then right", "two answers, right then wrong", "two answers"),
        DEFECT,
        "of several answers the first or the last counts: a hedge is paid",
    ),
    (
        ("grounding", "gui_action:ui_r1"),
        ("a second box", "the same box twice", "two actions"),
        DEFECT,
        "of several boxes or actions the first counts: a hedge is paid",
    ),
    (
        ("numeric:easyvideo",),
        ("two numbers",),
        DEFECT,
        "of two numbers the first counts: a hedge is paid",
    ),
    (
        _ANY,
        ("the answer in the thoughts only",),
        DEFECT,
        "what was only thought counts as the answer",
    ),
    (
        (
            "*:easyvideo_r1",
            "*:easyvideo_r1_regression",
            "*:easyvideo_r1_unified",
            "detection:vlm_r1_weighted_sum",
        ),
        ("no tags", "cut in the answer", "an empty answer"),
        DESIGN,
        "text that is in no answer block is no answer",
    ),
    (("scene_graph",), ("no tags",), DESIGN, "text that is in no answer block is no answer"),
    (
        ("*:easyvideo_r1", "tracking:easyvideo_r1", "st_grounding"),
        (
            "the first half of the keys",
            "one key only",
            "one key only, beside",
            "boxes: the first half of the keys",
            "boxes: one key only",
            "boxes: one key only, beside",
        ),
        DEFECT,
        "averages over the keys both sides share: what was left out costs nothing (accuracy.over: shared has that number)",
    ),
    (
        ("scene_graph",),
        (
            "one extra object",
            "six extra objects",
            "an extra relation",
            "every relation",
            "a relation of an unknown object",
        ),
        DEFECT,
        "shares of the truth only: whatever is invented is free (accuracy.over: truth has that number)",
    ),
    (
        ("scene_graph",),
        ("another key for the relations",),
        DESIGN,
        "'relations' is read as 'relationships' is",
    ),
    (
        ("grounding:perception_r1",),
        ("left and right swapped",),
        DEFECT,
        "an inverted box divides by zero",
    ),
    (
        ("grounding:perception_r1",),
        ("broken JSON", "cut in the answer"),
        DEFECT,
        "the bars of the special tokens are not escaped: any text that starts with < has the right form",
    ),
    (
        ("grounding:perception_r1", "gui_grounding:gui_g2"),
        ("text behind the answer", "words around the answer", "five numbers", "cut in the answer"),
        DESIGN,
        "the answer is asked for alone, and is not searched in other text",
    ),
    (
        ("counting:perception_r1",),
        ("the first as often as there are", "the middle as often as there are"),
        DEFECT,
        "copies of one box count as found: as many as there are objects, anywhere, are paid",
    ),
    (
        ("counting:perception_r1",),
        ("far beside",),
        DESIGN,
        "a centre outside of the picture is moved to its edge",
    ),
    (
        ("counting:perception_r1",),
        ("text behind the answer", "a name for each box"),
        DESIGN,
        "the answer is asked for alone: nothing may stand behind its end",
    ),
    (
        ("counting:perception_r1",),
        ("no end token",),
        DESIGN,
        "the end of the text is the end of the answer",
    ),
    (
        ("counting:perception_r1",),
        ("nothing found",),
        DESIGN,
        "[] is a readable answer, so its form is paid",
    ),
    (
        ("counting:perception_r1",),
        ("none there, nothing found",),
        DEFECT,
        "where nothing is there no answer can earn anything",
    ),
    (
        ("grounding:vlm_r1", *_GUI),
        ("decimals", "negative numbers"),
        DEFECT,
        "only digits are read: a decimal point or a minus loses the answer",
    ),
    (("tracking:videochat_r1",), ("tuples",), DESIGN, "round brackets are read as square ones"),
    (
        ("temporal_grounding:videochat_r1",),
        ("before the video",),
        DEFECT,
        "only digits are read: the minus is lost",
    ),
    (
        ("numeric:easyvideo",),
        (".5 for 0.5",),
        DEFECT,
        "only what starts with a digit is read: .5 becomes 5",
    ),
    (
        ("numeric:video_r1",),
        ("1,200 for 1200",),
        DEFECT,
        "a comma between thousands is taken for a decimal point",
    ),
    (
        ("numeric:video_r1",),
        ("boxed", "1/2 for 0.5"),
        DESIGN,
        "a box and a fraction are read as the number that they are",
    ),
    (
        ("grounding:vlm_r1", "grounding:v_triune", "detection:v_triune"),
        ("broken JSON",),
        DESIGN,
        "a list that is not closed is no answer unless the length limit cut it",
    ),
    (
        ("detection:v_triune",),
        ("one without area",),
        DEFECT,
        "a box without area fills up the number",
    ),
    (
        ("detection:v_triune",),
        ("an extra one without area",),
        DESIGN,
        "a box without area counts as not given",
    ),
    (
        ("detection:v_triune", "detection:perception_r1"),
        ("nothing found",),
        DESIGN,
        "an empty list is a readable answer, so its form is paid",
    ),
    (
        ("detection:v_triune iou_max_iou_first",),
        _ANY,
        DEFECT,
        "the loops overwrite the indices of the pair that they found (accuracy.matching: published has that number)",
    ),
    (
        ("detection:v_triune",),
        _ANY,
        DEFECT,
        "each truth in turn takes its best box, which a later one may need (accuracy.matching: "
        "published has that number)",
    ),
    (
        ("detection:vlm_r1_weighted_sum",),
        ("one wrong label", "labels exchanged", "only wrong ones"),
        DEFECT,
        "a box with a wrong label counts as found (accuracy.matching: published has that number)",
    ),
    (
        ("detection:vlm_r1_weighted_sum",),
        ("an object without a label",),
        DEFECT,
        "an object without a label raises",
    ),
    (
        ("detection:perception_r1",),
        ("one wrong label", "labels exchanged"),
        DEFECT,
        "a pair with a wrong label counts in F1 and IoU, so a box under any name is paid",
    ),
    (
        ("detection:perception_r1",),
        ("only wrong ones", "all far too large", "a wrong answer"),
        DEFECT,
        "any list of known labels is paid its form, 0.25, whatever its boxes",
    ),
    (
        ("detection:perception_r1",),
        ("one with swapped corners",),
        DESIGN,
        "one inverted box costs itself; there it fails the answer",
    ),
    (
        ("detection:vlm_r1", "detection:perception_r1"),
        ("labels in capitals",),
        DESIGN,
        "case does not tell labels apart",
    ),
    (_GUI, ("double quotes",), DESIGN, "both quotes of Python are read"),
    (
        ("gui_grounding:gui_g2",),
        ("corners swapped",),
        DEFECT,
        "an inverted box is worth as much as the box",
    ),
    (
        ("choice:easyvideo_r1",),
        ("the text of the option",),
        DESIGN,
        "the text of an option names it",
    ),
    (("grounded_qa",), ("no answer",), DESIGN, "without an answer block there is no answer"),
    (
        ("tracking", "st_grounding"),
        ("a bare mapping", "single quotes", "numbers with decimals as keys"),
        DESIGN,
        "keys are compared as numbers, and boxes are read with and without their key",
    ),
    (
        ("tracking", "st_grounding"),
        (
            "one box of three numbers",
            "one box of words",
            "boxes: one box of three numbers",
            "boxes: one box of words",
            "no boxes",
            "a time only",
        ),
        DESIGN,
        "a box that cannot be read costs that box and no other",
    ),
    (
        ("math:r1_v",),
        (
            "\\dfrac{1}{2} for \\frac{1}{2}",
            "\\sqrt{12} for 2\\sqrt{3}",
            "2\\sqrt{2} for 2\\sqrt{3}",
            "1+x for x+1",
            "0.12 for 12\\%",
            "- 3 for -3",
        ),
        DEFECT,
        "LaTeX without dollars is read as its first number or not at all: right roots and terms earn nothing and wrong ones 1",
    ),
    (
        ("math:r1_v", "math:v_triune"),
        ("no tags", "cut in the answer", "the answer in the thoughts only"),
        DESIGN,
        "text that is in no answer block is no answer",
    ),
    (
        ("math:easyvideo_r1",),
        ("a sum", "\\frac{2}{4} for \\frac{1}{2}", "0.12 for 12\\%"),
        DESIGN,
        "equal in meaning is right",
    ),
)


def _names(pattern: str, preset: str) -> bool:
    return preset.endswith(pattern[1:]) if pattern.startswith("*") else preset.startswith(pattern)


def verdict(preset: str, what: str) -> tuple[str, str] | None:
    """(defect or by design, why) of a completion on which the values differ; None for one that no rule names."""
    for presets, kinds, kind, why in _RULES:
        if (kinds == _ANY or what in kinds) and any(_names(pattern, preset) for pattern in presets):
            return kind, why
    return None
