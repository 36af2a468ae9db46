"""From two texts to a reward in [0, 1]: edit distance, word errors, ROUGE, exact match, ANLS, token F1.

How texts are normalised is declared per task (`normalise`, a list of STEPS) and never global: an answer in code keeps
its spaces. Of several accepted answers the best one counts. Every mode is symmetric in nothing but its formula: the
prediction comes first, the truth second. Model text is bounded before anything is computed (`max_chars`), so that no
text takes longer than a few milliseconds, and a prediction beyond the bound earns 0: extra text never pays.

What appended junk does: `indel`, `cer`, `wer`, `ratio`, `rouge`, `token_f1` and `exact` never rise by text that shares
nothing with the truth. `indel` (right characters minus wrong ones) never rises unless more than half of what is appended
is right, so that filling up an unread page with likely characters does not pay, as it does with `ned` and `cer`.
`ned` and `anls` divide by the longer text: a wrong answer may gain a little from junk, a right one always loses.
`contains` is the rule of OCRBench, made for evaluation: a text that names many answers hits, so it is no training reward.

    python -c "from mmrl.rewards.text import make_text_reward as m; print(m('ned')('hallo', ['hello', 'hi']))"
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rapidfuzz.distance import Indel, LCSseq, Levenshtein

from mmrl.errors import ConfigError, DataError, did_you_mean, need_package

__all__ = [
    "MAX_CHARS",
    "MODES",
    "STEPS",
    "TextReward",
    "anls",
    "char_error_rate",
    "check_names",
    "check_number",
    "check_steps",
    "docvqa_anls",
    "edit_ratio",
    "is_coordinates",
    "make_text_reward",
    "net_characters",
    "normalise",
    "normalised_edit_distance",
    "rouge",
    "stream_safe",
    "token_f1",
    "unicode_form",
    "word_error_rate",
    "words",
]

MAX_CHARS = 8_192
"""Default bound of a text in characters, about two dense pages; edit distance takes a few milliseconds there."""
_MOST_CHARS = 65_536

_WORD = re.compile(  # one ideograph, kana or Thai letter is a word of its own: these scripts write no spaces
    r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
    r"|[^\W_\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+"
)
_ASCII_WORD = re.compile(r"[a-z0-9]+")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_MARKS = r"[\[\](){},.;:\s0-9+-]*"
_COORDINATES = re.compile(
    rf"\[{_MARKS}(?:(?:nan|inf(?:inity)?|(?<=[0-9])e(?=[0-9+-])){_MARKS})*", re.IGNORECASE
)
_PIECE = 2_048


def check_names(
    kind: str, function: Callable[..., Any], params: Mapping[str, Any], but: Sequence[str] = ()
) -> None:
    """Raise ConfigError, with a suggestion, for a key of `params` that is no parameter of `function`; `kind` names it."""
    known = [name for name in inspect.signature(function).parameters if name not in but]
    for name in params:
        if name not in known:
            raise ConfigError(
                f"unknown parameter {name!r} of {kind}; expected {', '.join(known) or 'none'}."
                f"{did_you_mean(name, known)}"
            )


def check_number(name: str, value: Any, low: float, high: float) -> float:
    """`value` when it is a number in [low, high]; raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(f"expected {name} to be a number in [{low:g}, {high:g}], found {value!r}")
    return float(value)


# normalisation

_MOST_MARKS = 30
_LEADING_MARKS = frozenset("\u0f73\u0f75\u0f81\uff9e\uff9f")
"""Characters of combining class 0 whose compatible form starts with a combining mark; Unicode has these five."""
_JOINER = "\u034f"


def stream_safe(text: str) -> str:
    """`text` with a grapheme joiner after each 30 combining marks in a row: Unicode's Stream-Safe Text Format (UAX 15).

    No writing has so many. Putting the marks of a longer run in order takes time that grows with its square. Linear.
    """
    if text.isascii():
        return text
    cuts, run = [0], 0
    for place, char in enumerate(text):
        if not unicodedata.combining(char) and char not in _LEADING_MARKS:
            run = 0
            continue
        run += 1
        if run > _MOST_MARKS:
            cuts.append(place)
            run = 1
    return _JOINER.join(
        text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)
    )


@functools.lru_cache(maxsize=32)  # the reward and each metric ask for the same text
def _unicode_form(text: str, form: Literal["NFC", "NFD", "NFKC", "NFKD"]) -> str:
    return unicodedata.normalize(form, stream_safe(text))


def unicode_form(text: str, form: Literal["NFC", "NFD", "NFKC", "NFKD"] = "NFKC") -> str:
    """unicodedata.normalize in linear time on any text, see `stream_safe`. Every text of a model is normalised here."""
    return text if text.isascii() else _unicode_form(text, form)


def _without_punctuation(text: str) -> str:
    return "".join(" " if unicodedata.category(char)[0] == "P" else char for char in text)


STEPS: Mapping[str, Callable[[str], str]] = {
    "nfkc": unicode_form,
    "lower": str.lower,
    "punctuation": _without_punctuation,
    "articles": functools.partial(_ARTICLES.sub, " "),
    "collapse": lambda text: " ".join(text.split()),
    "strip": str.strip,
}
"""Normalisation steps by name: Unicode NFKC, lower case, punctuation to spaces, a/an/the removed, runs of white space
to one space, white space stripped at both ends. They run in the order given."""


def check_steps(steps: Any) -> tuple[str, ...]:
    """Names of normalisation steps; raises ConfigError for unknown ones."""
    if isinstance(steps, str) or not isinstance(steps, Sequence):
        raise ConfigError(
            f"expected normalise as a list of {', '.join(STEPS)}, found {steps!r}; [] keeps the text as it is"
        )
    for step in steps:
        if step not in STEPS:
            raise ConfigError(
                f"unknown normalisation step {step!r}; expected some of {', '.join(STEPS)}."
                f"{did_you_mean(str(step), STEPS)}"
            )
    return tuple(steps)


def normalise(text: str, steps: Iterable[str]) -> str:
    """`text` after the named STEPS, in their order."""
    for step in steps:
        text = STEPS[step](text)
    return text


@functools.lru_cache(maxsize=1024)  # each completion of a group is compared with the same truths
def _known(truth: str, steps: tuple[str, ...]) -> str:
    return normalise(truth, steps)


def _bounded(text: str, steps: Iterable[str], limit: int) -> str | None:
    """`text` normalised, or None when it is longer than `limit` or grows beyond it (NFKC makes 18 letters of one)."""
    if len(text) > limit:
        return None
    if not text.isascii():
        grown = 0
        # piece by piece, so that a text that explodes costs one piece
        for start in range(0, len(text), _PIECE):
            grown += len(unicode_form(text[start : start + _PIECE]))
            if grown > limit:
                return None
    said = normalise(text, steps)
    return said if len(said) <= limit else None


def words(text: str) -> list[str]:
    """Runs of letters and digits, without underscores; a character of a script without spaces is a word. Linear time."""
    return _WORD.findall(text)


def is_coordinates(text: str) -> bool:
    """True for an answer that is nothing but numbers in brackets (a box, a point, [NaN]): no words, hence no text."""
    return _COORDINATES.fullmatch(text) is not None


# formulas, on normalised texts of bounded length


def normalised_edit_distance(prediction: str, truth: str) -> float:
    """Levenshtein distance on characters / length of the longer text, in [0, 1]; 0 for two empty texts. PageOCR's number."""
    return float(Levenshtein.normalized_distance(prediction, truth))


def char_error_rate(prediction: str, truth: str) -> float:
    """Levenshtein distance on characters / length of the truth; may exceed 1. Empty truth: 0 if both are empty, else 1."""
    return _error_rate(Levenshtein.distance(prediction, truth), len(prediction), len(truth))


def _error_rate(distance: int, length: int, true_length: int) -> float:
    return distance / true_length if true_length else float(length > 0)


def word_error_rate(prediction: str, truth: str) -> float:
    """Levenshtein distance on words (split at white space) / number of true words, as jiwer counts; may exceed 1."""
    said, meant = _numbered(prediction.split(), truth.split())
    return _error_rate(Levenshtein.distance(said, meant), len(said), len(meant))


def edit_ratio(prediction: str, truth: str) -> float:
    """2 * longest common subsequence / sum of lengths (Levenshtein.ratio, VLM-R1's fallback); 1 for two empty texts."""
    return float(Indel.normalized_similarity(prediction, truth))


def net_characters(prediction: str, truth: str, wrong_cost: float = 1.0) -> float:
    """max(0, right - wrong_cost * wrong) / length of the truth, in [0, 1]; 1 for two empty texts.

    `right` is the longest common subsequence, `wrong` the other characters of the prediction. With wrong_cost 1 it is
    1 - insertions and deletions / length of the truth (a substitution is one of each), clipped at 0.
    """
    if not truth:
        return float(not prediction)
    right = LCSseq.similarity(prediction, truth)
    return max(0.0, right - wrong_cost * (len(prediction) - right)) / len(truth)


def _numbered(*texts: Sequence[str]) -> list[list[int]]:
    """Words -> the same small integers in all texts, so that equality of numbers is equality of words."""
    numbers: dict[str, int] = {}
    return [[numbers.setdefault(word, len(numbers)) for word in text] for text in texts]


def _f1(hits: int, predicted: int, true: int) -> float:
    return 2 * hits / (predicted + true) if hits else 0.0


def token_f1(prediction: str, truth: str) -> float:
    """F1 of the two bags of words (SQuAD); 1 when both hold no words."""
    said, meant = Counter(words(prediction)), Counter(words(truth))
    if not said and not meant:
        return float(prediction == truth)
    return _f1((said & meant).total(), said.total(), meant.total())


def _ngrams(tokens: Sequence[int], n: int) -> Counter[tuple[int, ...]]:
    return Counter(zip(*(tokens[i:] for i in range(n)), strict=False))


@functools.cache
def _stemmer() -> Any:
    from rouge_score.tokenizers import DefaultTokenizer

    return DefaultTokenizer(use_stemmer=True)


@functools.lru_cache(maxsize=65_536)
def _stem(word: str) -> str:
    """The Porter stem of an English word as the rouge-score package cuts it; words of up to 3 letters stay."""
    return (
        str(_stemmer().tokenize(word)[0]) if len(word) > 3 and _ASCII_WORD.fullmatch(word) else word
    )


def rouge(
    prediction: str,
    truth: str,
    *,
    ascii_words: bool = False,
    skip_short: bool = True,
    stem: bool = False,
) -> float:
    """Mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L in [0, 1].

    `ascii_words` cuts words as the rouge-score package does, which drops every letter outside a-z. `skip_short` leaves
    ROUGE-2 out of the mean when the truth is one word; without it an equal one-word text scores 2/3, as in the package.
    `stem` compares English words by their Porter stems (the package's use_stemmer), so that "dogs" is "dog".
    """
    cut = [
        _ASCII_WORD.findall(text.lower()) if ascii_words else words(text.lower())
        for text in (prediction, truth)
    ]
    said, meant = _numbered(*([_stem(word) for word in text] if stem else text for text in cut))
    if not meant:
        return float(prediction == truth)
    values = [
        _f1(
            (_ngrams(said, n) & _ngrams(meant, n)).total(),
            max(0, len(said) - n + 1),
            max(0, len(meant) - n + 1),
        )
        for n in (1, 2)
        if len(meant) >= n or not skip_short
    ]
    values.append(_f1(LCSseq.similarity(said, meant), len(said), len(meant)))
    return math.fsum(values) / len(values)


def anls(prediction: str, truth: str, threshold: float = 0.5) -> float:
    """1 - normalised edit distance when that is at least `threshold`, else 0: ANLS without DocVQA's way with white space."""
    similarity = 1.0 - normalised_edit_distance(prediction, truth)
    return similarity if similarity >= threshold else 0.0


def docvqa_anls(prediction: str, truth: str, threshold: float = 0.5) -> float:
    """DocVQA's ANLS of one question and one accepted answer (docvqa.org's program, as in QwenLM/Qwen-VL
    eval_mm/infographicsvqa_eval.py): the edit distance of the texts in lower case with runs of white space as one space, over
    the length of the longer text *as it was written*, in upper case (where one letter may become two).

    White space therefore makes a wrong answer better ('x' and a thousand spaces before 'y' is 0.99 of any short truth): a rule
    for evaluation, no reward.
    """
    length = max(len(prediction.upper()), len(truth.upper()))
    distance = Levenshtein.distance(
        " ".join(prediction.lower().split()), " ".join(truth.lower().split())
    )
    similarity = 1.0 - (distance / length if length else 0.0)
    return similarity if similarity >= threshold else 0.0


# modes

_PAGE = ("nfkc", "collapse", "strip")
_SHORT = ("nfkc", "lower", "collapse", "strip")


@dataclass(frozen=True)
class TextReward:
    """reward(prediction, truth or accepted truths) in [0, 1]; the best accepted truth counts.

    `steps` normalise both texts. A prediction longer than `max_chars` (before or after normalisation) earns 0. Raises
    DataError when there is no truth, or one longer than `max_chars`.
    """

    mode: str
    formula: Callable[[str, str], float]
    steps: tuple[str, ...] = _SHORT
    max_chars: int = MAX_CHARS

    def __call__(self, prediction: str, truths: str | Sequence[str]) -> float:
        accepted = [truths] if isinstance(truths, str) else list(truths)
        if not accepted or not all(isinstance(truth, str) for truth in accepted):
            raise DataError(
                f"expected a text or a list of accepted texts as truth, found {truths!r:.80}"
            )
        known = [_known(truth, self.steps) for truth in accepted]
        longest = max(map(len, known))
        if longest > self.max_chars:
            raise DataError(
                f"expected a truth of up to {self.max_chars} characters, found {longest}; raise max_chars (up to "
                f"{_MOST_CHARS}) or split the text"
            )
        said = _bounded(prediction, self.steps, self.max_chars)
        return 0.0 if said is None else max(self.formula(said, truth) for truth in known)


def _ned() -> Callable[[str, str], float]:
    """1 - normalised edit distance on characters."""
    return lambda said, truth: 1.0 - normalised_edit_distance(said, truth)


def _indel(wrong_cost: float = 1.0) -> Callable[[str, str], float]:
    """Right characters minus `wrong_cost` * wrong ones, as a share of the truth, clipped at 0."""
    return functools.partial(
        net_characters, wrong_cost=check_number("wrong_cost", wrong_cost, 0, 10)
    )


def _cer() -> Callable[[str, str], float]:
    """clip(1 - character error rate, 0, 1)."""
    return lambda said, truth: max(0.0, 1.0 - char_error_rate(said, truth))


def _wer() -> Callable[[str, str], float]:
    """clip(1 - word error rate, 0, 1) (Video-R1, EasyVideoR1)."""
    return lambda said, truth: max(0.0, 1.0 - word_error_rate(said, truth))


def _ratio() -> Callable[[str, str], float]:
    """Levenshtein ratio (VLM-R1 for plain text)."""
    return edit_ratio


def _rouge(
    ascii_words: bool = False, skip_short: bool = True, stem: bool = False, short: int = 0
) -> Callable[[str, str], float]:
    """Mean F1 of ROUGE-1, ROUGE-2, ROUGE-L. A truth of at most `short` characters is met by itself in any case, with 1
    (EasyVideoR1 unified_rl: 10), because a truth of one word has no ROUGE-2."""
    limit = check_number("short", short, 0, _MOST_CHARS)
    if stem:
        need_package("rouge_score", "rouge with stem: true", "text")
    mean = functools.partial(
        rouge, ascii_words=bool(ascii_words), skip_short=bool(skip_short), stem=bool(stem)
    )
    if not limit:
        return mean
    return lambda said, truth: (
        1.0
        if len(truth) <= limit and said.lower().strip() == truth.lower().strip()
        else mean(said, truth)
    )


def _exact() -> Callable[[str, str], float]:
    """1 for equal texts after normalisation."""
    return lambda said, truth: float(said == truth)


def _anls(threshold: float = 0.5) -> Callable[[str, str], float]:
    """ANLS with its threshold, white space collapsed before the length is taken (`docvqa_anls` is the benchmark's metric)."""
    return functools.partial(anls, threshold=check_number("threshold", threshold, 0, 1))


def _token_f1() -> Callable[[str, str], float]:
    """F1 of the bags of words."""
    return token_f1


def _contains(max_extra: int = 200) -> Callable[[str, str], float]:
    """1 when the truth is part of the prediction, which may be at most `max_extra` characters longer. Evaluation only."""
    extra = check_number("max_extra", max_extra, 0, _MOST_CHARS)
    return lambda said, truth: float(
        bool(truth) and truth in said and len(said) <= len(truth) + extra
    )


MODES: Mapping[str, tuple[Callable[..., Callable[[str, str], float]], tuple[str, ...]]] = {
    "ned": (_ned, _PAGE),
    "indel": (_indel, _PAGE),
    "wer": (_wer, _PAGE),
    "cer": (_cer, _PAGE),
    "ratio": (_ratio, _PAGE),
    "rouge": (_rouge, _SHORT),
    "exact": (_exact, _SHORT),
    "anls": (_anls, _SHORT),
    "token_f1": (_token_f1, ("nfkc", "lower", "punctuation", "articles", "collapse", "strip")),
    "contains": (_contains, _SHORT),
}
"""Mode -> (formula factory, normalisation steps unless `normalise` says otherwise)."""


def make_text_reward(
    mode: str = "ned", *, normalise: Any = None, max_chars: int = MAX_CHARS, **params: Any
) -> TextReward:
    """The text reward called `mode`: callable(prediction, truth or accepted truths) -> [0, 1].

    `normalise` lists STEPS (None: the mode's own; []: none). Parameters by mode: anls(threshold), contains(max_extra),
    indel(wrong_cost), rouge(ascii_words, skip_short, stem); the others have none. Raises ConfigError for unknown names and
    values out of range.
    """
    if mode not in MODES:
        raise ConfigError(
            f"unknown text mode {mode!r}; expected one of {', '.join(MODES)}.{did_you_mean(mode, MODES)}"
        )
    factory, default = MODES[mode]
    check_names(f"text mode {mode!r}", factory, params)
    bound = int(check_number("max_chars", max_chars, 1, _MOST_CHARS))
    return TextReward(
        mode, factory(**params), default if normalise is None else check_steps(normalise), bound
    )
