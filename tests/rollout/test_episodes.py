"""Environments of several turns: what the engine is asked, what the policy is shown, how rollouts end and fail, what is trained."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from PIL import Image

import mmrl
from mmrl.config import DataSource, load_config
from mmrl.data.sources import LoadedSource
from mmrl.distributed.world import World
from mmrl.errors import ConfigError, DataError, MediaError, RewardError
from mmrl.evaluation.evaluate import evaluate
from mmrl.evaluation.rescore import rescore
from mmrl.evaluation.settings import EvalSettings
from mmrl.registry import task_from_spec
from mmrl.report.build import build_report
from mmrl.rollout import PrefillOnceEngine, Request, SamplingSettings
from mmrl.rollout.episodes import (
    Beginning,
    Spent,
    begin,
    begin_groups,
    check_environments,
    play,
    play_written,
    side_by_side,
)
from mmrl.rollout.group_generator import GroupGenerator
from mmrl.rollout.prompt_rollouter import PromptRollouter
from mmrl.training.runlog import rollout_rows
from mmrl.training.trainer import Trainer
from mmrl.types import Rollout, Sample, StopReason
from mmrl.video.media import ORIENTATION_PARAM
from mmrl.workers.scorer import Scorer
from tests.kits.engine_kit import ALBUM, REPO, Album, policy, read_jsonl, tiny_folder

SAMPLING = SamplingSettings(max_new_tokens=5)
LIMIT = 1e-5


def chat(words: str, pictures: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "role": "user",
            "content": [
                *({"type": "image"} for _ in range(pictures)),
                {"type": "text", "text": words},
            ],
        }
    ]


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (56, 84, 3), dtype=np.uint8)


class Counting(mmrl.Environment):
    """Shows a picture after each turn; rewards are shares of letters from a to m; ends after `params['turns']`."""

    max_turns: ClassVar[int] = 4
    made: ClassVar[list[Counting]] = []

    def __init__(self) -> None:
        self.closed = self.turns = 0
        self.made.append(self)

    def reset(self, sample: Sample, seed: int) -> mmrl.Observation:
        self.sample, self.seed = sample, seed
        if sample.question == "broken reset":
            raise RuntimeError("no display")
        return mmrl.Observation(chat(sample.question, 1), [picture(0)])

    def step(self, turn: mmrl.Turn) -> mmrl.Outcome:
        self.turns += 1
        last = self.turns >= self.sample.params.get("turns", 2)
        if self.sample.question == "broken step" and self.turns == 2:
            raise SystemExit("the browser died")
        share = sum("a" <= c <= "m" for c in turn.text) / max(1, len(turn.text)) / 4
        if last:
            return mmrl.Outcome(reward=share, terminated=True, info={"correct": 1.0})
        return mmrl.Outcome(
            mmrl.Observation(chat(f"turn {self.turns}", 1), [picture(self.turns)]), reward=share
        )

    def close(self) -> None:
        self.closed += 1


class Play(Album):
    """The album's rows, played."""

    part_names = ("reward",)

    def environment(self, template: mmrl.Template) -> mmrl.Environment:
        return Counting()

    def load(self, path: str) -> Iterable[Sample]:
        return [replace(s, images=()) for s in super().load(path)]

    def messages(self, sample: Sample, template: mmrl.Template) -> list[dict[str, Any]]:
        return chat(sample.question)


def sample(question: str = "yes", **params: Any) -> Sample:
    return Sample("1", "play", "plays", question, None, params=params)


def config_of_nothing() -> Any:
    return load_config(None, ["data.train=[{task: grounding, path: x}]"])


def played(
    question: str = "yes", count: int = 3, greedy: bool = False, **params: Any
) -> tuple[Rollout, ...]:
    p = policy()
    episodes = begin(p, sample(question, **params), Play(), count, (3, 1), greedy=greedy)
    (rollouts,) = play(p, PrefillOnceEngine(p), [episodes], SAMPLING)
    return rollouts


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Counting.made.clear()


def test_every_turn_is_shown_all_that_was_before_it() -> None:
    p, rollouts = policy(), played(turns=3)
    assert [len(r.turns) for r in rollouts] == [3, 3, 3] and len(
        {r.turns[0].prompt.fingerprint for r in rollouts}
    ) == 1
    assert len({id(r.turns[0].prompt) for r in rollouts}) == 1, "siblings share their first prompt"
    assert len({env.seed for env in Counting.made}) == 1, "and begin alike"
    for r in rollouts:
        assert r.terminated and not r.truncated and r.error is None and r.info == {"correct": 1.0}
        assert r.score is not None and r.score.value == pytest.approx(
            sum(t.reward for t in r.turns)
        )
        for number, (before, after) in enumerate(zip(r.turns, r.turns[1:], strict=False), 1):
            shown = after.prompt.ids_P[before.prompt.length :].tolist()
            assert tuple(shown[: len(before.token_ids)]) == before.token_ids
            tail = p.processor.tokenizer.decode(shown[len(before.token_ids) :])
            assert tail.endswith(f"turn {number}<|im_end|>\n<|im_start|>assistant\n")
            assert tail.startswith("\n" if before.stop is StopReason.EOS else "<|im_end|>\n"), (
                "the end of a message is told once"
            )
            assert len(after.prompt.visuals) == number + 1
    assert [env.closed for env in Counting.made] == [1, 1, 1]


def test_the_log_probs_of_a_rollout_are_those_of_training() -> None:
    p = policy()
    turns = [t for r in played(turns=3) for t in r.turns]
    with torch.no_grad():
        found = p.evaluate([t.prompt for t in turns], [t.token_ids for t in turns])
    assert (found.logp_N - torch.tensor([x for t in turns for x in t.logprobs])).abs().max() < LIMIT
    assert found.num_tokens < sum(t.prompt.length + len(t.token_ids) for t in turns) / 2


def test_a_rollout_does_not_depend_on_what_is_played_beside_it() -> None:
    alone = played(turns=2)
    p = policy()
    groups = [
        begin(p, sample("no", turns=3), Play(), 2, (9,)),
        begin(p, sample(turns=2), Play(), 3, (3, 1)),
    ]
    beside = play(p, PrefillOnceEngine(p), groups, SAMPLING)[1]
    assert [[t.token_ids for t in r.turns] for r in beside] == [
        [t.token_ids for t in r.turns] for r in alone
    ]
    assert len({r.turns[1].token_ids for r in alone}) > 1, (
        "siblings have noise of their own at later turns too"
    )
    assert (
        played(count=1, greedy=True)[0].turns[1].token_ids
        == played(count=1, greedy=True)[0].turns[1].token_ids
    )


def test_the_first_turn_is_one_request_with_the_noise_of_plain_answers() -> None:
    p = policy()
    (first,) = PrefillOnceEngine(p).generate(
        [Request(played()[0].turns[0].prompt, 3, (3, 1))], SAMPLING
    )
    assert [t.token_ids for t in first] == [r.turns[0].token_ids for r in played()]


def test_the_limit_on_turns_truncates() -> None:
    for r in played(turns=99):
        assert (
            len(r.turns) == Counting.max_turns
            and r.truncated
            and not r.terminated
            and r.error is None
        )
        assert r.score is not None and r.score.value == pytest.approx(
            sum(t.reward for t in r.turns)
        )


def test_an_environment_that_fails_costs_its_rollout() -> None:
    for r in played("broken step"):
        assert (
            re.fullmatch(
                r"reward_error: environment \(test_episodes\.py:\d+\): SystemExit: the browser died",
                str(r.error),
            )
            and len(r.turns) == 2
        )
        assert r.score is not None and r.score.value == 0 and not r.score.parsed
    for r in played("broken reset"):
        assert str(r.error).startswith("reward_error: environment (test_episodes.py:")
        assert str(r.error).endswith("RuntimeError: no display")
    assert all(env.closed == 1 for env in Counting.made)


def test_an_environment_says_whether_a_turn_could_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Counting.step
    monkeypatch.setattr(
        Counting, "step", lambda self, turn: replace(step(self, turn), parsed=False)
    )
    for r in played():
        assert r.error is None and r.score is not None and not r.score.parsed
        assert r.score.value == pytest.approx(sum(t.reward for t in r.turns)), "what it paid counts"


def test_what_an_evaluation_could_not_judge_is_counted() -> None:
    p, task = policy(), Play()
    rows = (sample("broken step"), sample("yes"), sample("broken reset"))
    source = LoadedSource(DataSource(task="grounding", path="x"), task, rows)
    with Scorer([("grounding", {})], [task], workers=0, timeout_s=1.0) as scorer:
        found = evaluate(
            p, PrefillOnceEngine(p), scorer, [source], EvalSettings(SAMPLING, samples=0)
        )
    lost, why = found.unjudged
    assert lost == 2 and why.endswith("the browser died")


class Odd(Counting):
    """Answers with what it must not."""

    answers: ClassVar[Any] = None

    def step(self, turn: mmrl.Turn) -> mmrl.Outcome:
        return self.answers()


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (
            lambda: mmrl.Outcome(),
            "expected an observation or the end (terminated, truncated), found neither",
        ),
        (
            lambda: mmrl.Outcome(reward=float("nan"), terminated=True),
            "expected a finite reward, found nan",
        ),
        (
            lambda: mmrl.Outcome(reward=7.0, terminated=True),
            "expected a value in [0, 1], found 7.0",
        ),
        (
            lambda: mmrl.Outcome(terminated=True, info={"x": float("inf")}),
            "expected finite metrics, found {'x': inf}",
        ),
        (
            lambda: mmrl.Outcome(mmrl.Observation(chat("more", 1))),
            "expected one image item per picture, found 1 items for 0",
        ),
        (
            lambda: mmrl.Outcome(mmrl.Observation(chat("more", 1), [np.zeros((4, 4))])),
            "expected a picture as uint8 (H, W, 3)",
        ),
        (lambda: None, "'NoneType' object has no attribute"),
    ],
)
def test_what_an_environment_must_not_answer_is_said(
    answers: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Odd, "answers", staticmethod(answers))
    monkeypatch.setattr(Play, "environment", lambda self, template: Odd())
    assert words in str(played(count=1)[0].error)


def test_a_prompt_that_cannot_be_used_is_the_samples_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        Counting, "reset", lambda self, sample, seed: mmrl.Observation(chat("one", 2), [picture(0)])
    )
    with pytest.raises(
        DataError, match="expected one image item per picture, found 2 items for 1 pictures"
    ):
        played()
    assert Counting.made and all(env.closed == 1 for env in Counting.made)


def test_settings_about_one_answer_are_refused() -> None:
    task = [(Play(), {"play"})]
    for override in (
        "algorithm.contrast.kind=mask",
        "algorithm.overlong=soft",
        "algorithm.offline.per_group=1",
        "eval.views=[mask]",
    ):
        config = load_config(
            None,
            ["data.train=[{task: grounding, path: x}]", "algorithm.overlong_buffer=8", override],
        )
        with pytest.raises(
            ConfigError,
            match=r"expected no \S+.* with task '.*', whose rollouts take several turns",
        ):
            check_environments(config, task)
        check_environments(config, [(Album(), {"album"})])


def test_an_evaluation_refuses_views() -> None:
    p, source = policy(), LoadedSource(DataSource(task="grounding", path="x"), Play(), (sample(),))
    settings = EvalSettings(SAMPLING, samples=0, views=("mask",))
    with Scorer([("grounding", {})], [source.task], workers=0, timeout_s=1.0) as scorer:
        with pytest.raises(
            ConfigError,
            match=r"expected no views with task '.*', whose rollouts take several turns",
        ):
            evaluate(p, PrefillOnceEngine(p), scorer, [source], settings)
        found = evaluate(p, PrefillOnceEngine(p), scorer, [source], replace(settings, views=()))
    assert [row["turns"][-1] for row in found.predictions] == [
        row["text"] for row in found.predictions
    ]
    assert found.metric("greedy/correct") == 1.0


class Ending:
    """A rollout engine that somebody ends."""

    def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> Any:
        raise KeyboardInterrupt


def _unusable(self: Counting, sample: Sample, seed: int) -> mmrl.Observation:
    if sample.question == "unusable" or (sample.question == "third" and len(self.made) == 3):
        raise MediaError("expected a picture, found none", kind="missing")
    return mmrl.Observation(chat(sample.question, 1), [picture(0)])


@pytest.mark.parametrize("how", ["training", "evaluation"])
def test_all_environments_of_a_wave_are_reset_at_once(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each reset waits for all others: one group after the other would wait for ever."""
    questions = ["yes", "unusable", "no"]
    together = threading.Barrier(3 * len(questions), timeout=60)

    def reset(self: Counting, sample: Sample, seed: int) -> mmrl.Observation:
        together.wait()
        self.sample = sample
        return _unusable(self, sample, seed)

    monkeypatch.setattr(Counting, "reset", reset)
    monkeypatch.setattr(Counting, "concurrent", True)
    samples = tuple(replace(sample(q, turns=1), id=q) for q in questions)
    source = LoadedSource(DataSource(task="grounding", path="x"), Play(), samples)
    p = policy()
    with Scorer([("grounding", {})], [source.task], workers=0, timeout_s=1.0) as scorer:
        if how == "evaluation":
            settings = EvalSettings(SAMPLING, samples=2, on_error="record")
            found = evaluate(p, PrefillOnceEngine(p), scorer, [source], settings).predictions
            bad = [str(row["score"].get("reason", "")).startswith("input_error") for row in found]
            assert bad == [row["id"] == "unusable" for row in found] and sum(bad) == 3
        else:
            config = play_run(tmp_path, "wave", "data.on_error=record")
            world = World(torch.device("cpu"))
            rollouter = PromptRollouter(config, p, PrefillOnceEngine(p), scorer, [source], world)
            groups = list(rollouter.groups(1))
            assert sorted(len(g.rollouts) for g in groups) == [3, 3]
    assert {env.closed for env in Counting.made} == {1}


def test_what_many_environments_show_is_encoded_before_more_are_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pictures of a screen for all rollouts of a step at once would fill the memory."""
    monkeypatch.setattr("mmrl.rollout.episodes._MOST_THREADS", 6)
    events: list[str] = []
    reset = Counting.reset

    def noted(self: Counting, sample: Sample, seed: int) -> mmrl.Observation:
        events.append("reset")
        return reset(self, sample, seed)

    monkeypatch.setattr(Counting, "reset", noted)
    monkeypatch.setattr(Counting, "shown", lambda self, sizes: events.append("shown"))
    asked = [Beginning(sample(), Play(), 3, (n,)) for n in range(5)]
    groups = begin_groups(policy(), asked)
    assert [len(group) for group in groups if isinstance(group, list)] == [3] * 5
    wave = ["reset"] * 6 + ["shown"] * 6
    assert events == wave * 2 + ["reset"] * 3 + ["shown"] * 3


def test_an_interrupt_drops_the_calls_that_wait_for_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mmrl.rollout.episodes._MOST_THREADS", 2)
    called, begun = [], threading.Event()

    def waits() -> None:
        called.append(begun.set())
        time.sleep(0.05)

    def ends() -> None:
        assert begun.wait(60)
        raise KeyboardInterrupt

    kinds = [True] * 40 + [False]
    episodes = [SimpleNamespace(environment=SimpleNamespace(concurrent=w)) for w in kinds]
    with pytest.raises(KeyboardInterrupt):
        side_by_side(cast(Any, episodes), [waits] * 40 + [ends])
    assert 0 < len(called) < 40


def test_environments_that_compute_run_here_beside_those_that_wait() -> None:
    here, begun = threading.get_ident(), threading.Event()

    def waits() -> int:
        assert begun.wait(60), "the others run meanwhile"
        return threading.get_ident()

    def computes() -> int:
        begun.set()
        return threading.get_ident()

    episodes = [SimpleNamespace(environment=SimpleNamespace(concurrent=w)) for w in (True, False)]
    found = side_by_side(cast(Any, episodes), [waits, computes])
    assert found[0] != here and found[1] == here


@pytest.mark.parametrize("questions", [("yes", "unusable"), ("third",), ("broken reset", "ended")])
def test_whatever_ends_a_wave_or_an_evaluation_closes_each_environment_once(
    questions: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A later sample cannot be used; the third environment cannot (evaluating, one stands open); an engine ends."""
    if "ended" not in questions:
        monkeypatch.setattr(Counting, "reset", _unusable)
    samples = tuple(replace(sample(q), id=q) for q in questions)
    source = LoadedSource(DataSource(task="grounding", path="x"), Play(), samples)
    config = play_run(tmp_path, "ended", "data.on_error=raise")
    p, engine = policy(), cast(Any, Ending())
    with Scorer([("grounding", {})], [source.task], workers=0, timeout_s=1.0) as scorer:
        with pytest.raises((DataError, KeyboardInterrupt)):
            settings = EvalSettings(SAMPLING, samples=2, on_error="raise")
            evaluate(p, engine, scorer, [source], settings)
        assert Counting.made and [env.closed for env in Counting.made] == [1] * len(Counting.made)
        Counting.made.clear()
        rollouter = PromptRollouter(config, p, engine, scorer, [source], World(torch.device("cpu")))
        with pytest.raises((DataError, KeyboardInterrupt)):
            list(rollouter.groups(1))
    assert Counting.made and [env.closed for env in Counting.made] == [1] * len(Counting.made)


def test_an_evaluation_opens_a_bounded_number_of_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most: list[int] = []

    def reset(self: Counting, sample: Sample, seed: int) -> mmrl.Observation:
        most.append(sum(not env.closed for env in self.made))
        return ordinary(self, sample, seed)

    ordinary = Counting.reset
    monkeypatch.setattr(Counting, "reset", reset)
    samples = tuple(replace(sample(turns=1), id=str(i)) for i in range(5))
    p, source = policy(), LoadedSource(DataSource(task="grounding", path="x"), Play(), samples)
    with Scorer([("grounding", {})], [source.task], workers=0, timeout_s=1.0) as scorer:
        settings = EvalSettings(SAMPLING, samples=2)
        together = evaluate(p, PrefillOnceEngine(p), scorer, [source], settings)
        assert max(most) == 15
        most.clear()
        monkeypatch.setattr("mmrl.evaluation.evaluate._EPISODES", 7)
        apart = evaluate(p, PrefillOnceEngine(p), scorer, [source], settings)
    assert max(most) == 6 and apart.predictions == together.predictions


def test_an_evaluation_keeps_what_its_gallery_was_shown_and_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordinary = Counting.step
    mark = mmrl.Mark("point", (12, 30), 0)

    def step(self: Counting, turn: mmrl.Turn) -> mmrl.Outcome:
        return replace(ordinary(self, turn), marks=[mark] if self.turns == 2 else [])

    monkeypatch.setattr(Counting, "step", step)
    samples = tuple(replace(sample(turns=3), id=str(i)) for i in range(2))
    p, source = policy(), LoadedSource(DataSource(task="grounding", path="x"), Play(), samples)
    with Scorer([("grounding", {})], [source.task], workers=0, timeout_s=1.0) as scorer:
        settings = EvalSettings(SAMPLING, samples=2, gallery=1)
        plain = evaluate(p, PrefillOnceEngine(p), scorer, [source], settings).predictions
        found = evaluate(
            p, PrefillOnceEngine(p), scorer, [source], settings, pictures=tmp_path
        ).predictions
    assert plain == [{k: v for k, v in row.items() if k != "film"} for row in found]
    assert [(r["id"], r["mode"]) for r in found if "film" in r] == [("0", "greedy")]
    film = next(r["film"] for r in found if "film" in r)
    assert [kept["size"] for kept in film["pictures"]] == [[84, 56]] * 3
    for number, kept in enumerate(film["pictures"]):
        with Image.open(tmp_path / kept["file"]) as shown:
            assert np.array_equal(np.asarray(shown), picture(number))
    # the second turn's mark is on the first picture
    assert [turn["picture"] for turn in film["turns"]] == [0, 0, 2]
    assert [len(turn["marks"]) for turn in film["turns"]] == [0, 1, 0]
    assert film["turns"][1]["marks"] == [{"kind": "point", "at": [12.0, 30.0]}]


def test_a_reward_that_an_environment_paid_is_not_scored_again(tmp_path: Path) -> None:
    config, p, file = play_run(tmp_path, "log"), policy(), tmp_path / "log.jsonl"
    plays = LoadedSource(config.data.train[0], Play(), (sample(),))
    answers = LoadedSource(
        DataSource(task=ALBUM, path="x"), Album(), (replace(sample(), task="album"),)
    )
    engine, settings = PrefillOnceEngine(p), EvalSettings(SAMPLING, samples=2)
    with Scorer([], [plays.task, answers.task], workers=0, timeout_s=1.0) as scorer:
        rollouter = PromptRollouter(config, p, engine, scorer, [plays], World(torch.device("cpu")))
        groups = list(rollouter.groups(1))
        trained = rollout_rows(groups, "abs_orig", 1, 5, rollouter.tally.origins)
        found = evaluate(p, engine, scorer, [plays], settings).predictions
        plain = evaluate(p, engine, scorer, [answers], settings, first_key=1).predictions
    assert trained and all(row["environment"] is True for row in (*trained, *found))
    for rows in (trained, found):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = rf"found none in {len(rows)} lines; first: line 1: .* a rollout in an environment"
        with pytest.raises(DataError, match=words):
            rescore(file, trust_code=True)
    old = [{k: v for k, v in row.items() if k != "environment"} for row in found]
    file.write_text("".join(json.dumps(row) + "\n" for row in (*trained, *old, *plain)))
    again = rescore(file, trust_code=True)
    assert len(again.broken) == len(trained) + len(old) and len(again.rows) == len(plain) == 3
    assert not any(row.changed for row in again.rows)


@pytest.mark.parametrize("spell", [str, Path])
def test_a_picture_of_a_file_is_read_as_the_samples_own(
    spell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(picture(0)).save(tmp_path / "turned.png", exif=exif)
    monkeypatch.setattr(
        Counting,
        "reset",
        lambda self, sample, seed: mmrl.Observation(
            chat("what", 1), [spell(tmp_path / "turned.png")]
        ),
    )
    p = policy()
    for params, size in (({ORIENTATION_PARAM: "stored"}, (84, 56)), ({}, (56, 84))):
        (episode,) = begin(p, sample(**params), Play(), 1, (1,))
        assert episode.failure is None and episode.prompt is not None
        assert [x.orig_wh for x in episode.prompt.images] == [size]


def test_rewards_of_a_group_are_refused_where_an_environment_pays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Play, "in_group", True)
    with pytest.raises(ConfigError, match="`score_in_group` would never be asked"):
        check_environments(config_of_nothing(), [(Play(), {"play"})])
    monkeypatch.setattr(Album, "in_group", True)
    check_environments(config_of_nothing(), [(Album(), {"album"})])


def test_dr_grpo_divides_by_the_length_of_a_whole_rollout(tmp_path: Path) -> None:
    trainer = Trainer(play_run(tmp_path, "long", "algorithm.loss_aggregation=dr_grpo"))
    with trainer.open_runtime():
        assert trainer.learner.samples.longest == 5 * Counting.max_turns


def test_a_task_is_asked_for_its_environment_and_nothing_stays_open() -> None:
    check_environments(config_of_nothing(), [(Play(), {"play"})])
    assert [env.closed for env in Counting.made] == [1]


# ---- whole runs


def play_run(folder: Path, name: str, *overrides: str) -> Any:
    rows = folder / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"id": str(i), "images": [], "question": f"question {i}"}) + "\n"
            for i in range(4)
        )
    )
    spec = f"{Path(__file__)}:Play"
    return load_config(
        None,
        [
            f"name={name}",
            f"dir={folder}",
            f"model.path={tiny_folder('qwen2_5_vl', window_vision=False)}",
            "model.device=cpu",
            f"data.train=[{{task: '{spec}', path: {rows}}}]",
            f"data.eval=[{{task: '{spec}', path: {rows}}}]",
            "train.steps=2",
            "train.prompts_per_step=3",
            "rollout.group_size=3",
            "rollout.max_new_tokens=5",
            "optim.lr=0.002",
            "reward.workers=0",
            "eval.samples=2",
            "eval.every=0",
            "algorithm.dynamic_sampling=false",
            "seed=3",
            *overrides,
        ],
    )


@pytest.mark.parametrize("kind", ["serial", "pipelined"])
def test_an_environment_that_cannot_be_reset_costs_its_rollout_not_the_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has no turn that was written has no weights that wrote it: it made its group older than any."""
    loaded = type(task_from_spec(f"{Path(__file__)}:Play").environment(None))  # type: ignore[arg-type]
    reset, calls = loaded.reset, itertools.count()

    def sometimes(self: Any, sample: Sample, seed: int) -> mmrl.Observation:
        if next(calls) % 3 == 0:
            raise RuntimeError("no display")
        return reset(self, sample, seed)

    monkeypatch.setattr(loaded, "reset", sometimes)
    row = Trainer(
        play_run(
            tmp_path,
            kind,
            f"schedule.kind={kind}",
            "data.eval=[]",
            "eval.samples=0",
            "reward.max_failure_share=0.5",
        )
    ).fit()
    assert row["step"] == 2 and row["train/parse_rate"] == pytest.approx(2 / 3)
    assert row["train/grad_norm"] > 0


def test_an_evaluation_that_judges_nothing_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = type(task_from_spec(f"{Path(__file__)}:Play").environment(None))  # type: ignore[arg-type]

    def broken(self: Any, turn: mmrl.Turn) -> mmrl.Outcome:
        raise KeyError("page")

    monkeypatch.setattr(loaded, "step", broken)
    with pytest.raises(
        RewardError, match=r"12 of 12 rewards failed in the evaluation of step 0 .*KeyError: 'page'"
    ):
        Trainer(play_run(tmp_path, "dead")).fit()


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    kept = (
        "train/loss",
        "train/grad_norm",
        "train/reward/mean",
        "train/logprob_gap/max",
        "train/tokens/packed",
    )
    return [{k: row[k] for k in kept} for row in read_jsonl(folder / name / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_a_run_trains_on_all_turns_and_packing_changes_no_number(
    advantage: str, tmp_path: Path
) -> None:
    for name, overrides in (
        ("shared", []),
        ("padded", ["train.forward=padded"]),
        ("small", ["train.token_budget=1"]),
        ("pipelined", ["schedule.kind=pipelined", "schedule.order=key"]),
    ):
        Trainer(play_run(tmp_path, name, f"algorithm.advantage={advantage}", *overrides)).fit()
    shared, padded, small, pipelined = (
        rows_of(tmp_path, name) for name in ("shared", "padded", "small", "pipelined")
    )
    assert all(
        row["train/logprob_gap/max"] < LIMIT and row["train/grad_norm"] > 0 for row in shared
    )
    for other in (padded, small, pipelined):
        for a, b in zip(shared, other, strict=True):
            assert a["train/reward/mean"] == pytest.approx(b["train/reward/mean"], abs=1e-9)
            assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-4)
            assert a["train/loss"] == pytest.approx(b["train/loss"], abs=1e-6)
    assert shared[0]["train/tokens/packed"] < padded[0]["train/tokens/packed"] / 2
    assert shared[0]["train/tokens/packed"] < small[0]["train/tokens/packed"], (
        "cut between rollouts"
    )
    logged = read_jsonl(tmp_path / "shared" / "rollouts" / "step_000002.jsonl")
    assert logged and all(
        len(row["turns"]) == 2 and row["turns"][-1] == row["text"] for row in logged
    )
    # the first rollout of each group that is logged keeps what it was shown, and the report draws it
    films = [row.get("film") for row in logged]
    assert [film is not None for film in films] == [True, False, False] * 2
    with Image.open(
        tmp_path / "shared/rollouts/pictures" / films[0]["pictures"][1]["file"]
    ) as kept:
        assert np.array_equal(np.asarray(kept), picture(1))
    page = build_report(tmp_path / "shared").read_text(encoding="utf-8")
    drawn = page[page.index('id="rollouts"') :]
    assert drawn.count('class="stills turns"') == 4 and "turns of answer 1 of 3" in drawn
    evaluated = read_jsonl(tmp_path / "shared" / "eval" / "step_000002" / "predictions.jsonl")
    assert len(evaluated) == 4 * (1 + 2) and all(len(row["turns"]) == 2 for row in evaluated)
    assert len({row["turns"][0] for row in evaluated if row["mode"] == "sampled"}) > 1


def _union(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds that at least one of the spans covers."""
    covered, end = 0.0, 0.0
    for start, stop in sorted(spans):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered


@pytest.mark.slow
@pytest.mark.parametrize("tree", [[], ["rollout.tree.roots=1", "rollout.group_size=3"]])
@pytest.mark.parametrize("concurrent", [False, True])
def test_a_step_tells_the_time_of_environments_apart(
    concurrent: bool, tree: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the environments' own clocks; those side by side count once."""
    loaded = type(task_from_spec(f"{Path(__file__)}:Play").environment(None))  # type: ignore[arg-type]
    spans: list[tuple[float, float]] = []
    steps: list[list[tuple[float, float]]] = []

    def timed(call: Any) -> Any:
        def wrapper(*arguments: Any) -> Any:
            began = time.perf_counter()
            time.sleep(0.05)
            found = call(*arguments)
            spans.append((began, time.perf_counter()))
            return found

        return wrapper

    def generate(*arguments: Any) -> Any:
        spans.clear()  # evaluations play, too
        found = made(*arguments)
        steps.append([*spans])
        return found

    made = GroupGenerator.generate
    monkeypatch.setattr(GroupGenerator, "generate", generate)
    monkeypatch.setattr(loaded, "concurrent", concurrent)
    for name in ("reset", "step"):
        monkeypatch.setattr(loaded, name, timed(getattr(loaded, name)))
    Trainer(play_run(tmp_path, "timed", "algorithm.max_rounds=1", *tree)).fit()
    rows = read_jsonl(tmp_path / "timed" / "metrics.jsonl")
    assert len(rows) == len(steps) == 2
    for row, found in zip(rows, steps, strict=True):
        wanted = _union(found)
        alone = sum(stop - start for start, stop in found)
        assert wanted > 0.08 and (alone > 1.5 * wanted) == concurrent
        assert wanted <= row["time/environment"] < 2 * wanted + 1
        parts = ("rollout", "environment", "reward", "logprobs", "update")
        assert sum(row[f"time/{part}"] for part in parts) <= row["time/total"]
    page = build_report(tmp_path / "timed").read_text(encoding="utf-8")
    assert '<i class="swatch" style="--c:var(--c7)"></i>environment</td>' in page


def test_turns_that_are_played_again_count_as_their_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rollouts, step, spent = played(turns=2), Counting.step, Spent()
    monkeypatch.setattr(Counting, "step", lambda self, turn: time.sleep(0.02) or step(self, turn))
    p = policy()
    again = begin(p, sample(turns=2), Play(), 3, (3, 1))
    found = play_written(p, again, [r.turns for r in rollouts], spent)
    scores = [[r.score and r.score.value for r in given] for given in (found, rollouts)]
    assert scores[0] == scores[1]
    assert spent.environments >= 3 * 2 * 0.02 and spent.rewards < 0.02


@pytest.mark.slow
def test_a_resumed_run_equals_an_undisturbed_one(tmp_path: Path) -> None:
    Trainer(play_run(tmp_path, "whole")).fit()
    Trainer(play_run(tmp_path, "parts", "train.steps=1")).fit()
    Trainer(play_run(tmp_path, "parts"), resume=True).fit()
    assert rows_of(tmp_path, "whole") == rows_of(tmp_path, "parts")


# ---- the example


def zoom(name: str) -> Any:
    import examples.zoom as module

    return getattr(module, name)


def test_the_overview_says_where_and_not_which() -> None:
    paint, shrink = zoom("paint"), zoom("shrink")
    for quarter in range(4):
        views = [shrink(paint(quarter, name), 4) for name in zoom("STRIPES")]
        assert all(np.array_equal(views[0], view) for view in views), "not one pixel differs"
        half = views[0].shape[0] // 2
        top, left = (quarter // 2) * half, (quarter % 2) * half
        assert (views[0][top : top + half, left : left + half] == zoom("_GREY")).all()
        close = {
            shrink(
                paint(quarter, name)[top * 4 : (top + half) * 4, left * 4 : (left + half) * 4], 2
            ).tobytes()
            for name in zoom("STRIPES")
        }
        assert len(close) == 4, "from close by they can be told"


def test_the_example_plays_by_its_rules() -> None:
    task = task_from_spec(f"{REPO / 'examples' / 'zoom.py'}:Zoom")
    asked = Sample("1", "zoom", "zoom", "where", "blue", params={"quarter": 2})

    def turns(*texts: str) -> Sequence[mmrl.Outcome]:
        environment = task.environment(policy().template)
        assert environment is not None
        environment.reset(asked, 0)
        return [environment.step(mmrl.Turn((), text, (), StopReason.EOS)) for text in texts]

    assert turns("north")[0].terminated and turns("north")[0].reward == 0
    look, end = turns("C", "blue")
    assert look.observation is not None and look.observation.images[0].shape == (56, 56, 3)
    assert end.terminated and end.info["correct"] == end.info["found"] == 1.0
    assert (
        turns("A", "blue")[1].info == {"correct": 1.0, "found": 0.0}
        and turns("C", "red")[1].info["correct"] == 0
    )
    assert (
        turns("C", "blue")[1].reward > turns("A", "blue")[1].reward >= turns("A", "red")[1].reward
    )
