"""A node whose program is killed or stopped: the error names it, nothing is left, and the job restarts if it may."""

from __future__ import annotations

from pathlib import Path

from tests.kernels import Kernel

TRAIN = """
def train(gate=""):
    dist.init_process_group("gloo")
    dist.barrier()
    print(f"rank {rank()} of {os.environ['WORLD_SIZE']} is under way, restart "
          f"{os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
    while not (gate and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"):
        time.sleep(0.05)
    return rank()
"""


def _start(notebook: Kernel, call: str) -> None:
    notebook.run(TRAIN)
    notebook.run(f"job = {call}")
    notebook.run(
        "while not all('under way' in job.logs(r) for r in range(4)): time.sleep(0.05)\n"
        "nodes = sorted(node_programs())"
    )


def test_a_silent_node_is_named_and_lost(notebook: Kernel) -> None:
    _start(notebook, "launch(train, background=True, dashboard='text')")
    notebook.run("os.kill(nodes[0], signal.SIGSTOP)")
    error = notebook.run("job.result(200)", raises="NodeLost").raised
    assert "has sent no heartbeat for 15 s" in error.value
    notebook.wait_for_no_processes()


LOADS = """
class Loaded:
    def __reduce__(self):
        return load, (path,)

def load(path):
    try:
        open(path, "x").close()
    except FileExistsError:  # the other node was first
        while True:
            time.sleep(1)
    threading.Thread(target=die, args=(threading.get_ident(),), daemon=True).start()

def die(main):
    while not is_ready(sys._current_frames()[main]):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)

def is_ready(frame):  # the launching process has asked for everything that it needs
    is_waiting = frame.f_code.co_name == "wait_readable"
    return is_waiting and time.monotonic() - frame.f_locals["self"].last_s > 1
"""


def test_a_node_lost_while_another_loads_the_call_is_named(notebook: Kernel, tmp_path: Path) -> None:
    notebook.run(f"path = {str(tmp_path / 'first')!r}\n{LOADS}")
    error = notebook.run("launch(print, Loaded())", raises="LaunchError").raised
    assert "its process was killed by SIGKILL" in error.value
    notebook.wait_for_no_processes()


def test_a_lost_node_is_replaced_for_a_restart(notebook: Kernel) -> None:
    _start(notebook, "launch(train, 'open', background=True, max_restarts=1, return_all=True)")
    notebook.run("os.kill(nodes[1], signal.SIGKILL)")
    assert notebook.run("job.result(200)").value == [0, 1, 2, 3]
    assert notebook.run("job.attempt").value == 1
    assert "restart 1" in notebook.run("job.logs(3)").value
    assert "restart 0" in notebook.run("job.logs(3, attempt=0)").value


def test_a_failed_rank_starts_again_on_the_same_nodes(kept: Kernel) -> None:
    kept.run("""
def train():
    dist.init_process_group("gloo")
    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if restart == "0" and rank() == 3:
        raise ValueError("the first time")
    dist.barrier()
    return restart, os.getppid(), torch.rand(()).item()
""")
    kept.run("values = launch(train, max_restarts=2, return_all=True)")
    assert kept.run("[value[0] for value in values]").value == ["1"] * 4
    assert kept.run("len({value[1] for value in values})").value == 2
    assert kept.run("len({value[2] for value in values})").value == 1, "random states of the launch"
