"""Entry point of ``python -m nblaunch``."""

from __future__ import annotations

from nblaunch.cli import main

if __name__ == "__main__":
    main()
