"""State of the process itself: exit handlers, signals, working folder, limits, C streams, environment, random
generators.
"""

from __future__ import annotations

from pathlib import Path

from tests.contracts.inheritance.contract import contract
from tests.kernels import Kernel


@contract("exit handlers")
def test_kernel_exit_handlers_run_only_in_the_kernel(kernel: Kernel, start_method: str) -> None:
    kernel.run(
        "import atexit, os, nblaunch\n"
        "atexit.register(print, 'exit handler ran')\n"
        "def train(): print('worker', os.getpid())"
    )
    cell = kernel.run(
        f"nblaunch.notebook_launcher(train, num_processes=2, start_method={start_method!r}, dashboard='none')\n"
        "logs = [nblaunch.last_job().logs(rank) for rank in (0, 1)]\n"
        "print(logs)"
    )
    assert "worker" in cell.stdout
    assert "exit handler ran" not in cell.stdout


@contract("Python profilers")
def test_a_profiler_of_the_kernel_does_not_measure_workers(kernel: Kernel, start_method: str) -> None:
    kernel.run(
        "import cProfile, sys, nblaunch\n"
        "def train():\n"
        "    is_measured = sys.getprofile() is not None\n"
        "    with cProfile.Profile() as profiler: len('ab')\n"
        "    return is_measured, len(profiler.getstats()) > 0\n"
        "options = {'num_processes': 1, 'dashboard': 'none'}"
    )
    cell = kernel.run(
        "with cProfile.Profile() as profiler:\n"
        f"    value = nblaunch.notebook_launcher(train, start_method={start_method!r}, **options)\n"
        "value, len(profiler.getstats()) > 0"
    )
    assert cell.value == ((False, True), True)


@contract("signal handlers")
def test_only_forked_workers_keep_handlers_of_cells(kernel: Kernel, start_method: str) -> None:
    kernel.run(
        "import signal, nblaunch\n"
        "def note(number, frame): print('handled')\n"
        "for number in (signal.SIGUSR1, signal.SIGTERM): signal.signal(number, note)\n"
        "def train():\n"
        "    numbers = (signal.SIGUSR1, signal.SIGTERM)\n"
        "    return [callable(signal.getsignal(number)) for number in numbers], signal.getitimer(signal.ITIMER_REAL)"
    )
    cell = kernel.run(
        "signal.setitimer(signal.ITIMER_REAL, 1000)\n"
        f"value = nblaunch.notebook_launcher(train, num_processes=2, start_method={start_method!r}, dashboard='none')\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "value"
    )
    is_forked = start_method == "fork"
    assert cell.value[0] == [is_forked, False]
    assert cell.value[1] == (0.0, 0.0)


@contract("working folder, umask and resource limits")
def test_folder_umask_and_limits_are_inherited(kernel: Kernel, start_method: str, tmp_path: Path) -> None:
    kernel.run(
        "import os, resource, nblaunch\n"
        f"os.chdir({str(tmp_path)!r})\n"
        "before = os.umask(0o027)\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1000), hard))\n"
        "def train():\n"
        "    import os, resource\n"
        "    return os.getcwd(), os.umask(0o027), resource.getrlimit(resource.RLIMIT_NOFILE)"
    )
    cell = kernel.run(
        f"value = nblaunch.notebook_launcher(train, num_processes=2, start_method={start_method!r}, dashboard='none')\n"
        "value == (os.getcwd(), 0o027, resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert cell.value is True


@contract("C stream buffers")
def test_c_streams_are_written_once(kernel: Kernel, start_method: str, tmp_path: Path) -> None:
    kernel.run(
        "import ctypes, os, nblaunch\n"
        f"folder = {str(tmp_path)!r}\n"
        "def put(name, text):\n"
        "    import ctypes\n"
        "    libc = ctypes.CDLL(None)\n"
        "    libc.fopen.restype = ctypes.c_void_p\n"
        "    stream = libc.fopen(os.path.join(folder, name).encode(), b'w')\n"
        "    libc.fputs(text.encode(), ctypes.c_void_p(stream))\n"
        "put('kernel', 'of the kernel')\n"
        "def train(): put(f'rank_{os.environ[\"RANK\"]}', 'of a rank')"
    )
    kernel.run(
        f"nblaunch.notebook_launcher(train, num_processes=2, start_method={start_method!r}, dashboard='none')\n"
        "ctypes.CDLL(None).fflush(None)"
    )
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {"kernel": "of the kernel", "rank_0": "of a rank", "rank_1": "of a rank"}


@contract("environment variables")
def test_the_environment_is_inherited_and_separate(kernel: Kernel, start_method: str) -> None:
    kernel.run(
        "import os, nblaunch\n"
        "os.environ['SET_IN_A_CELL'] = 'yes'\n"
        "def train(): return os.environ['SET_IN_A_CELL'], os.environ['RANK'], os.environ['WORLD_SIZE']"
    )
    cell = kernel.run(
        f"nblaunch.notebook_launcher(train, num_processes=2, start_method={start_method!r}, dashboard='none', "
        "return_all=True)"
    )
    assert cell.result == "[('yes', '0', '2'), ('yes', '1', '2')]"


@contract("environment variables")
def test_variables_too_large_for_exec_arrive(kernel: Kernel, start_method: str) -> None:
    kernel.run(
        "import os, nblaunch\n"
        "os.environ['LARGE'] = 'x' * 200_000\n"  # more than one variable may have
        "for number in range(40): os.environ[f'MANY_{number}'] = 'y' * 100_000\n"  # more than all may have
        "def train(): return len(os.environ['LARGE']), sum(name.startswith('MANY_') for name in os.environ)"
    )
    cell = kernel.run(
        f"nblaunch.notebook_launcher(train, num_processes=2, start_method={start_method!r}, dashboard='none')"
    )
    assert cell.value == (200_000, 40)


@contract("random generators", is_slow=True)
def test_generators_start_with_the_kernels_state(kernel: Kernel, start_method: str) -> None:
    kernel.run(
        "import random, numpy, torch, nblaunch\n"
        "def draw():\n"
        "    return [random.random() for _ in range(50)] + numpy.random.rand(50).tolist() + torch.rand(50).tolist()\n"
        "def seed(): random.seed(5); numpy.random.seed(5); torch.manual_seed(5)\n"
        "def launch():\n"
        f"    return nblaunch.notebook_launcher(draw, num_processes=2, start_method={start_method!r}, "
        "dashboard='none', return_all=True)"
    )
    kernel.run(
        "seed()\n"
        "first, second = launch(), launch()\n"
        "after = draw()\n"
        "seed()\n"
        "assert first == [draw()] * 2, first\n"
        "assert second[0] == second[1] and not set(first[0]) & set(second[0]), second\n"
        "assert not set(second[0]) & set(after), after\n"
        "seed()\n"
        "assert launch() == first, 'the same seed gives the same launch'\n"
        "assert [draw()] * 2 == second"
    )


def test_sets_of_strings_have_one_order_on_all_spawned_ranks_and_in_each_launch(kernel: Kernel) -> None:
    kernel.run(
        "import nblaunch\n"
        "def order(): return list(set(map(str, range(100))))\n"
        "def launch(): return nblaunch.notebook_launcher(\n"
        "    order, num_processes=2, start_method='spawn', dashboard='none', return_all=True)"
    )
    values = kernel.run("launch() + launch()").value
    assert values == values[:1] * 4


def test_generators_that_the_kernel_has_not_loaded_are_the_same_on_all_ranks() -> None:
    with Kernel.start(is_new=True) as kernel:  # `import numpy` does not import numpy.random
        kernel.run(
            "import random, sys, numpy, nblaunch\n"
            "assert not {'numpy.random', 'torch'} & sys.modules.keys()\n"
            "def draw(with_torch):\n"
            "    drawn = numpy.random.rand(9).tolist()\n"
            "    if with_torch:\n"
            "        import torch\n"
            "        drawn += torch.rand(9).tolist()\n"
            "    return drawn\n"
            "def launch(start_method):\n"
            "    return nblaunch.notebook_launcher(draw, (start_method == 'fork',), num_processes=2, backend='cpu', "
            "start_method=start_method, dashboard='none', return_all=True)"
        )
        seen = set()
        for method in ("fork", "forkserver", "spawn"):
            first, second = kernel.run(f"launch({method!r})").value
            assert first == second
            assert seen.isdisjoint(first)
            seen.update(first)
        kernel.run("random.seed(5); first = launch('forkserver'); random.seed(5)")
        assert kernel.run("first == launch('forkserver')").value


def test_a_restart_replays_the_numbers_of_the_first_attempt(kernel: Kernel) -> None:
    kernel.run(
        "import os, random, numpy, torch, nblaunch\n"
        "def draw(): return random.random(), float(numpy.random.rand()), torch.rand(1).item()\n"
        "def train():\n"
        "    print(draw())\n"
        "    if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise ValueError('once')\n"
        "    return draw()"
    )
    kernel.run(
        "random.seed(5); numpy.random.seed(5); torch.manual_seed(5)\n"
        "value = nblaunch.notebook_launcher(train, num_processes=2, max_restarts=1, dashboard='none')\n"
        "assert nblaunch.last_job().attempt == 1\n"
        "after = draw()\n"
        "random.seed(5); numpy.random.seed(5); torch.manual_seed(5)\n"
        "draw()\n"
        "assert value == draw(), value\n"
        "assert value != after"
    )


def test_a_custom_numpy_generator_is_inherited(kernel: Kernel) -> None:
    kernel.run(
        "import numpy, nblaunch\n"
        "def draw(): return numpy.random.get_bit_generator().__class__.__name__, numpy.random.rand(50).tolist()\n"
        "def launch(start_method):\n"
        "    return nblaunch.notebook_launcher(draw, num_processes=1, start_method=start_method, dashboard='none')"
    )
    for kind in ("PCG64", "SFC64"):
        kernel.run(
            f"numpy.random.set_bit_generator(numpy.random.{kind}(5))\n"
            "first, second = launch('forkserver'), launch('fork')\n"
            f"numpy.random.set_bit_generator(numpy.random.{kind}(5))\n"
            f"assert first == draw() and first[0] == {kind!r}, first\n"
            "assert not set(first[1]) & set(second[1]), second"
        )


@contract("subprocess programs")
def test_programs_of_cells_can_be_polled(kernel: Kernel, start_method: str) -> None:
    kernel.run(
        "import os, subprocess, nblaunch\n"
        "running, killed = (subprocess.Popen(['cat'], stdin=subprocess.PIPE) for _ in range(2))\n"
        "ended = subprocess.Popen(['sh', '-c', 'exit 3'])\n"
        "os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)\n"
        "def train():\n"
        "    own = subprocess.run(['sh', '-c', 'exit 4']).returncode\n"
        "    if os.environ['RANK'] == '0': killed.kill()\n"
        "    return running.poll(), ended.poll(), killed.wait(), own"
    )
    launch = f"nblaunch.notebook_launcher(train, num_processes=2, start_method={start_method!r}, dashboard='none', "
    if start_method == "fork":
        assert kernel.run(f"{launch} return_all=True)").value == [(None, 3, -9, 4)] * 2
    else:
        assert "running" in kernel.run(f"{launch})", raises="PayloadError").raised.value
        kernel.run("killed.kill()")
    assert kernel.run("running.kill(); [one.wait() for one in (running, ended, killed)]").value == [-9, 3, -9]


def test_a_program_of_a_cell_seems_to_run_while_no_descriptor_is_free(kernel: Kernel) -> None:
    kernel.run(
        "import subprocess, nblaunch\n"
        "from tests.no_descriptors import no_descriptor_left\n"
        "running = subprocess.Popen(['cat'], stdin=subprocess.PIPE)\n"
        "def train():\n"
        "    with no_descriptor_left():\n"
        "        without = running.poll()\n"
        "    return without, running.poll()\n"
    )
    launch = "nblaunch.notebook_launcher(train, num_processes=1, start_method='fork', dashboard='none')"
    assert kernel.run(launch).value == (None, None)
    kernel.run("running.kill(); running.wait()")
