"""What every process that prepares media needs, imported once by multiprocessing's fork server: from then on one starts in moments,
and what was imported lies in memory once for all.

The fork server runs no thread and reads no clip; see mmrl/workers/prefetch.py.
"""

from __future__ import annotations

import os

from mmrl.workers.fork_server import import_for_all

# the libraries read it when they are imported: each process has one core's work
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
import_for_all(
    ("torch", "mmrl.video.visuals", "transformers.processing_utils", "torchvision", "av")
)
