"""A program that runs ``nblaunch launch`` for each given configuration file, one after the other.

    python launch_files.py script.py first.yaml second.yaml ...
    ──> for each file ``=== first.yaml``, the script's output, and ``=== code 0``

The workers are forked from this program, so torch, its compiler and DeepSpeed are imported once instead of in every
launch.
"""

from __future__ import annotations

import sys

import deepspeed  # noqa: F401
import torch._dynamo.utils
import torch._inductor.compile_fx
import torch.distributed.fsdp  # noqa: F401

from nblaunch import cli

OPTIONS = ["--start_method", "fork", "--dashboard", "none"]

if __name__ == "__main__":
    script, *files = sys.argv[1:]
    for file in files:
        print(f"=== {file}", flush=True)
        code = cli.main(["launch", "--config_file", file, *OPTIONS, script])
        print(f"=== code {code}", flush=True)
