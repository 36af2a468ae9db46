"""What the recipes' comments claim of settings, compared with the settings, the schema and the code that computes them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmrl.config import ADVANTAGE_SCALES, RunConfig, load_config
from mmrl.distributed.world import World
from mmrl.errors import ConfigError
from mmrl.registry import task_from_spec
from mmrl.robotics.config import load_embodied
from mmrl.training.advice import remarks
from mmrl.training.group_advantages import GroupAdvantages
from mmrl.types import RewardContext, Rollout, RolloutGroup, Sample, Score, StopReason, Turn

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = {path.stem: path for path in sorted(CONFIGS.glob("*.yaml")) if "suites" not in path.stem}


@dataclass(frozen=True)
class Line:
    """A commented line of a recipe: its section (top-level key), its own key, value and comment."""

    recipe: str
    section: str
    key: str
    value: str
    comment: str


def commented() -> list[Line]:
    """Every key of every recipe with the comment beside it and below it."""
    found: list[Line] = []
    for name, path in RECIPES.items():
        section = ""
        for text in path.read_text(encoding="utf-8").splitlines():
            if text[:1].isalpha():
                section = text.partition(":")[0]
            key, _, rest = text.strip().partition(":")
            value, mark, comment = rest.partition(" # ")
            if (
                text.strip().startswith("#")
                and found
                and found[-1].recipe == name
                and text[:1] == " "
            ):
                last = found.pop()
                found.append(
                    Line(
                        name,
                        last.section,
                        last.key,
                        last.value,
                        f"{last.comment} {text.strip(' #')}",
                    )
                )
            elif mark and not text.startswith("#"):
                found.append(Line(name, section, key.strip(" -"), value.strip(), comment.strip()))
    return found


LINES = commented()


def config_of(recipe: str, *overrides: str) -> RunConfig:
    tree = yaml.safe_load(RECIPES[recipe].read_text(encoding="utf-8"))
    return (load_embodied if "env" in tree else load_config)(RECIPES[recipe], list(overrides))


def lines(pattern: str, at_least: int) -> list[tuple[Line, re.Match[str]]]:
    """Comments that match; fewer than there were when this was written means that the test lost sight of them."""
    found = [(line, match) for line in LINES if (match := re.search(pattern, line.comment))]
    assert len(found) >= at_least, f"{pattern}: {len(found)}"
    return found


def test_merged_patches_are_counted_right() -> None:
    for line, match in lines(r"(\d+) merged patches", 15):
        assert int(line.value) == int(match.group(1)) * 28 * 28, line


def test_only_evaluated_checkpoints_are_saved_where_a_recipe_says_so() -> None:
    for line, _ in lines("multiple of eval.every", 10):
        c = config_of(line.recipe)
        assert c.train.save_every % c.eval.every == 0, line


def test_every_recipe_has_the_shared_values_its_comments_compare_with() -> None:
    for line, _ in lines("half of rollout.group_size", 1):
        c = config_of(line.recipe)
        assert c.algorithm.contrast.group_size == c.rollout.group_size / 2
    for line, _ in lines("four of each task", 1):
        c = config_of(line.recipe)
        assert c.train.prompts_per_step == 4 * len(c.data.train) and c.data.balance == "tasks"
    for line, _ in lines("all held-out rows of each task", 1):
        assert (
            "rows 40-49" in RECIPES[line.recipe].read_text(encoding="utf-8")
            and int(line.value) == 10
        )


def test_headers_name_the_settings_below_them() -> None:
    claims: list[tuple[str, str, Any]] = [
        (
            "grounding",
            "clip 0.2 / 0.28, frozen vision tower and projector",
            lambda c: (
                (c.algorithm.clip_low, c.algorithm.clip_high, set(c.model.freeze))
                == (0.2, 0.28, {"vision", "projector"})
            ),
        ),
        (
            "gui",
            "KL 0.04, lr 1e-6,",
            lambda c: (c.algorithm.kl.coef, c.optim.lr, c.rollout.group_size) == (0.04, 1e-6, 8),
        ),
        (
            "video_qa",
            "128 * 28 * 28 pixels each, 768 new tokens, KL 0.04, lr 1e-6 cosine",
            lambda c: (
                (
                    c.rollout.group_size,
                    c.algorithm.contrast.group_size,
                    c.data.video.num_frames,
                    c.data.video.max_pixels,
                    c.rollout.max_new_tokens,
                    c.algorithm.kl.coef,
                    c.optim.lr,
                    c.optim.schedule,
                )
                == (8, 4, 16, 128 * 28 * 28, 768, 0.04, 1e-6, "cosine")
            ),
        ),
        (
            "video_qa",
            "# without its division by the group's standard deviation",
            lambda c: c.algorithm.advantage_scale == "none",
        ),
        (
            "tgrpo_tiny",
            "Video-R1's numbers",
            lambda c: (
                (
                    c.algorithm.contrast.group_size,
                    c.algorithm.contrast.factor,
                    c.algorithm.contrast.threshold,
                    c.algorithm.contrast.bonus,
                )
                == (4, 0.8, 0.1, 0.3)
            ),
        ),
        ("libero", "as OpenVLA-OFT evaluates libero_object", lambda c: c.env.horizon == 280),
    ]
    for recipe, words, holds in claims:
        assert words in RECIPES[recipe].read_text(encoding="utf-8"), (
            f"{recipe}: the claim is gone, so must its line here"
        )
        assert holds(config_of(recipe)), (recipe, words)


@pytest.mark.parametrize(
    ("recipe", "words", "override"),
    [
        ("temporal_grounding", "filter: {key: reward}", "algorithm.filter={key: reward}"),
        ("temporal_grounding", "`freeze: []`", "model.freeze=[]"),
        ("video_qa", "`freeze: []`", "model.freeze=[]"),
        ("video_qa", "{kind: fps, fps: 2}", "data.video={kind: fps, fps: 2}"),
        ("video_mixed", "none: off", "algorithm.contrast.kind=none"),
        ("mixed", "ema_within", "algorithm.advantage_scale=ema_within"),
        ("video_qa", "pairs:", "algorithm.contrast.unit=pairs"),
        (
            "mixed",
            "{detection: {preset: v_triune}, ...}",
            "data.train.0.params={tasks: {detection: {preset: v_triune}}}",
        ),
        ("detection", "{preset: v_triune}", "data.train.0.params={preset: v_triune}"),
        ("gui", "{preset: gui_rcpo}", "data.train.0.params={preset: gui_rcpo}"),
        ("puzzles", "or task: maze", "data.train.0.task=maze"),
        *(
            ("temporal_grounding", preset, f"data.train.0.params={{preset: {preset}}}")
            for preset in ("temporal_r1", "videochat_r1", "easyvideo_r1", "onethinker")
        ),
    ],
)
def test_alternatives_that_comments_name_load(recipe: str, words: str, override: str) -> None:
    assert words in RECIPES[recipe].read_text(encoding="utf-8"), (
        f"{recipe}: the claim is gone, so must its line here"
    )
    source = config_of(recipe, override).data.train[0]
    task_from_spec(source.task, source.params)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_says_at_once_all_that_ppo_needs(recipe: str) -> None:
    ppo = ["algorithm.advantage=gae", "rollout.group_size=1"]
    needed: list[str] = []
    try:
        config_of(recipe, *ppo)
    except ConfigError as error:
        listed = re.search(r"settings must change; over a recipe: (.*)", str(error))
        scale = "advantage_scale batch" in str(error)
        one = "algorithm.advantage_scale=batch" if scale else "vla.value_head=true"
        needed = listed[1].split() if listed else [one]
    assert config_of(recipe, *ppo, *needed).algorithm.advantage == "gae"
    if recipe in ("grounding", "detection", "counting", "ocr", "puzzles", "gui", "tracking"):
        assert needed == [], "the line for PPO of docs/concepts.md names none"


EXAMPLES = {
    "algorithm.overlong_buffer": "16",
    "algorithm.router_replay.mode": "R3",
    "algorithm.contrast": "{kind: shuffle}",
    "algorithm.turns.gamma": "0.9",
    "rollout.tree.rounds": "1",
}
"""Values for keys that the table of published methods names without one."""


def published() -> list[tuple[str, list[str]]]:
    """Method and overrides of each row of the table in docs/concepts.md."""
    text = (CONFIGS.parent / "docs" / "concepts.md").read_text(encoding="utf-8")
    part = text.split("## Published methods, and the settings that make them")[1].split("\n## ")[0]
    found = []
    for row in re.findall(r"^\| (.+?) \| (.+) \|$", part, re.MULTILINE)[1:]:
        # of alternatives the first: what follows an `or` says the same key again
        given: dict[str, str] = {}
        for key, value in re.findall(r"`([a-z_.]+)(?:: ([^`]+))?`", row[1]):
            given.setdefault(key, value or EXAMPLES[key])
        found.append((row[0], [f"{key}={value}" for key, value in given.items()]))
    return found


@pytest.mark.parametrize(("method", "overrides"), published())
def test_the_table_of_published_methods_loads(method: str, overrides: list[str]) -> None:
    recipe = (
        "video_qa" if "T-GRPO" in method else "zoom" if "several turns" in method else "grounding"
    )
    config = config_of(recipe, *overrides)
    if (
        method == "GRPO"
    ):  # DeepSeekMath's objective, arXiv 2402.03300, equation 3, as most have it today: without KL
        a = config.algorithm
        assert (a.advantage, a.advantage_scale, a.loss_aggregation) == (
            "grpo",
            "std",
            "sequence_mean",
        )
        assert a.clip_low == a.clip_high == 0.2 and a.dual_clip is None and not a.dynamic_sampling
    if method == "DAPO":  # arXiv 2503.14476
        a = config.algorithm
        assert (a.clip_low, a.clip_high, a.loss_aggregation) == (0.2, 0.28, "token_mean")
        assert a.dual_clip is None and a.dynamic_sampling and a.overlong == "soft"


def test_onethinkers_name_stands_where_its_rule_is_used() -> None:
    for line in (line for line in LINES if line.key == "advantage_scale"):
        if "OneThinker" in line.comment:
            assert config_of(line.recipe).algorithm.advantage_scale == "ema", line
    named = {
        line.recipe
        for line in LINES
        if line.key == "advantage_scale" and "OneThinker" in line.comment
    }
    assert named == {"mixed", "mixed_tiny", "video_mixed", "video_tiny"}


# T-GRPO: can the bonus act?


def step_of(recipe: str, right: tuple[int, ...] = (1, 4, 6)) -> list[RolloutGroup]:
    """Three groups of 8 real answers to a choice question, so many of each right and all in form, scored by the recipe's own rule
    for choice questions. Shuffled frames make all answers wrong in the first two and leave all right in the last, whose order
    does not matter."""
    source = config_of(recipe).data.train[0]
    params = {"tasks": {"choice": {}}, **source.params} if source.task == "mixed" else source.params
    if source.task not in ("mixed", "choice"):
        params = {}
    task = task_from_spec("choice", params["tasks"]["choice"] if "tasks" in params else params)
    sample = Sample("q", "choice", "src", "Which way?", "B", params={"options": ["left", "right"]})
    context = RewardContext(1, 10, None)  # type: ignore[arg-type]

    def answer(text: str) -> Rollout:
        score = task.score(sample, text, context)
        assert score.parsed, (text, score)
        return Rollout((Turn((1,), text, (0.0,), StopReason.EOS),), score)

    gold, wrong = answer(task.gold(sample, context)), answer(task.wrong(sample, context))
    assert (
        isinstance(gold.score, Score)
        and gold.score.parts["accuracy"] > wrong.score.parts["accuracy"]
    )  # type: ignore[union-attr]
    return [
        RolloutGroup(
            sample,
            (gold,) * n + (wrong,) * (8 - n),
            key=(1, i, 0),
            view="shuffle",
            contrast=((wrong, gold)[i == len(right) - 1],) * 4,
        )
        for i, n in enumerate(right)
    ]


def acts(config: RunConfig, groups: list[RolloutGroup]) -> bool:
    """Whether the bonus changes any advantage by more than the divisor's epsilon does."""

    def advantages(bonus: float) -> list[float]:
        changed = config.model_copy(deep=True)
        changed.algorithm.contrast.bonus = bonus
        found = GroupAdvantages(changed, World()).assign(groups)
        return [a for key in sorted(found) for a in found[key]]

    pairs = zip(advantages(0.0), advantages(config.algorithm.contrast.bonus), strict=True)
    return max(abs(a - b) for a, b in pairs) > 1e-3


WITH_CONTRAST = [
    name for name in RECIPES if "kind: shuffle" in RECIPES[name].read_text(encoding="utf-8")
]


@pytest.mark.parametrize("recipe", WITH_CONTRAST)
def test_the_bonus_acts_on_right_or_wrong_answers_or_the_recipe_says_that_it_does_not(
    recipe: str,
) -> None:
    config, text = config_of(recipe), RECIPES[recipe].read_text(encoding="utf-8")
    found = acts(config, step_of(recipe))
    assert found == ("the bonus\n  # cancels exactly" not in text), recipe
    assert found != any("cancels exactly" in line for line in remarks(config)), (
        "and so does the run when it starts"
    )
    assert set(WITH_CONTRAST) == {"tgrpo_tiny", "video_mixed", "video_qa"}


def test_the_settings_that_are_said_to_let_it_act_do() -> None:
    """The comments of video_qa.yaml and tgrpo_tiny.yaml, the remark and ContrastConfig: only std and plain cancel it; the common
    std of several groups does so where all of them get the bonus."""
    groups = step_of("video_qa")
    for scale in ("batch", "batch_rewards", "ema", "ema_within", "none"):
        assert acts(config_of("video_qa", f"algorithm.advantage_scale={scale}"), groups[:2]) == (
            scale == "none"
        ), scale
    for scale in ADVANTAGE_SCALES["grpo"]:
        assert acts(config_of("video_qa", f"algorithm.advantage_scale={scale}"), groups) == (
            scale != "std"
        ), scale
    assert acts(
        config_of("video_qa", "algorithm.advantage_scale=std", "algorithm.reward_aggregation=gdpo"),
        groups,
    )
