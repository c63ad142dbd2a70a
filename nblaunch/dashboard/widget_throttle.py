"""Widget updates within a budget of bytes per second.

    panel ──update(widget, value="...")──> Throttle ──flush()──> front end

Each change to a widget sends a message of at least 600 bytes, and many messages block a slow front end, for example a
remote one or one on a phone. The panel therefore passes the values of all widgets to the throttle on every tick, and
the throttle sends those that have changed: urgent ones immediately, the others within the budget, the most overdue
first. It skips intermediate values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

MESSAGE_BYTES = 650
"""Size of a message without its values: headers with ids, dates and names of Jupyter's message sessions."""

RATE_BYTES_S = 17_000.0
"""Average bytes per second."""

BURST_BYTES = 12_000.0
"""Bytes that may be sent at once after a period without messages."""


@dataclass(eq=False)
class _Slot:
    """A widget and its values.

    Args:
        widget: a widget of ipywidgets.
        every_s: seconds between updates.
        wanted: trait -> new value.
        sent: trait -> value in the front end.
        sent_s: time of the last update.
        is_urgent: send it regardless of the budget.
    """

    widget: Any
    every_s: float = 0.0
    wanted: dict[str, Any] = field(default_factory=dict)
    sent: dict[str, Any] = field(default_factory=dict)
    sent_s: float = float("-inf")
    is_urgent: bool = False

    def changes(self) -> dict[str, Any]:
        return {name: value for name, value in self.wanted.items() if self.sent[name] != value}


class Throttle:
    """Sends widgets' new values within a budget. Only one thread may use it at a time."""

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._slots: dict[int, _Slot] = {}
        self._budget_bytes: float = BURST_BYTES
        self._filled_s = clock()

    def update(
        self,
        widget: Any,
        *,
        every_s: float = 0.0,
        is_urgent: bool = False,
        **values: Any,
    ) -> None:
        """Set new values of ``widget``, which :meth:`flush` sends.

        Args:
            widget: a widget of ipywidgets.
            every_s: seconds between updates; if the budget is short, all widgets' intervals grow by the same factor.
            is_urgent: send it at the next flush, regardless of the budget.
            **values: trait -> value.
        """
        slot = self._slots.setdefault(id(widget), _Slot(widget))
        for name in values:  # the front end knows the initial values
            slot.sent.setdefault(name, getattr(widget, name))
        slot.every_s, slot.is_urgent = every_s, slot.is_urgent or is_urgent
        slot.wanted.update(values)

    def is_due(self, widget: Any, every_s: float) -> bool:
        """Return whether ``widget`` may be sent; callers check it before they compute expensive values."""
        slot = self._slots.get(id(widget))
        return slot is None or self._clock() - slot.sent_s >= every_s

    def flush(self, *, sends_all: bool = False) -> int:
        """Send the changes that are due, or all changes; return the number of widgets sent."""
        now_s = self._clock()
        # Urgent messages may have overdrawn the budget; the limit on the deficit lets other messages follow soon.
        budget = max(self._budget_bytes, -BURST_BYTES) + (now_s - self._filled_s) * RATE_BYTES_S
        self._budget_bytes = min(budget, BURST_BYTES)
        self._filled_s = now_s
        num_sent = 0
        for slot in sorted(self._slots.values(), key=lambda slot: _overdue(slot, now_s), reverse=True):
            slot.is_urgent |= sends_all
            is_due = slot.is_urgent or now_s - slot.sent_s >= slot.every_s
            changes = slot.changes() if is_due else {}
            if not changes:
                slot.is_urgent = False
                continue
            if not slot.is_urgent and self._budget_bytes < 0:
                continue
            self._send(slot, changes, now_s)
            num_sent += 1
        return num_sent

    def _send(self, slot: _Slot, changes: dict[str, Any], now_s: float) -> None:
        self._budget_bytes -= MESSAGE_BYTES + sum(map(_weight, changes.values()))
        # Sent values are stored here, because the front end itself changes some of the widget's traits.
        slot.sent.update(changes)
        slot.sent_s, slot.is_urgent = now_s, False
        if len(changes) == 1:
            ((name, value),) = changes.items()
            setattr(slot.widget, name, value)
            return
        with slot.widget.hold_sync():
            for name, value in changes.items():
                setattr(slot.widget, name, value)


def _overdue(slot: _Slot, now_s: float) -> float:
    if slot.is_urgent:
        return float("inf")
    return (now_s - slot.sent_s) / max(slot.every_s, 0.1)


def _weight(value: Any) -> int:
    """Return the approximate size of a value in a message, in bytes; widgets are sent as ids."""
    return len(value) if isinstance(value, str) else 40
