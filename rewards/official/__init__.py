"""The benchmarks' own extractors: what each takes out of a reply, whatever else stands there. The answer level `official`.

    python -c "from mmrl.rewards.official import Asked, extract; \
      print(extract('mmmu', 'It is (B).', Asked('choice', 'B', number=4)))"

An extractor reads a reply as its benchmark's program does, so that a number may be compared with the published ones; the rules
are retold from those programs, which assets/fixtures/extractors holds up against them. Where two texts of one reply could be the
answer these programs take one of them, and some call a reply right for every truth: what is a hack of the benchmark, or left to
chance there, is wrong here (`DEVIATIONS`). They are for evaluation: as a reward, `native` cannot be talked into a second guess.
"""

from __future__ import annotations

from collections.abc import Mapping

from mmrl.errors import ConfigError, did_you_mean
from mmrl.rewards.official import choices, numbers, places, texts
from mmrl.rewards.official.asked import Asked, Extractor, Found

__all__ = ["Asked", "DEVIATIONS", "EXTRACTORS", "Extractor", "Found", "check_extractor", "extract"]

EXTRACTORS: Mapping[str, Mapping[str, Extractor]] = {
    "mmmu": {"choice": choices.mmmu, "open_text": texts.mmmu_open},
    "mathvista": {
        "choice": choices.mathvista,
        "numeric": numbers.mathvista,
        "open_text": texts.mathvista,
    },
    "mvbench": {"choice": choices.mvbench},
    "tempcompass": {"choice": choices.tempcompass, "boolean": choices.tempcompass_yes_no},
    "vsibench": {"choice": choices.vsibench, "numeric": numbers.vsibench},
    "longvideobench": {"choice": choices.longvideobench},
    "mlvu": {"choice": choices.mlvu},
    "videomme": {"choice": choices.videomme},
    "pixmo_count": {"counting": numbers.pixmo_count},
    "ocrbench": {"ocr": texts.whole},
    "pageocr": {"ocr": texts.whole},
    "videommmu": {"choice": choices.videommmu, "open_text": texts.videommmu_open},
    "refcoco": {"grounding": places.refcoco},
    "screenspot": {"gui_grounding": places.seeclick},
    "screenspot_points": {"gui_grounding": places.points},
}
"""Name -> task -> extractor. Sources stand beside each function."""

DEVIATIONS: Mapping[str, str] = {
    "chance": "the program draws an option at random; here that is wrong",
    "any": "the program calls the reply right whichever option is the truth; here it is wrong",
    "empty": "the program takes an empty reply for the shortest option; here it is wrong",
    "space": "a reply's white space at its ends, which the program takes for its first word, is no part of it here",
    "model": "the program asks a language model; here the reply's own text stands for what that would extract",
}
"""Where an extractor here differs from its program, and how."""


def check_extractor(name: object, task: str) -> str:
    """`name` when it is an extractor that reads the answers of `task`; raises ConfigError otherwise."""
    if name not in EXTRACTORS:
        raise ConfigError(
            f"unknown extractor {name!r} of task {task}; expected one of {', '.join(EXTRACTORS)}."
            f"{did_you_mean(str(name), EXTRACTORS)}"
        )
    if task not in EXTRACTORS[str(name)]:
        fitting = [known for known, kinds in EXTRACTORS.items() if task in kinds]
        raise ConfigError(
            f"expected an extractor for answers of task {task}, {', '.join(fitting) or 'of which there is none'}, "
            f"found {name!r}, which reads {', '.join(EXTRACTORS[str(name)])}; set answers: native, or another "
            "extractor"
        )
    return str(name)


def extract(name: str, reply: str, asked: Asked) -> Found:
    """What the extractor `name` finds in `reply`. Raises KeyError for a pair of name and task that EXTRACTORS has not."""
    return EXTRACTORS[name][asked.task](reply, asked)
