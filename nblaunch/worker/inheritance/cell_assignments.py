"""Attributes of modules and classes that cells have changed, for workers that import these modules again.

    config.lr = 0.1                    a setting in one of the user's modules
    config.options["width"] = 8        an entry of a dictionary, list or set in one of the user's modules
    Config.width = 8                   a setting in a module's class
    F.gelu = my_gelu                   a library's function, replaced by one of the notebook's
    cfg.merge({"lr": 0.1})             an object in one of the user's modules, see ``used_objects.py``

A forked worker has the kernel's modules. A fresh process imports them, and would silently compute with their original
values. The text of the cells shows what they have changed; the values are read from the modules at launch.

Plain values are sent (``plain_values.py``). A note names other values that a cell has assigned.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterable, Sequence
from contextvars import ContextVar, copy_context
from functools import partial
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple

from nblaunch import packages
from nblaunch.user_code import is_user_module
from nblaunch.wire.pickling import payload
from nblaunch.worker.inheritance import cell_text, plain_values, used_objects
from nblaunch.worker.inheritance.used_objects import OF_PROCESS, Place

_MAX_BYTES = 1 << 20
"""Larger values are named instead, because every worker would load them, even if its function does not use them."""


class AssignedAttribute(NamedTuple):
    """An attribute that a cell may have changed.

    Args:
        place: where it is.
        value: its value, pickled.
    """

    place: Place
    value: bytes


class _StateOfThread(NamedTuple):
    """The value of a ``ContextVar``, or the attributes of a ``threading.local``, in the thread that launches."""

    value: Any


def read(sources: Iterable[str]) -> tuple[list[AssignedAttribute], list[str]]:
    """Return the attributes that cells have changed, with current values, and messages about changes that can't be
    sent.

    Args:
        sources: the text of the cells.
    """
    cells = [cell_text.read(text) for text in sources]
    values, changed = used_objects.find(cells)
    for path, is_content in dict.fromkeys(each for cell in cells for each in cell.assigned):
        resolved = _resolve(path, is_content)
        if resolved is not None:
            place, value = resolved
            values[place] = value
            changed.add(place)
    sent: list[AssignedAttribute] = []
    left: dict[str, None] = {}
    for place, value in values.items():
        content, problem = _content(value)
        if content is not None:
            sent.append(AssignedAttribute(place, content))
        elif place in changed and value is not None:
            left[f"{'.'.join(filter(None, place))} ({problem})"] = None
    return sent, list(left)


def _content(value: Any) -> tuple[bytes | None, str]:
    """Return the pickled value, or None and the reason why the value can't be sent."""
    if not plain_values.has_own_class(value):
        return None, f"an object of the class {type(value).__name__}"
    if isinstance(value, ContextVar):
        if value not in copy_context():
            return None, ""  # it has its default
        value = _StateOfThread(value.get(None))
    elif isinstance(value, threading.local):
        value = _StateOfThread(dict(vars(value)))
    if not plain_values.is_plain(value.value if isinstance(value, _StateOfThread) else value):
        return None, f"an object of the class {type(value).__name__}"
    try:
        return payload.to_bytes(value, main_by_reference=False, max_bytes=_MAX_BYTES), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def write(attributes: Sequence[AssignedAttribute]) -> None:
    """Change these attributes in this process, each as soon as its module is imported."""
    for attribute in attributes:
        packages.when_imported(attribute.place.module, partial(_write, attribute))


def _write(attribute: AssignedAttribute, module: Any) -> None:
    _, owner_name, name = attribute.place
    try:
        value = _load(attribute.value)
        owner = attrgetter(owner_name)(module) if owner_name else module
        present = vars(owner).get(name)
        if isinstance(value, _StateOfThread):
            _set_state_of_thread(present, value.value)
        elif not plain_values.take_over(present, value):  # other modules may have imported the object itself
            setattr(owner, name, value)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        place = ".".join(filter(None, attribute.place))
        print(f"the kernel's {place} can't be set in this worker: {message}", file=sys.stderr)


def _set_state_of_thread(present: Any, value: Any) -> None:
    if isinstance(present, ContextVar):
        present.set(value)
    else:
        vars(present).clear()
        vars(present).update(value)


def _load(content: bytes) -> Any:
    """Unpickle a value; if this replaces variables of the notebook that the call has set, restore them."""
    names = vars(sys.modules["__main__"])
    before = dict(names)
    value = pickle.loads(content)
    names.update(before)
    return value


def _resolve(path: cell_text.Path, is_container: bool) -> tuple[Place, Any] | None:
    """Return the attribute at the end of a path that starts with a name in the notebook, and its value.

    Return None if the attribute does not belong to a module or a module's class. The attribute itself must exist,
    because the cell may assign it in a function that has not run. Properties of a module, such as torch's flags, are
    handled in ``settings.py``.
    """
    root, *names, last = path
    owner = vars(sys.modules["__main__"]).get(root)
    for name in names:
        if not plain_values.has_own_class(owner):
            return None
        owner = vars(owner).get(name) if isinstance(owner, (ModuleType, type)) else None
    if not plain_values.has_own_class(owner):
        return None
    if isinstance(owner, type):
        module, qualified = sys.modules.get(owner.__module__), owner.__qualname__
        is_found = module is not None and _found(module, qualified) is owner
    else:
        module, qualified = owner, ""
        is_found = isinstance(owner, ModuleType) and sys.modules.get(owner.__name__) is owner
    if not is_found or module is None or last not in vars(owner) or module.__name__ == "__main__":
        return None
    if module.__name__.partition(".")[0] in OF_PROCESS or (not qualified and last.startswith("__")):
        return None
    value = vars(owner)[last]
    if is_container and not (plain_values.is_changeable(value) and is_user_module(module)):
        return None
    return Place(module.__name__, qualified, last), value


def _found(module: ModuleType, qualified: str) -> Any:
    try:
        return attrgetter(qualified)(module)
    except AttributeError:
        return None
