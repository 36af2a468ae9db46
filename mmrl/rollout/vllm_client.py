"""The run's side of a rollout server (mmrl.rollout.vllm_server): the same calls as VLLMBackend, over HTTP.

All processes of a run share the server; the main one sends the weights. A server that is not there yet is waited for when the run
starts; one that goes away later ends the run, which can be resumed once it is back.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, ClassVar
from urllib.parse import urlsplit

import torch

from mmrl.config import VLLMConfig
from mmrl.errors import ConfigError, MismatchError, RolloutError
from mmrl.rollout.vllm_inputs import MissingMedia, WirePrompt, WireSampling
from mmrl.rollout.vllm_wire import dump, dump_prompts
from mmrl.rollout.weight_sender import Piece, WeightSender, address_towards, pieces
from mmrl.rollout.weight_transfer import ServerGone

__all__ = ["ServerGone", "VLLMClient"]

_log = logging.getLogger(__name__)
_ERRORS = {"ConfigError": ConfigError, "MismatchError": MismatchError}
_PAUSE_S = 0.5  # between two tries while the server starts
_GLANCE_S = 5.0  # for a server that was lost to say that it is back


class VLLMClient:
    """See the module. Not for several threads at once."""

    shared = True
    dropped = False  # a server has its own device, and does not sleep

    counts: ClassVar[dict[str, float]] = {}

    def __init__(
        self, settings: VLLMConfig, model: str, dtype: str | None, url: str = "", longest: int = 0
    ) -> None:
        """Waits for the server at `url` (by default the first of the settings). `dtype` None: it may compute in any type;
        `longest`: tokens of a prompt with its answer that it has to take."""
        self.url = url or settings.urls[0]
        self._settings = settings
        self._address = urlsplit(self.url if "//" in self.url else f"//{self.url}")
        if self._address.scheme not in ("", "http", "https") or not self._address.hostname:
            raise ConfigError(f"expected engine.vllm.url like http://host:port, found '{self.url}'")
        self.loaded = ""  # name of the weights that this run sent last; set on the processes that did not send them
        # hashes of media that were sent, and the digests of their tensors
        self._known: dict[str, str] = {}
        self.transfer: Any = None
        self._sender = WeightSender(self, settings.transfer, settings.timeout_s)
        self._key = os.environ.get("MMRL_API_KEY", "")
        found = self._wait()
        if dtype is not None and found["dtype"] != dtype:
            raise ConfigError(
                f"expected the rollout server {self.url} to compute in {dtype} as this run does, found "
                f"{found['dtype']}; start it with the run's configuration"
            )
        if os.path.basename(found["model"].rstrip("/")) != os.path.basename(model.rstrip("/")):
            raise ConfigError(
                f"expected the rollout server {self.url} to hold the model {model}, found {found['model']}; start it "
                "with the run's configuration"
            )
        if found["max_model_len"] < longest:
            raise ConfigError(
                f"expected the rollout server {self.url} to take prompts and answers of {longest} tokens, found its "
                f"engine.vllm.max_model_len {found['max_model_len']}; start it with the run's configuration, or set "
                f"engine.vllm.max_model_len: {found['max_model_len']} here, if nothing is longer"
            )

    def wanted(self, hash: str) -> bool:
        """Whether the server has not been sent the tensor of this media hash."""
        return hash not in self._known

    def generate(
        self, asked: Sequence[tuple[WirePrompt, WireSampling]]
    ) -> list[list[tuple[list[int], list[float]]]]:
        """See VLLMBackend.generate."""
        found = (
            self._ask(
                "/generate", [p for p, _ in asked], {"sampling": [asdict(s) for _, s in asked]}
            )
            if asked
            else []
        )
        return [[(ids, logprobs) for ids, logprobs in group] for group in found]

    def score(self, asked: Sequence[tuple[WirePrompt, Sequence[int]]]) -> list[list[float]]:
        """See VLLMBackend.score."""
        return self._ask(
            "/probe", [p for p, _ in asked], {"completions": [list(c) for _, c in asked]}
        )

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[dict[str, int]]:
        """See VLLMBackend.load. All weights the first time and after a failure; later those that differ from the ones sent before,
        which the server must still hold."""
        sync, held = secrets.token_hex(8), list[dict[str, int]]()
        for piece in pieces(weights, sync, self.loaded):
            held = self.send(piece)
        self.loaded = sync
        return held

    def send(self, piece: Piece) -> list[dict[str, int]]:
        """A piece of a sync, until whose end the server has no weights; then the digests of all that it holds. Raises ServerGone,
        and RolloutError for weights that the server does not take."""
        self.loaded = ""
        return self._sender.send(piece)

    def sleep(self) -> None:
        """The server has its own device."""

    def close(self) -> None:
        """The server goes on, for the next run."""
        self._sender.close()

    def _ask(self, path: str, prompts: list[WirePrompt], rest: dict[str, Any]) -> Any:
        tensors: dict[str, torch.Tensor] = {}
        document = {
            "weights": self.loaded,
            "prompts": dump_prompts(prompts, tensors, self._known),
            **rest,
        }
        status, answer = self._exchange("POST", path, dump(document, tensors))
        if status == 409:
            self._known.clear()  # asked again, everything goes along: other runs may push out more meanwhile
            raise MissingMedia(answer["missing"])
        self._check(status, answer)
        return answer["found"]

    def answers(self) -> bool:
        """Whether the server says at once that it is there."""
        try:
            return self._once("GET", "/health", b"", _GLANCE_S)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def health(self) -> Any:
        """What the server says of itself."""
        status, answer = self._exchange("GET", "/health")
        self._check(status, answer)
        return answer

    def own_address(self) -> str:
        """See Post."""
        assert self._address.hostname is not None
        return address_towards(self._address.hostname, self._address.port or 80)

    def post(self, path: str, body: bytes) -> Any:
        """See Post."""
        status, answer = self._exchange("POST", path, body)
        self._check(status, answer)
        return answer

    def _check(self, status: int, answer: Any) -> None:
        if status == 503:
            raise ServerGone(
                f"the rollout server {self.url} has no weights: it was started again during the run, or a sync "
                "failed on it; look at its log, then resume the run"
            )
        if status == 412:
            raise RolloutError(
                f"another run replaced the weights of the server {self.url}: expected those that this run sent "
                "last, found others; give each run a server of its own, then resume the run"
            )
        if status != 200:
            kind = _ERRORS.get(answer.get("kind", ""), RolloutError)
            raise kind(
                f"rollout server {self.url}: {answer.get('error', answer)} (status {status})"
            )

    def _exchange(self, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
        """Status and JSON of one request. Raises RolloutError when the server is gone or too slow."""
        try:
            return self._once(method, path, body)
        except TimeoutError as error:
            raise ServerGone(
                f"the rollout server {self.url} did not answer {path} within engine.vllm.timeout_s = "
                f"{self._settings.timeout_s:g} s; raise it, or look at the server's log"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerGone(
                f"the rollout server {self.url} is gone ({type(error).__name__}: {error}); look at its log, start "
                "it again, then resume the run"
            ) from error

    def _once(self, method: str, path: str, body: bytes, timeout_s: float = 0.0) -> tuple[int, Any]:
        kind = (
            http.client.HTTPSConnection
            if self._address.scheme == "https"
            else http.client.HTTPConnection
        )
        assert self._address.hostname is not None
        connection = kind(
            self._address.hostname,
            self._address.port,
            timeout=timeout_s or self._settings.timeout_s,
        )
        try:
            connection.request(
                method, path, body, {"Authorization": f"Bearer {self._key}"} if self._key else {}
            )
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, {"error": text[:500].decode(errors="replace")}

    def _wait(self) -> Any:
        """The server's health, as soon as it answers. It listens once its own model is loaded: both may be started together."""
        end, told = time.monotonic() + self._settings.start_s, False
        while True:
            try:
                status, answer = self._once("GET", "/health", b"", _GLANCE_S)
            except (ConnectionError, TimeoutError, http.client.HTTPException) as error:
                if time.monotonic() > end:
                    raise RolloutError(
                        f"no rollout server answers at {self.url} after engine.vllm.start_s = "
                        f"{self._settings.start_s:g} s ({error}); start it: mmrl rollout-server CONFIG --port "
                        f"{self._address.port or 80}"
                    ) from error
                if not told:
                    _log.warning(
                        "no rollout server answers at %s yet (%s): waiting for it, %g s at most (engine.vllm.start_s)",
                        self.url,
                        error,
                        self._settings.start_s,
                    )
                told = True
                time.sleep(_PAUSE_S)
            except OSError as error:  # no such host: waiting does not help
                raise RolloutError(
                    f"expected a rollout server at {self.url}, found that it cannot be reached: {error}; look at engine.vllm.url"
                ) from error
            else:
                if status == 401:
                    raise ConfigError(
                        f"expected the key of the rollout server {self.url} in MMRL_API_KEY, found "
                        f"{'another one' if self._key else 'none'} there; set the key that it was started with"
                    )
                self._check_health(status, answer)
                return answer

    def _check_health(self, status: int, answer: Any) -> None:
        """Raise ConfigError where another program answers: vLLM's own server has a /health, too, which says nothing."""
        if (
            status != 200
            or not isinstance(answer, dict)
            or not all(isinstance(answer.get(key), str) for key in ("model", "dtype"))
            or not isinstance(answer.get("max_model_len"), int)
        ):
            raise ConfigError(
                f"expected a rollout server at {self.url}, found another program: its /health has status {status} and names no "
                "model, dtype and max_model_len; give engine.vllm.url the address of `mmrl rollout-server`"
            )
