"""A front end made of nothing: the widgets as a browser would have them, from the messages of a kernel."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

VIEW = "application/vnd.jupyter.widget-view+json"


class FrontEnd:
    """The models of widgets, by their ids, after all ``messages``.

    Args:
        messages: from IOPub, in order.
    """

    def __init__(self, messages: Iterable[dict[str, Any]]) -> None:
        self.models: dict[str, dict[str, Any]] = {}
        self.closed: set[str] = set()
        self.num_updates = 0
        self.num_bytes = 0
        for message in messages:
            content = message["content"]
            if message["msg_type"] == "comm_open":
                self.models[content["comm_id"]] = dict(content["data"]["state"])
            elif message["msg_type"] == "comm_msg" and content["data"].get("method") == "update":
                self.models[content["comm_id"]].update(content["data"]["state"])
                self.num_updates += 1
                self.num_bytes += size(message)
            elif message["msg_type"] == "comm_close":
                self.closed.add(content["comm_id"])

    @property
    def open_ids(self) -> set[str]:
        return set(self.models) - self.closed

    def of(self, name: str) -> dict[str, dict[str, Any]]:
        """The models of one kind, as "IntProgress" or "Button", in the order in which they were made."""
        return {
            key: state for key, state in self.models.items() if state.get("_model_name") == f"{name}Model"
        }

    @property
    def descriptions(self) -> list[str]:
        """The texts of all buttons."""
        return [state["description"] for state in self.of("Button").values()]

    def button(self, description: str) -> str:
        """The id of the button with this text."""
        assert self.descriptions.count(description) == 1, f"{description!r} in {self.descriptions}"
        return list(self.of("Button"))[self.descriptions.index(description)]

    def style(self, model_id: str) -> dict[str, Any]:
        return self.models[self.models[model_id]["style"].removeprefix("IPY_MODEL_")]

    def layout(self, model_id: str) -> dict[str, Any]:
        return self.models[self.models[model_id]["layout"].removeprefix("IPY_MODEL_")]

    @property
    def bars(self) -> dict[str, int]:
        """The progress bars in percent, by their names."""
        found = re.findall(r'role="progressbar" aria-label="([^"]*)".*?aria-valuenow="(\d+)"', self.html)
        return {name: int(value) for name, value in found}

    @property
    def html(self) -> str:
        """The values of all HTML widgets."""
        return "\n".join(state["value"] for state in self.of("HTML").values())


def size(message: dict[str, Any]) -> int:
    """Bytes of a message on its way to the front end: its four parts."""
    parts = ("header", "parent_header", "metadata", "content")
    return sum(len(json.dumps(message[part], default=str)) for part in parts)
