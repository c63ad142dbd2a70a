"""Notebooks and launches with the packages of an image, or in marimo. Only ``make test-images`` collects these
tests.
"""

from __future__ import annotations

import os

IMAGE = os.environ.get("IMAGE")
if IMAGE is None:
    collect_ignore_glob = ["test_*.py"]
else:
    collect_ignore = ["test_image.py" if IMAGE == "marimo" else "test_marimo.py"]
