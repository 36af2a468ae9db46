"""Text in pictures, read by Tesseract: what the tool `read` of `mmrl.tasks.visual_tools` tells.

    need_reader("the tool read")               # before a run starts: MissingExtraError says what to install
    words = read_text(pixels, limit_s=20.0)    # 'EXIT\\nPlatform 4', '' where nothing is readable

The library pytesseract (extra `ocr`) starts Tesseract 5 (Debian's package tesseract-ocr, which brings English) for each reading,
without a shell. It is given pixels, and settings that are written here: no text of a model or of a data set reaches its
command line. What is read is a stranger's text, since anything may be written on a picture: it is bounded in length, and signs with
which chat templates mark pictures and turns (`<|im_end|>`, `[IMG]`) are parted by a space, as in `< |im_end|>`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time

import numpy as np

from mmrl.errors import MissingExtraError, MMRLError, need_package

__all__ = [
    "LEAST_SIDE",
    "MOST_PIXELS",
    "MOST_SIDE",
    "ReadingTooLong",
    "need_reader",
    "parted",
    "read_text",
]

MOST_PIXELS = 16_000_000
"""Pixels of a region that is read; writing more for Tesseract would take seconds that no limit ends."""
LEAST_SIDE, MOST_SIDE = 8, 32_767
"""Pixels of a side of a region that is read: Sauvola's threshold needs 7, and Tesseract takes no longer side."""
_OLDEST = 5  # of Tesseract: the first that knows this threshold
_MOST_CHARS = 2_000
_LANGUAGE = "eng"
# Columns and blocks; where that finds nothing, one block: single signs. With Sauvola's threshold, which is that of a pixel's
# surroundings: with Tesseract's own, of the whole picture, print on a sign before another ground is lost.
_MODES = tuple(f"--psm {mode} -c thresholding_method=2" for mode in (3, 6))
_MARKS = re.compile(r"[<\[◁](?=[|｜/_A-Za-z])")
# as many at a time as there are processors, so that the limit counts reading and not waiting for the others
_turn = threading.BoundedSemaphore(
    len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
)


class ReadingTooLong(MMRLError):
    """Tesseract did not end in time and was ended."""


def need_reader(purpose: str) -> None:
    """Raises MissingExtraError where the library, the program or its English data is missing: what needs it, and the command that
    adds it."""
    need_package("pytesseract", purpose, "ocr")
    program = shutil.which("tesseract")
    if program is None:
        raise MissingExtraError(
            f"expected the program tesseract for {purpose}, found none on PATH: apt-get install tesseract-ocr"
        )
    version = _says(program, "--version")
    release = re.search(r"tesseract v?(\d+)", version)
    if release is None or int(release[1]) < _OLDEST:
        raise MissingExtraError(
            f"expected Tesseract {_OLDEST} or newer for {purpose}, found {program} that says {version[:80]!r}; install a newer "
            "release (Debian 12, Ubuntu 24.04 and conda-forge have one)"
        )
    languages = _says(program, "--list-langs")
    if _LANGUAGE not in languages.split():
        raise MissingExtraError(
            f"expected {program} with English data ({_LANGUAGE}) for {purpose}, found {languages[-300:]!r}: apt-get install "
            "tesseract-ocr-eng"
        )


def _says(program: str, option: str) -> str:
    """What the program prints."""
    done = subprocess.run(
        [program, option],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=60,
        check=False,
    )
    return (done.stdout + done.stderr).strip()


def parted(text: str) -> str:
    """`text` without the marks of any chat template: a space behind each `<` and `[` that begins one."""
    return _MARKS.sub(r"\g<0> ", text)


def read_text(pixels: np.ndarray, limit_s: float) -> str:
    """The lines of text in `pixels`, uint8 (h, w, 3), in reading order, at most 2,000 characters; '' where nothing is readable.
    `limit_s`: seconds of reading. Raises ReadingTooLong, and MMRLError where Tesseract fails."""
    import pytesseract
    from PIL import Image

    picture = Image.fromarray(pixels)
    # one thread each (others wait for each other on busy processors); the library hands on what it finds under this name
    pytesseract.pytesseract.environ = {**os.environ, "OMP_THREAD_LIMIT": "1"}
    with _turn:
        until = time.monotonic() + limit_s
        for mode in _MODES:
            left = until - time.monotonic()
            if left <= 0:
                raise ReadingTooLong(f"expected a text within {limit_s:g} s")
            try:
                found = pytesseract.image_to_string(
                    picture, lang=_LANGUAGE, config=mode, timeout=left
                )
            except pytesseract.TesseractError as error:
                raise MMRLError(
                    f"expected Tesseract to read a region of {picture.width} x {picture.height} pixels, found its error "
                    f"{error.status}: {error.message[-300:]}"
                ) from error
            except (
                RuntimeError
            ) as error:  # what the library raises after its limit, and nothing else
                raise ReadingTooLong(f"expected a text within {limit_s:g} s") from error
            if lines := [line for row in found.splitlines() if (line := " ".join(row.split()))]:
                return _bounded(parted("\n".join(lines)))
    return ""


def _bounded(text: str) -> str:
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]} ..."
