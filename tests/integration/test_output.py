"""Workers' output and displays in the cell and in the logs."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from tests.kernels import Cell, Kernel
from tests.thorough import thorough

OUTPUT_KINDS = ("stream", "display_data", "update_display_data")


def lines_of(cell: Cell, rank: int) -> list[str]:
    return labelled(cell.stdout, rank)


def labelled(text: str, rank: int) -> list[str]:
    """Return the lines of a rank, without its label."""
    label = f"[{rank}] "
    return [line.removeprefix(label) for line in text.splitlines() if line.startswith(label)]


def iopub_messages(cell: Cell) -> int:
    return sum(message["msg_type"] in OUTPUT_KINDS for message in cell.messages)


def test_lines_and_bars_of_four_workers_arrive_whole_in_few_messages(shared: Kernel) -> None:
    cell = shared.run(
        """
from tqdm.auto import tqdm
def train():
    import threading
    pace = threading.Event()
    rank = os.environ["RANK"]
    for step in tqdm(range(10), desc=f"rank {rank}"):
        print(f"rank {rank} step {step}", "and more", sep=" | ")
        pace.wait(0.1)
notebook_launcher(train, num_processes=4)
"""
    )
    for rank in range(4):
        assert lines_of(cell, rank)[:10] == [f"rank {rank} step {step} | and more" for step in range(10)]
    plain = [line for line in cell.stdout.splitlines() if "it/s" not in line]
    assert len(plain) == 40
    assert all(re.fullmatch(r"\[(\d)\] rank \1 step \d+ \| and more", line) for line in plain), plain
    bars = [line for line in cell.stdout.splitlines() if "it/s" in line]
    assert all("100%" in line for line in bars), bars
    assert len(bars) == 4
    assert iopub_messages(cell) < 40


def test_endless_output_is_shortened_and_kept_on_disk(shared: Kernel) -> None:
    cell = shared.run(
        """
def train():
    for i in range(10_000):
        print("line", i)
notebook_launcher(train, num_processes=2)
job = nblaunch.last_job()
[job.logs(rank).splitlines() == [f"line {i}" for i in range(10_000)] for rank in (0, 1)], str(job.log_dir)
"""
    )
    assert cell.result is not None
    complete, log_dir = cell.value
    assert complete == [True, True]
    shown = [line.partition("] ")[2] for line in cell.stdout.splitlines()]
    assert 50 < len(shown) <= 60
    assert (shown[0], shown[-1]) == ("line 0", "line 9999")
    folded = next(display.data for display in cell.displays if "more lines" in display.data["text/html"])
    assert 500 < folded["text/html"].count("line ") < 5000
    num_hidden = int(folded["text/plain"].split()[1].replace(",", ""))
    # Some of the counted lines say what is missing.
    assert num_hidden == pytest.approx(2 * 10_000 - len(shown), abs=10)
    assert f" of {num_hidden:,} more lines" in folded["text/html"]
    assert log_dir in folded["text/plain"]
    for rank in (0, 1):
        assert f"{log_dir}/attempt_0/rank_{rank}.log" in folded["text/html"]
    assert iopub_messages(cell) < 60


def test_captured_cells_have_the_lines_of_earlier_log_handlers(shared: Kernel) -> None:
    shared.run(
        "import contextlib, io, logging\n"
        "logging.getLogger('early').addHandler(logging.StreamHandler(sys.stdout))\n"
        "def log(): logging.getLogger('early').error('a line')"
    )
    shared.run("%%capture captured\nnotebook_launcher(log, num_processes=2)")
    assert shared.run("captured.stdout.splitlines()").value == ["[0] a line", "[1] a line"]
    shared.run(
        "with contextlib.redirect_stdout(io.StringIO()) as text: notebook_launcher(log, num_processes=1)"
    )
    assert shared.run("text.getvalue()").value == "a line\n"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_all_descriptor_output_is_captured(shared: Kernel, method: str) -> None:
    cell = shared.run(
        f"""
import logging, subprocess, warnings
logging.getLogger("mine").handlers[:] = [logging.StreamHandler(sys.stderr), logging.StreamHandler(sys.stdout)]
out, err = sys.stdout, sys.stderr
def to_kernels_streams():
    logging.getLogger("mine").warning("logged by a handler of the kernel")
    print("to the kernel's stream", file=out); print("to the kernel's other stream", file=err)
def train(to_more_streams):
    import ctypes
    print("printed")
    print("to stderr", file=sys.stderr)
    sys.stdout.write("half "); sys.stdout.write("a line\\n")
    sys.stdout.flush()
    os.write(1, b"descriptor 1\\n"); os.write(2, b"descriptor 2\\n")
    subprocess.run(["echo", "from a subprocess"], check=True)
    os.system("echo from a shell")
    libc = ctypes.CDLL(None)
    libc.puts(b"from C"); libc.fflush(None)
    sys.stdout.buffer.write(b"as bytes\\n"); sys.stdout.flush()
    to_more_streams()
    logging.basicConfig(level="INFO", format="%(message)s", force=True)
    logging.info("logged by basicConfig")
    warnings.warn("a warning")
    print("no end", end="")
notebook_launcher(train, ({"to_kernels_streams" if method == "fork" else "print"},), 2, start_method={method!r})
"""
    )
    expected = [
        "printed", "to stderr", "half a line", "descriptor 1", "descriptor 2", "from a subprocess", "from a shell",
        "from C", "as bytes", "logged by basicConfig", "no end",
    ]  # fmt: skip
    if method == "fork":
        expected[9:9] = [
            "logged by a handler of the kernel", "logged by a handler of the kernel", "to the kernel's stream",
            "to the kernel's other stream",
        ]  # fmt: skip
    for rank in (0, 1):
        lines = lines_of(cell, rank)
        assert [line for line in lines if line in expected] == expected
        assert any("UserWarning: a warning" in line for line in lines)
    assert cell.stderr == ""


BUFFERED = """
import ctypes
libc = ctypes.CDLL(None)
os.environ.pop("PYTHONUNBUFFERED", None)  # under which Python takes C's buffer away, too
buffer = ctypes.create_string_buffer(4096)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(buffer))  # for good
libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), buffer, 0, 4096)
libc.printf(b"of the kernel ")  # not yet written, and not for the workers to write
"""


def test_unflushed_native_output_is_captured(fresh: Kernel) -> None:
    fresh.run(BUFFERED)
    ends = ("return", "sys.exit(1)", "os.kill(os.getpid(), 9)")
    for method, end in (*(("fork", end) for end in ends), ("spawn", "return")):
        cell = fresh.run(
            f"""
def train():
    import ctypes, os, sys
    libc = ctypes.CDLL(None)
    for i in range(3):
        libc.printf(b"line %d\\n", i)
    print("from Python")
    libc.printf(b"no end")
    if os.environ["RANK"] == "0":
        {end}
try:
    notebook_launcher(train, num_processes=2, start_method={method!r})
except Exception as error:
    assert type(error).__name__ == "WorkerDied", error
nblaunch.last_job().logs(0).splitlines()
"""
        )
        # A killed process can't write its unfinished line.
        rest = [] if "kill" in end else ["no end"]
        assert cell.value == ["line 0", "line 1", "line 2", "from Python", *rest], (method, end)


@pytest.mark.parametrize("method", ["fork", thorough("forkserver")])
def test_bars_of_every_kind_are_status_lines(shared: Kernel, method: str) -> None:
    cell = shared.run(
        f"""
import importlib, warnings
warnings.simplefilter("ignore")
MODULES = ("tqdm", "tqdm.auto", "tqdm.notebook", "tqdm.autonotebook")
theirs = {{module: importlib.import_module(module).tqdm for module in MODULES}}
def show(where, module, bar_class):
    for _ in bar_class(range(3), desc=where):
        pass
    for _ in bar_class(range(2), desc="outer"):
        for _ in bar_class(range(2), desc="inner", leave=False):
            pass
    with bar_class(total=5, desc="by hand") as bar:
        bar.update(2); bar.set_postfix(loss=0.5); bar.set_description("renamed"); bar.update(3)
        bar.write("written beside the bar")
    print("end of", module)
def train(where):
    warnings.simplefilter("ignore")
    for module in MODULES:
        show(where, module, theirs[module] if where == "cell" else importlib.import_module(module).tqdm)
for where in ("cell", "inside"):
    notebook_launcher(train, (where,), 2, start_method={method!r})
    print("----")
"""
    )
    assert cell.stderr == ""
    assert [set(display.data) for display in cell.displays] == [{"text/html", "text/plain"}] * 2
    of_cell, of_inside, rest = cell.stdout.split("----\n")
    assert rest == ""
    for where, part in (("cell", of_cell), ("inside", of_inside)):
        for rank in (0, 1):
            lines = labelled(part, rank)
            for module in ("tqdm", "tqdm.auto", "tqdm.notebook", "tqdm.autonotebook"):
                end = lines.index(f"end of {module}") + 1
                shown, lines = lines[:end], lines[end:]
                assert any(line.startswith(f"{where}: 100%") and "3/3" in line for line in shown), shown
                assert any(line.startswith("outer: 100%") and "2/2" in line for line in shown), shown
                assert any(line.startswith("renamed: 100%") and "loss=0.5" in line for line in shown), shown
                assert "written beside the bar" in shown
                assert len([line for line in shown if line.strip()]) <= 6, shown
            assert lines == []


def test_bars_first_imported_inside_the_function_are_status_lines_too(fresh: Kernel) -> None:
    for method in ("fork", "forkserver"):
        cell = fresh.run(
            f"""
def train():
    import warnings
    warnings.simplefilter("ignore")
    from tqdm.notebook import tqdm
    for _ in tqdm(range(2), desc="outer"):
        for _ in tqdm(range(2), desc="inner", leave=False):
            pass
    import tqdm.notebook, importlib.resources
    return tqdm.notebook.__spec__.loader.get_source("tqdm.notebook") is not None
assert "tqdm.notebook" not in sys.modules
notebook_launcher(train, num_processes=2, start_method={method!r})
"""
        )
        assert cell.value is True
        for rank in (0, 1):
            (bar,) = [line for line in lines_of(cell, rank) if line]
            assert bar.startswith("outer: 100%"), method
        assert len(cell.displays) == 2  # the table and the result


RICH = """
def train():
    import rich, rich.progress, rich.table, threading
    for _ in rich.progress.track(range(20), description="reading"):
        threading.Event().wait(0.02)
    table = rich.table.Table()
    table.add_column("loss"); table.add_row("0.125")
    rich.print(table)
    rich.print("[bold]bold[/]")
"""


def test_live_displays_of_rich_are_one_line_each(fresh: Kernel) -> None:
    """First displays on a console that the function creates, then on the cell's."""
    fresh.run(RICH)
    of_the_cell = "import rich, rich.progress; rich.get_console()\n"
    for before, method in (("", "fork"), ("", "forkserver"), (of_the_cell, "fork")):
        cell = fresh.run(f"{before}notebook_launcher(train, num_processes=2, start_method={method!r})")
        assert cell.stderr == ""
        assert len(cell.displays) == 1  # the table of ranks
        for rank in (0, 1):
            lines = lines_of(cell, rank)
            assert [line.split()[0] for line in lines if "100%" in line] == ["reading"], (before, method)
            assert any("0.125" in line for line in lines)
            assert "bold" in lines[-1]
            assert len(lines) <= 8, lines


def test_a_widget_of_a_worker_is_shown_as_text(shared: Kernel) -> None:
    cell = shared.run(
        """
import ipywidgets, logging, traitlets.log
from IPython.display import display
of_cell = ipywidgets.IntProgress()
def train():
    handler = logging.StreamHandler()
    traitlets.log.get_logger().addHandler(handler)  # where a kernel's session complains
    widget = ipywidgets.IntText(description="steps")
    display(widget)
    widget.value = of_cell.value = 3
    return widget.value
notebook_launcher(train, num_processes=2)
"""
    )
    assert cell.result == "3"
    assert cell.stderr == ""
    assert "from fork" not in cell.stdout
    shown = [display.data for display in cell.displays if "text/html" not in display.data]
    assert [set(data) for data in shown[:2]] == [{"text/plain"}] * 2
    assert shown[0]["text/plain"].startswith("IntText(")


@pytest.mark.parametrize("method", ["fork", thorough("forkserver")])
def test_displays_and_figures_appear_in_the_cell(shared: Kernel, method: str) -> None:
    cell = shared.run(
        f"""
import matplotlib.pyplot as plt
plt.plot([1, 2]); plt.title("of the kernel")      # left open by the cell that launches: the kernel's to show
from IPython.display import HTML, display
def train():
    import matplotlib.pyplot as plt
    if os.environ["RANK"] == "0":
        display(HTML("<i>shown</i>"))
        handle = display(HTML("0 %"), display_id=True)
        handle.update(HTML("100 %"))
        plt.figure(figsize=(1, 1)); plt.plot([3, 4]); plt.show()
        plt.figure(figsize=(1, 1)); plt.plot([5, 6])       # left open
    return sorted(plt.get_fignums())
notebook_launcher(train, num_processes=2, start_method={method!r})
"""
    )
    shown = [display for display in cell.displays if not display.is_result]
    html = [display.data.get("text/html", "") for display in shown]
    assert "<i>shown</i>" in html
    assert "100 %" in html
    assert "0 %" not in html
    # Two from rank 0, one from the kernel, none twice.
    assert sum("image/png" in display.data for display in shown) == 3


@pytest.mark.parametrize("method", ["fork", thorough("forkserver")])
def test_printed_stacks_begin_with_the_function(shared: Kernel, method: str) -> None:
    cell = shared.run(
        f"""
import logging, torch, traceback, warnings
def root(x):
    return torch.sqrt(x - 2)
def train():
    warnings.simplefilter("always")  # anomaly detection warns, and an earlier cell may have hidden warnings
    traceback.print_stack()
    logging.getLogger("mine").error("here", stack_info=True)
    print("own", [step.name for step in traceback.extract_stack(limit=5)])
    with torch.autograd.detect_anomaly(check_nan=True):
        try:
            root(torch.ones(1, requires_grad=True)).backward()
        except RuntimeError:
            print("the end")
notebook_launcher(train, num_processes=1, start_method={method!r})
"""
    )
    lines = [line.removeprefix("[0] ") for line in cell.stdout.splitlines()]
    assert "own ['train']" in lines, cell.describe()
    assert "    return torch.sqrt(x - 2)" in lines, cell.stdout
    assert "the end" in lines
    assert len(lines) < 30, cell.stdout


def test_no_input_is_requested(shared: Kernel) -> None:
    for ask in ("input('name? ')", "getpass.getpass('word? ')", "bound('word? ')", "asks('name? ')"):
        cell = shared.run(
            f"""
import getpass
from getpass import getpass as bound
asks = input
def train():
    return {ask}
notebook_launcher(train, num_processes=2)
""",
            raises="RuntimeError",
            allow_stdin=True,
        )
        assert "no keyboard" in cell.raised.value
        assert "before the launch" in cell.raised.value
        # the shown line is the user's call, not the place that raises
        assert "/nblaunch/" not in cell.raised.text
    cell = shared.run(
        """
def train():
    import getpass
    try:
        input("name? ")
    except RuntimeError as error:
        print("input:", error)
    getpass.getpass("word? ")
notebook_launcher(train, num_processes=2, start_method="forkserver")
""",
        raises="RuntimeError",
    )
    assert "no keyboard" in cell.raised.value


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_breakpoints_without_input_are_skipped(shared: Kernel, method: str) -> None:
    cell = shared.run(
        f"""
def train():
    breakpoint()
    return "went on"
notebook_launcher(train, num_processes=2, start_method={method!r})
""",
    )
    assert cell.value == "went on"
    assert "line 2 of train" in cell.stdout


def test_every_kind_of_text_arrives(shared: Kernel) -> None:
    cell = shared.run(
        r"""
def train():
    print("ünïcödé 中文 🙂")
    print("half a pair: \ud83d")
    os.write(1, b"not utf-8: \xff\xfe!\n")
    print("a" * 100_000)
    print("\x1b[31mred\x1b[0m")
    print("tab\tand\x00zero")
    print()
    print("  indented")
    os.write(1, b"no end of line")
notebook_launcher(train, num_processes=2)
len(nblaunch.last_job().logs(1).splitlines()[3])
"""
    )
    assert cell.result == "100000"
    for rank in (0, 1):
        lines = lines_of(cell, rank)
        assert lines[0] == "ünïcödé 中文 🙂"
        assert lines[1].startswith("half a pair: ")
        assert lines[2] == "not utf-8: ��!"
        assert lines[3].startswith("aaaa")
        assert "more" in lines[3]
        assert len(lines[3]) < 10_000
        assert "red" in lines[4]
        assert "  indented" in lines
        assert lines[-1] == "no end of line"


def test_huge_lines_are_shortened_and_logged_whole(shared: Kernel) -> None:
    cell = shared.run(
        """
def train():
    for _ in range(40):
        os.write(1, b"x" * (1 << 20))
    os.write(1, b"\\r" + b" " * (9 << 20))      # nothing that a screen would show, for longer than one read
    os.write(1, b"\\rlast words\\n")
    print("after it")
notebook_launcher(train, num_processes=2)
job = nblaunch.last_job()
(job.log_dir / "attempt_0" / "rank_1.log").stat().st_size > 49 << 20
""",
    )
    assert cell.result == "True"
    for rank in (0, 1):
        assert lines_of(cell, rank) == ["last words", "after it"]


def test_logs_are_private_and_pruned_in_the_chosen_folder(shared: Kernel, tmp_path: Path) -> None:
    cell = shared.run(
        f"""
os.chdir({str(tmp_path)!r})
before = dict(os.environ)
def print_and_stay(number):  # jobs that are over in a moment prune now and then only
    print(number)
    import psutil
    while not any("nblaunch-guardian" in p.cmdline() for p in psutil.Process(os.getppid()).children()):
        pass
os.environ.update(NBLAUNCH_LOG_DIR="relative/logs", NBLAUNCH_KEEP_JOBS="3")
folders = []
try:
    for i in range(5):
        notebook_launcher(print_and_stay, (i,), 1)
        folders.append(str(nblaunch.last_job().log_dir))
    os.chdir("/")
    text = nblaunch.last_job().logs(0)
    notebook_launcher(print, ("elsewhere",), 1, log_dir={str(tmp_path / "asked")!r})
    folders.append(str(nblaunch.last_job().log_dir))
    os.environ["HOME"] = {str(tmp_path / "home")!r}
    notebook_launcher(print, ("at home",), 1, log_dir="~/logs")
    folders.append(str(nblaunch.last_job().log_dir))
finally:
    os.environ.clear(); os.environ.update(before)
folders, text
"""
    )
    assert cell.result is not None
    folders, text = cell.value
    *usual, asked, home = map(Path, folders)
    assert text == "4\n"
    assert [folder.exists() for folder in usual] == [False, False, True, True, True]
    assert usual[-1].parent == tmp_path / "relative" / "logs"
    assert asked.parent == tmp_path / "asked"
    assert home.parent == tmp_path / "home" / "logs"
    for folder in (usual[-1].parent, usual[-1], usual[-1] / "attempt_0", asked):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    log = usual[-1] / "attempt_0" / "rank_0.log"
    assert (stat.S_IMODE(log.stat().st_mode), log.read_text()) == (0o600, "4\n")


def test_invalid_log_folders_are_rejected(shared: Kernel, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    cell = shared.run(
        f"notebook_launcher(print, num_processes=2, log_dir={str(file)!r})", raises="LaunchError"
    )
    assert str(file) in cell.raised.value
    assert "log_dir=" in cell.raised.value


def test_warnings_of_wrapped_classes_name_the_line_of_the_cell(shared: Kernel) -> None:
    cell = shared.run(
        """
import warnings
from torch.nn.parallel import DistributedDataParallel

def train():
    torch.distributed.init_process_group("gloo")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DistributedDataParallel(nn.Linear(2, 1), check_reduction=True)
    places = [(warning.filename, warning.lineno) for warning in caught if warning.category is FutureWarning]
    return places, [(train.__code__.co_filename, train.__code__.co_firstlineno + 4)]

notebook_launcher(train, num_processes=2, backend="cpu", dashboard="none")"""
    )
    places, expected = cell.value
    assert places == expected
