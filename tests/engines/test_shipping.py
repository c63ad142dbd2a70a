"""Code for nodes: sent modules, and the names of modules that must be installed there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from nblaunch.engines import shipping
from nblaunch.engines.messages import ModuleSource

SEND = """
import json, sys
sys.path.insert(0, {folder!r})
import helpers, deep.inner
from dataclasses import asdict
from nblaunch.engines import shipping
from nblaunch.start_methods.saved_call import save_call
from nblaunch.wire.pickling import payload

def train(config):
    import numpy
    return helpers.double(config), deep.inner.VALUE, tables.Table

tables = __import__("pandas") if False else __import__("rich.table", fromlist=["Table"])
sources = shipping.user_modules({folder!r})
saved = save_call((train, ({{"yaml": "a key, no module"}},)))
print(json.dumps([[asdict(one) for one in sources], shipping.required(payload.pickles_in(saved.fd), sources)]))
"""


def _notebook(folder: Path) -> Path:
    folder.mkdir()
    (folder / "helpers.py").write_text("def double(x):\n    return 2 * x\n\nclass Odd(Exception): pass\n")
    (folder / "later.py").write_text("VALUE = 7\n")
    (folder / "deep").mkdir()
    (folder / "deep" / "__init__.py").write_text("")
    (folder / "deep" / "inner.py").write_text("from deep.lazy import OTHER\nVALUE = OTHER + 1\n")
    (folder / "deep" / "lazy.py").write_text("OTHER = 41\n")
    return folder


def test_notebook_modules_are_importable_on_a_node(tmp_path: Path) -> None:
    import json

    folder = _notebook(tmp_path / "notebook")
    sent = subprocess.run(
        [sys.executable, "-c", SEND.format(folder=str(folder))],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        cwd=folder,
    )
    sources, required = json.loads(sent.stdout)
    assert {"helpers", "later", "deep", "deep.inner", "deep.lazy"} == {one["name"] for one in sources}
    assert "rich" in required
    assert not {"helpers", "deep", "yaml", "__main__"} & set(required)

    node = tmp_path / "node"
    node.mkdir()
    code = f"""
import sys
from pathlib import Path
from nblaunch.engines import shipping
from nblaunch.engines.messages import ModuleSource
shipping.install([ModuleSource(**one) for one in {sources!r}], Path({str(node)!r}))
import helpers, later, deep.inner, pickle, subprocess
print(helpers.double(4), later.VALUE, deep.inner.VALUE, helpers.double.__code__.co_filename)
print(pickle.loads(pickle.dumps(helpers.Odd)) is helpers.Odd, helpers.Odd.__module__)
fresh = [sys.executable, "-c", f"import sys; sys.path[:] = {{sys.path!r}}; import deep.inner; print(deep.inner.VALUE)"]
print(subprocess.run(fresh, capture_output=True, text=True).stdout)
"""
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True, cwd=tmp_path
    )
    assert there.stdout.split() == ["8", "7", "42", str(folder / "helpers.py"), "True", "helpers", "42"]


def test_missing_modules_are_named() -> None:
    assert shipping.missing(["sys", "torch", "no_such_module_here", "another_missing"]) == [
        "no_such_module_here",
        "another_missing",
    ]


def test_sent_modules_take_precedence(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from nblaunch.engines import shipping
from nblaunch.engines.messages import ModuleSource
shipping.install([ModuleSource("rich", "/elsewhere/rich.py", "VALUE = 1", False)], Path({str(tmp_path)!r}))
import rich
print(rich.VALUE)
"""
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert there.stdout == "1\n"


def test_sent_variables_contain_no_secrets_or_paths() -> None:
    environment = {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "2",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "PATH": "/bin",
        "NBLAUNCH_LOG_DIR": "/here",
    }
    assert shipping.variables(environment) == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"}


def test_a_sent_module_keeps_its_filename() -> None:
    (own,) = [one for one in shipping.user_modules(None) if one.name == __name__] or [
        ModuleSource(__name__, __file__, Path(__file__).read_text(), False)
    ]
    assert own.filename == __file__
