"""A simulated front end: a browser's widgets, built from a kernel's messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

VIEW = "application/vnd.jupyter.widget-view+json"


class FrontEnd:
    """The models of widgets, by their ids, after all ``messages``.

    Args:
        messages: messages from IOPub, in order.
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
                # An earlier panel that was closed sends this again; pages drop it, too.
                if content["comm_id"] not in self.models:
                    continue
                self.models[content["comm_id"]].update(content["data"]["state"])
                self.num_updates += 1
                self.num_bytes += size(message)
            elif message["msg_type"] == "comm_close":
                self.closed.add(content["comm_id"])

    @property
    def open_ids(self) -> set[str]:
        return set(self.models) - self.closed

    def of(self, name: str) -> dict[str, dict[str, Any]]:
        """Return the models of one kind, such as "IntProgress" or "Button", in the order of their creation."""
        return {
            key: state for key, state in self.models.items() if state.get("_model_name") == f"{name}Model"
        }

    @property
    def descriptions(self) -> list[str]:
        """Return the texts of all buttons."""
        return [state["description"] for state in self.of("Button").values()]

    def button(self, description: str) -> str:
        """Return the id of the button with this text."""
        assert self.descriptions.count(description) == 1, f"{description!r} in {self.descriptions}"
        return list(self.of("Button"))[self.descriptions.index(description)]

    def style(self, model_id: str) -> dict[str, Any]:
        return self.models[self.models[model_id]["style"].removeprefix("IPY_MODEL_")]

    def layout(self, model_id: str) -> dict[str, Any]:
        return self.models[self.models[model_id]["layout"].removeprefix("IPY_MODEL_")]

    @property
    def bars(self) -> dict[str, int]:
        """Return the progress of bars in percent, by their names."""
        found = re.findall(r'role="progressbar" aria-label="([^"]*)".*?aria-valuenow="(\d+)"', self.html)
        return {name: int(value) for name, value in found}

    @property
    def html(self) -> str:
        """Return the values of all HTML widgets."""
        return "\n".join(state["value"] for state in self.of("HTML").values())


def size(message: dict[str, Any]) -> int:
    """Return the bytes of a message to the front end: its four parts."""
    parts = ("header", "parent_header", "metadata", "content")
    return sum(len(json.dumps(message[part], default=str)) for part in parts)


class VSCode:
    """The outputs of cells in VS Code, built from a kernel's messages.

    The rules differ from JupyterLab's, see ``src/kernels/execution`` in microsoft/vscode-jupyter
    (cellDisplayIdTracker.ts and cellExecutionMessageHandler.ts): a message counts only as an answer to an executed
    cell, even after the cell's end; a display id refers to one output, the last one displayed with it; and an update
    may refer to an output of any cell. If a cell has more than :data:`MAX_OUTPUTS` outputs, VS Code shows the first
    ones (microsoft/vscode#325786).
    """

    MAX_OUTPUTS = 500

    def __init__(self, messages: Iterable[dict[str, Any]], cells: Iterable[str]) -> None:
        self.outputs: dict[str, list[dict[str, Any]]] = {cell: [] for cell in cells}
        named: dict[str, dict[str, Any]] = {}
        for message in messages:
            outputs = self.outputs.get(message["parent_header"].get("msg_id", ""))
            if outputs is None:
                continue
            kind, content = message["msg_type"], message["content"]
            display_id = content.get("transient", {}).get("display_id")
            if kind == "update_display_data":
                if display_id in named:
                    named[display_id]["data"] = content["data"]
            elif kind == "stream":
                if outputs and outputs[-1].get("stream") == content["name"]:
                    outputs[-1]["text"] += content["text"]
                else:
                    outputs.append({"stream": content["name"], "text": content["text"]})
            elif kind in ("display_data", "execute_result", "error"):
                outputs.append({"kind": kind, "data": content.get("data", {})})
                if display_id is not None:
                    named[display_id] = outputs[-1]

    def tables(self, cell: str) -> list[str]:
        """Return the text of each visible display in a cell."""
        shown = self.outputs[cell][: self.MAX_OUTPUTS]
        return [output["data"].get("text/plain", "") for output in shown if "data" in output]
