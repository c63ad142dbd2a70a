"""nblaunch's training steps, compiled by libtpu for absent TPUs: collectives, element types, memory.

The tests prove that the steps compile, and their memory, but not that they run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nblaunch.cli.estimate import JobSettings, ModelSize, training_need

pytestmark = pytest.mark.timeout(400)

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
TOPOLOGIES = ("v5e:2x4", "v6e:2x4")
TYPES = {("no", False): {"f32", "f64"}, ("bf16", False): {"bf16"}, ("bf16", True): {"bf16", "f32"}}
WIDTH = 2048
NUM_LAYERS = 4


def run(*command: str, **variables: str) -> dict[str, Any]:
    """Return the JSON that a program prints last."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=env)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def compiled(folder: Path, topology: str, **step: Any) -> dict[str, Any]:
    """Return the TPU compiler's results for a traced step."""
    file, spmd = folder / "step.hlo", step.get("spmd", False)
    devices = {"CPU_NUM_DEVICES": "8"} if spmd else {}
    traced = run(
        sys.executable, "-m", "tests.tpu_compiler.trace_step", str(file), json.dumps(step), **devices
    )
    # libtpu would query this host, which has no TPU.
    host = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TMPDIR": str(folder)}
    way = "partitions" if spmd else "replicas"
    program = str(FOLDER / "compile_program.py")
    return traced | run(
        os.environ["TPU_COMPILER"], program, str(file), topology, str(traced["devices"]), way, **host
    )


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("step", [{"replicas": 1}, {"replicas": 8}, {"spmd": True}], ids=["1", "8", "spmd"])
@pytest.mark.parametrize(("precision", "downcast"), TYPES)
def test_types_and_collectives_of_a_step(
    tmp_path: Path, topology: str, step: dict[str, Any], precision: str, downcast: bool
) -> None:
    """Weights, state and gradients have the requested type; doubles remain only for Python's numbers."""
    found = compiled(tmp_path, topology, precision=precision, downcast=downcast, **step)
    assert found["collectives"].keys() == (set() if found["devices"] == 1 else {"all-reduce"})
    assert found["devices"] == step.get("replicas", 8)
    assert set(found["types"]) - {"s64", "s32"} == TYPES[precision, downcast]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_sharded_weights_are_gathered_and_their_gradients_scattered(tmp_path: Path, topology: str) -> None:
    """Each device holds an eighth of weights, gradients and state, and its rows of the batch."""
    whole = compiled(tmp_path, topology, spmd=True, width=WIDTH)
    parts = compiled(tmp_path, topology, spmd=True, sharded=True, width=WIDTH)
    assert "all-gather" not in whole["collectives"]
    assert parts["collectives"]["all-gather"] >= NUM_LAYERS
    assert parts["collectives"]["reduce-scatter"] == NUM_LAYERS
    assert parts["argument_bytes"] < whole["argument_bytes"] / 6
    assert parts["output_bytes"] < whole["output_bytes"] / 6
    assert parts["temporary_bytes"] < whole["temporary_bytes"]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_memory_estimates_match_the_compiler(tmp_path: Path, topology: str, precision: str) -> None:
    found = compiled(tmp_path, topology, precision=precision, width=WIDTH)
    # Weights and state are updated in place: memory that stays, and memory that is only temporary.
    needed = found["output_bytes"] + found["temporary_bytes"]
    size = ModelSize(found["num_parameters"], found["num_parameters"])
    estimate = training_need("xla", size, JobSettings(1, precision, 2, "tpu")).device
    assert estimate == pytest.approx(needed, rel=0.1)
