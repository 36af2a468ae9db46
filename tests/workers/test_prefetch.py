"""Media workers: what they prepare is what the engine would have made; a clip that kills or hangs one costs only itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from mmrl.config import RunConfig, load_config
from mmrl.errors import ConfigError, MediaError, MMRLError
from mmrl.evaluation.evaluate import evaluate
from mmrl.evaluation.result import Evaluation
from mmrl.evaluation.settings import EvalSettings
from mmrl.policy.policy import Policy
from mmrl.rollout import PrefillOnceEngine, SamplingSettings
from mmrl.training.trainer import Trainer
from mmrl.types import Sample
from mmrl.workers.prefetch import Ahead, Media, Prefetcher, media_of
from mmrl.workers.scorer import Scorer
from tests.kits.clip_kit import (
    VIDEO,
    Deadly,
    broken_clip,
    cached_policy,
    clip_sample,
    loaded,
    make_clip,
)
from tests.kits.engine_kit import ENVIRONMENT, REPO, picture, read_jsonl, small_run


def deadly(policy: Policy) -> Deadly:
    """The policy's visual cache, with clips that kill or hang workers."""
    policy.encoder.visuals.__class__ = Deadly
    return policy.encoder.visuals


def clips(folder: Path, *names: str) -> list[Media]:
    return [Media(0, "video", make_clip(folder, name)) for name in names]


@pytest.fixture(scope="module")
def pool_and_policy(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Prefetcher, Policy, Path]]:
    folder = tmp_path_factory.mktemp("media")
    policy = cached_policy(folder / "cache")
    with Prefetcher([deadly(policy)], 2, timeout_s=2.0) as pool:
        yield pool, policy, folder


def mixed_samples(folder: Path) -> list[Sample]:
    """Clips, clips sampled otherwise, clips beside pictures, the same clip again, text alone, and two that cannot be read."""
    return [
        clip_sample(0, make_clip(folder, "a")),
        clip_sample(1, make_clip(folder, "b"), video={"num_frames": 2}),
        clip_sample(2, make_clip(folder, "b"), make_clip(folder, "c"), images=[picture((112, 84))]),
        clip_sample(3, make_clip(folder, "a")),
        clip_sample(4),
        clip_sample(5, broken_clip(folder)),
        clip_sample(6, str(folder / "nowhere.mp4")),
        clip_sample(7, images=[picture((56, 56))]),
    ]


@pytest.mark.slow
def test_prepared_media_are_read_from_the_cache_and_equal_those_made_here(
    pool_and_policy: tuple[Prefetcher, Policy, Path],
) -> None:
    pool, policy, folder = pool_and_policy
    media = [*clips(folder, "x0", "x1", "x2"), Media(0, "image", picture((112, 84), 3))]
    pool.expect(media)
    assert [pool.wait(m) for m in media] == ["built"] * 4
    assert [pool.wait(m) for m in media] == ["built"] * 4, "asked again, it says the same"
    stats, visuals, plain = (
        policy.encoder.visuals.stats,
        policy.encoder.visuals,
        cached_policy(None).encoder.visuals,
    )
    before = stats.built
    for one in media:
        seen, own = (
            (v.video if one.kind == "video" else v.image)(one.path) for v in (visuals, plain)
        )
        assert seen == own and torch.equal(visuals.pixels(seen), plain.pixels(own))
    assert stats.built == before and plain.stats.built == 4


@pytest.mark.slow
def test_media_that_nobody_expected_are_prepared_when_asked_for(
    pool_and_policy: tuple[Prefetcher, Policy, Path],
) -> None:
    pool, policy, folder = pool_and_policy
    (one,) = clips(folder, "unexpected")
    assert pool.wait(one) == "built"
    assert (
        pool.wait(Media(0, "video", one.path, {"num_frames": 4}, "other words, same frames"))
        == "present"
    )
    before = policy.encoder.visuals.stats.built
    policy.encoder.visuals.video(one.path)
    assert policy.encoder.visuals.stats.built == before


@pytest.mark.slow
def test_errors_of_media_are_those_of_the_reader(
    pool_and_policy: tuple[Prefetcher, Policy, Path],
) -> None:
    pool, _, folder = pool_and_policy
    for path in (broken_clip(folder), str(folder / "nowhere.mp4")):
        with pytest.raises(MediaError) as here:
            cached_policy(None).encoder.visuals.video(path)
        for _ in range(2):
            with pytest.raises(MediaError) as there:
                pool.wait(Media(0, "video", path))
            assert (str(there.value), there.value.kind) == (str(here.value), here.value.kind)
    Path(folder / "nowhere.mp4").write_bytes(Path(make_clip(folder, "found")).read_bytes())
    assert pool.wait(Media(0, "video", str(folder / "nowhere.mp4"))) == "built", (
        "a file that was fixed is read"
    )
    (folder / "nowhere.mp4").unlink()


@pytest.mark.slow
def test_a_mistake_in_a_row_is_met_by_whoever_asks(
    pool_and_policy: tuple[Prefetcher, Policy, Path],
) -> None:
    pool, policy, folder = pool_and_policy
    wrong = clip_sample(9, make_clip(folder, "a"), video={"numframes": 2})
    assert pool.wait(media_of(wrong)[0]).startswith("unsure: ConfigError: unknown key 'numframes'")
    policy.encoder.ahead = Ahead(pool)
    with pytest.raises(ConfigError, match="unknown key 'numframes' in params"):
        policy.encoder.references(wrong)
    policy.encoder.ahead = None


@pytest.mark.slow
def test_a_clip_that_kills_hangs_or_confuses_its_worker_has_failed_and_the_others_are_prepared(
    pool_and_policy: tuple[Prefetcher, Policy, Path],
) -> None:
    pool, policy, folder = pool_and_policy
    names = ["d0", "deadly-1", "d1", "hanging-1", "d2", "babbling-1"]
    media = clips(folder, *names)
    pool.expect(media)
    kinds = {}
    for name, one in zip(names, media, strict=True):
        try:
            pool.wait(one)
        except MediaError as error:
            kinds[name] = error.kind
            assert one.path in str(error) and error.path == one.path
            said = {
                "d": "exit code -9",
                "h": "no result within 2 s",
                "b": "sent a message that cannot be read",
            }
            assert said[name[0]] in str(error)
    assert kinds == {"deadly-1": "crashed", "hanging-1": "timeout", "babbling-1": "crashed"}
    failures = pool._losses.count
    with pytest.raises(MediaError, match="timeout"):
        pool.wait(media[3])
    assert pool._losses.count == failures, "it is not tried again"
    policy.encoder.ahead = Ahead(pool)
    with pytest.raises(MediaError, match="crashed"):
        policy.encoder.references(clip_sample(1, media[1].path))
    policy.encoder.ahead = None


@pytest.mark.slow
def test_a_worker_killed_while_idle_is_replaced(
    pool_and_policy: tuple[Prefetcher, Policy, Path],
) -> None:
    pool, _, folder = pool_and_policy
    pool.wait(clips(folder, "a")[0])
    victim = psutil.Process(pool._workers[0].process.pid)
    victim.kill()
    psutil.wait_procs([victim], timeout=5)
    media = clips(folder, "k0", "k1", "k2")
    pool.expect(media)
    assert [pool.wait(m) for m in media] == ["built"] * 3


@pytest.mark.slow
def test_a_fork_server_that_is_gone_takes_nothing_along(
    pool_and_policy: tuple[Prefetcher, Policy, Path],
) -> None:
    """Nobody tells whether its workers live; a signal that is sent to all processes does not end it."""
    pool, _, folder = pool_and_policy
    first, *later = clips(folder, "f0", "f1", "f2")
    pool.wait(first)
    server = psutil.Process(pool._workers[0].pid).parent()
    assert server is not None and server.pid != os.getpid()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        server.send_signal(number)
    time.sleep(0.5)
    assert server.status() != psutil.STATUS_ZOMBIE
    server.kill()  # and left to be waited for by multiprocessing
    deadline = time.monotonic() + 20
    while server.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = [psutil.Process(w.pid) for w in pool._workers]
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.extend(map(pool.wait, later)), daemon=True)
    asking.start()
    asking.join(120)
    assert found == ["built"] * 2
    assert psutil.wait_procs(workers[:1], timeout=10)[0], "one that was replaced has ended"


@pytest.mark.slow
def test_workers_share_what_they_import(pool_and_policy: tuple[Prefetcher, Policy, Path]) -> None:
    pool, _, folder = pool_and_policy
    for media in clips(folder, "shared_1", "shared_2"):
        pool.wait(media)
    deadline = time.monotonic() + 60
    while not all(w.ready for w in pool._workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    for worker in pool._workers:
        held = psutil.Process(worker.pid).memory_full_info()
        # torch, transformers and decoders lie in memory once: a spawned process had nearly all of it for itself
        assert held.uss < 0.5 * held.rss, held
        assert (
            psutil.Process(worker.pid).num_threads() < 12
        )  # one core's work, whatever the machine has


@pytest.mark.slow
def test_no_more_than_ahead_is_prepared_and_closing_ends_every_process_and_everybody_who_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Prefetcher([deadly(cached_policy(tmp_path / "cache"))], 1, ahead=2)
    media = clips(tmp_path, *(f"n{i}" for i in range(6)))
    pool.expect(media)
    pool.wait(media[0])
    deadline = time.monotonic() + 20
    while len(pool._done) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    assert set(pool._done) == set(media[:3]), "the one asked for and two ahead"
    assert [pool.wait(m) for m in media] == ["built"] * 6
    pool.expect(clips(tmp_path, "m0", "m1", "m2", "m3"))
    pool.forget()
    time.sleep(0.5)
    assert len(pool._done) <= 6 + 2, "what is not expected any more is not begun"
    monkeypatch.setattr("mmrl.workers.spawned.END_S", 1.0)
    close_while_waited_for(pool, clips(tmp_path, "hanging")[0])


def close_while_waited_for(pool: Prefetcher, stuck: Media) -> None:
    """Close `pool` while a worker hangs in `stuck` and somebody waits for it."""
    found: list[BaseException] = []

    def ask() -> None:
        try:
            pool.wait(stuck)
        except MMRLError as error:
            found.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.5)
    processes = [w.process for w in pool._workers]
    pool.close()
    asking.join(5)
    assert not asking.is_alive() and "closed while media were waited for" in str(found[0])
    for process in processes:  # killed; on a busy machine it takes the system a while
        process.join(20)
    assert processes and not any(p.is_alive() for p in processes)
    assert not pool._thread.is_alive()
    pool.close()


@pytest.mark.slow
def test_a_pool_that_only_dies_gives_up_and_says_so(tmp_path: Path) -> None:
    policy = cached_policy(tmp_path / "cache")
    with Prefetcher([deadly(policy)], 1, restarts=1) as pool:
        pool.expect(clips(tmp_path, "deadly-1", "deadly-2", "deadly-3"))
        with pytest.raises(
            MMRLError, match=r"2 crashed or hung in a row.*exit code -9.*data.workers to 0"
        ):
            for one in clips(tmp_path, "deadly-1", "deadly-2", "deadly-3"):
                try:
                    pool.wait(one)
                except MediaError:
                    continue
        processes = [w.process for w in pool._workers]
    assert not any(p.is_alive() for p in processes)


PARENT = """
    import signal
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
    import sys, time
    from pathlib import Path
    from mmrl.workers.prefetch import Media, Prefetcher
    from tests.kits.clip_kit import Deadly, cached_policy, make_clip
    if __name__ == "__main__":
        folder = Path(sys.argv[1])
        policy = cached_policy(folder / "cache")
        policy.encoder.visuals.__class__ = Deadly
        for _ in range(2):
            try:
                with Prefetcher([policy.encoder.visuals], 1) as pool:
                    pool.wait(Media(0, "video", make_clip(folder, "a")))
                    print("workers", *(w.process.pid for w in pool._workers), flush=True)
                    pool.wait(Media(0, "video", make_clip(folder, "hanging")))
            except KeyboardInterrupt:
                print("interrupted", flush=True)
"""


@pytest.mark.slow
def test_no_process_is_left_when_the_engine_is_interrupted_or_killed(tmp_path: Path) -> None:
    """An engine that is interrupted, has another pool then, and is killed."""
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT), encoding="utf-8")
    parent = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        cwd=REPO,
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert parent.stdout is not None
        for number in (signal.SIGINT, signal.SIGKILL):
            # libraries may speak before
            line = next(line for line in parent.stdout if line.startswith("workers"))
            workers = [psutil.Process(int(pid)) for pid in line.split()[1:]]
            assert len(workers) == 1
            time.sleep(0.5)
            parent.send_signal(number)
            if number == signal.SIGINT:
                assert "interrupted\n" in parent.stdout
            else:
                _, err = parent.communicate(timeout=30)
            _, alive = psutil.wait_procs(workers, timeout=10)
            assert alive == []
        assert parent.returncode == -signal.SIGKILL and "KeyboardInterrupt" not in err, (
            "workers leave the interrupt to the engine"
        )
    finally:
        parent.kill()


def answers(
    policy: Policy, samples: list[Sample], pool: Prefetcher | None, views: tuple[str, ...] = ()
) -> Evaluation:
    source = loaded(*samples)
    policy.encoder.ahead = None if pool is None else Ahead(pool)
    with Scorer([], [source.task], workers=0) as scorer:
        return evaluate(
            policy,
            PrefillOnceEngine(policy),
            scorer,
            [source],
            EvalSettings(SamplingSettings(max_new_tokens=6), 2, views=views),
        )


@pytest.mark.slow
def test_an_evaluation_with_workers_is_the_same_bit_for_bit(
    pool_and_policy: tuple[Prefetcher, Policy, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mmrl.evaluation.evaluate._CHUNK", 3)
    samples = mixed_samples(tmp_path)
    alone = answers(cached_policy(tmp_path / "alone"), samples, None, ("shuffle", "mask"))
    pool, policy, _ = pool_and_policy
    before = policy.encoder.visuals.stats.built
    together = answers(policy, samples, pool, ("shuffle", "mask"))
    policy.encoder.ahead = None
    assert policy.encoder.visuals.stats.built == before, "the engine's process decoded nothing"
    assert together.predictions == alone.predictions and together.view_answers == alone.view_answers
    assert together.results == alone.results
    assert sum("input_error" in (p["score"]["reason"] or "") for p in alone.predictions) == 2 * 3


@pytest.mark.slow
def test_a_run_with_workers_is_the_same_and_decodes_nothing_itself(tmp_path: Path) -> None:
    options = {"options": ["left", "right"], "width": 84, "height": 56, "duration": 2.0}
    for name, count in (("train", 5), ("eval", 3)):
        rows = [
            {
                "id": f"{name}{n}",
                "question": "Which?",
                "answer": "AB"[n % 2],
                "video": make_clip(tmp_path, f"{name}{n}"),
                "params": options,
            }
            for n in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8"
        )
    logs = []
    for workers in (0, 1):
        tree = small_run(
            tmp_path / str(workers),
            "",
            eval={"best_metric": "greedy/reward", "views": ["mask"]},
            algorithm={"dynamic_sampling": False},
            data={
                "train": [{"task": "choice", "path": str(tmp_path / "train.jsonl")}],
                "workers": workers,
                "eval": [{"task": "choice", "path": str(tmp_path / "eval.jsonl")}],
                "cache": {"dir": str(tmp_path / f"cache{workers}")},
                "video": VIDEO.model_dump(),
            },
        )
        trainer = Trainer(RunConfig.model_validate(tree))
        trainer.fit()
        built = trainer.policy.encoder.visuals.stats.built
        assert built == (0 if workers else 8), "training and held-out clips, each once"
        folder = tmp_path / str(workers) / "run"
        logs.append(
            [
                [
                    {
                        k: v
                        for k, v in row.items()
                        if not k.startswith(("time/", "speed/", "memory/"))
                    }
                    for row in read_jsonl(path)
                ]
                for path in sorted(folder.rglob("*.jsonl"))
            ]
        )
        assert {"eval/view/mask/gap", "eval/view/mask/plain", "eval/view/mask/changed"} <= set(
            read_jsonl(folder / "metrics.jsonl")[-1]
        )
    assert logs[0] == logs[1] and len(logs[0]) >= 5


def test_workers_need_a_cache_folder() -> None:
    with pytest.raises(
        ConfigError,
        match=r"data.workers \(2\).*expected data.cache.dir, found null; set data.cache.dir",
    ):
        load_config(None, ["data.workers=2"])
    assert load_config(None, ["data.workers=2", "data.cache.dir=x"]).data.workers == 2
    with pytest.raises(
        ConfigError,
        match=r"found 1 worker.*data.cache.dir null; set data.cache.dir, or data.workers to 0",
    ):
        Prefetcher([cached_policy(None).encoder.visuals], 1)
