"""A launched script runs in every process as ``python script.py`` would run it."""

from __future__ import annotations

import json
import py_compile
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Ended, labelled, launch, script

FACTS = """
import json, os, pickle, sys

class Thing:
    pass

def facts(x: int = 0):
    import helper
    return {
        "annotation": facts.__annotations__["x"].__name__,
        "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0], "helper": helper.__file__,
        "package": __package__, "spec": __spec__ and __spec__.name, "cached": __cached__ and True,
        "main": sys.modules["__main__"].__dict__ is globals(),
        "pickled": type(pickle.loads(pickle.dumps(Thing()))) is Thing,
    }

if __name__ == "__main__":
    print(json.dumps(facts()))
"""


def facts_of(ended: Ended, rank: int) -> dict[str, object]:
    assert ended.code == 0, ended.err
    (line,) = labelled(ended.lines, rank)
    return json.loads(line)  # type: ignore[no-any-return]


def by_python(*words: str) -> dict[str, object]:
    return json.loads(subprocess.check_output([sys.executable, *words], text=True))  # type: ignore[no-any-return]


def test_a_script_runs_as_under_python() -> None:
    Path("sub").mkdir()
    Path("sub/helper.py").write_text("")
    name = script(FACTS, "sub/train.py")
    words = ["--lr", "0.1", "--", "--cpu", "-m", ""]
    expected = by_python(name, *words)
    ended = launch("--num_processes", "2", name, *words)
    assert facts_of(ended, 0) == expected
    assert facts_of(ended, 1) == expected


def test_open_files_are_flushed_and_instances_of_its_classes_are_logged() -> None:
    """The launcher does not have these classes, because the script is another process's ``__main__``."""
    text = """
import enum
from nblaunch import Accelerator

class P(enum.IntEnum):
    A = 3

if __name__ == "__main__":
    accelerator = Accelerator()
    accelerator.log({"p": P.A}, step=1)
    accelerator.log({"q": 0.5}, step=2)
    out = open("out.txt", "w")
    print("written", file=out)
"""
    ended = launch("--num_processes", "1", script(text, "train.py"))
    assert ended.code == 0, ended.err
    assert Path("out.txt").read_text() == "written\n"


def test_a_module_runs_as_under_python_m() -> None:
    Path("package").mkdir()
    Path("package/__init__.py").write_text("")
    Path("helper.py").write_text("")
    script(FACTS, "package/__main__.py")
    by_python("-m", "package", "--lr", "1")  # compile it, so that both runs find it compiled
    expected = by_python("-m", "package", "--lr", "1")
    ended = launch("--num_processes", "2", "-m", "package", "--lr", "1")
    assert facts_of(ended, 0) == expected
    assert facts_of(ended, 1) == expected


@pytest.mark.parametrize("kind", ["folder", "zip", "compiled"])
def test_a_folder_or_a_zip_file_or_compiled_code_runs_as_under_python(kind: str) -> None:
    Path("app").mkdir()
    Path("app/helper.py").write_text("")
    script(FACTS, "app/__main__.py")
    if kind == "zip":
        shutil.make_archive("app", "zip", "app")
    if kind == "compiled":
        py_compile.compile("app/__main__.py", "app/main.pyc")
    name = {"folder": "app", "zip": "app.zip", "compiled": "app/main.pyc"}[kind]
    by_python(name, "--lr", "1")  # compile it, so that both runs find it compiled
    expected = by_python(name, "--lr", "1")
    ended = launch("--num_processes", "2", name, "--lr", "1")
    assert facts_of(ended, 0) == expected
    assert facts_of(ended, 1) == expected


def test_torchrun_scripts_work_with_spawned_loaders_and_draw_different_numbers() -> None:
    name = script("""
        import os, random, sys
        import torch
        import torch.distributed as dist
        from torch.utils.data import DataLoader, Dataset

        class Numbers(Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, place):
                return place

        if __name__ == "__main__":
            dist.init_process_group("gloo")
            total = torch.ones(1) * (dist.get_rank() + 1)
            dist.all_reduce(total)
            how = {"num_workers": 1, "multiprocessing_context": "spawn"} if dist.get_rank() == 1 else {}
            loader = DataLoader(Numbers(), **how)
            print(int(total), sum(int(batch) for batch in loader), os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"])
            print("drawn", random.random())
            dist.destroy_process_group()
    """)
    ended = launch("--num_processes", "2", name)
    assert ended.code == 0, ended.err
    assert sorted(line for line in ended.lines if "drawn" not in line) == ["[0] 3 6 2 0", "[1] 3 6 2 1"]
    assert len({line.split()[2] for line in ended.lines if "drawn" in line}) == 2


def test_settings_reach_the_accelerator() -> None:
    name = script("""
        from nblaunch import Accelerator
        accelerator = Accelerator()
        dynamo = accelerator._preparer.dynamo
        print(accelerator.mixed_precision, accelerator.gradient_accumulation_steps, accelerator.debug,
              dynamo.backend, dynamo.mode, Accelerator(gradient_accumulation_steps=5).gradient_accumulation_steps)
    """)
    options = "--mixed_precision bf16 --gradient_accumulation_steps 3 --debug --dynamo_backend EAGER --num_processes 1"
    ended = launch(*options.split(), "--start_method", "fork", name)
    assert ended.out == "bf16 3 True eager None 5\n", ended.err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--use_deepspeed --zero_stage 1 --gradient_clipping 0.5", "DEEPSPEED Parameter None 1"),
        ("--config_file fsdp.yaml --fsdp_min_num_params 10", "FSDP DTensor 10 None"),
    ],
)
@pytest.mark.thorough
def test_launch_strategy_reaches_the_accelerator(options: str, expected: str) -> None:
    Path("fsdp.yaml").write_text("""
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 20
  fsdp_version: 2
num_processes: 2
""")
    name = script("""
        import torch
        from nblaunch import Accelerator

        accelerator = Accelerator()
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(4, 8)).pow(2).mean())
        optimizer.step()
        fsdp, deepspeed = accelerator.state.fsdp_plugin, accelerator.state.deepspeed_plugin
        print(accelerator.distributed_type.name, type(next(model.parameters())).__name__,
              fsdp and fsdp.min_num_params, deepspeed and deepspeed.zero_stage)
        accelerator.end_training()
    """)
    usual = ["--num_processes", "2", "--dashboard", "none", "--start_method", "fork"]
    ended = launch(*usual, *options.split(), name)
    assert ended.code == 0, ended.err
    assert sorted(line for line in ended.lines if line.startswith("[")) == [
        f"[0] {expected}",
        f"[1] {expected}",
    ]


def test_all_output_is_shown_in_whole_lines() -> None:
    """Unlike in a notebook, nothing is omitted, because programs may read the output."""
    name = script("""
        import sys
        print("x" * 9000)
        for number in range(3000):
            print(number, file=sys.stderr if number % 2 else sys.stdout)
        print("no end of line", end="")
    """)
    ended = launch("--num_processes", "2", "--dashboard", "none", name)
    expected = ["x" * 9000, *map(str, range(3000)), "no end of line"]
    assert labelled(ended.lines, 0) == expected
    assert labelled(ended.lines, 1) == expected


@pytest.mark.parametrize("dashboard", ["text", "none"])
def test_notes_do_not_mix_with_the_output(dashboard: str) -> None:
    name = script("print('{}')")
    ended = launch("--num_processes", "1", "--enable_cpu_affinity", "--dashboard", dashboard, name)
    assert ended.out == "{}\n", ended.err
    assert "enable_cpu_affinity (command line) has no effect" in ended.err


def test_a_function_of_a_script_is_launched_with_the_settings_of_a_file() -> None:
    Path("mine.yaml").write_text("num_processes: 2\nuse_cpu: true\nmixed_precision: bf16\ndashboard: none\n")
    name = script("""
        import nblaunch

        def train(number):
            accelerator = nblaunch.Accelerator()
            return number, accelerator.process_index, accelerator.num_processes, accelerator.mixed_precision

        if __name__ == "__main__":
            print(nblaunch.launch(train, (7,), config_file="mine.yaml", return_all=True))
            import nblaunch.launcher.job as module   # the folder of the same name is still there
            from nblaunch import launch
            settings = dict(config_file="mine.yaml", num_processes=1, mixed_precision="no", monitor_interval=1)
            print(launch(train, (8,), **settings), module.Job)
            for wrong in ({"num_procs": 2}, {"num_processes": "x"}, {"config_file": "none.yaml"}):
                try:
                    launch(train, (8,), **wrong)
                except (TypeError, ValueError) as error:
                    print(type(error).__name__, error)
    """)
    ended = subprocess.run([sys.executable, name], capture_output=True, text=True, timeout=300)
    assert ended.stdout.splitlines() == [
        "[(7, 0, 2, 'bf16'), (7, 1, 2, 'bf16')]",
        "(8, 0, 1, 'no') <class 'nblaunch.launcher.job.Job'>",
        "TypeError launch() got an unexpected keyword argument 'num_procs'; did you mean num_processes?",
        "ConfigError num_processes='x' must be a whole number",
        "ConfigError none.yaml: no such file; `nblaunch config` creates one",
    ], ended.stderr


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_program_without_streams_can_launch(method: str) -> None:
    """A daemon has closed its streams; pipes between launcher and workers must not get the numbers 0 to 2."""
    name = script(f"""
        import pathlib
        import nblaunch
        def train():
            print("into the log")
            return 42
        if __name__ == "__main__":
            result = nblaunch.launch(train, num_processes=2, backend="cpu", start_method={method!r})
            pathlib.Path("result").write_text(f"{{result}} {{nblaunch.last_job().logs(1)}}")
    """)
    line = shlex.join([sys.executable, name])
    subprocess.run(["/bin/sh", "-c", f"{line} <&- >&- 2>&-"], timeout=300, check=True)
    assert Path("result").read_text().split() == ["42", "into", "the", "log"]
