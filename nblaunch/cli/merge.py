"""``nblaunch merge-weights``: merges a checkpoint's model shards into files that can be read without nblaunch."""

from __future__ import annotations

import argparse

from nblaunch.cli import UsageError
from nblaunch.errors import CheckpointError


def set_up(parser: argparse.ArgumentParser) -> None:
    """Set up the command."""
    parser.description = (
        "Merge the shards of an FSDP2 checkpoint into model.safetensors. The whole model must fit into this "
        "machine's memory; no device is needed."
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "checkpoint_directory", help="folder with the shards, such as checkpoint/pytorch_model_fsdp_0"
    )
    parser.add_argument("output_path", help="folder for the merged model; created if it does not exist")
    parser.add_argument(
        "--unsafe_serialization",
        "--unsafe-serialization",
        action="store_true",
        help="write pytorch_model.bin, in torch's format",
    )
    parser.add_argument(
        "--remove_checkpoint_dir",
        "--remove-checkpoint-dir",
        action="store_true",
        help="remove the shards after the merged model is written",
    )


def run(arguments: argparse.Namespace) -> int:
    """Merge the shards and return the exit code."""
    from nblaunch.training.checkpoints.fsdp_states import merge_fsdp_weights

    try:
        merge_fsdp_weights(
            arguments.checkpoint_directory,
            arguments.output_path,
            not arguments.unsafe_serialization,
            arguments.remove_checkpoint_dir,
        )
    except (CheckpointError, ValueError) as error:
        raise UsageError(str(error)) from None
    print(f"written to {arguments.output_path}")
    return 0
