"""Values by rank."""

from __future__ import annotations

from typing import Any

from nblaunch import formatting


class RankValues(dict[int, Any]):
    """rank -> value. Its text shows equal values once: ``[0-3] 2``."""

    def __repr__(self) -> str:
        ranks_of: dict[str, list[int]] = {}
        for rank in sorted(self):
            ranks_of.setdefault(repr(self[rank]), []).append(rank)
        return "\n".join(f"[{formatting.spans(ranks)}] {text}" for text, ranks in ranks_of.items())

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        """Show the same text in IPython, whose own one is that of a dict."""
        printer.text(repr(self))
