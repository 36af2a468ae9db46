"""`mmrl push`: a checkpoint to the Hugging Face Hub, with a model card made from its run and without what is the machine's own."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import yaml

from mmrl.errors import CheckpointError, ConfigError
from mmrl.files import write_text
from mmrl.policy.manifest import has_manifest, problems
from mmrl.report.card import Publication, model_card

__all__ = ["prepare", "push_command"]

_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
# What a checkpoint of mmrl is made of; whatever else lies in its folder (evaluations, notes, keys) stays where it is.
_PUBLISHED = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "vla.json",
    "adapter/adapter_config.json",
    "adapter/adapter_model.safetensors",
    "additional_chat_templates/*.jinja",
)
_REPLACED = ("*.safetensors", "*.safetensors.index.json", "adapter/*", "trainer/*")
_WRITTEN_ANEW = ("trainer", "README.md")


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
    publication = Publication.of(source)
    folder.mkdir(parents=True, exist_ok=True)
    told = [
        f"{repo}: weights, processor, model card (README.md) and settings (trainer/config.yaml)"
    ]
    names = sorted(p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file())
    chosen = [n for n in names if any(_fits(n, pattern) for pattern in _PUBLISHED)]
    for name in chosen:
        _put(source / name, folder / name, link=link and "/" not in name)
    if rest := sorted({n.partition("/")[0] for n in names if n not in chosen} - {*_WRITTEN_ANEW}):
        told.append(f"left out, since it is no part of the model: {', '.join(rest)}")
    told += _adapter(folder / "adapter", publication.base)
    if publication.left_out:
        told.append(f"left out of the settings: {', '.join(publication.left_out)}")
    (folder / "trainer").mkdir()
    published = yaml.safe_dump(publication.settings, sort_keys=False, allow_unicode=True)
    write_text(folder / "trainer" / "config.yaml", published)
    write_text(folder / "README.md", model_card(publication, repo))
    return told


def _fits(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern)


def _put(source: Path, target: Path, *, link: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if link:
        os.symlink(source, target)
    else:
        shutil.copyfile(source, target)


def _adapter(folder: Path, name: str | None) -> list[str]:
    """An adapter names the model it belongs to: on another machine only a name of the Hub is one."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        return []
    if name is None:
        shutil.rmtree(folder)
        return [
            "adapter/ is left out: its base model is a folder of this machine, no name on the Hub that others could load; the "
            "weights have it merged"
        ]
    described = json.loads(file.read_text(encoding="utf-8"))
    described["base_model_name_or_path"] = name
    write_text(file, json.dumps(described, indent=2, sort_keys=True) + "\n")
    return [f"adapter/ names its base model: {name}"]


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
        # of a repository that was there already, --private changes nothing
        if private and not api.model_info(repo).private:
            raise ConfigError(
                f"expected a private repository, found {repo}, which exists and is public; make it private on the Hub, or "
                "choose another name"
            )
        found = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message="Upload a checkpoint trained with mmrl",
            delete_patterns=list(_REPLACED),
        )
    except refused as error:
        raise ConfigError(
            f"{repo}: the Hub did not take the upload: {str(error).strip().splitlines()[0]}; log in with `hf auth login` "
            "(a token that may write), unset HF_HUB_OFFLINE, or write the files with --out FOLDER"
        ) from error
    return str(found.repo_url)
