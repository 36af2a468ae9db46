"""What generator processes of tests find imported: see `prepared_generators` in tests/kits/prepared_kit.py."""

from __future__ import annotations

from mmrl.workers.fork_server import import_for_all
from tests.kits.prepared_kit import TRAINING

import_for_all(("mmrl.training.generator_host", *TRAINING))
