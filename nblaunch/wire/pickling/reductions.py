"""Pickling for objects that the ``pickle`` module alone can't send to a fresh process.

Some belong to the kernel's process. A fresh process creates them again, with the same settings:

compiled functions   torch pickles compiled modules, but not compiled functions, whose closures hold state of a
                     thread; the fresh process finds the compiled code in inductor's cache on disk
executors            thread pools and process pools, which start with their first task
data loaders         without the iterator and processes that ``persistent_workers`` keeps
TorchScript          compiled and traced modules and functions, in torch's own file format

The memory of a tensor (``UntypedStorage``) is sent as a tensor of bytes, because torch can't read its own file of it.

Others are rejected with a reason: a connection would arrive as a descriptor number, which belongs to another file in
the fresh process; queues and locks that processes share contain connections and semaphores.

Some classes name a module that does not contain them; for example, pytest's ``Skipped`` names ``builtins``. cloudpickle
copies such a class. An object that a worker sends back then has, in the kernel, a copy of its class, which no
``except`` clause for the original matches, and whose ``super().__init__`` fails. Here, such a class is pickled by
reference to a module that holds it under its name, as pickle does for functions without a module.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import inspect
import io
import operator
import pickle
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from typing import Any

Reduction = tuple[Any, ...]

_HEAP_TYPE = 1 << 9  # made by a class statement; source: Py_TPFLAGS_HEAPTYPE, Include/object.h


class PicklingError(pickle.PicklingError):
    """An object can't be pickled as a whole; naming one of its parts would not help the user."""


def reduction(obj: Any) -> Reduction | None:
    """Return how to pickle ``obj`` for a fresh process; None if pickle itself can do it.

    Raises:
        PicklingError: only a fork can pass it to another process.
    """
    if isinstance(obj, types.FunctionType):
        return _of_compiled(obj)
    if isinstance(obj, type):
        return _of_hidden_class(obj)
    for name, cls, reduce in _REDUCTIONS:
        kind = getattr(sys.modules.get(name), cls, None)
        if kind is not None and isinstance(obj, kind):
            return reduce(obj)
    return None


_SETTINGS = ("fullgraph", "error_on_graph_break", "export", "compiler_config")


def _of_compiled(function: types.FunctionType) -> Reduction | None:
    original = vars(function).get("_torchdynamo_orig_callable")
    if original is None:
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    context: Any = cells["self"].cell_contents if "self" in cells else None
    kind = type(context)
    if kind.__name__ != "OptimizeContext" or getattr(context, "callback", None) is None:
        return None
    settings = {name: getattr(context, name) for name in _SETTINGS if hasattr(context, name)}
    settings["dynamic"] = getattr(context, "_dynamic", None)
    parameters = inspect.signature(kind).parameters
    return _compile, (
        kind,
        context.callback,
        context._backend_ctx_ctor,
        context.first_ctx,
        {name: value for name, value in settings.items() if name in parameters},
        original,
    )


def _compile(
    kind: Any, callback: Any, make_context: Any, first: Any, settings: Mapping[str, Any], function: Any
) -> Any:
    return kind(callback, make_context, first, **settings)(function)


def _of_thread_executor(pool: Any) -> Reduction | None:
    # A user's class may take other arguments; Python 3.14 stores the initializer elsewhere.
    if (
        pool._shutdown
        or type(pool).__module__ != "concurrent.futures.thread"
        or not hasattr(pool, "_initargs")
    ):
        return None
    return type(pool), (pool._max_workers, pool._thread_name_prefix, pool._initializer, pool._initargs)


def _of_process_executor(pool: Any) -> Reduction | None:
    if pool._shutdown_thread or type(pool).__module__ != "concurrent.futures.process":
        return None
    arguments = (
        type(pool),
        pool._max_workers,
        pool._mp_context.get_start_method(),
        pool._initializer,
        pool._initargs,
        getattr(pool, "_max_tasks_per_child", None),
    )
    return _make_process_executor, arguments


def _make_process_executor(
    kind: Any, max_workers: int, start_method: str, initializer: Any, initargs: Any, max_tasks: int | None
) -> Any:
    options = {} if max_tasks is None else {"max_tasks_per_child": max_tasks}
    return kind(max_workers, get_context(start_method), initializer, initargs, **options)


def _reject(what: str) -> Callable[[Any], Reduction]:
    def reject(obj: Any) -> Reduction:
        raise PicklingError(f"only forked workers can inherit {what}")

    return reject


def _reject_iterator(iterator: Any) -> Reduction:
    raise PicklingError(
        "the worker processes of this iterator serve only the process that created it. Call iter(loader) inside the "
        "function to read the loader from its beginning"
    )


def _of_loader(loader: Any) -> Reduction | None:
    if getattr(vars(loader).get("_iterator"), "_workers", None) is None:
        return None
    make, arguments, state, *rest = loader.__reduce_ex__(4)
    return make, arguments, {**state, "_iterator": None}, *rest


def _of_script(script: Any) -> Reduction:
    return _load_script, (script.save_to_buffer(),)


def _load_script(data: bytes) -> Any:
    torch = importlib.import_module("torch")
    with warnings.catch_warnings():
        # The user's own use of TorchScript has caused this warning.
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.load(io.BytesIO(data), map_location="cpu")


def _of_hidden_class(cls: type) -> Reduction | None:
    """Return how to pickle a class by reference to the module that holds it; None if that is its ``__module__``, or if
    no module holds it.
    """
    if not cls.__flags__ & _HEAP_TYPE or "." in cls.__qualname__:
        return None
    name = cls.__qualname__
    if cls.__module__ == "__main__" or _holds(sys.modules.get(cls.__module__), name, cls):
        return None
    for module_name, module in tuple(sys.modules.items()):
        if module_name != "__main__" and _holds(module, name, cls):
            return _class_of, (module_name, name)
    return None


def of_named_object(obj: Any, main: Any, dispatch_table: Mapping[type, Callable[[Any], Any]]) -> Any:
    """Return how to copy an object of ``__main__`` that reduces to its name, such as a sentinel or a ``NewType``.

    The copy becomes a member of ``__main__`` in the fresh process. For other objects, return their own reduction, or
    NotImplemented.

    Raises:
        PicklingError: the object can't be copied.
    """
    kind: Any = type(obj)
    reduce = dispatch_table.get(kind)
    if reduce is None and kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__:
        return NotImplemented
    reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if reduce is None else reduce(obj)
    is_name = isinstance(reduced, str) and getattr(main, reduced, None) is obj
    if not is_name or pickle.whichmodule(obj, reduced) != "__main__":  # type: ignore[attr-defined]
        return reduced
    try:
        object.__new__(kind)
    except TypeError:  # a class written in C
        raise PicklingError(f"only forked workers can inherit objects of type {kind.__name__}") from None
    names = [*getattr(obj, "__dict__", ()), *copyreg._slotnames(kind)]  # type: ignore[attr-defined]
    attributes = {name: getattr(obj, name) for name in names if hasattr(obj, name)}
    return object.__new__, (kind,), (reduced, attributes), None, None, _set_named_object


def _set_named_object(obj: Any, state: tuple[str, Mapping[str, Any]]) -> None:
    name, attributes = state
    for attribute, value in attributes.items():
        object.__setattr__(obj, attribute, value)
    setattr(sys.modules["__main__"], name, obj)


def _of_type_alias(alias: Any) -> Reduction:
    kind: Any = type(alias)
    return functools.partial(kind, alias.__name__, alias.__value__, type_params=alias.__type_params__), ()


def _holds(module: Any, name: str, cls: type) -> bool:
    """Return whether ``module`` has ``cls``, without calling its ``__getattr__``, which may import other modules."""
    return getattr(module, "__dict__", {}).get(name) is cls


def _class_of(module_name: str, name: str) -> Any:
    return getattr(importlib.import_module(module_name), name)


def _of_storage(storage: Any) -> Reduction:
    torch = sys.modules["torch"]
    data = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return operator.methodcaller("untyped_storage"), (data.set_(storage),)


_REDUCTIONS: tuple[tuple[str, str, Callable[[Any], Reduction | None]], ...] = (
    ("concurrent.futures.thread", "ThreadPoolExecutor", _of_thread_executor),
    ("concurrent.futures.process", "ProcessPoolExecutor", _of_process_executor),
    ("typing", "TypeAliasType", _of_type_alias),
    ("typing_extensions", "TypeAliasType", _of_type_alias),
    ("torch.utils.data.dataloader", "DataLoader", _of_loader),
    ("torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter", _reject_iterator),
    ("torch", "UntypedStorage", _of_storage),
    ("torch.jit", "ScriptModule", _of_script),
    ("torch.jit", "ScriptFunction", _of_script),
    ("multiprocessing.queues", "Queue", _reject("a multiprocessing queue")),
    ("multiprocessing.queues", "SimpleQueue", _reject("a multiprocessing queue")),
    ("multiprocessing.connection", "_ConnectionBase", _reject("a multiprocessing connection")),
    ("multiprocessing.synchronize", "SemLock", _reject("a multiprocessing lock or semaphore")),
    ("multiprocessing.synchronize", "Condition", _reject("a multiprocessing condition")),
    ("multiprocessing.synchronize", "Event", _reject("a multiprocessing event")),
    ("multiprocessing.sharedctypes", "SynchronizedBase", _reject("a shared multiprocessing value")),
)
"""Module, class, and how to pickle objects of the class."""
