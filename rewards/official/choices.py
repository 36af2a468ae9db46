"""Letters out of replies, and yes or no, as the programs of MMMU, MVBench, MLVU, Video-MME and others take them.

    python -c "from mmrl.rewards.official import Asked, extract; print(extract('mlvu', 'B) cat', Asked('choice', 'B')))"

Each function takes (reply, asked) and gives the letter as shown, '' where the program finds none. Linear in the reply's length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from mmrl.rewards.official.asked import NOTHING, Asked, Found
from mmrl.rewards.official.numbers import quick
from mmrl.rewards.parsing import MAX_ANSWER_CHARS

__all__ = [
    "longvideobench",
    "mathvista",
    "mlvu",
    "mmmu",
    "mvbench",
    "tempcompass",
    "tempcompass_yes_no",
    "videomme",
    "videommmu",
    "vsibench",
]

_MMMU_MARKS = (",", ".", "!", "?", ";", ":", "'")
_MMMU_WORDS = 5  # of a reply with more, the options' texts are looked for as well
_VIDEOMME_PREFIXES = (
    "The best answer is",
    "The correct answer is",
    "The answer is",
    "The answer",
    "The best option isThe correct option is",
    "Best answer:Best option:",
)  # two commas are missing in the program
_LONGVIDEO_PREFIXES = (
    "The best answer is",
    "The correct answer is",
    "The answer is",
    "The answer",
    "The best option is",
    "The correct option is",
    "Best answer:",
    "Best option:",
)


def _padded(reply: str) -> str:
    """One mark after the other is taken off both ends, and a space put there, so that a letter stands between spaces."""
    for mark in _MMMU_MARKS:
        reply = reply.strip(mark)
    return f" {reply} "


def _said(text: str, letters: str, form: str) -> list[str]:
    return [letter for letter in letters if form.format(letter) in text]


def _last(found: Sequence[str], place: Callable[[str], int]) -> Found:
    """The letter that stands last; of equal places the first letter."""
    return Found(max(found, key=place)) if found else NOTHING


def _latest(text: str, letters: str, form: str) -> Found:
    """The last letter that stands in `text` in that form, for example '({})'."""
    return _last(_said(text, letters, form), lambda letter: text.rfind(form.format(letter)))


def _by_content(text: str, asked: Asked) -> Found:
    """The option whose words stand last in a reply of more than five words."""
    if len(text.split()) <= _MMMU_WORDS:
        return NOTHING
    low, words = (
        text.lower(),
        {
            letter: option.lower()
            for letter, option in zip(asked.letters, asked.options, strict=False)
        },
    )
    return _last(
        [letter for letter in words if words[letter] in low],
        lambda letter: low.rfind(words[letter]),
    )


def mmmu(reply: str, asked: Asked) -> Found:
    """MMMU-Benchmark/MMMU, mmmu/utils/eval_utils.py, parse_multi_choice_response: "(B)", else " B ", else an option's text, the
    last one each. The program draws a letter where there is none; here that is wrong."""
    text = _padded(reply)
    for form in ("({})", " {} "):
        found = _latest(text, asked.letters, form)
        if found.text:
            return found
    return _by_content(text, asked)


def videommmu(reply: str, asked: Asked) -> Found:
    """EvolvingLMMs-Lab/VideoMMMU, lmms_eval/tasks/videommmu/utils.py, parse_multi_choice_response: "B." or "B:", else "(B)", else
    "B " (also the last letter of a word), else an option's text, the last one each."""
    if reply in ("", "API Error"):
        return NOTHING
    text = _padded(reply)
    dotted, pointed = _said(text, asked.letters, "{}."), _said(text, asked.letters, "{}:")
    if dotted or pointed:
        form = "{}." if dotted else "{}:"
        return _last([*dotted, *pointed], lambda letter: text.rfind(form.format(letter)))
    bracketed = _latest(text, asked.letters, "({})")
    if bracketed.text:
        return bracketed
    if spaced := _said(text, asked.letters, "{} "):
        # -1 where it ends a word: then the first letter counts
        return _last(spaced, lambda letter: text.rfind(f" {letter} "))
    return _by_content(text, asked)


def mathvista(reply: str, asked: Asked) -> Found:
    """lupantech/MathVista, evaluation/extract_answer.py (quick_extract) and calculate_score.py (normalize_extracted_answer): a
    choice, "(b)", "B", else the choice with the smallest edit distance. Where the program asks a language model, the reply stands
    for what that would extract."""
    said = (reply if reply in asked.options else quick(reply, asked.params)).strip()
    bracketed = re.search(r"\(([a-zA-Z])\)", said)
    said = bracketed[1].upper() if bracketed else said
    if len(said) == 1 and said in asked.letters:
        return Found(said)
    if not said or not asked.options or len(said) > MAX_ANSWER_CHARS:
        return NOTHING
    from rapidfuzz.distance import Levenshtein

    distances = [Levenshtein.distance(said, option) for option in asked.options]
    return Found(asked.letters[distances.index(min(distances))])


def mvbench(reply: str, asked: Asked) -> Found:
    """OpenGVLab/Ask-Anything, video_chat2/mvbench.ipynb, infer_mvbench and check_ans: "(" and the first word of the reply's first
    line, without full stops, is inside "(b)", or "(b)" inside it. That makes an empty reply, or "(A)(B)(C)", right for every
    truth; here what fits several letters is wrong."""
    lines = reply.strip().split("\n")
    word = f"({lines[0]}".lower().split(" ")[0]
    plain = word.replace(".", "")
    fitting = [
        letter
        for letter in asked.letters
        if plain in f"({letter.lower()})" or f"({letter.lower()})" in word
    ]
    return Found(fitting[0]) if len(fitting) == 1 else NOTHING


def mlvu(reply: str, asked: Asked) -> Found:
    """JUNJIE99/MLVU, evaluation/multiple_choice_evaluation/choice_bench.py, check_ans: the character before the first ")", else the
    whole reply."""
    end = reply.find(")")
    said = reply if end < 0 else reply[end - 1 : end]
    return Found(said) if len(said) == 1 and said in asked.letters else NOTHING


def _first_capital(reply: str, prefixes: Sequence[str], capitals: str) -> Found:
    for prefix in prefixes:
        reply = reply.replace(prefix, "")
    found = re.search(f"[{capitals}]", reply)
    return Found(found[0]) if found else NOTHING


def videomme(reply: str, asked: Asked) -> Found:
    """BradyFU/Video-MME, evaluation/eval_your_results.py, extract_characters_regex: phrases such as "The best answer is" are
    removed, then the first of the capitals A to D counts, also inside a word: "Answer: B" is A (copies such as VLMEvalKit's remove
    "Answer:" as well)."""
    return _first_capital(reply.strip(), _VIDEOMME_PREFIXES, "ABCD")


def longvideobench(reply: str, asked: Asked) -> Found:
    """EvolvingLMMs-Lab/lmms-eval, tasks/longvideobench/utils.py, parse_multi_choice_response, which its author calls the paper's:
    as Video-MME's, with A to E and both commas. The program draws a letter where there is none; here that is wrong."""
    return _first_capital(reply.strip(), _LONGVIDEO_PREFIXES, "ABCDE")


def vsibench(reply: str, asked: Asked) -> Found:
    """vision-x-nyu/thinking-in-space, lmms_eval/tasks/vsibench/utils.py, fuzzy_matching and exact_match: the text before the first
    space, without full stops at its end, is the letter in either case."""
    word = reply.split(" ")[0].rstrip(".").strip().lower()
    return next((Found(letter) for letter in asked.letters if letter.lower() == word), NOTHING)


def tempcompass(reply: str, asked: Asked) -> Found:
    """llyx97/TempCompass, eval_multi-choice.py with --disable_llm: the reply is a letter from A to D, or begins with "B." or
    "B)"."""
    reply = reply.replace("</s>", "").strip()
    known = reply[:1] in tuple("ABCD") and reply[1:2] in ("", ".", ")")
    return Found(reply[0]) if known else NOTHING


def tempcompass_yes_no(reply: str, asked: Asked) -> Found:
    """llyx97/TempCompass, eval_yes_no.py with --disable_llm: the reply begins with yes or no in either case, also as part of a
    word."""
    low = reply.replace("</s>", "").strip().lower()
    return next((Found(word) for word in ("yes", "no") if low.startswith(word)), NOTHING)
