"""What keeps reinforcement learning from rewards that are checked from learning, seen in the metrics of one step.

    for finding in diagnose(row, config.alarms):
        print(finding.name, finding.source, finding.message)

A group teaches something only where its rewards differ, so a run dies silently of four things: answers that do not keep the format,
answers cut before they are complete, prompts that are all too hard or all too easy, and rewards that fail. A fifth looks like
success: one answer to every prompt, where the reward pays for guessing (mmrl.training.collapse); a critic (PPO) may be further
from the returns than a constant would be, and a judge may part from what is known to be right. mmrl.training.alarms raises an
alarm where one of them lasts, `mmrl try` says it before a run is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmrl.config import AlarmConfig

__all__ = ["DIAGNOSES", "Finding", "diagnose", "signal_share", "trained"]

DIAGNOSES = (
    "parse_rate",
    "no_signal",
    "zero_gradient",
    "truncated",
    "same_answer",
    "reward_failures",
    "critic",
    "judge",
)
Row = Mapping[str, Any]
# the commonest truth's share lies at least this far below the commonest answer's
_TRUTHS_DIFFER = 0.2
_SPREAD = 0.02  # standard deviation of rewards below which there is nothing for a critic to explain
# a mean reward: where one answer earns no more, it is mmrl.training.alarms' reward_stuck
_PAYS_NOTHING = 0.01


@dataclass(frozen=True)
class Finding:
    """What is wrong in a step, and what to do. `source`: a data source, '' for the whole step."""

    name: str
    message: str
    source: str = ""
    severity: str = "error"


def trained(row: Row) -> bool:
    """Whether a gradient changed the weights in this step."""
    return (row.get("train/grad_norm") or 0.0) > 0.0


def signal_share(row: Row, where: str = "train") -> float | None:
    """Share of the groups that could be judged whose rewards differ, by the run's own filter; None where there were none."""
    asked, failed = row.get(f"{where}/groups/asked"), row.get(f"{where}/groups/failed") or 0.0
    # of prompts, of episodes
    kept = row.get(f"{where}/groups/kept", row.get(f"{where}/groups/trained"))
    return None if kept is None or not asked or asked <= failed else kept / (asked - failed)


def diagnose(row: Row, config: AlarmConfig) -> list[Finding]:
    """What is wrong in this step's metrics (a row of metrics.jsonl); [] where nothing is."""
    found = []
    # of a robot parse_rate counts episodes that finished: see task_failed and prompts_failed
    if "train/episodes" not in row:
        found += _formats(row, config)
        if (cut := row.get("train/clipped_share")) is not None and cut >= config.truncated:
            found.append(
                Finding(
                    "truncated",
                    f"{cut:.0%} of the answers are cut at rollout.max_new_tokens: raise it, or lead the "
                    "policy to shorter answers (algorithm.overlong: soft)",
                    severity="warning",
                )
            )
        found += _collapses(row, config)
        found += _judges(row, config)
        if (failed := _reward_failures(row)) > config.reward_failures:
            found.append(
                Finding(
                    "reward_failures",
                    f"{failed:.0%} of the rewards raised, hung or crashed ({_reasons(row)}), and "
                    "these completions are not trained on: fix the reward; rollouts/ has their "
                    "texts, `mmrl score` scores them again",
                    severity="warning",
                )
            )
    found += _critic(row, config)
    if signal_share(row) == 0.0:
        found.append(Finding("no_signal", _no_signal(row)))
    elif signal_share(row) and row.get("train/grad_norm") == 0.0:
        found.append(
            Finding(
                "zero_gradient",
                "groups have signal, but the gradient is exactly 0: each of their tokens is masked, "
                "clipped or without advantage; check algorithm.overlong (mask), clip_low and "
                "clip_high, and model.freeze",
            )
        )
    return found


def _critic(row: Row, config: AlarmConfig) -> list[Finding]:
    """Values that are far from what they should predict; not where rewards hardly differ, so that rounding is what is left."""
    explained, spread = row.get("train/critic/explained_variance"), row.get("train/reward/std")
    if (
        explained is None
        or explained >= config.explained_variance
        or (spread is not None and spread < _SPREAD)
    ):
        return []
    value, target = (row.get(f"train/critic/{name}") for name in ("value", "return"))
    return [
        Finding(
            "critic",
            f"the critic's values explain {explained:.2g} of the variance of the returns (1: all, 0: no more "
            f"than a constant would; mean value {value:.3g}, mean return {target:.3g}), and advantages are made "
            "of them: lower algorithm.critic.lr where values swing, raise it where they lag, or let the critic "
            "learn alone at first (algorithm.critic.warmup)",
            severity="warning",
        )
    ]


def _formats(row: Row, config: AlarmConfig) -> list[Finding]:
    """The whole step where nearly nothing parses, else each source of which nearly nothing does."""
    if (rate := row.get("train/parse_rate")) is not None and rate <= config.parse_rate:
        return [Finding("parse_rate", _unreadable(row, "train", rate, "the answers"))]
    suffix = "/parse_rate"
    sources = sorted(
        name[len("train/") : -len(suffix)]
        for name in row
        if name.startswith("train/") and name.endswith(suffix) and name != f"train{suffix}"
    )
    return [
        Finding(
            "parse_rate",
            _unreadable(row, f"train/{s}", rate, f"the answers of source '{s}'"),
            s,
            "warning",
        )
        for s in sources
        if (rate := row[f"train/{s}{suffix}"]) is not None and rate <= config.parse_rate
    ]


def _judges(row: Row, config: AlarmConfig) -> list[Finding]:
    """A judge that parts from the rule on the prompts held out for that, or from itself when a pair's order is swapped."""
    asked = row.get("train/judge_audited") or 0.0
    swapped = row.get("train/judge_swapped") or 0.0
    if asked and (agreed := (row.get("train/judge_agreed") or 0.0) / asked) < config.judge:
        kind = (row.get("train/judge_too_kind") or 0.0) / asked
        said = (
            f"the judge agrees with the rule on {agreed:.0%} of the answers held out to compare them, and calls {kind:.0%} of them "
            "right that are wrong: the policy may have learned what pleases the judge. Look at rollouts/ (detail: judge); take a "
            "stricter rubric, a stronger judge, or use hybrid, which asks it only where the rule cannot tell"
        )
    elif (
        swapped and (agreed := (row.get("train/judge_swap_agreed") or 0.0) / swapped) < config.judge
    ):
        said = (
            f"only {agreed:.0%} of the comparisons name the same answer when their order is swapped: the judge prefers a place, "
            "and its verdicts are mostly ties; take a stronger judge, or a rubric with clearer criteria"
        )
    else:
        return []
    return [Finding("judge", said, severity="warning")]


def _collapses(row: Row, config: AlarmConfig) -> list[Finding]:
    """The whole step in which nearly all prompts get one answer, else each source of which they do."""
    if (found := _collapsed(row, "train", config)) is not None:
        return [Finding("same_answer", found, severity="warning")]
    suffix = "/same_answer"
    sources = sorted(
        name[len("train/") : -len(suffix)]
        for name in row
        if name.startswith("train/") and name.endswith(suffix) and name != f"train{suffix}"
    )
    return [
        Finding("same_answer", found, s, "warning")
        for s in sources
        if (found := _collapsed(row, f"train/{s}", config, f" of source '{s}'")) is not None
    ]


def _collapsed(row: Row, where: str, config: AlarmConfig, whose: str = "") -> str | None:
    """What to say of the prompts below `where` when their answers are one answer that pays, their truths are not; else None."""
    share, reward = row.get(f"{where}/same_answer"), row.get(f"{where}/reward/mean")
    truths = row.get(f"{where}/same_truth") or 0.0  # without truths nothing speaks for one answer
    if (
        share is None
        or share < config.same_answer
        or share - truths < _TRUTHS_DIFFER
        or not reward
        or reward <= _PAYS_NOTHING
    ):
        return None
    known = (
        f", their commonest truth for {truths:.0%}"
        if row.get(f"{where}/same_truth") is not None
        else ""
    )
    return (
        f"one answer, or near copies of it, is given to {share:.0%} of the different prompts{whose}{known}, and earns "
        f"{reward:.3g} on average: the policy has collapsed to a guess that the reward pays. Look at rollouts/; take a reward "
        "that cannot be guessed (assets/results/hack_search.md names those that can), data whose truths differ more, a lower "
        "optim.lr or a KL term"
    )


def _unreadable(row: Row, where: str, rate: float, whose: str) -> str:
    cut = row.get(f"{where}/clipped_share")
    if cut is not None and cut >= 0.5:
        fix = f"{cut:.0%} are cut before they are complete: raise rollout.max_new_tokens, or ask for a shorter format"
    else:
        fix = (
            "look at their texts in rollouts/; warm-start the model with `mmrl sft`, or ask for a format that it keeps "
            "(data.train[].params: prompt, answer_format, preset), or read its dialect (answers: native; `mmrl try` says how "
            "many answers that would read)"
        )
    reasons = _reasons(row, where)
    return f"{rate:.0%} of {whose} keep the format{f' ({reasons})' if reasons else ''}; {fix}"


def _reasons(row: Row, where: str = "train") -> str:
    """The commonest reasons why completions failed, with their shares."""
    prefix = f"{where}/failed/"
    shares = sorted(
        ((v, k[len(prefix) :]) for k, v in row.items() if k.startswith(prefix) and v), reverse=True
    )
    return ", ".join(f"{reason} {share:.0%}" for share, reason in shares[:3])


def _reward_failures(row: Row) -> float:
    return sum(v for k, v in row.items() if k.startswith("train/failed/reward_") and v)


def _no_signal(row: Row) -> str:
    asked = row["train/groups/asked"]
    weak = row.get("train/groups/weak") or 0.0
    if weak:
        return (
            f"none of the {asked:g} groups is trained on: in {weak:g} of them the rewards differ, and algorithm.filter or "
            "data.selection leaves them out; widen filter.low and filter.high, or lower the selection's threshold"
        )
    said = f"in none of the {asked:g} groups did the rewards differ, so nothing is trained on"
    if "train/episodes" in row:
        rate = row.get("train/success_once") or 0.0
        return f"{said}: {rate:.0%} of the episodes succeed. " + (
            "The tasks are solved: choose harder ones"
            if rate > 0.5
            else "Judge the warm start with `mmrl eval`, give it more "
            "time (env.horizon), more episodes of a state (rollout.group_size), or rewards on the way (rl.reward: shaped)"
        )
    easy, hard = (row.get(f"train/groups/{name}") or 0.0 for name in ("all_one", "all_zero"))
    mean = row.get("train/reward/mean")
    shown = "" if mean is None else f" (mean reward {mean:.3g})"
    if easy > asked / 2:
        return (
            f"{said}: every answer is right{shown}. Take harder prompts (data.train[].pass_rate), or a higher "
            "rollout.temperature"
        )
    if hard > asked / 2:
        return (
            f"{said}: every answer scores 0{shown}. Warm-start the model (`mmrl sft`), take easier prompts or a larger model, "
            "or a reward that grades (data.train[].params: mode); a larger rollout.group_size finds rarer successes"
        )
    return (
        f"{said}{shown}. Raise rollout.temperature or rollout.group_size, or take another reward or filter "
        "(algorithm.filter, data.selection)"
    )
