"""DeepSpeed's configuration as transformers and TRL look at it: :class:`HfDeepSpeedConfig`."""

from __future__ import annotations

from typing import Any

from nblaunch.training.strategies.deepspeed.config import get, read_config


class HfDeepSpeedConfig:
    """A configuration with questions about it, which other libraries subclass.

    Args:
        config_file_or_dict: a dict, the path of a JSON file, or JSON text, also in base64.

    Raises:
        ValueError: there is no such file, or it holds no JSON object.
        TypeError: it is none of these.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config: dict[str, Any] = read_config(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Look up the stage, and whether states or weights lie outside of the devices."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = (
            self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param")
        )
        self._offload = self._stage in (2, 3) and any(device in ("cpu", "nvme") for device in devices)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the dict that holds the last part of a key such as ``"zero_optimization.stage"``, and that part.

        None in place of the dict where something on the way is missing.
        """
        way, _, name = ds_key_long.rpartition(".")
        node = get(self.config, way) if way else self.config
        return (node if isinstance(node, dict) else None), name

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a key; ``default`` where it is missing."""
        return get(self.config, ds_key_long, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a key with all that is below it.

        Raises:
            ValueError: it is not there, and ``must_exist``.
        """
        node, name = self.find_config_node(ds_key_long)
        if node is not None and name in node:
            del node[name]
        elif must_exist:
            raise ValueError(f"the DeepSpeed configuration has no {ds_key_long!r}: {self.config}")

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether a key is set, and to something true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether a key is set, and to something false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Return whether optimizer states and gradients are sharded, but not weights."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Return whether weights are sharded, too."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Return whether states or weights lie in host memory or on disk."""
        return self._offload
