"""`mmrl push`: a checkpoint to the Hugging Face Hub, with a model card made from its run and without what is the machine's own."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from mmrl.config.trust import is_place
from mmrl.errors import CheckpointError, ConfigError
from mmrl.files import write_text
from mmrl.policy.manifest import has_manifest, problems
from mmrl.report.card import hub_name, model_card

__all__ = ["prepare", "push_command"]

_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_LEFT_BEHIND = ("trainer", "README.md")  # the first holds the optimizer; both are written anew
_MACHINES_OWN = ("operations", "engine", "dir", "threads")


def push_command(
    checkpoint: Path,
    repo: str,
    *,
    private: bool = False,
    out: Path | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Upload `checkpoint` to the repository `repo` (owner/name), which is made where it is missing; with `out` write the
    files there instead of uploading them. Raises ConfigError, CheckpointError."""
    if not _REPO.fullmatch(repo):
        raise ConfigError(
            f"expected the name of a repository as owner/name, found {repo!r}; for example me/boxes-3b"
        )
    if out is not None:
        if out.exists():
            raise ConfigError(
                f"expected a new folder after --out, found {out}; remove it, or name another"
            )
        for line in prepare(checkpoint, repo, out, link=False):
            say(line)
        say(f"written to {out}: look at {out / 'README.md'}, then push without --out")
        return
    with tempfile.TemporaryDirectory(prefix="mmrl-push-") as folder:
        for line in prepare(checkpoint, repo, Path(folder), link=True):
            say(line)
        say(f"pushed to {_upload(Path(folder), repo, private)}")


def prepare(checkpoint: Path, repo: str, folder: Path, *, link: bool) -> list[str]:
    """Fill `folder` with what is published: weights, processor, the card as README.md, and trainer/config.yaml without places
    of this machine. `link`: large files as symbolic links. Returns what was changed or left out, a line each.

    Raises CheckpointError for a checkpoint that is damaged, or none.
    """
    source = checkpoint.resolve()
    if not (source / "config.json").is_file():
        raise CheckpointError(
            f"expected a checkpoint with config.json and weights, found {checkpoint}; name one such as "
            "runs/NAME/checkpoints/best"
        )
    if has_manifest(source) and (wrong := problems(source)):
        raise CheckpointError(
            f"expected {checkpoint} as it was saved, found: {'; '.join(wrong)}; push another checkpoint of the run"
        )
    card = model_card(source, repo)
    folder.mkdir(parents=True, exist_ok=True)
    for item in sorted(source.iterdir()):
        if item.name not in _LEFT_BEHIND:
            _put(item, folder / item.name, link=link and item.is_file())
    settings = yaml.safe_load((source / "trainer" / "config.yaml").read_text(encoding="utf-8"))
    told = [
        f"{repo}: weights, processor, model card (README.md) and settings (trainer/config.yaml)"
    ]
    told += _adapter(folder / "adapter", settings.get("model", {}).get("path"))
    (folder / "trainer").mkdir()
    published = yaml.safe_dump(_without_places(settings), sort_keys=False, allow_unicode=True)
    write_text(folder / "trainer" / "config.yaml", published)
    write_text(folder / "README.md", card)
    return told


def _put(source: Path, target: Path, *, link: bool) -> None:
    if link:
        os.symlink(source, target)
    elif source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)


def _adapter(folder: Path, base: Any) -> list[str]:
    """An adapter names the model it belongs to: on another machine only a name of the Hub is one."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        return []
    if (name := hub_name(base)) is None:
        shutil.rmtree(folder)
        return [
            f"adapter/ is left out: its base model {base!r} is no name on the Hub that others could load; the weights "
            "have it merged"
        ]
    described = json.loads(file.read_text(encoding="utf-8"))
    described["base_model_name_or_path"] = name
    write_text(file, json.dumps(described, indent=2, sort_keys=True) + "\n")
    return [f"adapter/ names its base model: {name}"]


def _without_places(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting of the run; files and folders by their own name, addresses and what only this machine has left out."""

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: clean(v) for k, v in value.items() if not _is_address(v)}
        if isinstance(value, list):
            return [clean(v) for v in value if not _is_address(v)]
        return re.split(r"[/\\]", value.rstrip("/\\"))[-1] if is_place(value) else value

    return {key: clean(value) for key, value in settings.items() if key not in _MACHINES_OWN}


def _is_address(value: Any) -> bool:
    return isinstance(value, str) and "://" in value


def _transport_errors() -> tuple[type[Exception], ...]:
    """Of the HTTP client that the installed huggingface_hub uses, which is not the same in all of its releases."""
    loaded = [sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules]
    return tuple(module.HTTPError for module in loaded)


def _upload(folder: Path, repo: str, private: bool) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    refused: tuple[type[Exception], ...] = (
        HfHubHTTPError,
        LocalTokenNotFoundError,
        OSError,
        *_transport_errors(),
    )
    api = HfApi()
    try:
        repo = api.create_repo(repo, private=private, exist_ok=True).repo_id
        found = api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message="Upload a checkpoint trained with mmrl"
        )
    except refused as error:
        raise ConfigError(
            f"{repo}: the Hub did not take the upload: {str(error).strip().splitlines()[0]}; log in with `hf auth login` "
            "(a token that may write), unset HF_HUB_OFFLINE, or write the files with --out FOLDER"
        ) from error
    return str(found.repo_url)
