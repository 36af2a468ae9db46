"""What every process that prepares media needs, imported once by multiprocessing's fork server: from then on one starts in moments,
and what was imported lies in memory once for all.

The fork server runs no thread and reads no clip; see mmrl/workers/prefetch.py.
"""

from __future__ import annotations

import gc
import importlib
import os

from mmrl.operations.startup import loaded, loading

# the libraries read it when they are imported: each process has one core's work
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
loading()
for _name in ("torch", "mmrl.video.visuals", "transformers.processing_utils", "torchvision", "av"):
    try:
        importlib.import_module(_name)
    except ImportError:  # what needs it says so
        continue
# what is here stays, in every process that is forked from this one: to look through it would also copy its pages
gc.freeze()
loaded()
