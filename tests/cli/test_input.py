"""Standard input of a launched script: rank 0 reads it, as under mpirun; the other ranks get none."""

from __future__ import annotations

import os
import pty
import subprocess

import pytest

from tests.cli.conftest import PROGRAM, labelled, launch, script
from tests.terminal import Emulator, run_in_terminal

READ = """
import os, sys
print(os.environ["RANK"], repr(sys.stdin.read()))
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_rank_0_reads_a_pipe(method: str) -> None:
    ended = launch("--num_processes", "2", "--start_method", method, script(READ), stdin="lr=3\n")
    assert ended.code == 0, ended.err
    assert sorted(ended.lines) == ["[0] 0 'lr=3\\n'", "[1] 1 ''"]


def test_rank_0_asks_questions() -> None:
    name = script("""
        import os, sys
        if os.environ["RANK"] == "0":
            print("first:", input("go on? "))
            print("second:", sys.stdin.readline().strip())
    """)
    ended = launch("--num_processes", "2", name, stdin="yes\nno\n")
    assert ended.code == 0, ended.err
    assert labelled(ended.lines, 0) == ["go on? first: yes", "second: no"]


def test_programs_of_rank_0_read_the_input() -> None:
    name = script("import os, subprocess\nif os.environ['RANK'] == '0':\n    subprocess.run(['cat'])\n")
    ended = launch("--num_processes", "2", name, stdin="a line\n")
    assert ended.code == 0, ended.err
    assert ended.lines == ["[0] a line"]


@pytest.mark.parametrize("ask", ["input('go on? ')", "getpass.getpass('word? ')"])
def test_other_ranks_have_no_input_and_say_so(ask: str) -> None:
    name = script(f"import getpass, os\nif os.environ['RANK'] == '1':\n    {ask}\n")
    ended = launch("--num_processes", "2", name, stdin="yes\n")
    assert ended.code == 1
    assert "EOFError: " in ended.err
    assert "only rank 0 reads standard input" in ended.err
    assert "engine=" not in ended.err


def test_a_library_that_expects_the_end_of_input_can_go_on() -> None:
    name = script("try:\n    input()\nexcept EOFError:\n    print('default')\n")
    ended = launch("--num_processes", "2", name, stdin="")
    assert ended.code == 0, ended.err
    assert sorted(ended.lines) == ["[0] default", "[1] default"]


def test_a_terminal_answers_rank_0() -> None:
    own, its = pty.openpty()
    try:
        name = script("import os\nif os.environ['RANK'] == '0':\n    print('answer', input('go on? '))\n")
        command = [*PROGRAM, "launch", "--cpu", "--num_processes", "2", "--dashboard", "none", name]
        os.write(own, b"yes\n")
        ended = subprocess.run(command, stdin=its, capture_output=True, text=True, timeout=300)
    finally:
        os.close(own)
        os.close(its)
    assert ended.returncode == 0, ended.stderr
    assert "[0] go on? answer yes" in ended.stdout.splitlines()


QUESTIONS = """
import getpass, os
if os.environ["RANK"] == "0":
    print("whole line")
    print("open line", end="")
    print("name", input("who? "))
    print("more")
    print("word", getpass.getpass("word? "))
    print("at 0", end="")
    breakpoint()
    print("end")
"""


@pytest.mark.parametrize("term", ["xterm", "dumb"])  # with and without a table that is redrawn
def test_output_before_a_prompt_is_shown_before_it(term: str) -> None:
    command = [*PROGRAM, "launch", "--cpu", "--num_processes", "2", script(QUESTIONS)]
    answers = [("who? ", "me"), ("word? ", "secret"), ("(Pdb) ", "p 6 * 7"), ("(Pdb) ", "c")]
    code, written = run_in_terminal(command, answers=answers, term=term)
    screen = Emulator()
    screen.write(written)
    assert code == 0, screen.text
    lines = [line for line in screen.text.splitlines() if line.startswith("[0] ") or line == "42"]
    assert lines == [
        "[0] whole line",
        "[0] open line",
        "[0] who? me",
        "[0] name me",
        "[0] more",
        "[0] word?",
        "[0] word secret",
        "[0] at 0",
        "[0] (Pdb) p 6 * 7",
        "42",
        "[0] (Pdb) c",
        "[0] end",
    ]
