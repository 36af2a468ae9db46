"""Replies on which the benchmarks' own extractors are run: clean ones, prose, hedges, several answers, none, marks and alphabets.

    python -c "from scripts._extractor_cases import CHOICES; print(len(CHOICES))"

Every reply is one of a model that was asked the `question` of its kind; `scripts.record_extractors` hands them to the programs and
writes down for which truths each calls them right.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["BOXES", "CHOICES", "COUNTS", "MATHVISTA_NUMBERS", "NUMBERS", "OPEN", "OPTIONS", "POINTS", "YES_NO"]

OPTIONS: Sequence[str] = ("a red cat", "the dog", "Both birds", "none of these")

CHOICES: Sequence[str] = (
    "A", "B", "C", "D", "E", "b", "a.", "B.", "(B)", "B)", "B:", "[B]", "**B**", "\\boxed{B}", "$B$", "`B`", '"B"', "'B'", "B\n",
    "b)", "(b)", "(B) the dog", "B. the dog", "B: the dog", "B) the dog", "the dog", "The dog", "the dog.", "dog", "a red cat",
    "I think it is the dog because it barks loudly.", "It shows neither a red cat nor the dog but Both birds here.",
    "The answer is B", "The answer is B.", "The answer is (B).", "The best answer is: B", "The correct answer is B) the dog",
    "Answer: B", "answer: b", "Option B", "Best option: (B) the dog", "The best option is C", "The correct option is D.",
    "The final answer is **C**.", "<answer>C", "So the answer must be (C)", "A or B", "A and B", "A, B", "(A) (B)", "(A)(B)(C)(D)",
    "ABCD", "A. no, wait: C.", "Not A. The answer is B.", "(A) is wrong, therefore (C)", "A dog barks.",
    "A dog is what I see in the picture here.", "I cannot tell.", "I see a Cat", "Definitely", "Because", "Could be", "Dog",
    "maybe C", "C?", "C!", "C;", "C,", "...C...", "?", ".", ":", ")", "(", "()", "-", "0", "2", "\uff22", "\u0412",
    "\u7b54\u6848\u662fB", "\u9009B\u3002", "B\u3002", "\u24b7",
    "The options are: A. a red cat; B. the dog; C. Both birds; D. none of these. I choose D.",
    "First, the dog is seen. Then a red cat comes. The question asks who came last, so it is a red cat",
    "Let me think. The tail is long\nand the ears are short.\nB", "B\nbecause of the ears", "API Error", "B " + "x" * 60, "yes",
    "</s>B</s>", "B. A. C.", "C: B:", "A: no B. yes", "the answer is THE DOG",
    "Neither the dog nor Both birds nor a red cat are here", "Animal: B", "GRAB", "B,", ",B", "'B", "B'", "!B!", "B.)", "(A", "A)",
    ") B", "x) B", "a)b)c)", "(B", "the red CAB is there",
)
"""For the question "Which animal is it?" with OPTIONS."""

YES_NO: Sequence[str] = (
    "yes", "no", "Yes", "No", "YES", "NO", "yes.", "no.", "Yes, there is.", "No, there is not.", "yesterday", "nothing",
    "not at all", "Nope", "Yep", "I think yes", "The answer is yes.", "The answer is no", "yes and no", "no, yes", "Yes or no",
    " yes", "yes ", "\nno", "true", "false", "True.", "False.", "**yes**", "(yes)", '"no"', "none", "now it moves", "y", "n", "1",
    "0", "\u662f", "\u5426", "si", "yes</s>", "</s>no", "", ".", "know", "Not sure", "no idea", "yesyes", "YeS!", "nO?",
    "Answer: yes", "No.\nYes.",
)
"""Replies to "Does the ball fall?"."""

NUMBERS: Sequence[str] = (
    "3", "3.0", "3.5", "-3", "+3", "0", "0.0", "3.", ".5", "3..", "3 m", "3m", "3 meters", "3.5 metres", "about 3",
    "approximately 3.2", "The answer is 3", "The distance is 3.5 meters.", "3,000", "3,5", "1_000", "1e3", "1E-1", "1e400",
    "-1e400", "nan", "inf", "Infinity", "three", "Three.", "3 or 4", "3-4", "3 to 4", "~3", "\u2248 3", "3\n4", "3\t4", "\u0663",
    "\uff13", "\u00bd", "1/2", "50%", "$3", "$3$", "\\boxed{3}", "**3**", "(3)", "[3]", "{3}", '"3"', "'3'", "`3`", "x = 3", "=3",
    "", ".", "m", "3.14159265358979", "0003", "2.9999999", "100 cm", "12 chairs", "A", "I see 4 chairs.", "4 chairs, 2 tables",
    "Answer: 4", "4.", "4. chairs", "99999999999999999999",
)
"""Replies to a question whose answer is a number; truths 3, 3.2, 4 and 12."""

COUNTS: Sequence[str] = (
    "three", "Three.", "Twenty", "twenty-one", "zero", "None", "There are none.", "There are no cats.", "no cats", "4 cats",
    "There are 4 cats.", "There are 4", "There are four", "The number of cats is 4.", "4 cats and 3",
    "Counting the cats shows a total of 4.", "Counting the cats shows a total of 4 cats in all",
    "a total of 3, or a total of 4 cats", "a total of 3 cats\na total of 4 cats", "cats\na total of 4 cats",
    "A TOTAL OF 4 CATS", "a total of four cats", "4..", "4. .", "4 .", "04", "+4", "-4", "4.0", "4,", "(4)", "4\n", "\u0664",
    "1_2", "12", "twelve", "20", "twenty", "3 4", "4 or 3", "1. one cat 2. two cats", "", ".", "..", "answer: 4",
    '<points x1="10.0" y1="20.0" x2="30.0" y2="40.0" alt="cats">cats</points>', "1e1", "\uff14", "100", "0", "nil",
    "10.5, 20.5 30.5, 40.5 a total of 2", "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx", "99999999999999999999",
)
"""Replies to "How many cats are there?"; truths are 0 to 20 and 100."""

OPEN: Sequence[tuple[str, Any]] = (
    ("12", "12"), ("12.0", "12"), ("12.004", "12"), ("12.006", "12"), ("1,200", "1200"), ("$1,200.50", "1200.5"), ("12 kg", "12"),
    ("The mass is 12 kg", "12"), ("The mass is 12 kg.", "12"), ("So the mass is 12 kg and the height 3 m", "3"), ("x = 12", "12"),
    ("x = 3\ny = 12", "12"), ("x = 3\ny = 12", "3"), ("It could be 11, 12 or 13", "12"), ("11 12 13 14", "13"), ("1e3", "1000"),
    ("1.2e3 N", "1200"), ("1.2E+3", "1200"), ("-5", "-5"), ("-5", "5"), ("minus 5", "5"), ("3-12", "12"), ("3-12", "-12"),
    ("0.333", "0.33"),
    ("1/3", "0.33"), ("50%", "50"), ("50%", "0.5"), ("Paris", "Paris"), ("paris", "Paris"), ("It is Paris.", "Paris"),
    ("Paris, not London", "London"), ("The capital is Paris, the river is the Seine", "Paris"), ("Parisian", "Paris"), ("A", "A"),
    ("a", "A"),
    ("It is A", "A"), ("A dog", "A"), ("I say a thing", "a"), ("24/7", ["24/7", "3.43"]), ("3.43", ["24/7", "3.43"]),
    ("about 3.43 hours", ["24/7", "3.43"]), ("3.429", ["24/7", "3.43"]), ("", "12"), (".", "12"), ("...", "12"), ("\n", "12"),
    ("is ", "12"),
    ("The answer is", "12"), ("the answer is :", "12"), ("Final answer: 12", "12"), ("**12**", "12"), ("\\boxed{12}", "12"),
    ("\uff11\uff12", "12"),
    ("\u0661\u0662", "12"), ("twelve", "12"), ("Thus we get 12. Therefore the result is 13", "12"),
    ("Thus we get 12. Therefore the result is 13", "13"), ("We know it is 12\nbut maybe not", "12"), ("A = 3, so B = 4", "4"),
    ("A = 3", "3"),
    ("nan", "nan"), ("inf", "inf"), ("infinity", "inf"), ("1e400", "inf"), ("1_000", "1000"), ("API Error", "API"),
    ("API Error", "a"),
    ("12,34", "12"), ("12,345", "12"), ("12,345", "345"), ("12,345.67", "12345.67"), (".5", "0.5"), ("0.5.", "0.5"),
    ("v1.5.3", "1.5"),
    ("x12", "12"), ("12x", "12"), ("2,000,000 people", "2000000"), ("The total number of cars are 5", "5"), ("They have 5", "5"),
    ("adds up to 5 in total ", "5"), ("I counted 5 cars; there are 5 cars", "5"), ("5 cars are there", "5"), ("is is is 5", "5"),
    ("stra\u00dfe", "STRASSE"), ("\u0130stanbul", "istanbul"), ("so. Nice is in France. It is warm", "Nice"), ("is ?\nis 12", "12"),
    ("He said: the answer is 12!\nBut the other is 13?", "12"), ("True", "true"), ("[1, 2, 3]", "[1, 2, 3]"), ("1, 2, 3", "2"),
)
"""(reply, truth) of open questions."""

MATHVISTA_NUMBERS: Sequence[tuple[str, str, Mapping[str, Any]]] = tuple(
    (reply, truth, {"answer_type": kind, **more})
    for kind, truth, more in (("integer", "5", {}), ("float", "1.2", {"precision": 1}), ("float", "0.33", {"precision": 2}))
    for reply in (
        "5", "5.0", "5.7", "-5", "+5", " 5 ", "05", "1.2", "1.20", "1.24", "1.25", "0.33", ".333", "1/3", "1e0", "12e-1",
        'The answer is "5".',
        'The answer is "1.2".', 'The answer is "0.3333".', 'The answer is "5"', "The answer is 5.", "5 apples", "five", "", "nan",
        "inf", "1_2",
        "\u0665", "1,2", "$5$", "5%", "(5)", '"5"', 'I think. The answer is "5". The answer is "6".', "6", "1.3",
        "99999999999999999999999", "1e400",
        "A", "5\n", "\\boxed{5}", "**1.2**"))
"""(reply, truth, params) of MathVista's free-form rows."""

BOXES: Sequence[str] = (
    "[0.1, 0.2, 0.5, 0.6]", "[10, 20, 50, 60]", "[10,20,50,60]", "[ 10 , 20, 50, 60 ]", "[10, 20, 50 , 60]", "[10 20 50 60]",
    "(10, 20, 50, 60)", "(10, 20), (50, 60)", "10, 20, 50, 60", "[10, 20, 50]", "[10, 20, 50, 60, 70]", "[[10, 20, 50, 60]]",
    "[[10, 20, 50, 60], [1, 2, 3, 4]]", "[1, 2, 3, 4] or [5, 6, 7, 8]", "[1, 2, 3, 4][5, 6, 7, 8]", "The box is [10, 20, 50, 60].",
    "bbox: [10.5, 20.25, 50.0, 60.75]",
    '{"bbox_2d": [10, 20, 50, 60], "label": "cat"}', '```json\n[{"bbox_2d": [10, 20, 50, 60]}]\n```', "[-1, -2, 3, 4]",
    "[+1, 2, 3, 4]", "[1., 2., 3., 4.]", "[.1, .2, .3, .4]", "[1e1, 2, 3, 4]", "[50, 60, 10, 20]", "[10, 20, 10, 20]",
    "[0, 0, 0, 0]", "[x1, y1, x2, y2]", "[10px, 20px, 50px, 60px]", "<box>(10,20),(50,60)</box>",
    "<|box_start|>(10,20),(50,60)<|box_end|>", "", "none", "[10;20;50;60]", "[\n10,\n20,\n50,\n60\n]", "[10,\u00a020, 50, 60]",
    "[\uff11, 2, 3, 4]", "\uff3b1, 2, 3, 4\uff3d", "**[10, 20, 50, 60]**", "\\boxed{[10, 20, 50, 60]}", "$[10, 20, 50, 60]$",
    "[1,000, 2, 3, 4]", "Image 1: [1, 2, 3, 4]; no: [2, 3, 4, 5]", "[0.10, 0.20, 0.50, 0.60]", "[00010, 20, 50, 60]",
    "[10, 20, 50, 60", "10, 20, 50, 60]",
)
"""Replies to "Where is the cat? [x1, y1, x2, y2]"."""

POINTS: Sequence[str] = (
    "(0.5, 0.25)", "[0.5, 0.25]", "0.5, 0.25", "0.5 0.25", "(0.5,0.25)", "(0.5 0.25)", "x=0.5, y=0.25", "x: 0.5 y: 0.25",
    '{"x": 0.5, "y": 0.25}', "{'x': 0.5, 'y': 0.25}", "(50%, 25%)", "50%, 25%", "x=50% y=25%", "(0.4, 0.2, 0.6, 0.3)",
    "[0.4, 0.2, 0.6, 0.3]", "[[0.4, 0.2, 0.6, 0.3]]", "box: 0.4 0.2 0.6 0.3", "The rectangle is 0.4, 0.2, 0.6, 0.3",
    "0.4, 0.2, 0.6, 0.3", "<bbox>0.4, 0.2, 0.6, 0.3</bbox>", "< bbox id=1 > 0.4 0.2 0.6 0.3 < / bbox >",
    "<bbox>0.4, 0.2</bbox> (0.5, 0.25)", "<box>(400,200),(600,300)</box>", "<box>(400, 200),(600, 300)</box>",
    "<|box_start|>(400,200),(600,300)<|box_end|>", "click(0.5, 0.25)", "pyautogui.click(x=0.5, y=0.25)",
    "CLICK <point>[[0.5, 0.25]]</point>", "<point>0.5 0.25</point>", "I click at (0.5, 0.25).",
    "I click at (0.5, 0.25) or (0.1, 0.9)", "(0.1, 0.9) (0.5, 0.25)", "Step 1: click (0.5, 0.25)", "1. (0.5, 0.25)",
    "The button 3 is at 0.5, 0.25", "(0.5)", "0.5", "", "none", "(-0.5, 0.25)", "(0.5, 1.5)", "(1, 1)", "(0, 0)", "(.5, .25)",
    "(0.5., 0.25)", "(0.5; 0.25)", "(\uff10.5, 0.25)", "[0.5, 0.25, 0.1]", "(0.5,0.25,0.1)", "**(0.5, 0.25)**",
    "\\boxed{(0.5, 0.25)}", "```json\n[0.5, 0.25]\n```", "x is 0.5 and y is 0.25", "Point(0.5, 0.25), box (0, 0, 1, 1)",
    "max=3 y=4 (0.5, 0.25)", "box=7 max: 0.5, sky: 0.25", "0.5-0.25", "1e-1, 0.25",
)
"""Replies to "Where do you click?", shares of the picture; truths are the cells of a 4 x 4 grid."""
