"""What each rank holds of a model that an engine of DeepSpeed trains: one line of the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nblaunch import context, formatting
from nblaunch.events import Note
from nblaunch.training.collectives import operations
from nblaunch.training.process_context import ProcessContext
from nblaunch.training.strategies.deepspeed import library

_SHARDED = {
    1: "optimizer states are sharded",
    2: "gradients and optimizer states are sharded",
}


def report(engine: Any, name: str, process: ProcessContext) -> None:
    """Report it, where several ranks hold shards. All of them call it.

    Args:
        engine: just made.
        name: of the model's class.
        process: ranks of this process.
    """
    stage = int(engine.zero_optimization_stage())
    if not stage or process.topology.world_size == 1:
        return
    sizes = operations.gather_object([_part_bytes(engine, stage)])
    if process.topology.rank == 0:
        text = shares_line(name, stage, _model_bytes(engine.module), sizes, _kept_bytes(engine.module))
        context.current().emit(Note.of_job(text))


def shares_line(name: str, stage: int, model_bytes: int, sizes: Sequence[int], kept_bytes: int = 0) -> str:
    """What every rank holds, in one line.

    Args:
        name: of the model's class.
        stage: of ZeRO, 1 to 3.
        model_bytes: of all weights, in the numbers that the model computes in.
        sizes: bytes of every rank's part of what is sharded.
        kept_bytes: with stage 3, of the weights that are so small that they are never freed.
    """
    weights, share = formatting.size(model_bytes), formatting.size_range(sizes)
    if stage < 3:
        return (
            f"{name}: {weights} of weights on each of {len(sizes)} ranks; {_SHARDED[stage]}, each rank steps "
            f"{share} of weights in full precision (ZeRO stage {stage})"
        )
    kept = f"; {formatting.size(kept_bytes)} in small tensors stay gathered" if kept_bytes else ""
    return (
        f"{name}: {weights} of weights sharded over {len(sizes)} ranks, {share} each, as are gradients and optimizer "
        f"states (ZeRO stage 3){kept}"
    )


def _part_bytes(engine: Any, stage: int) -> int:
    """Of the weights on this rank; in stages 1 and 2 of the fp32 ones that its optimizer steps."""
    if stage == 3:
        held: list[Any] = library.parameters_in_parts(engine.module)
        return sum(_bytes(parameter.ds_tensor) for parameter in held)
    groups = getattr(engine.optimizer, "param_groups", [])  # none where an engine only evaluates
    return sum(_bytes(parameter) for group in groups for parameter in group["params"])


def _model_bytes(module: Any) -> int:
    return sum(
        getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
        for parameter in module.parameters()
    )


def _kept_bytes(module: Any) -> int:
    """Gathering them at each step would cost more than they take. Source: stage3_param_persistence_threshold."""
    return sum(
        parameter.ds_numel * parameter.element_size()  # type: ignore[attr-defined]
        for parameter in library.parameters_in_parts(module)
        if getattr(parameter, "ds_persist", False)
    )


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
