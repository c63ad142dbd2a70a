"""Invalid input is rejected with a clear message before anything is started."""

from __future__ import annotations

import functools
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nblaunch import LaunchError, backends, context, debug_launcher, notebook_launcher
from nblaunch.backends import discover
from nblaunch.backends.cpu import CpuBackend
from nblaunch.context import ProcessContext
from nblaunch.spec import LaunchSpec, parse_port
from nblaunch.topology import Topology
from nblaunch.worker.script import Script


def train(model: object, epochs: int = 1) -> None:
    raise AssertionError("it must not be called")


async def train_async(model: object) -> None:
    """Return a coroutine, which no launch would await."""


def train_in_steps(model: object) -> Iterator[int]:
    yield 1


class Trainer:
    def __call__(self, model: object) -> None:
        """Train."""


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Fail the test if any code starts a process."""

    def reject(*args: Any, **kwargs: Any) -> None:
        started.append(args)
        raise AssertionError("a process was started")

    started: list[Any] = []
    monkeypatch.setattr(os, "fork", reject)
    monkeypatch.setattr(subprocess, "Popen", reject)
    monkeypatch.setenv("NBLAUNCH_LOG_DIR", str(tmp_path / "logs"))
    yield
    assert started == []


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpus(CpuBackend):
        name = "gpus"
        device_noun = "GPU"
        is_oversubscribable = False

        def affinity(self) -> int:
            return 100

        def device_count(self) -> int:
            return 2

        def precision_problem(self, precision: str) -> str | None:
            return "bf16 needs a newer GPU" if precision == "bf16" else None

    monkeypatch.setitem(backends._registered, "gpus", Gpus())


START_METHODS = ("'auto'", "'fork'", "'forkserver'", "'spawn'")

BAD: list[tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = [
    ({"function": "train"}, TypeError, ("function='train'", "can't be called")),
    ({"function": None}, TypeError, ("function=None", "notebook_launcher(train, (model,))")),
    ({"args": "model"}, TypeError, ("args", "tuple", "str", "(model,)")),
    ({"args": 3}, TypeError, ("args", "tuple", "int")),
    ({"args": {"model": 1}}, TypeError, ("args", "tuple", "dict", "functools.partial(")),
    ({"function": train_async}, TypeError, ("train_async is an async function", "asyncio.run(train_async(")),
    ({"function": functools.partial(train_async, 1), "args": ()}, TypeError, ("train_async is an async",)),
    ({"function": train_in_steps}, TypeError, ("train_in_steps is a generator function", "list(train_in_steps")),
    ({"args": ()}, TypeError, ("train(model", "missing a required argument: 'model'", "args is empty")),
    ({"args": (1, 2, 3)}, TypeError, ("train(model", "too many positional arguments", "int, int, int")),
    ({"num_processes": 0}, ValueError, ("num_processes=0", "at least 1")),
    ({"num_processes": 10**20}, ValueError, ("num_processes=100000000000000000000", "at most 4096 on one machine")),
    ({"threads_per_process": 10**9}, ValueError, ("threads_per_process=1000000000", "at most 4096")),
    ({"num_processes": -1}, ValueError, ("num_processes=-1", "at least 1")),
    ({"num_processes": "two"}, TypeError, ("num_processes='two'", "whole number", "str")),
    ({"num_processes": True}, TypeError, ("num_processes=True", "whole number", "bool")),
    ({"num_processes": 2.0}, TypeError, ("num_processes=2.0", "whole number", "float")),
    ({"threads_per_process": 0}, ValueError, ("threads_per_process=0", "at least 1")),
    ({"mixed_precision": "fp4"}, ValueError, ("mixed_precision='fp4'", "'no'", "'fp16'", "'bf16'", "'fp8'")),
    ({"mixed_precision": "fp8", "backend": "cpu"}, ValueError, ("mixed_precision='fp8'", "cpu")),
    ({"start_method": "thread"}, ValueError, ("start_method='thread'", *START_METHODS)),
    ({"start_method": None}, ValueError, ("start_method=None", *START_METHODS)),
    ({"engine": "dask"}, ValueError, ("engine='dask'", "'auto'", "'local'", "'inline'")),
    ({"engine": ["local"]}, ValueError, ("engine=['local']", "'auto'", "'local'", "'inline'")),
    ({"strategy": "fsdp"}, ValueError, ("strategy='fsdp'", "'auto', 'spmd'", "Accelerator", "fsdp_plugin=...")),
    ({"strategy": ["spmd"]}, ValueError, ("strategy=['spmd']", "'auto', 'spmd'")),
    ({"strategy": None}, ValueError, ("strategy=None", "'auto', 'spmd'")),
    ({"strategy": "spmd", "backend": "cpu", "engine": "inline"}, ValueError, ("strategy='spmd'", "XLA")),
    ({"backend": "tpu"}, ValueError, ("backend='tpu'", "'auto'", "'cpu'", "'cuda'")),
    ({"backend": ["cpu"]}, ValueError, ("backend=['cpu']", "'auto'", "'cpu'", "'cuda'")),
    ({"dashboard": "fancy"}, ValueError, ("dashboard='fancy'", "'auto'", "'html'", "'text'", "'none'")),
    ({"dashboard": ["text"]}, ValueError, ("dashboard=['text']", "'auto'", "'html'", "'text'", "'none'")),
    ({"use_port": "http"}, ValueError, ("use_port='http'", "1 to 65535")),
    ({"use_port": 70000}, ValueError, ("use_port=70000", "1 to 65535")),
    ({"use_port": -5}, ValueError, ("use_port=-5", "1 to 65535")),
    ({"use_port": True}, ValueError, ("use_port=True", "1 to 65535")),
    ({"use_port": 29500.5}, ValueError, ("use_port=29500.5", "1 to 65535")),
    ({"master_addr": None}, TypeError, ("master_addr=None", "'127.0.0.1'")),
    ({"num_nodes": 0}, ValueError, ("num_nodes=0", "at least 1")),
    ({"num_nodes": True}, ValueError, ("num_nodes=True", "'1:4'")),
    ({"num_nodes": "two"}, ValueError, ("num_nodes='two'", "'1:4'")),
    ({"num_nodes": "3:2", "rdzv_backend": "c10d"}, ValueError, ("num_nodes='3:2'", "minimum above its maximum")),
    ({"num_nodes": "1:2"}, ValueError, ("num_nodes='1:2'", "rdzv_backend='c10d'")),
    ({"num_nodes": 2, "node_rank": 2}, ValueError, ("node_rank=2", "num_nodes=2")),
    ({"num_nodes": 2, "engine": "inline"}, ValueError, ("engine='inline'", "num_nodes=2")),
    ({"num_nodes": 2, "rdzv_conf": {"tiemout": 3}}, ValueError, ("'tiemout'", "'timeout'")),
    ({"num_nodes": 2, "rdzv_conf": {"timeout": "3"}}, ValueError, ("'timeout'", "positive number")),
    ({"num_nodes": 2, "rdzv_conf": [3]}, TypeError, ("rdzv_conf=[3]", "dict")),
    ({"num_nodes": 2, "rdzv_timeout_s": 0}, ValueError, ("rdzv_timeout_s=0", "at least 0.001")),
    ({"num_nodes": 2, "rdzv_endpoint": 29400}, TypeError, ("rdzv_endpoint=29400", "host:29400")),
    ({"num_nodes": 2, "rdzv_endpoint": "a b:1"}, ValueError, ("rdzv_endpoint='a b:1'", "host:29400")),
    ({"num_nodes": 2, "rdzv_endpoint": "host:99999"}, ValueError, ("rdzv_endpoint='host:99999'", "host:29400")),
    ({"node_rank": 1}, ValueError, ("node_rank=1", "num_nodes=1")),
    ({"rdzv_backend": "c10d", "num_nodes": 2}, ValueError, ("rdzv_backend='c10d'", "rdzv_endpoint='host:port'")),
    ({"rdzv_backend": "c10d", "num_nodes": "1:2"}, ValueError, ("rdzv_backend='c10d'", "rdzv_endpoint='host:port'")),
    ({"rdzv_backend": "etcd"}, ValueError, ("rdzv_backend='etcd'", "'static'", "'c10d'")),
    ({"rdzv_endpoint": "host:1"}, ValueError, ("rdzv_endpoint", "num_nodes=1")),
    ({"rdzv_conf": {"timeout": 3}}, ValueError, ("rdzv_conf", "num_nodes=1")),
    ({"max_restarts": -1}, ValueError, ("max_restarts=-1", "at least 0")),
    ({"interrupt_grace_s": float("nan")}, ValueError, ("interrupt_grace_s=nan", "at least 0")),
    ({"mixed_precision": None}, ValueError, ("mixed_precision=None", "'no'", "'fp16'", "'bf16'")),
    ({"num_processes": np.float32(2)}, TypeError, ("num_processes=", "whole number", "float32")),
    ({"num_processes": np.int64(0)}, ValueError, ("num_processes=", "at least 1")),
    ({"return_all": "yes"}, TypeError, ("return_all='yes'", "True or False")),
    ({"sync_weights": "no"}, TypeError, ("sync_weights='no'", "True or False")),
    ({"sync_weights": None}, TypeError, ("sync_weights=None", "True or False")),
    ({"background": "yes"}, TypeError, ("background='yes'", "True or False")),
    ({"log_dir": 5}, TypeError, ("log_dir=5", "folder")),
    ({"interrupt_grace_s": -1}, ValueError, ("interrupt_grace_s=-1", "at least 0")),
    ({"interrupt_grace_s": "5"}, TypeError, ("interrupt_grace_s='5'", "number", "str")),
    ({"log_line_prefix_template": 3}, TypeError, ("log_line_prefix_template", "3")),
    ({"engine": "inline", "num_processes": 2}, ValueError, ("num_processes=2", "engine='inline'", "1 and None")),
]  # fmt: skip


def _without_addresses(value: object) -> str:
    """Return the name of a case, the same in every process, because test processes compare their collected tests."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))[:50]


@pytest.mark.parametrize(("arguments", "kind", "words"), BAD, ids=_without_addresses)
def test_errors_name_setting_value_and_valid_values(
    arguments: dict[str, Any], kind: type[Exception], words: tuple[str, ...]
) -> None:
    with pytest.raises(kind) as caught:
        notebook_launcher(**{"function": train, "args": (1,), **arguments})
    assert type(caught.value) is kind
    message = str(caught.value)
    assert all(word in message for word in words), message


def test_more_processes_than_gpus_are_rejected(two_gpus: None) -> None:
    for number in (3, 100):
        with pytest.raises(ValueError, match=rf"num_processes={number}, .* 2 GPUs .*'gpus'.*1 to 2"):
            notebook_launcher(train, (1,), number)


def test_unsupported_precisions_are_rejected(two_gpus: None) -> None:
    with pytest.raises(ValueError, match=r"mixed_precision='bf16' .* gpus: bf16 needs a newer GPU"):
        notebook_launcher(train, (1,), 2, "bf16")


def test_missing_backends_are_rejected() -> None:
    if discover()["cuda"].affinity() > 0:
        pytest.skip("this machine has a GPU")
    with pytest.raises(RuntimeError, match=r"backend='cuda' can't be used here: "):
        notebook_launcher(train, (1,), backend="cuda")


def test_ports_in_use_are_rejected() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for use_port in (port, str(port)):
            with pytest.raises(LaunchError, match=rf"port {port} on 127\.0\.0\.1 is in use .*use_port"):
                notebook_launcher(train, (1,), 2, use_port=use_port, dashboard="none")


def test_foreign_addresses_are_rejected() -> None:
    # TEST-NET-1 of RFC 5737 has no hosts.
    for address in ("192.0.2.1", "nowhere.invalid"):
        with pytest.raises(
            LaunchError, match=rf"{address}: .*; master_addr must be an address of this machine"
        ):
            notebook_launcher(train, (1,), 2, master_addr=address, dashboard="none")


@pytest.mark.parametrize("engine", ["auto", "local", "inline"])
def test_launches_inside_workers_are_rejected(engine: str) -> None:
    before = context.take()
    topology = Topology(rank=1, local_rank=1, world_size=2, local_world_size=2)
    context.install(ProcessContext(topology=topology, backend=CpuBackend(), is_launched=True))
    try:
        with pytest.raises(RuntimeError, match="a worker requested a launch"):
            notebook_launcher(train, (1,), engine=engine)
        with pytest.raises(RuntimeError, match="a worker requested a launch"):
            debug_launcher(train, (1,))
    finally:
        context.install(before)


def test_the_debug_launcher_checks_the_same() -> None:
    with pytest.raises(ValueError, match="num_processes=0"):
        debug_launcher(train, (1,), 0)
    with pytest.raises(TypeError, match="missing a required argument: 'model'"):
        debug_launcher(train)


def test_valid_input_is_accepted() -> None:
    spec = LaunchSpec(train, [1], mixed_precision="BF16")  # type: ignore[arg-type]
    assert (spec.args, spec.mixed_precision, spec.accelerator_defaults) == (
        (1,),
        "bf16",
        {"mixed_precision": "bf16"},
    )
    spec = LaunchSpec(train, (1,), num_processes=np.int64(2), return_all=np.bool_(True))  # type: ignore[arg-type]
    assert (spec.num_processes, type(spec.num_processes)) == (2, int)
    LaunchSpec(print, log_line_prefix_template="$host: ${rank} 5 $")  # unknown names stay, as in torch
    assert LaunchSpec(lambda *values: None, (1, 2, 3)).args == (1, 2, 3)
    assert LaunchSpec(print, ("C functions have no signature at times",)).function_name == "print"
    assert LaunchSpec(dict, ()).args == ()
    assert LaunchSpec(functools.partial(functools.partial(train, 1))).function_name == "train"
    assert LaunchSpec(Trainer(), (1,)).function_name == "Trainer"
    assert LaunchSpec(Script("train.py")).function_name == "train.py"
    assert [parse_port(port) for port in (None, "", 0, "0", 80, "29500")] == [
        None,
        None,
        None,
        None,
        80,
        29500,
    ]


@pytest.mark.parametrize(
    ("given", "low", "high"), [(2, 2, 2), ("2", 2, 2), ("1:4", 1, 4), (np.int64(3), 3, 3)]
)
def test_a_number_of_machines_may_be_a_range(given: Any, low: int, high: int) -> None:
    spec = LaunchSpec(print, num_nodes=given, rdzv_backend="c10d", rdzv_endpoint="host")
    assert (spec.min_nodes, spec.max_nodes) == (low, high)
    assert spec.is_elastic


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        ({"master_addr": "10.0.0.1"}, ("10.0.0.1", 29500)),
        ({"master_addr": "10.0.0.1", "master_port": 4000}, ("10.0.0.1", 4000)),
        ({"rdzv_endpoint": "host:4000"}, ("host", 4000)),
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "host"}, ("host", 29400)),
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "[fd00::1]:4000"}, ("fd00::1", 4000)),
    ],
)
def test_machines_meet_at_the_given_address(settings: dict[str, Any], address: tuple[str, int]) -> None:
    assert LaunchSpec(print, num_nodes=2, **settings).rendezvous_address == address


@pytest.mark.parametrize(
    ("settings", "timeout_s"),
    [
        ({}, 600),
        ({"rdzv_conf": {"timeout": 20}}, 20),
        ({"rdzv_timeout_s": 5, "rdzv_conf": {"timeout": 20}}, 5),
    ],
)
def test_the_time_to_meet_has_two_names(settings: dict[str, Any], timeout_s: float) -> None:
    assert LaunchSpec(print, num_nodes=2, **settings).rendezvous_timeout_s == timeout_s


def test_one_machine_has_no_rendezvous_with_others() -> None:
    assert not LaunchSpec(print).is_elastic
    assert not LaunchSpec(print, rdzv_backend="c10d").is_elastic
    assert LaunchSpec(print, engine="elastic").is_elastic
    assert LaunchSpec(print, rdzv_backend="c10d", rdzv_endpoint="host:1").is_elastic
