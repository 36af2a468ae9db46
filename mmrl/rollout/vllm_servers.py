"""Several rollout servers as one: prompts are dealt over them, weights go to all, and one that is lost is done without.

    engine.vllm.url: [http://10.0.0.2:8100, http://10.0.0.3:8100]

Each server gets a share of about equal cost, as Ray actors do; answers are in the order of the questions. Noise belongs to a
request, so that who answers changes log-probs by rounding only. A server that goes away during a run is left out: its share is
asked of the others, which is logged and counted (`train/rollout_servers/up` and `reasked`). Before every sync it is looked for
again; once it is back it gets all weights and its share. Without any server the run ends, as with one.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from mmrl.config import VLLMConfig
from mmrl.distributed.cluster.objects import shares
from mmrl.errors import RolloutError
from mmrl.rollout.vllm_client import ServerGone, VLLMClient
from mmrl.rollout.vllm_inputs import MissingMedia, WirePrompt, WireSampling
from mmrl.rollout.weight_sender import pieces

__all__ = ["VLLMServers"]

_log = logging.getLogger(__name__)


class VLLMServers:
    """See the module. Not for several threads at once."""

    shared = True

    def __init__(self, settings: VLLMConfig, model: str, dtype: str, longest: int = 0) -> None:
        self._clients = [VLLMClient(settings, model, dtype, url, longest) for url in settings.urls]
        self._down: dict[int, str] = {}  # why, by number
        self._sync = ""
        self._reasked = 0
        self._threads = ThreadPoolExecutor(len(self._clients), thread_name_prefix="servers")

    # who answers

    def _up(self) -> list[int]:
        """Numbers of the servers that answer. Raises RolloutError where none does."""
        found = [n for n in range(len(self._clients)) if n not in self._down]
        if not found:
            raise RolloutError(
                f"all {len(self._clients)} rollout servers are gone ({'; '.join(self._down.values())}); look at their logs, "
                "start them again, then resume the run"
            )
        return found

    def _lose(self, number: int, error: Exception) -> None:
        self._down[number] = str(error)
        _log.warning("a rollout server is left out until it is back: %s", error)

    @property
    def counts(self) -> dict[str, float]:
        """Servers that answer, and prompts asked again since the last time."""
        reasked, self._reasked = self._reasked, 0
        return {"up": len(self._clients) - len(self._down), "reasked": reasked}

    @property
    def dropped(self) -> bool:
        """Whether a server that was lost is back: it lacks all weights. Looks for each of them."""
        back = [number for number in self._down if self._clients[number].answers()]
        for number in back:
            _log.warning("the rollout server %s is back", self._clients[number].url)
            del self._down[number]
            self._clients[number].loaded = ""
            self._clients[number].close()  # the way that weights went is gone with the old one
        return bool(back)

    @property
    def loaded(self) -> str:
        """Name of the weights sent last and, behind an @, of the servers that have them: what other processes are told."""
        return f"{self._sync}@{','.join(map(str, sorted(self._down)))}"

    @loaded.setter
    def loaded(self, name: str) -> None:
        self._sync, _, down = name.partition("@")
        lost = {int(number) for number in down.split(",") if number}
        self._down = {number: self._down.get(number, "lost by the main process") for number in lost}
        for client in self._clients:
            client.loaded = self._sync

    # questions

    def wanted(self, hash: str) -> bool:
        """Whether one of the servers has not been sent the tensor of this media hash."""
        return any(self._clients[number].wanted(hash) for number in self._up())

    def generate(
        self, asked: Sequence[tuple[WirePrompt, WireSampling]]
    ) -> list[list[tuple[list[int], list[float]]]]:
        """See VLLMBackend.generate."""
        answers: dict[int, Any] = {}
        while left := [n for n in range(len(asked)) if n not in answers]:
            costs = [
                len(asked[n][0].ids) + asked[n][1].count * asked[n][1].max_tokens for n in left
            ]
            up = self._up()
            parts = [[left[i] for i in part] for part in shares(costs, len(up))]
            found = self._each(
                up[: len(parts)],
                lambda client, place, parts=parts: _ask(  # type: ignore[misc]
                    client, [asked[n] for n in parts[place]], client.generate
                ),
            )
            for part, group in zip(parts, found, strict=True):
                if group is None:
                    self._reasked += len(part)
                else:
                    answers |= dict(zip(part, group, strict=True))
        return [answers[n] for n in range(len(asked))]

    def score(self, asked: Sequence[tuple[WirePrompt, Sequence[int]]]) -> list[list[float]]:
        """See VLLMBackend.score: the answers of every server, one server after the other."""
        found = self._each(self._up(), lambda client, _: _ask(client, asked, client.score))
        self._up()
        return [scores for each in found if each is not None for scores in each]

    def _each(self, numbers: Sequence[int], work: Callable[[VLLMClient, int], Any]) -> list[Any]:
        """What `work` finds at each of these servers, all at once; None of one that is gone. Raises any other error, when all
        have ended."""
        running: list[Future[Any]] = [
            self._threads.submit(work, self._clients[number], place)
            for place, number in enumerate(numbers)
        ]
        found: list[Any] = []
        failed: list[BaseException] = []
        for number, future in zip(numbers, running, strict=True):
            error = future.exception()
            if isinstance(error, ServerGone):
                self._lose(number, error)
            elif error is not None:
                failed.append(error)
            found.append(None if error else future.result())
        if failed:
            raise failed[0]
        return found

    # weights

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[dict[str, int]]:
        """See VLLMClient.load: each piece is read once and goes to all servers; digests of every one."""
        sync = secrets.token_hex(8)
        numbers = self._up()
        bases = {self._clients[n].loaded for n in numbers}
        # one that is back has none: then all weights come (see dropped)
        base = bases.pop() if len(bases) == 1 else ""
        self._sync = ""
        held: dict[int, list[dict[str, int]]] = {}
        for piece in pieces(weights, sync, base):
            numbers = self._up()
            found = self._each(
                numbers,
                lambda client, _, piece=piece: client.send(piece),  # type: ignore[misc]
            )
            held = {n: each for n, each in zip(numbers, found, strict=True) if each is not None}
        for number in self._up():
            self._clients[number].loaded = sync
        self._sync = sync
        return [digests for each in held.values() for digests in each]

    def sleep(self) -> None:
        """The servers have their own devices."""

    def close(self) -> None:
        """The servers go on, for the next run."""
        for client in self._clients:
            client.close()
        self._threads.shutdown(cancel_futures=True)


def _ask(
    client: VLLMClient, asked: Sequence[tuple[WirePrompt, Any]], ask: Callable[..., Any]
) -> Any:
    """`ask` of one server, without the tensors that it has; again with all that are at hand where it has forgotten some."""

    def bare(prompt: WirePrompt) -> WirePrompt:
        media = (m if client.wanted(m.hash) else replace(m, tensor=None) for m in prompt.media)
        return replace(prompt, media=tuple(media))

    try:
        return ask([(bare(prompt), rest) for prompt, rest in asked])
    except MissingMedia:
        if any(m.tensor is None for prompt, _ in asked for m in prompt.media):
            raise  # they were left out for all servers: whoever asks makes them again
        return ask(asked)
