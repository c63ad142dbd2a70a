"""Open objects of the kernel: files, folders, pipes, memory maps, C buffers."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.inheritance.contract import contract
from tests.kernels import Kernel

LAUNCH = "nblaunch.notebook_launcher(function, num_processes=2, start_method={!r}, return_all=True, dashboard='none')"


@contract("files open for reading")
def test_each_rank_reads_from_the_kernels_position(kernel: Kernel, tmp_path: Path, start_method: str) -> None:
    kernel.run(
        "import nblaunch\n"
        f"path = {str(tmp_path / 'numbers.txt')!r}\n"
        "with open(path, 'w') as file: file.writelines(f'{number}\\n' for number in range(20000))\n"
        "lines = iter(open(path, 'rb'))\n"
        "begun = [int(next(lines)) for _ in range(5)]\n"
        "def function(): return [int(line) for line in lines] == list(range(5, 20000))"
    )
    if start_method == "fork":
        assert kernel.run(LAUNCH.format(start_method)).value == [True, True]
        assert kernel.run("int(next(lines))").value == 5
    else:
        error = kernel.run(LAUNCH.format(start_method), raises="PayloadError").raised
        assert "lines (TypeError: cannot pickle '_io.BufferedReader' object)" in error.value


@contract("files open for writing")
def test_all_writes_of_kernel_and_ranks_arrive(kernel: Kernel, tmp_path: Path, start_method: str) -> None:
    kernel.run(
        "import nblaunch\n"
        f"path = {str(tmp_path / 'lines.txt')!r}\n"
        "file = open(path, 'w')\n"
        "file.write('kernel, before\\n')\n"
        "def function(): file.write('rank\\n' * 3000)"
    )
    if start_method != "fork":
        error = kernel.run(LAUNCH.format(start_method), raises="PayloadError").raised
        assert "file (" in error.value
        return
    kernel.run(LAUNCH.format(start_method))
    text = kernel.run("file.write('kernel, after\\n')\nfile.close()\nopen(path).read()").value
    assert text.startswith("kernel, before\n")
    assert text.endswith("kernel, after\n")
    assert text.count("rank") == 6000
    assert len(text) == len("kernel, before\nkernel, after\n") + 6000 * len("rank\n")


def test_a_warning_names_a_file_that_several_ranks_write_to(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(
        "import nblaunch, os\n"
        f"written = open({str(tmp_path / 'written')!r}, 'wb')\n"
        f"both = open({str(tmp_path / 'both')!r}, 'w+b')\n"
        f"lines = open({str(tmp_path / 'lines')!r}, 'a')\n"
        f"of_main = open({str(tmp_path / 'of_main')!r}, 'wb')\n"
        "def function():\n"
        "    for _ in range(3):\n"
        "        written.write(b'x' * 20000)\n"
        "        both.write(b'y' * 20000)\n"
        "        print('a line', file=lines, flush=True)\n"
        "        if os.environ['RANK'] == '0': of_main.write(b'z' * 20000)"
    )
    shown = kernel.run("nblaunch.notebook_launcher(function, num_processes=4)").shown
    warnings = sorted(line for line in shown.splitlines() if line.startswith("warning: "))
    assert [line.partition("write to ")[2].partition(",")[0] for line in warnings] == [
        str(tmp_path / "both"),
        str(tmp_path / "written"),
    ]
    assert "at its own position" in warnings[0]


@contract("folders")
def test_each_rank_lists_the_rest_of_a_folder(kernel: Kernel, tmp_path: Path, start_method: str) -> None:
    kernel.run(
        "import nblaunch, os\n"
        f"folder = {str(tmp_path / 'folder')!r}\n"
        "os.mkdir(folder)\n"
        # more than the system reads ahead
        "for number in range(2000): open(f'{folder}/{number}', 'w').close()\n"
        "entries = os.scandir(folder)\n"
        "begun = {next(entries).name for _ in range(5)}\n"
        "def function(): return begun | {entry.name for entry in entries} == set(map(str, range(2000)))"
    )
    if start_method == "fork":
        assert kernel.run(LAUNCH.format(start_method)).value == [True, True]
    else:
        error = kernel.run(LAUNCH.format(start_method), raises="PayloadError").raised
        assert "entries (TypeError: cannot pickle 'posix.ScandirIterator' object)" in error.value


@contract("pipes and sockets")
def test_a_pipe_is_shared_and_not_sent(kernel: Kernel, start_method: str) -> None:
    kernel.run(
        "import nblaunch, os, socket\n"
        "kernels, ranks = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "def function(): ranks.send(os.environ['RANK'].encode())"
    )
    if start_method == "fork":
        kernel.run(LAUNCH.format(start_method))
        assert kernel.run("sorted([kernels.recv(10), kernels.recv(10)])").value == [b"0", b"1"]
    else:
        error = kernel.run(LAUNCH.format(start_method), raises="PayloadError").raised
        assert "ranks (TypeError: cannot pickle 'socket' object)" in error.value


SERVER = """
import http.client, http.server, os, socket, threading, nblaunch

class Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *args): pass
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.path)))
        self.end_headers()
        self.wfile.write(self.path.encode())

server = http.server.ThreadingHTTPServer(("", 0), Echo)
threading.Thread(target=server.serve_forever, daemon=True).start()
"""


ASK = """
def ask(path):
    client.request("GET", path)
    return client.getresponse().read().decode()
"""
CLIENTS = {
    "requests": "import requests; client = requests.Session()\ndef ask(path): return client.get(root + path).text",
    "httpx": "import httpx; client = httpx.Client()\ndef ask(path): return client.get(root + path).text",
    "http.client": "client = http.client.HTTPConnection(root[7:])\n" + ASK,
    # Its source address makes this a connection to another machine.
    "http.client, to another machine": "client = http.client.HTTPConnection(elsewhere, server.server_port,"
    " source_address=('127.0.0.1', 0))\n" + ASK,
}


@pytest.mark.parametrize("client", CLIENTS)
def test_each_rank_has_an_http_connection_of_its_own(kernel: Kernel, client: str) -> None:
    kernel.run(
        f"{SERVER}\nroot = f'http://127.0.0.1:{{server.server_port}}'; elsewhere = {address_of_this_machine()!r}\n"
        f"{CLIENTS[client]}\n"
        "assert ask('/kernel') == '/kernel'\n"
        "def function():\n"
        "    paths = [f\"/{os.environ['RANK']}-{number}\" for number in range(50)]\n"
        "    return [ask(path) for path in paths] == paths"
    )
    assert kernel.run(LAUNCH.format("fork")).value == [True, True]
    assert kernel.run("answer = ask('/kernel'); server.shutdown(); answer").value == "/kernel"


def test_only_the_first_rank_uses_a_connection(kernel: Kernel) -> None:
    address = address_of_this_machine()
    kernel.run(
        "import nblaunch, socket\n"
        "server = socket.create_server(('', 0))\n"
        f"address = ({address!r}, server.getsockname()[1])\n"
        "connection = socket.create_connection(address, source_address=('127.0.0.1', 0))\n"
        "other, _ = server.accept()\n"
        "other.sendall(b'for the first rank')\n"
        "def function(): return connection.recv(100)"
    )
    assert kernel.run(LAUNCH.format("fork")).value == [b"for the first rank", b""]


class _Replies(socketserver.StreamRequestHandler):
    """A service of the machine, such as a database, that sends each line back."""

    def handle(self) -> None:
        for line in self.rfile:
            self.wfile.write(line)


class _LocalServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


class _TcpServer(socketserver.ThreadingTCPServer):
    daemon_threads = True


@pytest.fixture(params=["tcp", "unix"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, int] | str]:
    """Return the address of a service in this process, which the kernel has not started."""
    path = str(tmp_path / "service")
    is_local = request.param == "unix"
    server: socketserver.BaseServer = (
        _LocalServer(path, _Replies) if is_local else _TcpServer(("127.0.0.1", 0), _Replies)
    )
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield path if is_local else ("127.0.0.1", server.server_address[1])
        server.shutdown()
        thread.join()


CONNECT = """
import nblaunch, os, socket
address = {address!r}
client = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
client.connect(address)
replies = client.makefile("rb")

def ask(number):
    client.sendall(b"%d\\n" % number)
    return int(replies.readline())

assert ask(1) == 1

def function():
    numbers = list(range(100))
    return os.environ["RANK"] != "0" or [ask(number) for number in numbers] == numbers

def function_of_all():
    return ask(int(os.environ["RANK"]))
"""


def test_only_the_first_rank_uses_a_local_service(kernel: Kernel, address: tuple[str, int] | str) -> None:
    kernel.run(CONNECT.format(address=address))
    assert kernel.run(LAUNCH.format("fork")).value == [True, True]
    launch_all = LAUNCH.format("fork").replace("(function", "(function_of_all")
    error = kernel.run(launch_all, raises="BrokenPipeError").raised
    place = address if isinstance(address, str) else ":".join(map(str, address))
    assert f"connection to {place}, which only the first rank keeps" in error.text
    assert kernel.run("ask(2)").value == 2
    kernel.run("replies.close(), client.close()")


PROGRAM = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
connection.sendall(connection.recv(2, socket.MSG_WAITALL))
"""


def test_a_program_of_the_kernel_serves_all_ranks(kernel: Kernel) -> None:
    kernel.run(
        "import nblaunch, os, socket, subprocess, sys\n"
        f"service = subprocess.Popen([sys.executable, '-c', {PROGRAM!r}], stdout=subprocess.PIPE)\n"
        "client = socket.create_connection(('127.0.0.1', int(service.stdout.readline())))\n"
        "def function(): client.sendall(os.environ['RANK'].encode())"
    )
    kernel.run(LAUNCH.format("fork"))
    assert sorted(kernel.run("client.recv(2, socket.MSG_WAITALL)").value) == sorted(b"01")
    kernel.run("service.wait(), service.stdout.close(), client.close()")


def test_a_log_handler_connects_again_in_each_rank(kernel: Kernel) -> None:
    kernel.run(
        "import logging.handlers, nblaunch, os, socket\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "server.settimeout(5)\n"
        "handler = logging.handlers.SocketHandler(*server.getsockname())\n"
        "log = logging.getLogger('remote'); log.addHandler(handler)\n"
        "log.warning('of the kernel')\n"
        "def function(): log.warning('of rank %s', os.environ['RANK'])"
    )
    kernel.run(LAUNCH.format("fork"))
    received = kernel.run(
        "connections = [server.accept()[0] for _ in range(3)]\n"
        "handler.close(); server.close()\n"
        "[connection.makefile('rb').read().count(b'of rank') for connection in connections]"
    )
    assert received.value == [0, 1, 1]


def address_of_this_machine() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # connecting a UDP socket sends nothing; source of the address: RFC 5737
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("needs a network")
        return str(probe.getsockname()[0])


@contract("memory maps")
def test_a_memory_map_shows_the_files_bytes(kernel: Kernel, tmp_path: Path, start_method: str) -> None:
    kernel.run(
        "import nblaunch, mmap, numpy\n"
        f"path = {str(tmp_path / 'data')!r}\n"
        "data = numpy.arange(50000); data.tofile(path)\n"
        "array = numpy.memmap(path, dtype=data.dtype, mode='r')\n"
        "with open(path, 'rb') as file: raw = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
        "def function(): return bool((array == numpy.arange(50000)).all())\n"
        "def function_of_raw(): return raw[:] == data.tobytes()"
    )
    assert kernel.run(LAUNCH.format(start_method)).value == [True, True]
    launch_raw = LAUNCH.format(start_method).replace("(function", "(function_of_raw")
    if start_method == "fork":
        assert kernel.run(launch_raw).value == [True, True]
    else:
        assert "raw (TypeError: cannot pickle 'mmap.mmap' object)" in (
            kernel.run(launch_raw, raises="PayloadError").raised.value
        )


C_STREAMS = """
import ctypes, os, nblaunch
libc = ctypes.CDLL(None)
libc.fopen.restype = libc.fdopen.restype = ctypes.c_void_p
libc.fopen.argtypes = ctypes.c_char_p, ctypes.c_char_p
libc.fputs.argtypes, libc.fflush.argtypes = (ctypes.c_char_p, ctypes.c_void_p), (ctypes.c_void_p,)
"""


def test_c_streams_left_open_are_flushed_after_a_failure(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(
        C_STREAMS + f"folder = {str(tmp_path)!r}\n"
        "def function():\n"
        "    libc.fputs(b'left open', libc.fopen(os.path.join(folder, os.environ['RANK']).encode(), b'w'))\n"
        "    raise ValueError('rank')\n"
    )
    kernel.run("nblaunch.notebook_launcher(function, num_processes=1, dashboard='none')", raises="ValueError")
    assert (tmp_path / "0").read_text() == "left open"


def test_kernel_c_streams_are_flushed_once(kernel: Kernel) -> None:
    kernel.run(
        C_STREAMS + "reader, writer = os.pipe()\n"
        "stream = libc.fdopen(writer, b'w')\n"
        "libc.fputs(b'kernel\\n', stream)\n"
        "def function(): libc.fputs(b'rank\\n', stream)"
    )
    cell = kernel.run(
        "nblaunch.notebook_launcher(function, num_processes=2, start_method='fork', dashboard='none')\n"
        "libc.fflush(stream)\n"
        "os.read(reader, 1000).split()"
    )
    assert cell.value == [b"rank", b"rank", b"kernel"]


def test_loader_processes_have_own_positions(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(100))
    kernel.run(
        "import os, torch, nblaunch\n"
        "class Records:\n"
        "    def __init__(self, files): self.files = files\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, index): return [os.lseek(file.fileno(), 5, os.SEEK_SET) for file in self.files][0]\n"
        "def train():\n"
        # Enough to reuse the numbers of all descriptors that were closed when the worker began.
        f"    files = [open({str(tmp_path / 'data')!r}, 'rb', buffering=0) for _ in range(20)]\n"
        "    list(torch.utils.data.DataLoader(Records(files), num_workers=2, multiprocessing_context='fork'))\n"
        "    return [os.lseek(file.fileno(), 0, os.SEEK_CUR) for file in files]"
    )
    cell = kernel.run("nblaunch.notebook_launcher(train, num_processes=2, dashboard='none', return_all=True)")
    assert cell.value == [[0] * 20] * 2


ENVIRONMENT = """
import nblaunch, multiprocessing, os
context = multiprocessing.get_context("fork")

class Environment:
    "Answers each request with its double, in a process."
    def __init__(self):
        self.here, there = context.Pipe()
        self.process = context.Process(target=self.serve, args=(there,), daemon=True)
        self.process.start()
        there.close()
    def serve(self, there):
        while (number := there.recv()) is not None:
            there.send(2 * number)
    def ask(self, number):
        self.here.send(number)
        return self.here.recv()
    def close(self):
        self.here.send(None)
        self.process.join()

environment = Environment()
assert environment.ask(1) == 2
"""


def test_ranks_that_share_the_pipe_to_a_process_are_named(kernel: Kernel) -> None:
    kernel.run(ENVIRONMENT)
    shown = kernel.run(
        "def function(): environment.ask(1)\nnblaunch.notebook_launcher(function, num_processes=2)"
    ).shown
    assert "cell 1, line 16). Inside the function, create the object that owns the process" in shown
    one_rank = "def function(): return environment.ask(1) if os.environ['RANK'] == '0' else None\n"
    own = "def function():\n    own = Environment()\n    doubled = own.ask(1)\n    own.close()\n    return doubled\n"
    for program, expected in ((one_rank, [2, None]), (own, [2, 2])):
        cell = kernel.run(f"{program}nblaunch.notebook_launcher(function, num_processes=2, return_all=True)")
        assert "shared_pipe" not in cell.shown
        assert cell.value == expected
    error = kernel.run(
        "def function(): environment.process.is_alive()\nnblaunch.notebook_launcher(function, num_processes=2)",
        raises="AssertionError",
    ).raised
    assert "a cell started this process, and only the kernel can wait for it" in error.text
    kernel.run("environment.close()")
