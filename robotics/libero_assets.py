"""Where LIBERO's meshes, textures and recorded initial states come from, without questions asked and without pickles run.

    python -m mmrl.robotics.libero_assets stand-ins            # write our own shapes, print the folder
    python -m mmrl.robotics.libero_assets download ~/libero    # fetch the official meshes (needs a network)

The LIBERO packages hold task files and initial states but no meshes. Official ones come from a folder (option `assets`,
$MMRL_LIBERO_ASSETS, the package's own folder or its download cache); otherwise mmrl.robotics.libero_standins provides shapes
of ours that have the same names, so that libero_object runs anywhere. Results on stand-ins are no LIBERO scores.
Everything written lies under $MMRL_CACHE (default ~/.cache/mmrl), appears in one rename, and may be written by many
processes at once. Importable without LIBERO.
"""

from __future__ import annotations

import codecs
import hashlib
import importlib.util
import io
import os
import pickle
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.errors import ConfigError, DataError, MissingExtraError
from mmrl.robotics.cached_folders import cache_root, publish_folder
from mmrl.robotics.libero_standins import stand_ins

__all__ = [
    "INSTALL",
    "OFFICIAL_FOLDERS",
    "Assets",
    "download_assets",
    "find_assets",
    "init_states",
    "libero_folder",
    "write_config",
]

INSTALL = (
    "pip install --no-deps hf-libero==0.1.4 robosuite==1.4.0 bddl==1.0.1 && pip install 'mujoco>=3.3,<3.4' numba scipy "
    "opencv-python-headless pyyaml easydict matplotlib cloudpickle gymnasium networkx termcolor tqdm huggingface_hub "
    "future h5py"
)
"""What installs LIBERO beside transformers; its full requirements bring a torchvision that breaks it."""

OFFICIAL_FOLDERS = (
    "articulated_objects",
    "scenes",
    "stable_hope_objects",
    "stable_scanned_objects",
    "turbosquid_objects",
)
"""What a folder of official assets contains."""

_REPOSITORY = "lerobot/libero-assets"  # the data set hf-libero itself downloads


@dataclass(frozen=True)
class Assets:
    """A folder of meshes and textures; `kind` is 'official', 'modified (n of m files)' or 'stand-in'."""

    folder: Path
    kind: str


def libero_folder() -> Path:
    """The folder of the installed package that holds bddl_files and init_files. Imports nothing. Raises MissingExtraError."""
    try:
        spec = importlib.util.find_spec("libero.libero")
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise MissingExtraError(f"LIBERO is not installed. Install it with: {INSTALL}")
    return Path(spec.origin).parent


def write_config() -> None:
    """Give LIBERO the configuration file without which its import asks questions on the terminal.

    A configuration of the user's own ($LIBERO_CONFIG_PATH or ~/.libero) stays as it is; otherwise one in our cache is written
    and named in $LIBERO_CONFIG_PATH of this process.
    """
    own = Path(os.environ.get("LIBERO_CONFIG_PATH") or "~/.libero").expanduser()
    if (own / "config.yaml").is_file():
        return
    package = libero_folder()
    paths = {
        "benchmark_root": package,
        "bddl_files": package / "bddl_files",
        "init_states": package / "init_files",
        "datasets": package.parent / "datasets",
        "assets": package / "assets",
    }
    text = "".join(
        f"{key}: '{str(path).replace(chr(39), chr(39) * 2)}'\n" for key, path in paths.items()
    )
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    folder = publish_folder(
        cache_root() / "libero_config" / digest, lambda new: _write_text(new / "config.yaml", text)
    )
    os.environ["LIBERO_CONFIG_PATH"] = str(folder)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def find_assets(wanted: str | os.PathLike[str] = "auto") -> Assets:
    """The assets to use. `wanted`: 'auto' (official where they are found, else stand-ins), 'official', 'stand-in' or a folder
    with official assets. Never downloads. Raises MissingExtraError when official ones are wanted and not there."""
    wanted = os.fspath(wanted)
    if wanted == "stand-in":
        return Assets(stand_ins(), "stand-in")
    if wanted not in ("auto", "official"):
        return Assets(_checked(Path(wanted).expanduser(), "option assets"), "official")
    named = os.environ.get("MMRL_LIBERO_ASSETS")
    if named:
        return Assets(_checked(Path(named).expanduser(), "MMRL_LIBERO_ASSETS"), "official")
    for folder in (libero_folder() / "assets", Path.home() / ".cache" / "libero" / "assets"):
        if not _missing(folder):
            return Assets(folder, "official")
    if wanted == "official":
        raise MissingExtraError(
            "LIBERO's official meshes are not on this machine. With a network: python -m "
            "mmrl.robotics.libero_assets download FOLDER, then set MMRL_LIBERO_ASSETS=FOLDER (585 files, "
            "206 MB)"
        )
    return Assets(stand_ins(), "stand-in")


def _missing(folder: Path) -> list[str]:
    return [name for name in OFFICIAL_FOLDERS if not (folder / name).is_dir()]


def _checked(folder: Path, origin: str) -> Path:
    missing = _missing(folder)
    if missing:
        raise ConfigError(
            f"{origin}: expected a folder with LIBERO's assets ({', '.join(OFFICIAL_FOLDERS)}), found {folder} "
            f"without {', '.join(missing)}; or say 'stand-in'"
        )
    return folder.resolve()


def download_assets(folder: str | os.PathLike[str]) -> Path:
    """Fetch the official assets (206 MB) into `folder`. Raises DataError without a network."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingExtraError(
            "downloading LIBERO's assets needs huggingface_hub: pip install huggingface_hub"
        ) from error
    target = Path(folder).expanduser()
    try:
        snapshot_download(repo_id=_REPOSITORY, repo_type="dataset", local_dir=str(target))
    except Exception as error:  # the hub raises many kinds; all mean that the files are not here
        raise DataError(
            f"expected to download {_REPOSITORY} to {target}, found {type(error).__name__}: {error}. Without a network "
            "(or with HF_HUB_OFFLINE set), copy the folder from a machine that has one, or use stand-ins"
        ) from error
    return _checked(target, "download")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,
}


class _ArrayUnpickler(pickle.Unpickler):
    """Rebuilds numpy arrays and refuses every other global, so that a crafted file runs nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.empty(0).__reduce__()[0]  # numpy's own, by whichever name it has today
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise DataError(
                f"expected an array, found a pickle that asks for {module}.{name}; do not load this file"
            ) from None


def _read_init_file(data: bytes, path: Path) -> np.ndarray:
    """The states of one of LIBERO's init files (a zip with one pickled array), float64 (rows, state)."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            member = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            states = _ArrayUnpickler(io.BytesIO(archive.read(member))).load()
        states = np.asarray(states, dtype=np.float64)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except Exception as error:  # a broken archive or pickle raises almost anything
        raise DataError(
            f"{path}: expected an init-state file of LIBERO, found {type(error).__name__}: {error}"
        ) from error
    if states.ndim != 2 or not len(states) or not np.isfinite(states).all():
        raise DataError(f"{path}: expected finite states (rows, size), found shape {states.shape}")
    return states


def init_states(suite: str, task: str) -> np.ndarray:
    """Recorded initial states of a task, float64 (rows, size), usually 50 rows: [time, qpos, qvel]. Converted once to .npz
    (named after the file's checksum). Raises DataError for a file that is missing or not what it should be."""
    path = libero_folder() / "init_files" / suite / f"{task}.pruned_init"
    if not path.is_file():
        raise DataError(f"expected initial states at {path}, found no file; reinstall hf-libero")
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()[:16]
    folder = cache_root() / "libero_init" / digest

    def write(new: Path) -> None:
        np.savez_compressed(new / "states.npz", states=_read_init_file(data, path))

    with np.load(publish_folder(folder, write) / "states.npz", allow_pickle=False) as archive:
        return archive["states"]


def main(arguments: list[str]) -> int:
    """`stand-ins` or `download FOLDER`; prints the folder."""
    if arguments == ["stand-ins"]:
        print(find_assets("stand-in").folder)
    elif len(arguments) == 2 and arguments[0] == "download":
        print(download_assets(arguments[1]))
    else:
        print(
            f"expected 'stand-ins' or 'download FOLDER', found {' '.join(arguments) or 'nothing'}",
            file=sys.stderr,
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
