"""The task rewind: what the first frames do not tell, what calls show, and that a frame is decoded and encoded once."""

from __future__ import annotations

import collections
import json
import math
import threading
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmrl
from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError, MediaError
from mmrl.rollout.episodes import begin, play_scripted, play_written
from mmrl.task import Template
from mmrl.tasks import rewind as module
from mmrl.tasks.browser.task import Browser
from mmrl.tasks.clip_frames import ClipFrames
from mmrl.tasks.rewind import Rewind, RewindEnvironment, first_frames, label
from mmrl.tasks.rewind_clips import ASKS, UNSEEN, draw_rewind_clip, make_rewind_clips
from mmrl.tasks.tool_calls import read_call
from mmrl.tasks.zoom import Zoom
from mmrl.types import Sample, StopReason, Turn
from mmrl.video.decode import probe
from mmrl.video.encode import write_video
from tests.kits.clip_kit import VIDEO, clip, policy_of
from tests.kits.engine_kit import fresh_policy, policy, read_jsonl, tiny_folder

TEMPLATE = Template("", CoordFrame.ABS_RESIZED)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """Questions about eight generated clips."""
    return list(Rewind().load(make_rewind_clips(tmp_path_factory.mktemp("rewind"), 8, 3)))


@pytest.fixture
def noise(tmp_path: Path) -> Sample:
    """A question about a clip of 6 s at 4 frames per second in which every frame is another one."""
    return asked(clip(tmp_path, 24))


def asked(path: str, **params: Any) -> Sample:
    return Sample("n", "rewind", "rewind", "what is shown", "x", videos=(path,), params=params)


def turn(text: str) -> Turn:
    return Turn((1,), text, (0.0,), StopReason.EOS)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def begun(sample: Sample, **settings: Any) -> tuple[RewindEnvironment, mmrl.Observation]:
    environment = Rewind(**settings).environment(TEMPLATE)
    assert isinstance(environment, RewindEnvironment)
    return environment, environment.reset(sample, 0)


def words(observation: mmrl.Observation) -> list[str]:
    return [
        part["text"].strip()
        for message in observation.messages
        for part in message["content"]
        if part["type"] == "text"
    ]


# ---- the generated clips


@pytest.mark.slow
@pytest.mark.parametrize(("ask", "fps"), [("color", 4), ("shape", 8)])
def test_first_frames_are_the_same_for_every_answer_and_others_are_not(
    ask: str, fps: int, tmp_path: Path
) -> None:
    """Decoded and bit by bit, for every number of first frames up to UNSEEN."""
    for index in range(3):
        firsts, shown, spans = set(), set(), set()
        for answer in ASKS[ask]:
            frames, row = draw_rewind_clip(5, index, fps=fps, asks=(ask,), answer=answer)
            path = write_video(
                tmp_path / f"{index}-{answer}.mp4", frames, fps, quality=25, keyframe_every=1
            )
            assert row["answer"] == answer
            spans.add((row["question"], *row["span"]))
            seen = []
            for count in range(1, UNSEEN + 1):
                _, first = begun(asked(path), frames=count)
                assert len(first.images) == count
                seen += [picture.tobytes() for picture in first.images]
            firsts.add(tuple(seen))
            environment, _ = begun(asked(path))
            middle = environment.step(turn(call("frames", times=[sum(row["span"]) / 2])))
            assert middle.observation is not None
            shown.add(middle.observation.images[0].tobytes())
        assert len(firsts) == 1 and len(shown) == len(ASKS[ask]) and len(spans) == 1


@pytest.mark.slow
def test_a_question_tells_nothing_about_its_answer() -> None:
    """Whoever never looks has the question and the same first frames: the best guess from those is chance."""
    told = [draw_rewind_clip(7, index, 48)[1] for index in range(600)]
    known: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in told[:300]:
        known[row["question"]][row["answer"]] += 1
    right = [
        row["answer"] == (known[row["question"]] or {"red": 1}).most_common(1)[0][0]
        if known[row["question"]]
        else row["answer"] == "red"
        for row in told[300:]
    ]
    # 300 draws at 1/4: within three standard deviations
    assert np.mean(right) == pytest.approx(0.25, abs=3 * math.sqrt(0.25 * 0.75 / 300))
    windows = collections.Counter(row["question"] for row in told)
    assert len(windows) == 12, "each step of the longest clip is asked about"


def test_a_clip_depends_on_seed_and_place_alone(tmp_path: Path) -> None:
    files = {}
    for name, count, seed in (("a", 2, 1), ("b", 1, 1), ("c", 2, 2)):
        path = Path(make_rewind_clips(tmp_path / name, count, seed, size=48))
        files[name] = [p.read_bytes() for p in sorted((path.parent / "videos").iterdir())]
    assert files["a"][:1] == files["b"] and not set(files["a"]) & set(files["c"])
    with pytest.raises(ConfigError, match="found size=47"):
        make_rewind_clips(tmp_path / "d", 1, 1, size=47)
    with pytest.raises(ConfigError, match="fps=3"):
        make_rewind_clips(tmp_path / "d", 1, 1, fps=3)
    with pytest.raises(ConfigError, match="expected asks of color, shape"):
        make_rewind_clips(tmp_path / "d", 1, 1, asks=("size",))
    assert not (tmp_path / "d").exists()


# ---- players


@pytest.mark.parametrize("tools", [["frames"], ["watch"], ["frames", "watch"]])
@pytest.mark.parametrize("most", [1, 4])
def test_the_scripted_player_sees_what_it_answers(
    tools: list[str], most: int, rows: list[Sample]
) -> None:
    for sample in rows:
        environment, _ = begun(sample, tools=tools, most_times=most)
        rng = np.random.default_rng(0)
        said = environment.scripted(rng)
        assert said is not None
        asked_for = read_call(said)
        assert asked_for is not None
        assert asked_for.name in tools
        outcome = environment.step(turn(said))
        assert outcome.parsed and outcome.info["found"] == outcome.info["looked"] == 1.0
        assert outcome.reward == 0.0, "only the answer is paid for"
        last = environment.step(turn(environment.scripted(rng) or ""))
        assert last.terminated and last.reward == last.info["correct"] == 1.0


def test_who_never_looks_or_looks_elsewhere_is_at_chance(rows: list[Sample]) -> None:
    earned: dict[str, list[float]] = {"at_once": [], "astray": []}
    for name, rewards in earned.items():
        rng = np.random.default_rng(1)
        for _ in range(12):
            for sample in rows:
                environment, _ = begun(sample, **{name: 1})
                outcome = environment.step(turn(environment.scripted(rng) or ""))
                if name == "astray":
                    assert not outcome.terminated and outcome.info["looked"] == 1.0
                    if outcome.info["found"]:  # it looked there by accident
                        continue
                    outcome = environment.step(turn(environment.scripted(rng) or ""))
                assert outcome.terminated and outcome.info["found"] == 0.0
                rewards.append(outcome.reward)
    assert len(earned["at_once"]) == 96 and len(earned["astray"]) > 60
    for rewards in earned.values():
        limit = 3 * math.sqrt(0.25 * 0.75 / len(rewards))
        assert np.mean(rewards) == pytest.approx(0.25, abs=limit)


def test_a_rollout_is_shown_pictures_with_their_times(rows: list[Sample]) -> None:
    """Through a model's template: the scripted player's turns, with what the tool showed between them."""
    model, task = policy(), Rewind()
    episodes = [begin(model, row, task, 1, (0, i))[0] for i, row in enumerate(rows[:3])]
    rollouts = play_scripted(model, episodes, [(0, i) for i in range(3)])
    for rollout in rollouts:
        assert rollout.error is None and rollout.score is not None and rollout.score.value == 1.0
        first, second = rollout.turns
        assert len(first.prompt.visuals) == 4 and 4 < len(second.prompt.visuals) <= 12
        assert {v.kind for v in second.prompt.visuals} == {"image"}
        text = model.processor.tokenizer.decode(first.prompt.ids_P)
        assert "<|im_start|>user\nt = 0.0 s\n<|vision_start|>" in text
        assert '"name": "watch"' in text


# ---- what is shown


@pytest.mark.parametrize("party", ["pyav", "decord"])
def test_frames_are_those_of_the_file_at_the_times_asked_for(party: str, noise: Sample) -> None:
    path = noise.videos[0]
    if party == "pyav":
        av = pytest.importorskip("av")
        with av.open(path) as container:
            whole = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    else:
        decord = pytest.importorskip("decord")
        whole = list(decord.VideoReader(path)[:].asnumpy())
    assert len(whole) == 24
    environment, first = begun(noise)  # a frame stays for 0.25 s
    assert words(first)[:4] == ["t = 0.0 s", "t = 2.0 s", "t = 3.75 s", "t = 5.75 s"]
    outcome = environment.step(turn(call("frames", times=[3.49, 0.3, 1.0, 5.9])))
    assert outcome.observation is not None
    assert words(outcome.observation) == ["t = 0.25 s", "t = 1.0 s", "t = 3.25 s", "t = 5.75 s"]
    watched = environment.step(turn(call("watch", start=2, end=3, count=3)))
    assert watched.observation is not None
    assert words(watched.observation) == ["t = 2.0 s", "t = 2.5 s", "t = 3.0 s"]
    pairs = [
        *zip(first.images, [0, 8, 15, 23], strict=True),
        *zip(outcome.observation.images, [1, 4, 13, 23], strict=True),
        *zip(watched.observation.images, [8, 10, 12], strict=True),
    ]
    for shown, number in pairs:
        gaps = [float(np.abs(shown.astype(int) - frame.astype(int)).mean()) for frame in whole]
        # converters of colours differ by their rounding
        assert int(np.argmin(gaps)) == number and gaps[number] < 2.5
    assert outcome.info["frames_looked_at"] == 4 and watched.info["frames_looked_at"] == 7


def test_a_label_asked_for_again_shows_the_same_frame(tmp_path: Path) -> None:
    """At rates whose times are no decimals, and at variable ones."""
    frames = np.random.default_rng(0).integers(0, 256, (12, 4, 6, 3), dtype=np.uint8)
    frames = frames.repeat(14, 1).repeat(14, 2)
    paths = [
        write_video(tmp_path / "ntsc.mp4", frames, 30000 / 1001),
        write_video(
            tmp_path / "variable.mp4", frames, times=[k / 7 + k * k / 90 for k in range(12)]
        ),
    ]
    for path in paths:
        environment, first = begun(asked(path), frames=12, most_times=1)
        # spread over time where the rate varies: a frame that stays long is two of them
        assert len(first.images) == (12 if "ntsc" in path else 11)
        for text, picture in zip(words(first), first.images, strict=False):
            seconds = float(text.removeprefix("t = ").removesuffix(" s"))
            outcome = environment.step(turn(call("frames", times=[seconds])))
            assert outcome.observation is not None and outcome.observation.images[0] is picture
            assert words(outcome.observation) == [text]
    assert label(1001 / 30000) == "t = 0.034 s" and label(0.125) == "t = 0.125 s"


def test_view_shrinks_the_frames_and_tools_are_those_of_the_settings(noise: Sample) -> None:
    environment, first = begun(noise, view=42, tools=["watch"], most_frames=3)
    assert [picture.shape for picture in first.images] == [(28, 42, 3)] * 4
    (tool,) = first.tools
    assert tool["function"]["name"] == "watch"
    assert tool["function"]["parameters"]["required"] == ["start", "end"]
    assert tool["function"]["parameters"]["properties"]["count"]["maximum"] == 3
    outcome = environment.step(turn(call("watch", start=0, end=6)))
    assert outcome.observation is not None and len(outcome.observation.images) == 3
    _, silent = begun(noise, tools=[])
    assert not silent.tools


def test_the_end_of_a_clip_can_be_watched(noise: Sample) -> None:
    environment, _ = begun(noise)
    for start, end in ((5.8, 6.0), (5.75, 6.0), (5.99, 6)):
        outcome = environment.step(turn(call("watch", start=start, end=end)))
        assert outcome.observation is not None
        assert words(outcome.observation) == ["t = 5.75 s"]


@pytest.mark.parametrize("count", [385, 391])
def test_a_length_of_no_whole_milliseconds_is_told_so_that_it_can_be_asked_for(
    count: int, tmp_path: Path
) -> None:
    """16.0416... and 16.2916... seconds at 24 frames per second: neither the number told nor the player's own calls are refused."""
    ground = np.zeros((count, 48, 48, 3), np.uint8)
    write_video(tmp_path / "odd.mp4", ground, 24)
    whole = probe(str(tmp_path / "odd.mp4")).duration_s
    assert whole == pytest.approx(count / 24) and whole * 1000 % 1 > 0.1
    sample = asked(str(tmp_path / "odd.mp4"), span=(count / 24 - 0.04, count / 24))
    environment, shown = begun(sample, astray=0.5, max_turns=100)
    (told,) = [text for text in words(shown) if text.startswith("These are")]
    end = float(told.split(" seconds.")[0].rsplit(" ", 1)[1])
    assert 0 <= whole - end < 1e-3
    assert environment.step(turn(call("watch", start=16, end=end))).observation is not None
    rng = np.random.default_rng(0)
    for _ in range(40):
        environment.looks = 0
        environment.step(turn(environment.scripted(rng) or ""))
    assert environment.bad == 0


# ---- what a model may write


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("<tool_call>no call</tool_call>", "as JSON in the tool call"),
        (call("frames", times=[1]) * 2, "expected one tool call in a turn, found 2"),
        (call("zoom", times=[1]), "expected a call of frames, watch, found 'zoom'"),
        (call("<|image_pad|>"), "expected a call of frames, watch, found something else"),
        (call("frames"), "times as a list of 1 to 4 seconds such as [1.5, 3], found nothing"),
        (call("frames", times=[]), "found a list of 0"),
        (call("frames", times=[1, 2, 3, 4, 5]), "found a list of 5"),
        (call("frames", times="<|image_pad|>"), "found a text"),
        (call("frames", times={"1": 2}), "found a dict"),
        (
            call("frames", times=["1"]),
            "times in seconds from 0 to 6, the end of the video, found a",
        ),
        (call("frames", times=[True]), "found a bool"),
        (call("frames", times=[[1]]), "found a list of 1"),
        (call("frames", times=[1, 6.5]), "found 6.5"),
        (call("frames", times=[-0.5]), "found -0.5"),
        (call("frames", times=[10**400]), "found no such number"),
        (call("frames", times=[float("nan")]), "as JSON in the tool call"),
        ('<tool_call>{"name": "frames", "arguments": {"times": [1e400]}}', "found no such number"),
        (call("watch", start=1), "expected end in seconds from 0 to 6"),
        (call("watch", start=2, end=2), "expected start before end, found 2 and 2"),
        (call("watch", start=3, end=2), "expected start before end, found 3 and 2"),
        (call("watch", start="1", end=2), "expected start in seconds"),
        (call("watch", start=1, end=7), "found 7"),
        (call("watch", start=1, end=2, count=0), "count as a whole number from 1 to 8, found 0"),
        (call("watch", start=1, end=2, count=9), "found 9"),
        (call("watch", start=1, end=2, count=2.5), "found 2.5"),
        (call("watch", start=1, end=2, count=True), "found a bool"),
    ],
)
def test_a_call_that_cannot_be_followed_is_told_why_and_costs_a_turn(
    said: str, why: str, noise: Sample
) -> None:
    environment, _ = begun(noise)
    outcome = environment.step(turn(said))
    assert outcome.observation is not None and not outcome.parsed and not outcome.observation.images
    (text,) = words(outcome.observation)
    assert text.startswith("Error: expected ") and why in text and "<|" not in text
    assert outcome.info["bad_calls"] == 1.0 and outcome.info["looked"] == 0.0


def test_words_that_are_no_answer_end_with_nothing(noise: Sample) -> None:
    environment, _ = begun(noise)
    outcome = environment.step(turn("x y z"))
    assert outcome.terminated and outcome.reward == 0.0 and not outcome.parsed


def test_a_damaged_clip_costs_its_sample_and_a_vanished_one_its_rollout(
    noise: Sample, tmp_path: Path
) -> None:
    whole = Path(noise.videos[0]).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[:300])
    model, task = policy(), Rewind()
    for path in (tmp_path / "cut.mp4", tmp_path / "none.mp4"):
        with pytest.raises(MediaError, match=path.name):
            begin(model, asked(str(path)), task, 2, (0, 1))
    episodes = begin(model, noise, task, 2, (0, 1))
    Path(noise.videos[0]).unlink()
    looks = [turn(call("frames", times=[2.75])), turn("<answer>x</answer>")]
    rollouts = play_written(model, episodes, [looks, looks[1:]])
    assert rollouts[0].error is not None and "found nothing at" in rollouts[0].error
    assert rollouts[1].error is None and rollouts[1].score is not None
    assert rollouts[1].score.value == 1.0, "another rollout of the group goes on"


# ---- settings and rows


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"tool": []}, "unknown parameter 'tool'"),
        ({"tools": ["watc"]}, "expected rewind.tools of frames, watch, found 'watc'"),
        ({"tools": ["watch", "watch"]}, "each of rewind.tools once"),
        ({"tools": "watch"}, "rewind.tools as a list"),
        ({"frames": 0}, "rewind.frames"),
        ({"most_times": True}, "rewind.most_times"),
        ({"view": 4}, "rewind.view"),
        ({"astray": 2}, "rewind.astray"),
        ({"prompt": "?"}, "rewind.prompt"),
    ],
)
def test_wrong_settings_are_refused(params: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Rewind(**params)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"image": "a.png"}, 'expected {"video"'),
        ({"options": ["y", "z"]}, "expected options .* the answer 'x'"),
        ({"span": [2, 1]}, "expected span as"),
        ({"span": [0, float("nan")]}, "expected span as"),
        ({"span": [0, 10**400]}, "expected span as"),
    ],
)
def test_a_wrong_row_is_refused(row: dict[str, Any], why: str, tmp_path: Path) -> None:
    whole = {"video": "a.mp4", "question": "?", "answer": "x"}
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(row if "image" in row else whole | row), encoding="utf-8")
    with pytest.raises(DataError, match=rf"data\.jsonl:1: {why}"):
        list(Rewind().load(str(path)))


@pytest.mark.parametrize("task", [Rewind, Zoom, Browser])
@pytest.mark.parametrize("line", [b"\xff{}", b"[" * 100_000, b"nonsense", b"[1]"])
def test_a_line_that_is_no_object_is_named(task: Any, line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\n" + line)
    with pytest.raises(DataError, match=r"data\.jsonl:2: expected .*JSON object"):
        list(task().load(str(path)))


# ---- decoded and encoded once


def test_a_frame_is_decoded_once_for_all_who_ask_at_the_same_time(tmp_path: Path) -> None:
    path, copy = clip(tmp_path, 24), tmp_path / "copy.mp4"
    copy.write_bytes(Path(path).read_bytes())
    frames, found = ClipFrames(), []
    start = threading.Barrier(6)

    def ask(name: str) -> None:
        start.wait()
        found.append(frames.read(name, [5, 2, 9]))

    threads = [threading.Thread(target=ask, args=(n,)) for n in [path, str(copy)] * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert frames.decoded == 3 and len({tuple(map(id, f)) for f in found}) == 1
    frames.read(path, [9, 10])
    assert frames.decoded == 4
    # a bound of bytes, and another file of the same name
    small = ClipFrames(2 * 84 * 56 * 3)
    for number in (0, 1, 2, 0):
        small.read(path, [number])
    assert small.decoded == 4
    other = clip(tmp_path, 24, seed=1)
    Path(path).write_bytes(Path(other).read_bytes())
    assert not np.array_equal(frames.read(path, [5])[0], found[0][0])
    with pytest.raises(MediaError, match="expected frames 0 to 23"):
        frames.read(path, [24])


def test_the_visual_cache_encodes_an_equal_frame_once(noise: Sample) -> None:
    """Frames of a group's rollouts that are the same picture, shown first or by any tool, are one entry of the cache."""
    model = policy_of(freeze=("vision", "projector"), video=VIDEO)
    episodes = begin(model, noise, Rewind(), 3, (0, 1))
    looks = [
        call("frames", times=[2.0, 2.3]),  # 2.0 was shown at first
        call("watch", start=2, end=2.25),
        call("frames", times=[2.4, 4.1]),
    ]
    rollouts = play_written(model, episodes, [[turn(t), turn("<answer>x</answer>")] for t in looks])
    visuals = [v for r in rollouts for v in r.turns[-1].prompt.visuals]
    cache = model.encoder.visuals
    before = cache.stats.encoded
    cache.features(visuals, model.tower())
    # 4 at first, then 2.25 and 4.0
    assert len(visuals) == 18 and cache.stats.encoded - before == 6
    cache.features(visuals, model.tower())
    assert cache.stats.encoded - before == 6


@pytest.mark.slow
def test_a_tiny_model_trains_on_two_turns(
    rows: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its words are rubbish: the first turn is taken for a call, the second for an answer that is worth what its letters say. All
    else is the run's own, threads that decode included."""
    threads: list[str] = []
    step = RewindEnvironment.step

    def stepped(self: RewindEnvironment, written: Turn) -> mmrl.Outcome:
        threads.append(threading.current_thread().name)
        second = zlib.crc32(written.text.encode()) % 12
        said = written.text if self.looks else call("frames", times=[second, second + 1])
        return step(self, replace(written, text=said))

    monkeypatch.setattr(RewindEnvironment, "step", stepped)
    monkeypatch.setattr(
        module, "judged", lambda sample, text: (zlib.crc32(text.encode()) / 2**32, None)
    )
    data = Path(rows[0].videos[0]).parents[1] / "data.jsonl"
    trainer = mmrl.Trainer(
        tiny_folder("qwen2_5_vl", window_vision=False),
        task="rewind",
        train_data=str(data),
        params={"view": 56},
        config={
            "name": "rewind",
            "dir": str(tmp_path),
            "seed": 3,
            "model.device": "cpu",
            "train.steps": 1,
            "train.prompts_per_step": 2,
            "rollout.group_size": 3,
            "rollout.max_new_tokens": 5,
            "optim.lr": 0.002,
            "reward.workers": 0,
            "eval.samples": 0,
            "eval.every": 0,
            "algorithm.dynamic_sampling": False,
        },
        quiet=True,
    )
    row = trainer.fit()
    assert len(threads) == 12 and all(name.startswith("environment") for name in threads)
    assert math.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0
    assert row["train/logprob_gap/max"] < 1e-4
    logged = read_jsonl(tmp_path / "rewind" / "rollouts" / "step_000001.jsonl")
    assert len(logged) == 6 and all(len(answer["turns"]) == 2 for answer in logged)


def test_the_task_is_known_by_its_name_and_reads_its_examples(tmp_path: Path) -> None:
    from mmrl.registry import task_from_spec

    task = task_from_spec("rewind", {"frames": 2})
    samples = list(task.load(str(task.example_data(str(tmp_path)))))
    assert isinstance(task, Rewind) and len(samples) == 4
    for sample in samples:
        _, first = begun(sample, frames=2)
        assert len(first.images) == 2
        # what looks at one answer is shown the same frames as one clip
        assert sample.params["video"] == {"kind": "uniform", "num_frames": 2, "factor": 1}
        assert len(first_frames(probe(sample.videos[0]), 2)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "internvl"])
def test_families_of_other_kinds_play_it(family: str, rows: list[Sample]) -> None:
    """One that has no clips at all, and one of tiles; the templates of both have no place for tools."""
    model, task = fresh_policy(family, frame="rel1000"), Rewind()
    assert not model.encoder._shows_tools
    assert ("video" in model.family.refused) == (family == "gemma3")
    episodes = begin(model, rows[0], task, 1, (0, 0))
    (rollout,) = play_scripted(model, episodes, [(0, 0)])
    assert rollout.error is None and rollout.score is not None and rollout.score.value == 1.0
    first, second = rollout.turns
    assert len(first.prompt.visuals) == 4 < len(second.prompt.visuals)
    text = model.processor.tokenizer.decode(first.prompt.ids_P)
    assert '"name": "watch"' in text and text.index("t = 0.0 s") < text.index("Which color")
