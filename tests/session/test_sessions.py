"""Sessions in real kernels: variables, values, output, errors, interrupts, death, calls with trained weights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels import Kernel
from tests.thorough import thorough

PREAMBLE = """
import os, torch
from torch import nn
from nblaunch import Session
base = 40
session = Session(4, threads_per_process=1)
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Kernel]:
    """Start a kernel with a session of four ranks, which every test leaves running."""
    with Kernel.start() as kernel:
        kernel.run(PREAMBLE)
        yield kernel
        kernel.run("session.close()")
        assert kernel.processes() == []


def test_ranks_have_notebook_and_own_variables(shared: Kernel) -> None:
    shared.run("session.execute('rank = int(os.environ[\"RANK\"]); mine = base + rank')")
    cell = shared.run("dict(session['mine']), dict(session.ranks(1, 3).execute('mine + 1'))")
    assert cell.value == ({0: 40, 1: 41, 2: 42, 3: 43}, {1: 42, 3: 44})


def test_misfit_weights_are_kept_until_the_next_command(shared: Kernel) -> None:
    cell = shared.run("""
net = nn.Linear(2, 1)
def grow(net): net.weight = nn.Parameter(torch.ones(1, 3))
session.run(grow, (net,))
kept = {name: tuple(tensor.shape) for name, tensor in session.weights()[0].items()}
_ = session.execute("1")
kept, tuple(net.weight.shape), session.weights()
""")
    assert cell.value == ({"weight": (1, 3), "bias": (1,)}, (1, 2), {})
    assert "last_job().weights()[0]" in cell.stdout


def test_equal_values_are_shown_once(shared: Kernel) -> None:
    assert shared.run("session.execute('1 + 1')").result == "[0-3] 2"
    assert shared.run('session.execute(\'1 + int(os.environ["RANK"] == "2")\')').result == "[0-1, 3] 1\n[2] 2"


def test_code_runs_as_in_a_cell(shared: Kernel) -> None:
    shared.run("session.execute('import asyncio\\nawait asyncio.sleep(0)\\nhas_waited = True')")
    assert shared.run(
        "dict(session.ranks(2).execute('%env RANK')), set(session['has_waited'].values())"
    ).value == (
        {2: "2"},
        {True},
    )
    assert shared.run("session.execute('5;')").result == "[0-3] None"
    annotated = "def f(x: int): pass\nf.__annotations__['x'] is int"
    assert set(shared.run(f"dict(session.execute({annotated!r}))").value.values()) == {True}


def test_a_commands_output_is_in_its_cell(shared: Kernel) -> None:
    cell = shared.run("_ = session.ranks(1).execute('for i in range(200): print(\"line\", i)')")
    assert cell.stdout.splitlines()[0] == "[1] line 0"
    assert shared.run("_ = session.execute('print(\"next\")')").stdout == "[0-3] next\n"


def test_output_without_a_display_is_not_shown(shared: Kernel) -> None:
    shared.run("def talk(): print('unheard'); return 7")
    cell = shared.run("value = session.run(talk, dashboard='none')")
    assert (cell.stdout, cell.displays, shared.run("value").value) == ("", [], 7)
    assert shared.run("_ = session.execute('print(\"next\")')").stdout == "[0-3] next\n"


REPLACE_OUTPUT = """
import sys
class Logger:
    terminal = sys.stdout
    def write(self, text):
        self.terminal.write(text)
sys.stdout = Logger()
"""


def test_output_can_be_replaced_by_any_object(shared: Kernel) -> None:
    shared.run(f"session.execute({REPLACE_OUTPUT!r})")
    assert shared.run("_ = session.execute('print(\"seen\")')").stdout == "[0-3] seen\n"
    shared.run("session.execute('sys.stdout = sys.stdout.terminal')")


DISPLAYS = """
from IPython.display import HTML, display
display(HTML('<b>bold</b>'))
"""


def test_a_commands_displays_are_in_its_cell(kernel: Kernel) -> None:
    kernel.run(
        """
import time
from nblaunch import Session
from nblaunch.launcher.supervisor import Supervisor
receive = Supervisor._receive
def receive_late(supervisor, rank):
    time.sleep(0.2)  # as on a busy machine
    return receive(supervisor, rank)
Supervisor._receive = receive_late
session = Session(2)
"""
    )
    cell = kernel.run(f"_ = session.execute({DISPLAYS!r})")
    assert [one.data["text/html"] for one in cell.displays] == ["<b>bold</b>"] * 2
    kernel.run("session.close()")


def test_displays_can_be_updated_by_later_commands(shared: Kernel) -> None:
    kept = "from IPython.display import display\nhandle = display(os.environ['RANK'], display_id='shown')"
    cell = shared.run(f"_ = session.ranks(0, 1).execute({kept!r})")
    assert {one.display_id for one in cell.displays} == {"shown", "shown-rank1"}
    after = shared.run("_ = session.ranks(1).execute('handle.update(7)')")
    [update] = after.contents("update_display_data")
    assert update["transient"]["display_id"] == "shown-rank1"


def test_rows_show_the_end_of_a_long_command(shared: Kernel) -> None:
    shared.run("from nblaunch.session import output\noutput._LONG_S = 0.0")
    cell = shared.run("_ = session.execute('import time; time.sleep(0.3)')")
    assert "failed" not in str(cell.displays[0].data)
    assert "done" in str(cell.displays[0].data)
    shared.run("output._LONG_S = 2.0")


def test_a_command_may_close_its_output(kernel: Kernel) -> None:
    kernel.run("import os\nfrom nblaunch import Session\nsession = Session(1)")
    kernel.run("session.execute('os.close(1)')")
    assert kernel.run("session.execute('7')[0]").value == 7
    kernel.run("session.close()")


def test_errors_show_the_lines_of_their_commands(shared: Kernel) -> None:
    shared.run("session.execute('def fail():\\n    raise KeyError(7)')")
    cell = shared.run("session.execute('fail()')", raises="KeyError")
    assert cell.error is not None
    assert "raise KeyError(7)" in cell.error.text
    assert "----> 1 fail()" in cell.error.text


def test_unforked_ranks_start_without_variables(shared: Kernel) -> None:
    shared.run("session.execute('torch.distributed.barrier()')")
    cell = shared.run("with Session(1) as other: 'base' in other.execute('dir()')[0]")
    assert "not have the notebook's variables" in cell.stdout
    assert "another job of this process is running" in cell.stdout


def test_the_start_method_is_explained_before_the_start(shared: Kernel, tmp_path: Path) -> None:
    shared.run("session.execute('torch.distributed.barrier()')")
    os.mkfifo(tmp_path / "go")
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'go')!r}).close()")
    shared.run(f"os.environ['PYTHONPATH'] = {str(tmp_path)!r}")
    cell = shared.submit("with Session(1): del os.environ['PYTHONPATH']")
    try:
        cell.wait_for_text("not have the notebook's variables")
    finally:
        go = os.open(tmp_path / "go", os.O_RDWR)  # lets new interpreters continue
    cell.wait()
    os.close(go)
    assert cell.status == "ok", cell.describe()


def test_commands_from_other_threads_are_rejected(shared: Kernel) -> None:
    shared.run("import threading, traceback\nfrom nblaunch.session import output\noutput._LONG_S = 0.0")
    cell = shared.run(
        """
def other():
    for start in (lambda: session.execute('1'), lambda: session.run(os.getpid)):
        try:
            start()
        except RuntimeError as error:
            print('rejected:', error)

thread = threading.Thread(target=other)
threading.Timer(0.2, thread.start).start()
_ = session.execute('import time; time.sleep(1.5); print("the end")')
thread.join()
"""
    )
    assert cell.stdout.count("rejected: the session is running another command") == 2
    assert "the end" in cell.stdout
    assert len(cell.displays) == 1
    assert "done" in str(cell.displays[0].data)
    shared.run("output._LONG_S = 2.0")


def test_a_session_may_be_closed_while_a_command_runs(kernel: Kernel) -> None:
    kernel.run("import threading\nfrom nblaunch import Session\nsession = Session(2)")
    cell = kernel.run(
        "threading.Timer(0.5, session.close).start()\nsession.execute('import time; time.sleep(1000)')",
        raises="JobCancelled",
    )
    assert cell.error is not None
    assert "close()" in cell.error.value
    assert kernel.processes() == []
    assert kernel.run("session.restart()\nsession.execute('1')").result == "[0-1] 1"
    kernel.run("session.close()")


def test_figures_are_shown_without_a_call(shared: Kernel) -> None:
    cell = shared.run(
        "_ = session.ranks(0, 2).execute('import matplotlib.pyplot as plt\\n_ = plt.plot([1, 2])')"
    )
    assert sum("image/png" in one.data for one in cell.displays) == 2


def test_the_process_group_survives_a_failed_command(shared: Kernel) -> None:
    reduce = "x = torch.ones(2); torch.distributed.all_reduce(x); x.sum().item()"
    assert shared.run(f"set(session.execute({reduce!r}).values())").value == {8.0}
    failing = (
        "if os.environ['RANK'] == '1': raise ValueError('no such batch')\ntorch.distributed.all_reduce(x)"
    )
    cell = shared.run(f"session.execute({failing!r})", raises="ValueError")
    assert cell.error is not None
    assert "no such batch" in cell.error.value
    assert "rank 1" in cell.error.text
    assert shared.run(f"set(session.execute({reduce!r}).values())").value == {8.0}


COMMAND_GROUP = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
group = dist.new_group()
model = DistributedDataParallel(nn.Linear(4, 1), process_group=group)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(8, 4)).square().mean().backward()
optimizer.step()
num_within = len(os.listdir("/proc/self/task"))
dist.destroy_process_group(group)
del group, model, optimizer
"""


def test_threads_of_destroyed_groups_end_with_the_command(shared: Kernel) -> None:
    shared.run(f"session.execute({COMMAND_GROUP!r})")
    shared.run("session.execute('num_after = len(os.listdir(\"/proc/self/task\"))')")
    cell = shared.run("[list(session[name].values()) for name in ('num_within', 'num_after')]")
    within, after = cell.value
    assert all(few < many for few, many in zip(after, within, strict=True))


def _output_of(program: str, folder: Path) -> str:
    script = folder / "program.py"
    script.write_text(program)
    return subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=True
    ).stdout


ONE_HAS_TORCH = """
import sys
from nblaunch import Session

if __name__ == "__main__":
    with Session(2) as session:
        assert "torch" not in sys.modules
        session.ranks(0).execute("import torch")
        session.execute("import sys")
        print(set(session.execute("sys.modules['torch'].distributed.is_initialized()").values()))
"""


def test_all_ranks_join_once_one_imports_torch(tmp_path: Path) -> None:
    assert _output_of(ONE_HAS_TORCH, tmp_path).splitlines()[-1] == "{True}"


def test_waiting_ranks_are_freed_after_torch_failure(shared: Kernel) -> None:
    # The traceback that is kept for the debugger contains torch's own frames, which refer to the group.
    shared.run(
        "rank = 'torch.distributed.get_rank()'\n"
        "session.execute(f'torch.distributed.all_reduce(torch.ones(2, dtype=torch.int16 if {rank} == 0 else None))')",
        raises="RuntimeError",
    )
    reduce = "x = torch.ones(2); torch.distributed.all_reduce(x); x.sum().item()"
    assert shared.run(f"set(session.execute({reduce!r}).values())").value == {8.0}


def test_waiting_ranks_are_freed_despite_group_references(shared: Kernel) -> None:
    shared.run(
        """
session.execute('''
from nblaunch import Accelerator
accelerator = Accelerator()
wrapped = accelerator.prepare(nn.Linear(2, 1))
''')
waits = "if os.environ['RANK'] == '1': raise ValueError('no such batch')\\ntorch.distributed.barrier()"
"""
    )
    shared.run("session.execute(waits)", raises="ValueError")
    shared.run("session.execute('wrapped = accelerator.prepare(nn.Linear(2, 1))')")
    assert shared.run("set(session.execute('wrapped(torch.ones(1, 2)).shape[0]').values())").value == {1}


def test_interrupt_ends_a_collective_of_some_ranks(shared: Kernel) -> None:
    shared.run("session.execute('torch.distributed.barrier()')")  # all ranks join the process group
    waits = "print('begun'); torch.distributed.barrier()"
    cell = shared.submit(f"session.ranks(0).execute({waits!r})").wait_for_text("begun")
    shared.interrupt()
    assert cell.wait().error.name == "KeyboardInterrupt"  # type: ignore[union-attr]
    reduce = "x = torch.ones(2); torch.distributed.all_reduce(x); x.sum().item()"
    assert shared.run(f"set(session.execute({reduce!r}).values())").value == {8.0}


def test_an_interrupt_ends_collectives_that_wait_for_each_other(shared: Kernel) -> None:
    # Rank 2 has begun a collective without waiting, and can leave its group only after rank 3, which waits for rank 0.
    shared.run(
        """
waits = '''
import time
rank = torch.distributed.get_rank()
torch.distributed.barrier()
if rank == 2:
    torch.distributed.all_reduce(torch.ones(3), async_op=True)
print("begun")
if rank in (1, 3):
    torch.distributed.all_reduce(torch.ones(3))
time.sleep(100)
'''
"""
    )
    cell = shared.submit("session.execute(waits)").wait_for_text("begun")
    shared.interrupt()
    error = cell.wait().error
    assert error is not None
    assert error.name == "KeyboardInterrupt"
    reduce = "x = torch.ones(2); torch.distributed.all_reduce(x); x.sum().item()"
    assert shared.run(f"set(session.execute({reduce!r}).values())").value == {8.0}


def test_unpicklable_values_are_described(shared: Kernel) -> None:
    cell = shared.run(
        "import threading; session.put(name='x'); type(session.execute('__import__(\"threading\").Lock()')[0]).__name__"
    )
    assert cell.value == "Unpicklable"


def test_values_of_derived_classes_arrive_or_are_named(shared: Kernel) -> None:
    shared.run(
        """
session.execute('''
class Loss(float):
    pass
def local():
    class Local(int):
        pass
    return Local(7)
class Shown:
    def _repr_mimebundle_(self, **options):
        return {"text/plain": type("Text", (str,), {})("shown")}
''')
"""
    )
    cell = shared.run("session.execute('Loss(0.5)')", raises="ValueError")
    assert cell.error is not None
    assert "Loss" in cell.error.value
    assert shared.run("list(session.execute('local() + 0').values())").value == [7] * 4
    cell = shared.run("[(value + 0, type(value).__name__) for value in session.execute('local()').values()]")
    assert cell.value == [(7, "Local")] * 4
    assert shared.run("[type(value).__name__ for value in session.inspect('Loss(0.5)').values()]").value == (
        ["ValueError"] * 4
    )
    cell = shared.run(
        "from nblaunch.session.session import execute_and_display\n"
        "from nblaunch.wire.worker_commands import Execute\n"
        "execute_and_display(session, Execute(code='Shown()', shows_value=True))[3]['text/plain']"
    )
    assert cell.value == "shown"


def test_values_are_sent_to_ranks(shared: Kernel) -> None:
    shared.run("session.ranks(0, 2).put(batch=torch.arange(3))")
    assert shared.run("session.ranks(0, 2).execute('batch.tolist()')").result == "[0, 2] [0, 1, 2]"
    cell = shared.run("session.ranks(1)['batch']", raises="NameError")
    assert cell.error is not None


def test_an_error_says_how_to_send_a_variable_that_a_cell_set_later(shared: Kernel) -> None:
    shared.run("set_later = 3")
    for command in ("session.execute('set_later')", "session['set_later']"):
        assert "session.put(set_later=set_later)" in shared.run(command, raises="NameError").raised.text
    assert "session.put" not in shared.run("session['never_set']", raises="NameError").raised.text
    assert shared.run("session.put(set_later=set_later); session['set_later']").result.endswith(" 3")  # type: ignore[union-attr]


def test_unpicklable_arguments_are_named(shared: Kernel) -> None:
    shared.run("import threading; lock = threading.Lock()\ndef locked(x): return x")
    for call in ("session.put(lock=lock)", "session.run(locked, (lock,))"):
        cell = shared.run(call, raises="PayloadError")
        assert cell.error is not None
        assert "lock" in cell.error.value
    assert shared.run("session.execute('1')").result == "[0-3] 1"


def test_an_interrupt_returns_and_keeps_the_names(shared: Kernel) -> None:
    shared.run(
        "session.execute('from nblaunch import Accelerator\\nfor _ in Accelerator().progress(range(7)): pass')"
    )
    cell = shared.submit("session.execute('kept = 7\\nprint(\"begun\", flush=True)\\nwhile True: pass')")
    cell.wait_for_text("begun")
    cell.wait_for(lambda cell: cell.displays, what="the rows of a long command")
    assert "running for 0 s" not in str(cell.displays[0].data)  # but since its start
    shared.interrupt()
    assert cell.wait().error.name == "KeyboardInterrupt"  # type: ignore[union-attr]
    assert "interrupted" in str(cell.displays[0].data)
    assert "7/7" not in str(cell.displays[0].data)  # from the previous command
    assert shared.run("session.execute('kept')").result == "[0-3] 7"


RETURNS_EARLY = """
import os, tempfile, time
class Value(int):
    def __reduce__(self):    # its rank sends it, after the function has returned
        open(f"{returned}/{int(self)}", "w").close()
        return int, (int(self),)

def all_but_rank_3(holds):
    if os.environ["RANK"] != "3":
        return Value(os.environ["RANK"])
    while len(os.listdir(returned)) < 3:
        time.sleep(0.01)
    print("begun", flush=True)
    while True:
        try:
            time.sleep(3600)
        except KeyboardInterrupt:
            print("held", flush=True)
            if not holds:
                raise

def run(holds):
    global returned, caught
    returned = tempfile.mkdtemp()
    try:
        session.run(all_but_rank_3, (holds,), return_all=True)
    except BaseException as error:
        caught = error
"""


@pytest.mark.parametrize("holds", [False, True], ids=["interrupted", "killed"])
def test_interrupt_errors_have_the_returned_values(shared: Kernel, holds: bool) -> None:
    shared.run(RETURNS_EARLY)
    cell = shared.submit(f"run({holds})")
    cell.wait_for_text("begun")
    shared.interrupt()
    if holds:
        cell.wait_for_text("held")
        shared.interrupt()
    cell.wait()
    name = "JobCancelled" if holds else "KeyboardInterrupt"
    assert shared.run("type(caught).__name__, caught.partial").value == (name, {0: 0, 1: 1, 2: 2})
    shared.run("session.result()", raises="RuntimeError")
    shared.run("session.restart()" if holds else "session.execute('1')")


AWAITS = """
import asyncio
is_closed = False
print("begun", flush=True)
try:
    await asyncio.sleep(3600)
finally:
    is_closed = True
"""


def test_an_interrupt_ends_an_await(shared: Kernel) -> None:
    cell = shared.submit(f"session.execute({AWAITS!r})")
    cell.wait_for_text("begun")
    shared.interrupt()
    assert cell.wait().error.name == "KeyboardInterrupt"  # type: ignore[union-attr]
    assert set(shared.run("dict(session['is_closed'])").value.values()) == {True}
    assert shared.run("session.execute('await asyncio.sleep(0, 1)')").result == "[0-3] 1"


def test_a_session_of_one_rank_has_a_process_group(kernel: Kernel) -> None:
    kernel.run("import torch\nfrom nblaunch import Session\nsession = Session(1)")
    assert kernel.run("session.execute('torch.distributed.get_world_size()')").result == "[0] 1"
    kernel.run("session.execute('group = torch.distributed.group.WORLD')")
    kernel.run("session.execute('1 / 0')", raises="ZeroDivisionError")
    # No other rank can wait in it, so prepared objects stay usable.
    assert kernel.run("session.execute('torch.distributed.group.WORLD is group')").result == "[0] True"
    kernel.run("session.close()")


def test_handled_interrupts_lose_nothing(shared: Kernel) -> None:
    cell = shared.submit(
        """
import time
def handles(model):
    rank = torch.distributed.get_rank()
    try:
        print("ready", rank, flush=True)
        time.sleep(3600)
    except KeyboardInterrupt:
        with torch.no_grad():
            model.weight.fill_(7.0)
    return rank + 10

handled = nn.Linear(1, 1)
session.run(handles, (handled,), return_all=True)
"""
    )
    for rank in range(4):
        cell.wait_for_text(f"ready {rank}")
    shared.interrupt()
    cell.wait()
    assert cell.error is not None, cell.describe()
    assert (cell.error.name, "session.result()" in cell.error.value) == ("KeyboardInterrupt", True)
    assert shared.run("session.result(), handled.weight.item()").value == ([10, 11, 12, 13], 7.0)
    assert shared.run("session.execute('1')").result == "[0-3] 1"
    shared.run("session.result()", raises="RuntimeError")


@pytest.mark.parametrize("end", ["second interrupt", "death"])
def test_a_death_while_sending_loses_only_weights(kernel: Kernel, end: str) -> None:
    kernel.run(PREAMBLE.replace("Session(4", "Session(2"))
    kernel.run(
        f"""
import signal, tempfile, time
kernel, end, returned = os.getpid(), {end!r}, tempfile.mkdtemp()
class Sent(nn.Linear):
    pass
class Ending(Sent):
    def state_dict(self, *args, **kwargs):
        if os.getpid() != kernel and end == "death":
            os.kill(os.getpid(), signal.SIGKILL)
        if os.getpid() != kernel:
            while not os.path.exists(f"{{returned}}/1"):
                time.sleep(0.01)
            os.kill(kernel, signal.SIGINT)
            time.sleep(0.2)                        # or the system makes one interrupt of both
            os.kill(kernel, signal.SIGINT)
            time.sleep(3600)
        return super().state_dict(*args, **kwargs)

def fill(*models):
    for model in models:
        nn.init.constant_(model.weight, 7.0)
    return Value(int(os.environ["RANK"]) + 10)
class Value(int):
    def __reduce__(self):                          # is sent when the function has returned
        open(f"{{returned}}/{{os.environ['RANK']}}", "w").close()
        return int, (int(self),)
first, second = Sent(1, 1), Ending(1, 1)
nn.init.constant_(second.weight, 1.0)
"""
    )
    raised = "KeyboardInterrupt" if end == "second interrupt" else None
    cell = kernel.run("session.run(fill, (first, second), return_all=True)", raises=raised)
    assert kernel.run("session.result()").value == [10, 11]
    assert kernel.run("first.weight.item(), second.weight.item()").value == (7.0, 1.0)
    shown = cell.stdout + cell.stderr + "".join(str(one.data) for one in cell.displays)
    assert "args[1]" in shown, cell.describe()
    assert "SIGKILL while sending them" in shown, cell.describe()
    assert "the session has ended" in shown, cell.describe()
    if cell.error is not None:
        assert "session.result()" in cell.error.value
        assert "weights are loaded" not in cell.error.value
    died = "JobCancelled" if end == "second interrupt" else "WorkerDied"
    kernel.run("session.execute('1')", raises=died)
    kernel.run("session.restart()")
    assert kernel.run("session.execute('1')").result == "[0-1] 1"
    kernel.run("session.close()")


@pytest.mark.alarms("hang")
def test_incomplete_collectives_are_reported_and_left(kernel: Kernel) -> None:
    kernel.run("import os\nfrom nblaunch import Session\nsession = Session(3, hang_timeout_s=1.0)")
    kernel.run("session.execute('import torch; torch.distributed.barrier()')")
    waits = "kept = 1\nif torch.distributed.get_rank() > 0:\n    torch.distributed.all_reduce(torch.ones(1))"
    cell = kernel.submit(f"session.execute({waits!r})")
    cell.wait_for(lambda cell: any("no progress for" in str(one.data) for one in cell.displays))
    shown = str(cell.displays[0].data)
    assert "all_reduce" in shown
    assert "rank 0 returned from the function" in shown
    kernel.interrupt()
    assert cell.wait().error.name == "KeyboardInterrupt"  # type: ignore[union-attr]
    after = kernel.run("session.execute('kept')")
    assert after.result == "[0-2] 1"
    assert len(after.displays) == 1  # the message of the result
    kernel.run("session.close()")


def test_a_call_trains_the_model_of_the_notebook(shared: Kernel) -> None:
    shared.run(
        """
model = nn.Linear(2, 1)
before = model.weight.detach().clone()
def train(model, lr):
    from nblaunch import Accelerator
    accelerator = Accelerator()
    wrapped = accelerator.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    accelerator.backward(wrapped(torch.ones(4, 2)).sum())
    optimizer.step()
    print("trained")
    return accelerator.process_index
"""
    )
    cell = shared.run(
        "session.run(train, (model, 0.5), return_all=True), (model.weight - before).round().tolist()"
    )
    assert cell.value == ([0, 1, 2, 3], [[-2.0, -2.0]])
    assert "trained" in cell.stdout
    failing = "def fail(): raise KeyError('lr')\nsession.run(fail)"
    assert shared.run(failing, raises="KeyError").error is not None
    assert shared.run("session.run(train, (model, 0.5))").result == "0"


def test_unrequested_values_stay_in_the_ranks(shared: Kernel) -> None:
    shared.run(
        "def value():\n    import threading\n    return threading.Lock() if torch.distributed.get_rank() else 5"
    )
    assert shared.run("session.run(value)").value == 5
    shared.run("session.run(value, return_all=True)", raises="ResultError")


def test_commands_show_only_their_own_losses(shared: Kernel) -> None:
    shared.run(
        """
def learn(*losses):
    from nblaunch import Accelerator
    accelerator = Accelerator()
    weight = torch.ones((), requires_grad=True)
    for loss in losses:
        accelerator.backward(weight * loss)
shown = "set(session.inspect('context.current().slot.read(0).losses.means').values())"
session.execute("from nblaunch import context")
session.put(learn=learn)
"""
    )
    shared.run("session.execute('learn(1.0, 3.0)')")
    assert shared.run("eval(shown)").value == {(2.0,)}
    shared.run("session.execute('learn(5.0)')")
    assert shared.run("eval(shown)").value == {(5.0,)}
    shared.run("session.execute('1')")
    assert shared.run("eval(shown)").value == {()}
    cell = shared.run("session.run(learn, (1.25, 4.75), dashboard='html')")
    assert "4.7500" in str(cell.displays[0].data)
    cell = shared.run("session.run(learn, dashboard='html')")
    assert "4.7500" not in str(cell.displays[0].data)


def test_sys_exit_ends_only_the_command(shared: Kernel) -> None:
    shared.run(
        """
import sys
def leave(model, code):
    with torch.no_grad():
        model.weight.fill_(7.0)
    sys.exit(code)
left = nn.Linear(1, 1)
"""
    )
    assert shared.run("session.run(leave, (left, 0)), left.weight.item()").value == (None, 7.0)
    assert shared.run("session.execute('import sys; sys.exit()')").result == "[0-3] None"
    cell = shared.run("session.run(leave, (left, 3))", raises="RuntimeError")
    assert cell.error is not None
    assert "sys.exit(3)" in cell.error.value
    assert "sys.exit(code)" in cell.error.text
    cell = shared.run("session.execute('sys.exit(\"no data\")')", raises="RuntimeError")
    assert cell.error is not None
    assert "sys.exit('no data')" in cell.error.value


def test_a_process_that_a_command_forks_sends_no_reply(shared: Kernel) -> None:
    forks = "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\n[pid > 0]"
    assert shared.run(f"session.ranks(0).execute({forks!r})").result == "[0] [True]"
    assert shared.run("session.ranks(0).execute('\"next\"')").result == "[0] 'next'"


def test_loops_left_in_a_command_end_with_it(shared: Kernel) -> None:
    in_loop = "Accelerator().gradient_state.in_dataloader"
    read = f"""
from nblaunch import Accelerator
from torch.utils.data import DataLoader
batches = iter(Accelerator().prepare(DataLoader(range(8), batch_size=1)))
batch = next(batches)
{in_loop}
"""
    assert shared.run(f"dict(session.execute({read!r}))").value == dict.fromkeys(range(4), True)
    assert shared.run(f"dict(session.execute({in_loop!r}))").value == dict.fromkeys(range(4), False)
    shared.run("session.execute('del batches')")


OF_THE_CELL = """
from nblaunch import Accelerator
accelerator = Accelerator()
def train_with_it():
    model = nn.Linear(1, 1)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
"""
COUNT = "import gc; gc.collect(); sum(type(one).__name__ == 'AdamW' for one in gc.get_objects())"


def test_session_calls_keep_prepared_objects(shared: Kernel) -> None:
    shared.run(OF_THE_CELL)
    for _ in range(3):
        shared.run("session.run(train_with_it)")
    kept = shared.run(f"dict(session.execute({COUNT!r}))").value
    assert max(kept.values()) <= 1
    shared.run("del accelerator, train_with_it")


def test_a_session_is_an_argument_of_the_launcher(shared: Kernel) -> None:
    shared.run("def pid(): return os.getpid()\nfrom nblaunch import notebook_launcher")
    cell = shared.run(
        "notebook_launcher(pid, (), session=session, return_all=True) == list(session.pids.values())"
    )
    assert cell.value is True
    for settings in ("backend='cpu'", "num_processes=session.num_processes", "start_method='fork'"):
        assert shared.run(
            f"len(notebook_launcher(pid, (), session=session, return_all=True, {settings}))"
        ).value
    for settings in (
        "num_processes=7",
        "use_port=12345",
        "master_addr='10.9.9.9'",
        "background=True",
        "start_method='spawn'",
        "mixed_precision='bf16'",
        "strategy='spmd'",
        "max_restarts=1",
    ):
        assert shared.run(
            f"notebook_launcher(pid, (), session=session, {settings})", raises="ValueError"
        ).error


def test_other_types_are_rejected_as_session(shared: Kernel) -> None:
    cell = shared.run("notebook_launcher(print, (), session='session')", raises="TypeError")
    assert cell.error is not None
    assert "'session'" in cell.error.value


def test_unreferenced_sessions_end(kernel: Kernel) -> None:
    kernel.run(
        "from nblaunch import Session\nfor _ in range(3): session = Session(2)\npids = set(session.pids.values())"
    )
    assert kernel.run("dict(session.execute('1'))").value == {0: 1, 1: 1}
    kernel.run("import gc\ndel session\n_ = gc.collect()")
    kernel.wait_for_no_processes()


def test_a_session_outlives_the_thread_that_started_it(kernel: Kernel) -> None:
    kernel.run(
        """
import os, threading
from nblaunch import Session
sessions = []
thread = threading.Thread(target=lambda: sessions.append(Session(2)))
thread.start()
thread.join()
while os.path.exists(f"/proc/self/task/{thread.native_id}"):    # it ends a moment after join() returns
    pass
"""
    )
    assert kernel.run("set(sessions[0].execute('1 + 1').values())").value == {2}
    kernel.run("sessions[0].close()")


def test_wrong_arguments_are_rejected_at_once(shared: Kernel) -> None:
    for call in ("session.ranks(4)", "session['a b']"):
        assert shared.run(call, raises="ValueError").error is not None
    assert shared.run("session.run(3)", raises="TypeError").error is not None
    assert shared.run("session.execute('1')").result == "[0-3] 1"


def test_deaths_are_named_and_restarts_start_afresh(kernel: Kernel) -> None:
    kernel.run(PREAMBLE.replace("Session(4", "Session(2"))
    cell = kernel.run(
        'session.execute(\'import signal\\nos.environ["RANK"] == "1" and os.kill(os.getpid(), signal.SIGKILL)\')',
        raises="WorkerDied",
    )
    assert cell.error is not None
    assert "SIGKILL" in cell.error.value
    assert "session.restart()" in cell.error.text
    assert kernel.run("session.is_running").result == "False"
    assert kernel.run("session.status()").result == "[0-1] 'ended'"
    assert kernel.run("session.execute('1')", raises="LaunchError").error is not None
    kernel.run("base = 50; session.restart()")
    assert kernel.run("session['base']").result == "[0-1] 50"
    kernel.run("session.close()")
    assert kernel.processes() == []


DIES = """
import os, signal
from nblaunch import Session
from nblaunch.session import output
output._LONG_S = 0.0    # any command is shown with its rows
def die():
    if os.environ["RANK"] == "1":
        {death}
    signal.pause()
session = Session(2)
"""


@pytest.mark.parametrize(
    ("call", "death", "state", "how"),
    [
        ("session.run(die)", "os._exit(4)", "failed", "exit code 4"),
        ("session.execute('die()')", "os.kill(os.getpid(), signal.SIGKILL)", "killed", "SIGKILL"),
    ],
)
def test_the_table_shows_a_ranks_death(kernel: Kernel, call: str, death: str, state: str, how: str) -> None:
    kernel.run(DIES.format(death=death))
    [table] = kernel.run(call, raises="WorkerDied").displays
    rows = {line.split()[0]: line for line in table.data["text/plain"].splitlines()}
    assert "stopped" in rows["0"]
    assert state in rows["1"]
    assert how in rows["1"]
    assert "failed in rank 1" in table.data["text/plain"]
    kernel.run("session.close()")


AFTER = """
import os, signal
from nblaunch import context
worker = context.current()
emit = worker.emit
def emit_and_die(event):
    emit(event)
    if type(getattr(event, "event", None)).__name__ == os.environ.get("DIES_AFTER"):
        os.kill(os.getpid(), signal.SIGKILL)
worker.emit = emit_and_die
"""


def test_a_death_between_result_and_end_loses_nothing(kernel: Kernel) -> None:
    """A rank dies after each event of a command. What it has reported and printed arrives; nothing is made up."""
    kernel.run("import os, signal\nfrom nblaunch import Session\nsession = Session(2)")
    for after, code, raised in [
        ("Returned", "40 + int(os.environ['RANK'])", None),
        ("Failed", "def fail():\n    raise KeyError(7)\nfail()", "KeyError"),
        ("Started", "1", "WorkerDied"),
    ]:
        kernel.run(f"session.execute({AFTER!r})")
        dying = f"print('printed')\nos.environ['DIES_AFTER'] = {after!r}\n{code}"
        if after == "Started":  # the next command dies at its start
            kernel.run(f"session.ranks(1).execute({dying!r})")
        cell = kernel.run(f"session.ranks(1).execute({dying!r})", raises=raised)
        assert cell.result == ("[1] 41" if raised is None else None)
        if after != "Started":
            assert "[1] printed" in cell.stdout
            assert "SIGKILL" in kernel.run("session.execute('1')", raises="WorkerDied").raised.value
        if after == "Failed":
            assert "raise KeyError(7)" in cell.raised.text
        kernel.run("session.execute('1')", raises="LaunchError")
        kernel.run("session.restart()")
    kernel.run("session.close()")


@pytest.mark.parametrize("code", ["os._exit(0)", "Dies()"], ids=["in the code", "while its value is sent"])
def test_a_rank_that_ends_sends_no_value(kernel: Kernel, code: str) -> None:
    kernel.run(
        """
import os, signal
from nblaunch import Session
class Dies:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)
session = Session(2)
"""
    )
    cell = kernel.run(f"session.ranks(0).execute('print(\\'printed\\'); {code}')", raises="WorkerDied")
    assert "[0] printed" in cell.stdout
    kernel.run("session.close()")


def test_a_rank_that_dies_after_its_command_is_named(kernel: Kernel) -> None:
    """The launcher, not the user, interrupts the other rank."""
    kernel.run("import os, signal, threading\nfrom nblaunch import Session\nsession = Session(2)")
    dies_later = (
        "if os.environ['RANK'] == '1':\n    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
        "else:\n    signal.pause()"
    )
    cell = kernel.run(f"session.execute({dies_later!r})", raises="WorkerDied")
    assert "rank 1" in cell.raised.value
    kernel.run("session.close()")


def test_closing_all_descriptors_is_named_as_the_cause(kernel: Kernel) -> None:
    kernel.run(
        "import os\nfrom nblaunch import Session\nsession = Session(2)\ndef close(): os.closerange(3, 65536)"
    )
    assert "os.closerange()" in kernel.run("session.run(close)", raises="WorkerDied").raised.value
    kernel.run("session.restart()")
    assert kernel.run("session.run(lambda: 5)").value == 5
    kernel.run("session.close()")


def test_a_call_on_a_session_that_has_ended_shows_no_table(kernel: Kernel) -> None:
    kernel.run("from nblaunch import Session\nsession = Session(2)\nsession.close()")
    assert kernel.run("session.run(print)", raises="LaunchError").displays == []
    kernel.run("import os\nsession.restart()\n_ = session.execute('1')")
    kernel.run("os.kill(session.pids[1], 9)\nsession._runner.wait()")
    assert kernel.run("session.run(print)", raises="WorkerDied").displays == []


@pytest.mark.parametrize("start_method", ["forkserver", thorough("spawn")])
def test_fresh_workers_receive_functions_and_values(kernel: Kernel, start_method: str) -> None:
    kernel.run(f"from nblaunch import Session\nsession = Session(2, start_method={start_method!r})")
    kernel.run("factor = 3\ndef scale(x): return x * factor\nsession.put(y=2)")
    assert kernel.run("session.run(scale, (5,), return_all=True)").value == [15, 15]
    assert kernel.run("session.execute('y + 1')").result == "[0-1] 3"
    kernel.run("session.close()")
    assert kernel.processes() == []


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_idle_ranks_evaluate_in_their_global_variables(kernel: Kernel, start_method: str) -> None:
    """This covers ranks before the first command, and after a command that runs no code."""
    kernel.run(f"from nblaunch import Session\nsession = Session(2, start_method={start_method!r})")
    assert kernel.run("dict(session.inspect('__name__'))").value == {0: "__main__", 1: "__main__"}
    kernel.run("session.put(y=2)")
    assert kernel.run("dict(session.inspect('y'))").value == {0: 2, 1: 2}
    assert "ranks 0 and 1: idle" in (kernel.run("session.compare()").result or "")
    kernel.run("session.close()")
    assert kernel.processes() == []


def test_the_end_of_the_kernel_ends_the_workers(kernel: Kernel) -> None:
    kernel.run(PREAMBLE)
    assert len(kernel.processes()) >= 4
    kernel.close()
    assert kernel.processes() == []


OPENS_AND_CLOSES = """
import gc, os
from nblaunch import Session

def open_and_close():
    with Session(2, threads_per_process=1) as session:
        session.execute("1")

if __name__ == "__main__":
    open_and_close()
    gc.collect()
    gc.disable()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        open_and_close()
    print(len(os.listdir("/proc/self/fd")) - before)
"""


def test_closed_sessions_leave_no_descriptors(tmp_path: Path) -> None:
    assert _output_of(OPENS_AND_CLOSES, tmp_path).split()[-1] == "0"


LOSSES = """
import torch
from nblaunch import Accelerator
kept = []

def train(model, optimizer, losses):
    model, optimizer = Accelerator().prepare(model, optimizer)
    loss = model(torch.ones(2, 4)).pow(2).sum()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    kept.append(loss.item())

model = torch.nn.Linear(4, 1)
optimizer, losses = torch.optim.AdamW(model.parameters()), []
"""


def test_changed_arguments_of_a_call_are_named(kernel: Kernel) -> None:
    kernel.run(f"import nblaunch\n{LOSSES}\nsession = nblaunch.Session(num_processes=2)")
    cell = kernel.run("session.run(train, (model, optimizer, losses))")
    (changed,) = [line for line in cell.shown.splitlines() if "the function changes" in line]
    assert "args[2]" in changed
    assert "kept" not in changed.partition(" only in the workers")[0], "the ranks keep their variables"
    assert "args[1] (AdamW)" in cell.shown
    assert "sync_optimizers" not in cell.shown
    assert kernel.run("losses, len(optimizer.state)").value == ([], 0)
    kernel.run("session.close()")
