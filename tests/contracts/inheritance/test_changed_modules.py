"""What cells have changed and registered in modules applies in workers under every start method."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.inheritance.contract import contract
from tests.kernels import Kernel

MODULE = """
import argparse, contextvars, dataclasses, functools, os, threading

class Settings:
    def __init__(self): self.lr = 0.1

class AttributeDict(dict):
    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__

@dataclasses.dataclass
class Options:
    lr: float = 0.1
    def change(self, lr): self.lr = lr

cfg, options, attributes, args = Settings(), Options(), AttributeDict(lr=0.1), argparse.Namespace(lr=0.1)
cfg.inner = inner = Settings()
tags = contextvars.ContextVar("tags", default=())
of_thread = threading.local()
of_thread.lr = 0.1
lr = patched = in_loop = 0.1
rank = int(os.environ.get("RANK", -1))

def set_lr(value):
    global lr
    lr = value

def values():
    return [cfg.lr, cfg.inner.lr, inner.lr, options.lr, attributes.lr, args.lr, of_thread.lr, lr, patched, in_loop,
            tags.get()]

class Proxy:
    @property
    def __class__(self): raise RuntimeError("not bound yet")

request = Proxy()

class Registry:
    request = Proxy()
    def __init__(self): self.items = {}
    def register(self, item):
        assert item.__name__ not in self.items, "twice"
        self.items[item.__name__] = item
        return item

registry = Registry()

@functools.singledispatch
def area(shape): return "unknown"

@area.register
def _(shape: str): return "text"

class Unsent:
    def __init__(self): self.lock = threading.Lock(); self.lr = 0.1

unsent = Unsent()
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "theirs.py").write_text(MODULE)
    with Kernel.start(cwd=folder) as kernel:
        kernel.run(CELL)
        yield kernel


CELL = """
import theirs
from unittest import mock
from nblaunch import notebook_launcher

def launch(function, start_method):
    return notebook_launcher(
        function, num_processes=2, start_method=start_method, dashboard="none", return_all=True, backend="cpu"
    )
"""

CHANGES = """
%%time
from theirs import cfg, inner
theirs.set_lr(0.5)
theirs.options.change(0.5)
cfg.lr = inner.lr = theirs.attributes.lr = theirs.args.lr = theirs.of_thread.lr = 0.5
for name in ("in_loop",):
    setattr(theirs, name, 0.5)
theirs.tags.set(("mine",))
from theirs import request
try: request.lr = theirs.request.lr = 0.5
except RuntimeError: pass
"""


@contract("attributes of modules and classes")
def test_objects_and_variables_that_calls_have_changed_apply(shared: Kernel, start_method: str) -> None:
    shared.run(CHANGES.strip())
    shared.run(
        "import shlex\n"
        "def read(): return theirs.values(), theirs.cfg.inner is theirs.inner, shlex.quote('a'), shlex.join([])\n"
        "with mock.patch('theirs.patched', 0.5), mock.patch('shlex.quote', lambda text: 'mine'),"
        " mock.patch.object(shlex, 'join', lambda texts: 'mine'):\n"
        f"    of_ranks = launch(read, {start_method!r})"
    )
    assert shared.run("of_ranks").value == [([0.5] * 10 + [("mine",)], True, "mine", "mine")] * 2


def test_each_worker_computes_what_cells_do_not_change(shared: Kernel) -> None:
    assert shared.run("launch(lambda: theirs.rank, 'spawn')").value == [0, 1]


def test_a_changed_object_that_can_not_be_sent_is_named(shared: Kernel) -> None:
    cell = shared.run(
        "theirs.unsent.lr = 0.5\n"
        "notebook_launcher(lambda: None, num_processes=1, start_method='forkserver', dashboard='text')"
    )
    assert "theirs.unsent (" in cell.shown


REGISTRATIONS = """
import codecs, collections.abc, copyreg, doctest, html.entities, mimetypes, pickle
from functools import singledispatch

class Shape:
    size = 1

@theirs.area.register
def _(shape: int): return "number"

theirs.area.register(Shape, lambda shape: "shape")

@theirs.registry.register
class Mine: ...

def find_codec(name):
    if name == "theirs":
        return codecs.CodecInfo(lambda text, errors="strict": (b"mine", len(text)), None, name=name)

def reduce_shape(shape): return len, ("four",)

codecs.register(find_codec)
collections.abc.Sized.register(Mine)
copyreg.pickle(Shape, reduce_shape)
mimetypes.add_type("text/mine", ".mine")
doctest.set_unittest_reportflags(doctest.REPORT_CDIFF)
html.entities.html5["mine;"] = "!"

OTHERS = False
if OTHERS:
    mimetypes.add_type("text/other", ".other")
elif not OTHERS:
    mimetypes.add_type("text/second", ".second")
else:
    mimetypes.add_type("text/third", ".third")

def registered():
    import doctest, html, mimetypes
    return [theirs.area(1), theirs.area("a"), theirs.area(Shape()), sorted(theirs.registry.items),
            "a".encode("theirs"), issubclass(Mine, collections.abc.Sized),
            *(mimetypes.guess_type(f"a.{name}")[0] for name in ("mine", "other", "second", "third")),
            pickle.loads(pickle.dumps(Shape())), doctest.set_unittest_reportflags(doctest.REPORT_CDIFF),
            html.unescape("&mine;")]
"""


@contract("registrations")
def test_registrations_in_libraries_and_modules_apply(shared: Kernel, start_method: str) -> None:
    shared.run(
        "if 'Shape' not in vars():\n" + "\n".join(f"    {line}" for line in REGISTRATIONS.splitlines())
    )
    wanted = [
        "number",
        "text",
        "shape",
        ["Mine"],
        b"mine",
        True,
        "text/mine",
        None,
        "text/second",
        None,
        4,
        128,
        "!",
    ]
    assert shared.run("registered()").value == wanted
    assert shared.run(f"launch(registered, {start_method!r})").value == [wanted] * 2


def test_a_registration_that_can_not_be_repeated_is_named(shared: Kernel) -> None:
    cell = shared.run(
        "import codecs\n"
        "codecs.register((lambda: lambda name: None)())\n"
        "notebook_launcher(lambda: None, num_processes=1, start_method='forkserver', dashboard='text')"
    )
    assert "codecs.register(...) in a cell" in cell.shown


def test_a_script_changes_modules_for_its_workers(tmp_path: Path) -> None:
    import subprocess
    import sys

    (tmp_path / "theirs.py").write_text(MODULE)
    (tmp_path / "script.py").write_text(
        "import theirs\nfrom nblaunch import notebook_launcher\n"
        "def read(): return theirs.cfg.lr\n"
        "if __name__ == '__main__':\n"
        "    theirs.cfg.lr = 0.5\n"
        "    print(notebook_launcher(read, num_processes=1, start_method='spawn', dashboard='none'))\n"
    )
    run = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
    )
    assert run.stdout.strip().endswith("0.5"), run.stdout + run.stderr
