"""Programs compiled by the real TPU compiler. Collected only by ``make test-tpu-compiler``."""

from __future__ import annotations

import os

if not os.environ.get("TPU_COMPILER"):
    collect_ignore_glob = ["test_*.py"]
