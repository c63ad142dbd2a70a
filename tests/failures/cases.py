"""The table of failing functions, with the expected report of each."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A cell that launches ``train`` and fails.

    Args:
        name: name of the case.
        source: the cell before the launch; defines ``train``.
        raises: class of the exception in the kernel.
        value: its message, or the beginning of it.
        shows: other texts that the shown error must contain.
        line: the expected first source line.
        rank: rank of the root cause; None if any rank may be the first.
        check: an expression with ``error`` (the exception in the kernel) that must be true.
        is_remote: whether the function raises the exception, rather than the launcher.
        prints: text that the log of ``rank`` must contain.
        is_possible: whether this Python supports the case.
    """

    name: str
    source: str
    raises: str
    value: str
    line: str
    shows: tuple[str, ...] = ()
    rank: int | None = 1
    check: str = "True"
    is_remote: bool = True
    prints: str = ""
    is_possible: bool = True


LAUNCH = "notebook_launcher(train, num_processes=3, start_method={method!r}, interrupt_grace_s=1)"


def _raising(statement: str, before: str = "") -> str:
    """Return a function in which rank 1 runs ``body`` while the others wait for it in a collective."""
    return f"""{before}
def train():
    dist.init_process_group()
    print("it begins")
    if rank() == 1:
        {statement}
    dist.all_reduce(torch.ones(2))
    return "never"
"""


def _death(name: str, statement: str, value: str, shows: tuple[str, ...] = ()) -> Case:
    return Case(
        name,
        _raising(statement),
        raises="WorkerDied",
        value=value,
        line="notebook_launcher(",
        shows=("Its last lines:", "    it begins", *shows),
        is_remote=False,
        prints="it begins",
    )


def _signal(name: str, shows: tuple[str, ...] = ()) -> Case:
    statement = f"os.kill(os.getpid(), signal.{name})"
    return _death(name, statement, f"was killed by {name}", shows)


STUBBORN = """
class Stubborn(Exception):
    def __new__(cls, *args):
        if getattr(cls, "is_made", False):
            raise RuntimeError("only one of these may exist")
        cls.is_made = True
        return super().__new__(cls, *args)
"""
STACK = ("Its Python stack, innermost first:", "in train: os.kill(os.getpid()")

CASES = (
    Case(
        "error",
        _raising('raise ValueError("the loss is nan")'),
        raises="ValueError",
        value="the loss is nan",
        line='raise ValueError("the loss is nan")',
        check="type(error) is ValueError and error.args == ('the loss is nan',)",
        prints="it begins",
    ),
    Case(
        "error in backward",
        """
class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / 2
    @staticmethod
    def backward(ctx, gradient):
        if rank() == 1:
            raise ArithmeticError("a gradient is not finite")
        return gradient / 2

def train():
    model = torch.nn.Linear(2, 2)
    dist.init_process_group()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    Halved.apply(ddp(torch.ones(3, 2))).sum().backward()
    return "never" if rank() == 1 else dist.all_reduce(torch.ones(2))
""",
        raises="ArithmeticError",
        value="a gradient is not finite",
        line="Halved.apply(ddp(torch.ones(3, 2))).sum().backward()",
        shows=('raise ArithmeticError("a gradient is not finite")',),
        check="type(error) is ArithmeticError",
    ),
    _signal("SIGSEGV", STACK),
    _signal("SIGBUS", STACK),
    _signal("SIGABRT", STACK),
    _signal("SIGKILL"),
    _death("os._exit(0)", "os._exit(0)", "ended with exit code 0", ("os._exit(0)",)),
    _death("os._exit(3)", "os._exit(3)", "ended with exit code 3", ("os._exit(3)",)),
    _death("sys.exit(3)", "sys.exit(3)", "ended with exit code 3", ("sys.exit(3)",)),
    Case(
        "sys.exit(0) while others wait",
        _raising("sys.exit(0)"),
        raises="WorkerDied",
        value="called sys.exit(0) while ranks 0 and 2 still needed it",
        line="notebook_launcher(",
        is_remote=False,
        prints="it begins",
    ),
    Case(
        "return while others wait",
        _raising('return "early"'),
        raises="WorkerDied",
        value="returned from the function while ranks 0 and 2 still needed it",
        line="notebook_launcher(",
        is_remote=False,
        prints="it begins",
    ),
    Case(
        "exception with an unpicklable part",
        _raising("raise ValueError('in use', threading.Lock())"),
        raises="ValueError",
        value="('in use', '<unlocked _thread.lock object",
        line="raise ValueError('in use', threading.Lock())",
        check="type(error) is ValueError and error.args[0] == 'in use'",
    ),
    Case(
        "exception that can't be rebuilt",
        _raising(
            "raise Stubborn(7)",
            STUBBORN,
        ),
        raises="WorkerFailed",
        value="rank 1 raised Stubborn: 7",
        line="raise Stubborn(7)",
        shows=("Stubborn: 7",),
        check="isinstance(error, nblaunch.errors.WorkerError) and error.rank == 1",
    ),
    Case(
        "exception class of a cell",
        _raising('raise MyError("mine")', "class MyError(Exception):\n    pass"),
        raises="MyError",
        value="mine",
        line='raise MyError("mine")',
        check="type(error) is MyError",
    ),
    Case(
        "exception that takes no attributes",
        _raising(
            "raise Frozen(5)",
            "@dataclasses.dataclass(frozen=True)\nclass Frozen(Exception):\n    code: int",
        ),
        raises="Frozen",
        value="",
        line="raise Frozen(5)",
        check="type(error) is Frozen and error.code == 5",
    ),
    Case(
        "chained causes",
        _raising(
            "load()",
            """
class Wrapped(Exception):
    def __init__(self, path, *, line):
        super().__init__(f"{path}:{line}")
def load():
    try:
        try:
            {}["lr"]
        except KeyError as missing:
            raise Wrapped("config.toml", line=3) from missing
    except Wrapped as wrapped:
        raise RuntimeError("no learning rate") from wrapped
""",
        ),
        raises="RuntimeError",
        value="no learning rate",
        line='raise Wrapped("config.toml", line=3) from missing',
        shows=('raise RuntimeError("no learning rate") from wrapped', "direct cause"),
        check="type(error.__cause__) is Wrapped and type(error.__cause__.__cause__) is KeyError",
    ),
    Case(
        "error while another is handled",
        _raising(
            "load()",
            """
def load():
    try:
        {}["lr"]
    except KeyError:
        raise RuntimeError("no learning rate")
""",
        ),
        raises="RuntimeError",
        value="no learning rate",
        line='{}["lr"]',
        shows=('raise RuntimeError("no learning rate")', "During handling of the above exception"),
        check="error.__cause__ is None and type(error.__context__) is KeyError",
    ),
    Case(
        "KeyboardInterrupt of the function",
        _raising('raise KeyboardInterrupt("by hand")'),
        raises="KeyboardInterrupt",
        value="by hand",
        line='raise KeyboardInterrupt("by hand")',
        check="type(error) is KeyboardInterrupt",
    ),
    Case(
        "exception whose text can't be made",
        _raising(
            "raise Mute(3)",
            "class Mute(Exception):\n    def __str__(self):\n        raise RuntimeError('no text')",
        ),
        raises="Mute",
        value="<its message can't be shown: str() raises RuntimeError>",
        line="raise Mute(3)",
        check="isinstance(error, Mute) and error.args == (3,)",
    ),
    Case(
        "exception group",
        _raising("raise ExceptionGroup('two things', [ValueError('first'), TypeError('second')])"),
        raises="ExceptionGroup",
        value="two things (2 sub-exceptions)",
        line="",
        check="[str(e) for e in error.exceptions] == ['first', 'second'] and error.subgroup(TypeError) is not None",
        is_possible=sys.version_info >= (3, 11),
    ),
)
