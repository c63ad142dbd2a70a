"""Compile a program ahead of time for an absent TPU, with libtpu's own compiler through JAX.

    python compile_program.py FILE TOPOLOGY NUM_DEVICES replicas|partitions

It runs in a separate environment (``requirements.txt``), on any Linux host with x86-64. It prints JSON: bytes of
arguments, results and temporary values on each device, the collectives of the compiled program and the types of its
arguments.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib import _jax, xla_client
from jax._src.lib.mlir import ir
from jax.experimental import topologies
from jaxlib import _hlo

COLLECTIVES = r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("


def main(file: str, topology: str, num_devices: int, way: str) -> None:
    """Compile the program and print the results."""
    devices = topologies.get_topology_desc(topology, platform="tpu").devices[:num_devices]
    module = _hlo.hlo_module_from_text(Path(file).read_text())
    portable = _jax.mlir.hlo_to_stablehlo(module.as_serialized_hlo_module_proto())
    options = xla_client.CompileOptions()
    options.num_replicas = num_devices if way == "replicas" else 1
    options.num_partitions = num_devices if way == "partitions" else 1
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = options.num_replicas, options.num_partitions
    build.use_spmd_partitioning = way == "partitions"
    build.allow_spmd_sharding_propagation_to_output = [way == "partitions"]  # torch_xla does the same
    shape = (options.num_replicas, options.num_partitions)
    ids = np.array([device.id for device in devices]).reshape(shape)
    build.device_assignment = options.device_assignment = xla_client.DeviceAssignment.create(ids)
    with mlir.make_ir_context():
        program = ir.Module.parse(portable)
        listed = _jax.DeviceList(tuple(devices))
        executable = devices[0].client.compile(program, executable_devices=listed, compile_options=options)
    stats = executable.get_compiled_memory_stats()
    compiled = executable.hlo_modules()[0].to_string()
    entry = re.search(r"entry_computation_layout=\{\((.*?)\)->", compiled, re.DOTALL)
    arguments = re.findall(r"([a-z]+\d+)\[", entry[1] if entry else "")
    collectives = Counter(re.findall(COLLECTIVES, compiled))
    # libtpu represents a reduce-scatter as a fusion of an all-reduce and a slice.
    collectives["reduce-scatter"] += len(re.findall(r"calls=%all-reduce-scatter", compiled))
    print(
        json.dumps(
            {
                "argument_bytes": stats.argument_size_in_bytes,
                "output_bytes": stats.output_size_in_bytes,
                "temporary_bytes": stats.temp_size_in_bytes,
                "collectives": {name: count for name, count in collectives.items() if count},
                "types": Counter(arguments),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
