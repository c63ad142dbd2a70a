"""The end of a launched script: its exit code, its traceback, signals, and nothing left behind."""

from __future__ import annotations

import signal
from collections.abc import Callable

import psutil
import pytest

from tests.cli.conftest import Ended, Running, launch, script

Start = Callable[..., Running]

LOOP = """
import subprocess, sys, time

child = subprocess.Popen(["sleep", "1000"])
try:
    print("ready", child.pid, flush=True)
    while True:
        time.sleep(0.01)
finally:
    print("finally", flush=True)
"""


def test_exception_is_shown_like_python_with_script_lines() -> None:
    name = script("""
        import os
        import torch.distributed as dist
        dist.init_process_group("gloo")

        class OwnError(Exception):
            pass

        def step():
            if os.environ["RANK"] == "1":
                raise OwnError("rank one does not like this")
            dist.barrier()

        step()
    """)
    ended = launch("--num_processes", "2", name)
    assert ended.code == 1
    shown = ended.err[ended.err.index("rank 1 failed:") :].splitlines()
    assert shown[1] == "Traceback (most recent call last):"
    assert shown[2].startswith('  File "/')
    assert shown[2].endswith('train.py", line 14, in <module>')
    assert shown[3].strip() == "step()"
    assert "OwnError: rank one does not like this" in shown
    assert not any("nblaunch/" in line for line in shown[:8]), "frames of the launcher"
    assert "rank 1 (pid " in ended.err
    assert "rank 0: " in ended.err


@pytest.mark.parametrize(
    ("leaving", "code"),
    [
        ("sys.exit(7)", 7),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
        ("sys.exit('words')", 1),
    ],
)
def test_exit_code_comes_from_the_failed_rank(leaving: str, code: int) -> None:
    name = script(f"""
        import os, signal, sys, time
        if os.environ["RANK"] == "1":
            print("bad usage", flush=True)
            {leaving}
        time.sleep(100)
    """)
    ended = launch("--num_processes", "2", name)
    assert ended.code == code, ended.err
    assert "rank 1 (pid " in ended.err
    assert "    bad usage" in ended.err  # the last lines
    if code < 128:
        assert_no_advice(ended)


def assert_no_advice(ended: Ended) -> None:
    """A script chooses its own exit code."""
    assert "ended with exit code" in ended.err
    for words in ("function", "Something called", "Raise an exception"):
        assert words not in ended.err


def test_processes_that_end_with_code_0_have_succeeded() -> None:
    name = script("""
        import os, sys
        print("trained", flush=True)
        if os.environ["RANK"] == "0":
            os._exit(0)
        os.execv(sys.executable, [sys.executable, "-c", "print('second program', flush=True)"])
    """)
    ended = launch("--num_processes", "2", name)
    assert ended.code == 0, ended.err
    assert "[1] second program" in ended.lines
    assert "done in" in ended.err
    assert "before the function returned" not in ended.err


def test_a_rank_that_ends_with_code_0_does_not_hide_a_failure() -> None:
    name = script("""
        import os, sys, time
        if os.environ["RANK"] == "0":
            os._exit(0)
        time.sleep(1)
        os._exit(5)
    """)
    ended = launch("--num_processes", "2", name)
    assert ended.code == 5, ended.err
    assert "rank 1 (pid " in ended.err
    assert "rank 0: finished" in ended.err
    assert_no_advice(ended)


def test_ranks_of_a_script_may_leave_before_others() -> None:
    name = script("import os, sys\nif os.environ['RANK'] == '1':\n    sys.exit(0)\nprint('goes on')\n")
    ended = launch("--num_processes", "2", name)
    assert ended.code == 0
    assert "rank 1 (pid " not in ended.err
    assert "sys.exit(0)" not in ended.err


def test_a_syntax_error_points_to_the_script() -> None:
    ended = launch("--num_processes", "2", script("x = = 1\n"))
    assert ended.code == 1
    assert "SyntaxError" in ended.err
    assert "train.py" in ended.err


def children_of(running: Running) -> list[psutil.Process]:
    """Return the processes that the ranks started."""
    return [psutil.Process(int(line.split()[-1])) for line in running.seen if "ready" in line]


def assert_gone(processes: list[psutil.Process]) -> None:
    assert len(processes) == 2
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_user_signals_without_a_handler_have_no_effect_and_ctrl_c_lets_finally_blocks_run(
    start: Start,
) -> None:
    running = start("--num_processes", "2", "--dashboard", "none", script(LOOP))
    running.wait_for("ready", 2)
    children = children_of(running)
    running.send(signal.SIGUSR2)
    running.wait_for("no rank has a handler", 1)
    running.send(signal.SIGINT)
    ended = running.end()
    assert ended.code == 130
    assert ended.out.count("finally") == 2
    assert "Traceback" not in ended.out
    assert_gone(children)


def test_ctrl_c_twice_kills(start: Start) -> None:
    name = script(
        LOOP.replace('print("finally", flush=True)', 'print("finally", flush=True); time.sleep(1000)')
    )
    running = start("--num_processes", "2", "--dashboard", "none", "--interrupt_grace_s", "1000", name)
    running.wait_for("ready", 2)
    children = children_of(running)
    running.send(signal.SIGINT)
    running.wait_for("finally", 2)
    running.send(signal.SIGINT)
    assert running.end().code == 130
    assert_gone(children)


def test_sigterm_gives_time_for_a_checkpoint_at_the_same_step(start: Start) -> None:
    name = script("""
        import time
        from nblaunch import Accelerator
        accelerator = Accelerator()
        step = 0
        print("ready", flush=True)
        while not accelerator.should_stop:
            time.sleep(0.01 * (1 + accelerator.process_index))
            accelerator.wait_for_everyone()
            step += 1
        print("saved at", step, flush=True)
    """)
    running = start("--num_processes", "2", "--dashboard", "none", "--start_method", "fork", name)
    running.wait_for("ready", 2)
    running.send(signal.SIGTERM)
    ended = running.end()
    assert ended.code == 128 + signal.SIGTERM
    steps = {line.split("at ")[1] for line in ended.lines if "saved at" in line}
    assert len(steps) == 1, ended.out
    assert ended.out.count("saved at") == 2


def test_user_signals_reach_the_ranks_that_handle_them(start: Start) -> None:
    name = script("""
        import os, signal, sys, time
        def save(signum, frame):
            print("saved", flush=True)
            sys.exit(0)
        if os.environ["RANK"] == "1":
            signal.signal(signal.SIGUSR1, save)
            signal.signal(signal.SIGUSR2, save)
        print("ready", flush=True)
        for _ in range(10_000 if os.environ["RANK"] == "1" else 1):
            time.sleep(0.01)
    """)
    running = start("--num_processes", "2", "--dashboard", "none", name)
    running.wait_for("ready", 2)
    running.send(signal.SIGUSR1)
    ended = running.end()
    assert ended.code == 0, ended.out
    assert "[1] saved" in ended.lines
    assert "SIGUSR1 received: sent to rank 1" in ended.out


def test_sigterm_reaches_a_script_that_handles_it(start: Start) -> None:
    name = script("""
        import signal, sys, time
        def leave(signum, frame):
            print("handled", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        print("ready", flush=True)
        while True:
            time.sleep(0.01)
    """)
    running = start("--num_processes", "2", "--dashboard", "none", name)
    running.wait_for("ready", 2)
    running.send(signal.SIGTERM)
    ended = running.end()
    assert ended.code == 128 + signal.SIGTERM
    assert ended.out.count("handled") == 2


def test_sigterm_interrupts_a_script_without_a_handler(start: Start) -> None:
    running = start("--num_processes", "2", "--dashboard", "none", "--stop_grace_s", "0.1", script(LOOP))
    running.wait_for("ready", 2)
    children = children_of(running)
    running.send(signal.SIGTERM)
    ended = running.end()
    assert ended.code == 128 + signal.SIGTERM
    assert ended.out.count("finally") == 2
    assert_gone(children)


def test_nothing_outlives_a_killed_launcher(start: Start) -> None:
    running = start("--num_processes", "2", "--dashboard", "none", script(LOOP))
    running.wait_for("ready", 2)
    children = children_of(running)
    workers = psutil.Process(running.process.pid).children(recursive=True)
    running.send(signal.SIGKILL)
    running.process.wait()
    assert_gone(children)
    psutil.wait_procs(workers, timeout=30)
    assert not [one for one in workers if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_a_failed_job_starts_again() -> None:
    name = script("""
        import os, sys
        print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
            raise ValueError("only once")
    """)
    ended = launch("--num_processes", "2", "--max_restarts", "1", name)
    assert ended.code == 0, ended.err
    assert sorted(line for line in ended.lines if "attempt 1" in line and line[0] == "[") == [
        "[0] attempt 1",
        "[1] attempt 1",
    ]
