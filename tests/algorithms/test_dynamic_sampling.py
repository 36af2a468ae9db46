"""Dynamic sampling: nothing is lost, counts add up, order of arrival and interruptions change nothing.

Run: pytest tests/algorithms/test_dynamic_sampling.py
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.algorithms import DynamicSampler, SamplerSettings, StepReport, Verdict
from mmrl.errors import CheckpointError, ConfigError, NonFiniteError

SIGNAL, ZERO, ONE, HALF, FAILED = [0.0, 1.0, 1.0], [0.0, 0.0], [1.0, 1.0], [0.5, 0.5], None
OUTCOMES = [SIGNAL, ZERO, ONE, HALF, FAILED]
SOURCES = ("coco", "refcoco")

Draw = Callable[[], tuple[str, str] | None]


def _stream(limit: int | None = None, distinct: int | None = None) -> Draw:
    """Samples of two sources in turn; `distinct` of them in a circle, or ending after `limit`."""
    numbers: Iterator[int] = iter(range(limit)) if limit is not None else itertools.count()

    def draw() -> tuple[str, str] | None:
        number = next(numbers, None)
        if number is None:
            return None
        number = number % distinct if distinct else number
        return SOURCES[number % 2], f"s{number}"

    return draw


def _run_step(
    sampler: DynamicSampler,
    step: int,
    draw: Draw,
    outcome: Callable,
    shuffle: random.Random | None = None,
) -> tuple[StepReport, list, list]:
    """One step as a trainer runs it; returns the report, every ticket asked and the kept ones."""
    sampler.begin_step(step)
    asked, kept = [], []
    while tickets := sampler.request(draw):
        arrivals = list(tickets)
        if shuffle:
            shuffle.shuffle(arrivals)
        for ticket in arrivals:
            asked.append(ticket)
            if sampler.submit(ticket.key, outcome(ticket)) is Verdict.KEPT:
                kept.append(ticket)
    return sampler.end_step(), asked, kept


def _random_outcome(seed: int) -> Callable:
    """A fixed outcome per ticket, whatever the order in which it is looked at."""
    return lambda ticket: random.Random(f"{seed} {ticket.key}").choice(OUTCOMES)


knobs = st.builds(
    SamplerSettings,
    quota=st.integers(1, 6),
    max_attempts=st.integers(1, 4),
    carry_share=st.sampled_from([0.0, 0.25, 0.4, 1.0]),
    max_tries=st.integers(1, 4),
)


@settings(max_examples=60, deadline=None)
@given(knobs, st.integers(0, 10**6), st.sampled_from([None, 3, 7]), st.sampled_from([None, 5, 20]))
def test_counts_add_up_and_no_sample_is_lost(
    knob: SamplerSettings, seed: int, distinct, limit
) -> None:
    sampler, draw, outcome = DynamicSampler(knob), _stream(limit, distinct), _random_outcome(seed)
    grand = dict.fromkeys(("asked", "kept", "no_signal", "failed", "abandoned"), 0)
    tries: dict[tuple[str, str], int] = {}  # of what waits: attempts in vain, counted here anew
    for step in range(6):
        report, asked, kept = _run_step(sampler, step, draw, outcome)
        for counts in (report.counts, *report.by_source.values()):
            assert counts["asked"] == counts["kept"] + counts["no_signal"] + counts["failed"]
            assert counts["all_zero"] + counts["all_one"] <= counts["no_signal"]
        assert report.counts["asked"] == len(asked) and report.counts["kept"] == len(kept)
        assert report.counts["kept"] + report.unfilled == knob.quota
        assert len(asked) <= knob.quota * knob.max_attempts
        assert len({t.key for t in asked}) == len(asked)
        names = [(t.source, t.sample_id) for t in asked]
        # solved and failed ones do not wait
        dull = [t for t in asked if outcome(t) in (ZERO, HALF)]
        attempts = Counter((t.source, t.sample_id) for t in dull for _ in range(t.tries + 1))
        assert [t.tries for t in asked] == [
            tries.get(n, 0) if names.index(n) == i else 0 for i, n in enumerate(names)
        ]
        abandoned = {name for name, count in attempts.items() if count >= knob.max_tries}
        assert report.counts["abandoned"] == len(abandoned)
        # what waited still waits or was asked again; what was asked in vain waits, once, or is abandoned
        tries = {name: count for name, count in tries.items() if name not in names}
        tries |= {name: count for name, count in attempts.items() if name not in abandoned}
        assert set(sampler.carry_over) == set(tries)
        assert len(set(sampler.carry_over)) == len(sampler.carry_over) == report.queue
        for name in names:  # trained, waiting, abandoned, or back in the stream because nothing can be learnt or tried now
            results = [outcome(t) for t in asked if (t.source, t.sample_id) == name]
            assert (
                SIGNAL in results
                or name in tries
                or name in abandoned
                or set(map(str, results)) <= {str(ONE), "None"}
            )
        for name in grand:
            grand[name] += report.counts[name]
    totals = sampler.totals.values()
    assert grand == {name: sum(counts[name] for counts in totals) for name in grand}


@settings(max_examples=30, deadline=None)
@given(knobs, st.integers(0, 10**6))
def test_order_of_arrival_changes_nothing(knob: SamplerSettings, seed: int) -> None:
    runs = []
    for shuffle in (None, random.Random(seed), random.Random(seed + 1)):
        sampler, draw = DynamicSampler(knob), _stream(distinct=9)
        history = [
            _run_step(sampler, step, draw, _random_outcome(seed), shuffle) for step in range(4)
        ]
        runs.append(
            (
                [report for report, _, _ in history],
                [sorted(t.key for t in kept) for _, _, kept in history],
                sampler.carry_over,
                sampler.state_dict(),
            )
        )
    assert runs[0][:3] == runs[1][:3] == runs[2][:3]
    assert json.dumps(runs[0][3], sort_keys=True) == json.dumps(runs[1][3], sort_keys=True)


def _events(sampler: DynamicSampler, draw: Draw, seed: int, cut: int | None) -> list:
    """Every call and its answer over three steps; after call number `cut` the sampler is replaced by a restored one."""
    log: list = []

    def note(event) -> None:
        nonlocal sampler
        log.append(event)
        if len(log) == cut:
            state = json.loads(json.dumps(sampler.state_dict()))
            sampler = DynamicSampler(sampler.settings)
            sampler.load_state_dict(state)

    outcome = _random_outcome(seed)
    for step in range(3):
        sampler.begin_step(step)
        note(("begin", step))
        while True:
            tickets = sampler.request(draw)
            note(tickets)
            if not tickets:
                break
            for ticket in tickets:
                note(sampler.submit(ticket.key, outcome(ticket)))
        note(sampler.end_step())
    log.append(sampler.state_dict())
    return log


@settings(max_examples=60, deadline=None)
@given(knobs, st.integers(0, 10**6), st.integers(1, 60))
def test_restored_at_any_call_it_continues_identically(
    knob: SamplerSettings, seed: int, cut: int
) -> None:
    whole = _events(DynamicSampler(knob), _stream(distinct=11), seed, None)
    assert _events(DynamicSampler(knob), _stream(distinct=11), seed, cut) == whole


def test_a_group_without_signal_is_replaced_and_its_sample_comes_back() -> None:
    sampler, draw = (
        DynamicSampler(SamplerSettings(quota=2, max_attempts=3, carry_share=0.5)),
        _stream(),
    )
    results = {"s0": ZERO, "s1": SIGNAL, "s2": HALF, "s3": SIGNAL}
    report, asked, kept = _run_step(sampler, 0, draw, lambda t: results[t.sample_id])
    assert [(t.key, t.sample_id) for t in asked] == [
        ((0, 0, 0), "s0"),
        ((0, 1, 0), "s1"),
        ((0, 0, 1), "s2"),
        ((0, 0, 2), "s3"),
    ]
    assert [t.sample_id for t in kept] == ["s1", "s3"]
    assert report.by_source["coco"] == {
        "asked": 2,
        "kept": 0,
        "no_signal": 2,
        "failed": 0,
        "all_zero": 1,
        "all_one": 0,
        "weak": 0,
        "carried": 0,
        "abandoned": 0,
    }
    assert report.unfilled == 0
    assert sampler.carry_over == (("coco", "s0"), ("coco", "s2"))
    report, asked, _ = _run_step(sampler, 1, draw, lambda t: SIGNAL)
    # half a step is carried over
    assert [(t.sample_id, t.tries) for t in asked] == [("s0", 1), ("s4", 0)]
    assert report.counts["carried"] == 1 and sampler.carry_over == (("coco", "s2"),)


def test_the_step_goes_on_with_what_it_has_after_the_last_attempt() -> None:
    sampler = DynamicSampler(SamplerSettings(quota=3, max_attempts=2))
    report, asked, kept = _run_step(
        sampler, 0, _stream(), lambda t: SIGNAL if t.key[1] == 1 else ZERO
    )
    assert (len(asked), len(kept), report.unfilled, report.queue) == (5, 1, 2, 4)
    assert report.counts["no_signal"] == report.counts["all_zero"] == 4


@pytest.mark.parametrize(("result", "name"), [(ONE, "all_one"), (FAILED, "failed")])
def test_solved_and_failed_samples_do_not_wait(result: list[float] | None, name: str) -> None:
    sampler, draw = (
        DynamicSampler(SamplerSettings(quota=2, max_attempts=2, carry_share=1.0)),
        _stream(),
    )
    report, asked, _ = _run_step(sampler, 0, draw, lambda t: result)
    assert (report.counts[name], report.queue, report.counts["abandoned"]) == (4, 0, 0) and len(
        asked
    ) == 4
    report, asked, _ = _run_step(sampler, 1, draw, lambda t: SIGNAL)
    assert [t.sample_id for t in asked] == ["s4", "s5"] and report.counts["carried"] == 0, (
        "only the stream brings them"
    )


def test_a_sample_is_given_up_after_its_last_try_and_counted() -> None:
    sampler = DynamicSampler(SamplerSettings(quota=1, max_attempts=1, carry_share=1.0, max_tries=3))
    draw = _stream()
    results = {"s0": ZERO}
    history = [
        _run_step(sampler, step, draw, lambda t: results.get(t.sample_id, SIGNAL))
        for step in range(5)
    ]
    assert [(t.sample_id, t.tries) for _, asked, _ in history for t in asked] == [
        ("s0", 0),
        ("s0", 1),
        ("s0", 2),
        ("s1", 0),
        ("s2", 0),
    ]
    assert [report.counts["abandoned"] for report, _, _ in history] == [0, 0, 1, 0, 0]
    assert [report.queue for report, _, _ in history] == [1, 1, 0, 0, 0]
    assert history[2][0].by_source["coco"]["abandoned"] == sampler.totals["coco"]["abandoned"] == 1


def test_attempts_count_also_when_the_stream_brings_a_sample_twice_in_one_step() -> None:
    sampler = DynamicSampler(SamplerSettings(quota=3, max_attempts=1, carry_share=0.0, max_tries=3))
    report, _, _ = _run_step(sampler, 0, _stream(distinct=1), lambda t: ZERO)
    assert (
        report.counts["no_signal"] == 3
        and report.counts["abandoned"] == 1
        and sampler.carry_over == ()
    )


def test_states_written_before_samples_were_abandoned_still_load() -> None:
    sampler = DynamicSampler(SamplerSettings(quota=2))
    _run_step(sampler, 0, _stream(), lambda t: ZERO)
    state = json.loads(json.dumps(sampler.state_dict()))
    for counts in state["totals"].values():
        del counts["abandoned"]
    restored = DynamicSampler(sampler.settings)
    restored.load_state_dict(state)
    assert restored.state_dict() == sampler.state_dict()


def test_hopeless_samples_do_not_starve_the_stream() -> None:
    for quota, share, per_eight_steps in (
        (1, 0.25, 2),
        (4, 0.25, 8),
        (4, 0.0, 0),
        (3, 0.5, 12),
        (2, 1.0, 16),
    ):
        sampler = DynamicSampler(
            SamplerSettings(quota=quota, max_attempts=1, carry_share=share, max_tries=99)
        )
        draw = _stream()
        _run_step(sampler, 0, draw, lambda t: ZERO)  # fills the queue
        for step in range(1, 5):  # waiting earns no whole retries while the queue is empty or full
            _run_step(sampler, step, draw, lambda t: ZERO)
        reports = [_run_step(sampler, step, draw, lambda t: ZERO)[0] for step in range(5, 13)]
        assert sum(r.counts["carried"] for r in reports) == per_eight_steps
        assert max(r.counts["carried"] for r in reports) <= -(-quota * share // 1)


def test_an_empty_queue_saves_up_no_retries() -> None:
    sampler, draw = (
        DynamicSampler(SamplerSettings(quota=4, max_attempts=1, carry_share=0.25)),
        _stream(),
    )
    for step in range(10):
        _run_step(sampler, step, draw, lambda t: SIGNAL)
    _run_step(sampler, 10, draw, lambda t: ZERO)
    report, _, _ = _run_step(sampler, 11, draw, lambda t: ZERO)
    assert report.counts["carried"] == 1


def test_when_the_stream_ends_the_waiting_samples_are_asked() -> None:
    sampler, draw = (
        DynamicSampler(SamplerSettings(quota=2, max_attempts=1, carry_share=0.0)),
        _stream(limit=2),
    )
    _run_step(sampler, 0, draw, lambda t: ZERO)
    report, asked, _ = _run_step(sampler, 1, draw, lambda t: SIGNAL)
    assert [(t.sample_id, t.tries) for t in asked] == [("s0", 1), ("s1", 1)]
    report, asked, _ = _run_step(sampler, 2, draw, lambda t: SIGNAL)
    assert asked == [] and report.unfilled == 2 and report.counts["asked"] == 0


def test_a_waiting_sample_brought_by_the_stream_waits_no_more() -> None:
    sampler, draw = (
        DynamicSampler(SamplerSettings(quota=1, max_attempts=1, carry_share=0.0)),
        _stream(distinct=1),
    )
    _run_step(sampler, 0, draw, lambda t: ZERO)
    assert sampler.carry_over == (("coco", "s0"),)
    _, asked, _ = _run_step(sampler, 1, draw, lambda t: SIGNAL)
    assert asked[0].tries == 1 and sampler.carry_over == ()


def test_asking_early_never_exceeds_the_quota() -> None:
    sampler, draw = DynamicSampler(SamplerSettings(quota=2, max_attempts=3)), _stream()
    sampler.begin_step(0)
    first, second = sampler.request(draw)
    assert sampler.request(draw) == []
    assert sampler.submit(first.key, ZERO) is Verdict.NO_SIGNAL
    (third,) = sampler.request(draw)  # while `second` is still in flight
    assert third.key == (0, 0, 1)
    assert sampler.submit(third.key, SIGNAL) is sampler.submit(second.key, SIGNAL) is Verdict.KEPT
    assert sampler.request(draw) == []
    assert sampler.end_step().counts["asked"] == 3


def test_misuse_is_caught() -> None:
    sampler, draw = DynamicSampler(SamplerSettings(quota=1)), _stream()
    sampler.begin_step(0)
    (ticket,) = sampler.request(draw)
    with pytest.raises(AssertionError, match="still in flight"):
        sampler.end_step()
    with pytest.raises(NonFiniteError):
        sampler.submit(ticket.key, [0.0, float("nan")])
    sampler.submit(ticket.key, SIGNAL)  # the refused call changed nothing
    with pytest.raises(AssertionError, match="not requested, or was submitted twice"):
        sampler.submit(ticket.key, SIGNAL)
    with pytest.raises(AssertionError, match="still open"):
        sampler.begin_step(1)


def test_user_errors_say_what_to_do() -> None:
    with pytest.raises(ConfigError, match="expected quota at least 1, found 0"):
        SamplerSettings(quota=0)
    with pytest.raises(ConfigError, match="expected max_attempts at least 1, found 0"):
        SamplerSettings(quota=1, max_attempts=0)
    with pytest.raises(ConfigError, match="expected max_tries at least 1, found 0"):
        SamplerSettings(quota=1, max_tries=0)
    with pytest.raises(ConfigError, match=r"carry_share in \[0, 1\], found 1.5"):
        SamplerSettings(quota=1, carry_share=1.5)
    with pytest.raises(ConfigError, match=r"carry_share in \[0, 1\], found -0.5"):
        SamplerSettings(quota=1, carry_share=-0.5)
    with pytest.raises(ConfigError, match="tol at least 0, found nan"):
        SamplerSettings(quota=1, tol=float("nan"))


def test_a_damaged_state_is_refused_and_changes_nothing() -> None:
    sampler, draw = DynamicSampler(SamplerSettings(quota=2)), _stream()
    _run_step(sampler, 0, draw, lambda t: ZERO)
    before = sampler.state_dict()
    broken = [
        {},
        {**before, "format": 2},
        {**before, "queue": [["coco"]]},
        {**before, "totals": {"coco": {}}},
        {**before, "counts": None},
    ]
    for state in broken:
        with pytest.raises(CheckpointError, match="sampler state of format 1"):
            sampler.load_state_dict(state)
        assert sampler.state_dict() == before


def _verdict_of(rewards: list[float], **options: object) -> tuple[Verdict, list[str], tuple]:
    sampler, draw = DynamicSampler(SamplerSettings(quota=1, max_attempts=1)), _stream()
    sampler.begin_step(0)
    (ticket,) = sampler.request(draw)
    verdict = sampler.submit(ticket.key, rewards, **options)  # type: ignore[arg-type]
    counts = sampler.end_step().counts
    return verdict, [n for n in ("all_zero", "all_one", "weak") if counts[n]], sampler.carry_over


def test_solved_by_all_means_at_the_upper_end_of_the_tasks_rewards() -> None:
    assert _verdict_of([1.3, 1.3], top=1.3) == (Verdict.NO_SIGNAL, ["all_one"], ())
    verdict, names, waiting = _verdict_of([1.0, 1.0], top=1.3)
    assert verdict is Verdict.NO_SIGNAL and names == [] and len(waiting) == 1, (
        "there is more to earn: it waits"
    )
    assert _verdict_of([0.7, 0.7], top=0.7)[1] == ["all_one"]
    for low in ([-0.5, -0.5], [0.0, 0.0]):
        assert _verdict_of(low, top=1.0)[1] == ["all_zero"], "none earned anything"


def test_a_reward_just_below_the_top_is_not_solved() -> None:
    assert _verdict_of([0.9, 0.9])[1] == [] and len(_verdict_of([0.9, 0.9])[2]) == 1
    assert _verdict_of([1 - 1e-10, 1 - 1e-10])[1] == ["all_one"], "rounding of a sum of parts"


def test_settings_by_default_and_what_cannot_be_changed() -> None:
    made = SamplerSettings(quota=4)
    assert (made.max_attempts, made.carry_share, made.max_tries) == (3, 0.25, 3), (
        "as README and configs say"
    )
    with pytest.raises(FrozenInstanceError):
        made.quota = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplerSettings(4)  # type: ignore[misc]
    sampler = DynamicSampler(made)
    assert sampler.state_dict()["credit"] == 0.0
    sampler.begin_step(0)
    ticket = sampler.request(_stream())[0]
    assert ticket.tries == 0
    with pytest.raises(FrozenInstanceError):
        ticket.tries = 1  # type: ignore[misc]


def test_when_stream_and_queue_end_in_one_call_the_places_after_stay_empty_but_are_tried() -> None:
    # a stream that pauses, as one of another stage may
    answers = iter([("coco", "a"), None, ("coco", "b")])
    sampler = DynamicSampler(SamplerSettings(quota=3, max_attempts=1))
    sampler.begin_step(0)
    assert [t.sample_id for t in sampler.request(lambda: next(answers))] == ["a", "b"]


def test_the_caller_may_decide_what_is_kept() -> None:
    assert _verdict_of([0.0, 1.0], keep=False)[:2] == (Verdict.NO_SIGNAL, ["weak"])
    assert _verdict_of([0.5, 0.5], keep=True)[:2] == (Verdict.KEPT, [])
    assert _verdict_of([1.0, 1.0], keep=False)[:2] == (Verdict.NO_SIGNAL, ["all_one"])
    sampler, draw = DynamicSampler(SamplerSettings(quota=1, max_attempts=1)), _stream()
    sampler.begin_step(0)
    (ticket,) = sampler.request(draw)
    assert sampler.submit(ticket.key, None, keep=True) is Verdict.FAILED, (
        "a failed rollout has nothing to keep"
    )


def test_samples_of_another_stage_leave_the_queue() -> None:
    sampler, draw = DynamicSampler(SamplerSettings(quota=4, max_attempts=1)), _stream()
    _run_step(sampler, 0, draw, lambda t: HALF)
    before = sampler.carry_over
    assert sampler.retain(lambda source, name: source == "coco") == 2 and len(before) == 4
    assert sampler.carry_over == tuple(n for n in before if n[0] == "coco")
