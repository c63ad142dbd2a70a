"""Views of a process's state, loggers, settings from the environment, debug mode, and pickling."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nblaunch import Accelerator, backends, context
from nblaunch.errors import DistributedOperationException
from nblaunch.training.collectives.operations import gather
from nblaunch.training.collectives.rng import synchronize_rng_states
from nblaunch.training.options import GradientAccumulationPlugin, GradScalerKwargs
from nblaunch.training.state import AcceleratorState, GradientState, PartialState
from nblaunch.training.strategies.deepspeed.settings import get_active_deepspeed_plugin
from nblaunch.training.utilities.helpers import clear_environment, patch_environment
from nblaunch.training.utilities.log import get_logger
from nblaunch.training.utilities.memory import find_executable_batch_size, release_memory
from tests.training import ranks

# --- views -----------------------------------------------------------------------------------------------------------


def test_views_share_their_attributes() -> None:
    assert PartialState._shared_state == {}
    first, second = PartialState(), PartialState()
    first.colour = "red"
    assert second.colour == "red"
    assert pickle.loads(pickle.dumps(first)).colour == "red"
    assert PartialState._shared_state != {}
    with pytest.raises(AttributeError, match=r"PartialState.*shape"):
        _ = second.shape
    assert not hasattr(GradientState(), "colour")


def test_an_accelerator_has_the_state_of_the_process() -> None:
    kept = Accelerator()
    assert PartialState._shared_state != {}, "libraries ask so whether there is one"
    PartialState._reset_state()
    assert PartialState._shared_state == {}
    kept.free_memory()


@pytest.mark.parametrize("is_launched", [False, True])
def test_reset_views_say_so(is_launched: bool) -> None:
    if is_launched:
        context.install(context.ProcessContext(context.Topology(), backends.choose("cpu"), is_launched=True))
    accelerator = Accelerator()
    partial, state, gradients = PartialState(), accelerator.state, GradientState()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert PartialState._shared_state == AcceleratorState._shared_state == GradientState._shared_state == {}
    for view, name in ((partial, "device"), (state, "mixed_precision"), (gradients, "sync_gradients")):
        with pytest.raises(
            AttributeError, match=rf"This happens if `{type(view).__name__}._reset_state\(\)`"
        ):
            getattr(view, name)
    assert not partial.initialized
    assert PartialState().device == torch.device("cpu")
    assert partial.device == torch.device("cpu")


def test_accelerators_with_a_reset_state_say_so() -> None:
    accelerator = Accelerator()
    AcceleratorState._reset_state()
    for use in (lambda: accelerator.num_processes, lambda: accelerator.prepare(torch.nn.Linear(1, 1))):
        with pytest.raises(
            AttributeError, match=r"`AcceleratorState` object has no attribute.*This happens if"
        ):
            use()


def test_settings_of_accumulation_can_be_assigned() -> None:
    accelerator = Accelerator()
    assert accelerator.gradient_state.plugin_kwargs == {"num_steps": accelerator.gradient_accumulation_steps}
    accelerator.gradient_state.plugin_kwargs = {"num_steps": 3, "sync_with_dataloader": False}
    assert accelerator.gradient_accumulation_steps == 3
    assert not accelerator.gradient_state.sync_with_dataloader


def test_gradient_state_can_be_set_and_reset() -> None:
    accelerator = Accelerator()
    state = GradientState(GradientAccumulationPlugin(3))
    assert accelerator.gradient_accumulation_steps == 3
    state._set_sync_gradients(False)
    assert not accelerator.sync_gradients
    state.sync_gradients = True
    assert accelerator.sync_gradients
    GradientState._reset_state()
    assert GradientState().num_steps == 1


def test_a_notebook_state_shows_the_workers_window() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    state = accelerator.gradient_state
    _in_a_worker_alone()
    assert state.num_steps == 1, "the accelerator was not used there"
    accelerator.gradient_accumulation_steps = 4
    accelerator.sync_gradients = False
    assert (state.num_steps, state.sync_gradients) == (4, False)


def _in_a_worker_alone() -> None:
    """Turn this process from the notebook into a worker that has not joined its job yet."""
    context.install(context.ProcessContext(context.Topology(), backends.choose("cpu"), is_launched=True))


@pytest.mark.parametrize(
    "use",
    [
        lambda one: one.distributed_type,
        lambda one: one.deepspeed_plugin,
        lambda one: one.state.mixed_precision,
        repr,
    ],
    ids=["label", "plugin", "precision", "repr"],
)
def test_a_notebook_accelerators_state_can_be_used_first(use: Any) -> None:
    accelerator = Accelerator()
    here = use(accelerator)
    _in_a_worker_alone()
    assert use(accelerator) == here


def test_looking_for_an_attribute_of_a_state_joins_no_job() -> None:
    partial, state = PartialState(), Accelerator().state
    _in_a_worker_alone()
    assert not any(hasattr(one, "shape") for one in (partial, state))
    assert context.current().training is None
    assert partial.process_index == 0
    assert context.current().training is not None


def test_a_process_state_has_accelerates_attributes() -> None:
    state = PartialState()
    assert (state.debug, state.fork_launched, state.default_device) == (False, False, torch.device("cpu"))
    state.set_device()
    with pytest.raises(TypeError, match="colour"):
        PartialState(colour="red")


def test_plugins_and_handlers_are_shown() -> None:
    scaling = GradScalerKwargs(growth_interval=3)
    accelerator = Accelerator(cpu=True, dynamo_backend="eager", kwargs_handlers=[scaling])
    assert accelerator.state.dynamo_plugin.backend == "eager"
    assert AcceleratorState().dynamo_plugin is accelerator.state.dynamo_plugin
    assert accelerator.scaler_handler is scaling
    assert accelerator.autocast_handler is accelerator.ddp_handler is accelerator.profile_handler is None
    state = accelerator.state
    assert (
        state.torch_tp_plugin
        is state.megatron_lm_plugin
        is state.parallelism_config
        is state.device_mesh
        is None
    )
    assert not state.is_fsdp2
    with pytest.raises(ValueError, match="no DeepSpeed plugin"):
        get_active_deepspeed_plugin(state)


def test_settings_of_loaders_are_shown() -> None:
    accelerator = Accelerator()
    names = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking")
    assert [getattr(accelerator, name) for name in names] == [False, None, True, False, False]
    assert not accelerator.use_stateful_dataloader
    accelerator.even_batches = False
    assert not accelerator.even_batches
    assert not accelerator.dataloader_config.even_batches


def test_accelerators_are_pickled_with_prepared_objects() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, loader = nn.Linear(1, 1), DataLoader(TensorDataset(torch.arange(4.0)), shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared = accelerator.prepare(model, optimizer, loader)
    for _ in prepared[2]:
        copy = pickle.loads(pickle.dumps((accelerator, *prepared)))
    other, model, optimizer, loader = copy
    assert other.gradient_accumulation_steps == 2
    assert other._shared is accelerator._shared
    assert len(list(loader)) == 4
    model(torch.ones(1, 1)).backward()
    optimizer.step()
    accelerator.sync_gradients = False
    before = model.weight.clone()
    optimizer.step()
    assert torch.equal(before, model.weight), "it still knows the window of its process"


class _Owner:
    """An object that registers itself, like trainers."""

    def __init__(self) -> None:
        self.accelerator = Accelerator()
        self.accelerator.register_for_checkpointing(self)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_accelerators_are_pickled_with_registered_objects() -> None:
    owner = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(_Owner()))))
    assert [one.obj for one in owner.accelerator._checkpoints.registered] == [owner]


def test_a_trigger_may_be_the_first_use_after_unpickling() -> None:
    accelerator = pickle.loads(pickle.dumps(Accelerator()))
    assert not accelerator.check_trigger()
    accelerator.set_trigger()
    assert [accelerator.check_trigger() for _ in range(2)] == [True, False]


def test_dropped_objects_are_freed() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(4))))
    for _ in loader:
        break
    gone = [weakref.ref(loader), weakref.ref(accelerator)]
    gc.collect()
    gc.disable()
    try:
        del loader, accelerator
        assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()


# --- settings from the environment -----------------------------------------------------------------------------------


def test_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert Accelerator().gradient_accumulation_steps == 4
    assert Accelerator(gradient_accumulation_steps=2).gradient_accumulation_steps == 2
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "four")
    with pytest.raises(ValueError, match="ACCELERATE_GRADIENT_ACCUMULATION_STEPS='four'"):
        Accelerator()
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "on")
    assert PartialState().debug
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "maybe")
    with pytest.raises(ValueError, match=r"ACCELERATE_DEBUG_MODE='maybe' .*true.*false"):
        _ = PartialState().debug
    monkeypatch.setenv("ACCELERATE_USE_CPU", "yes")
    context.take()
    assert PartialState().device == torch.device("cpu")


def test_variables_can_be_set_temporarily(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_NAME", "before")
    monkeypatch.delenv("OTHER_NAME", raising=False)
    with patch_environment(some_name=1, OTHER_NAME="x"):
        assert (os.environ["SOME_NAME"], os.environ["OTHER_NAME"]) == ("1", "x")
    with pytest.raises(KeyError), patch_environment(some_name=2):
        _ = os.environ["OTHER_NAME"]
    assert os.environ["SOME_NAME"] == "before"
    assert "OTHER_NAME" not in os.environ
    with clear_environment():
        assert not os.environ
        os.environ["OTHER_NAME"] = "x"
    assert os.environ["SOME_NAME"] == "before"
    assert "OTHER_NAME" not in os.environ


# --- loggers ---------------------------------------------------------------------------------------------------------


def test_a_logger_needs_a_state() -> None:
    with pytest.raises(RuntimeError, match=r"Accelerator\(\).*PartialState\(\)"):
        get_logger("tests.early").warning("too early")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_logger_in_a_worker_needs_no_state_and_joins_no_job(
    rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    topology = context.Topology(rank=rank, local_rank=rank, world_size=2, local_world_size=2)
    context.install(context.ProcessContext(topology, backends.choose("cpu"), is_launched=True))
    logger = get_logger("tests.first")
    logger.warning("main")
    logger.warning("all", main_process_only=False)
    logged = ["[RANK 0] main", "[RANK 0] all"] if rank == 0 else ["[RANK 1] all"]
    assert [record.getMessage() for record in caplog.records] == logged
    assert context.current().training is None


def test_a_logger_names_rank_and_caller(caplog: pytest.LogCaptureFixture) -> None:
    PartialState()
    logger = get_logger("tests.lines")

    def helper() -> None:
        logger.warning("from %s", "outside", stacklevel=3)

    logger.warning("here")
    line = _line() - 1
    helper()
    outer = _line() - 1
    for _ in range(3):
        logger.warning_once("once")
    once = _line() - 1
    try:
        raise KeyError("key")
    except KeyError:
        logger.exception("failed", extra={"colour": "red"})
    records = caplog.records
    assert [record.getMessage() for record in records] == [
        "[RANK 0] here", "[RANK 0] from outside", "[RANK 0] once", "[RANK 0] failed"
    ]  # fmt: skip
    assert {record.filename for record in records} == {"test_state.py"}
    assert [records[0].lineno, records[2].lineno] == [line, once]
    # in older versions, frames of logging itself count, too, as in Accelerate
    if sys.version_info >= (3, 11):
        assert records[1].lineno == outer
    assert records[3].exc_info[0] is KeyError
    assert records[3].colour == "red"
    assert records[0].funcName == "test_a_logger_names_rank_and_caller"


def _line() -> int:
    return sys._getframe(1).f_lineno


@pytest.fixture
def root_level() -> Any:
    level = logging.root.level
    yield
    logging.root.setLevel(level)


@pytest.mark.usefixtures("root_level")
def test_a_level_from_argument_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_logger("tests.level", "debug").isEnabledFor(logging.DEBUG)
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "ERROR")
    assert not get_logger("tests.level").isEnabledFor(logging.WARNING)


def _log(path: str) -> None:
    state = PartialState()
    handler = logging.FileHandler(path)
    logger = get_logger("tests.ranks")
    logger.logger.addHandler(handler)
    logger.warning("main")
    state.wait_for_everyone()
    logger.warning("ordered", in_order=True)
    logger.warning("all", main_process_only=False)
    handler.close()


def test_loggers_log_on_the_chosen_ranks_in_order(tmp_path: Any) -> None:
    path = tmp_path / "log"
    ranks.run(_log, 3, str(path))
    lines = path.read_text().splitlines()
    assert lines[0] == "[RANK 0] main"
    assert [line for line in lines if "ordered" in line] == [f"[RANK {rank}] ordered" for rank in range(3)]
    assert sorted(line for line in lines if "all" in line) == [f"[RANK {rank}] all" for rank in range(3)]


def _log_in_order_by_level(path: str) -> list[int]:
    state = PartialState()
    logger = get_logger("tests.levels")
    logger.setLevel(logging.INFO if state.is_main_process else logging.ERROR)
    handler = logging.FileHandler(path)
    logger.logger.addHandler(handler)
    logger.info("of the first", main_process_only=False, in_order=True)
    logger.error("of both", main_process_only=False, in_order=True)
    handler.close()
    return gather(torch.tensor([state.process_index])).tolist()


def test_ordered_logs_allow_different_levels(tmp_path: Any) -> None:
    path = tmp_path / "log"
    assert ranks.run(_log_in_order_by_level, 2, str(path)) == [[0, 1]] * 2
    assert path.read_text().splitlines() == [
        "[RANK 0] of the first", "[RANK 0] of both", "[RANK 1] of both"
    ]  # fmt: skip


# --- memory ----------------------------------------------------------------------------------------------------------


def test_batches_shrink_until_they_fit() -> None:
    tried = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int, name: str) -> str:
        tried.append(batch_size)
        if batch_size > 70:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return f"{name} {batch_size}"

    assert train("size") == "size 64"
    assert tried == [100, 90, 81, 72, 64]
    assert train("size") == "size 64"
    assert tried == [100, 90, 81, 72, 64, 64], "it goes on with what has fitted"
    with pytest.raises(TypeError, match=r"train: too many positional arguments.*leave it out"):
        train(128, "size")


def test_functions_with_varargs_get_a_batch_size() -> None:
    def train(batch_size: int, *rest: Any) -> list[Any]:
        return [batch_size, *rest]

    for function in (train, lambda *args, **kwargs: train(*args, **kwargs)):
        find = find_executable_batch_size(function, starting_batch_size=4)
        assert [find(), find("model"), find("model", 2)] == [[4], [4, "model"], [4, "model", 2]]


def test_custom_batch_reductions_end_at_zero() -> None:
    sizes = iter([2, 1, 0])

    def train(batch_size: int) -> None:
        raise MemoryError

    with pytest.raises(RuntimeError, match=r"train .*memory"):
        find_executable_batch_size(train, 4, lambda: next(sizes))()
    with pytest.raises(TypeError, match="passes the batch size as the first argument"):
        find_executable_batch_size(lambda: None)()

    def fail(batch_size: int) -> None:
        raise ValueError("another error")

    with pytest.raises(ValueError, match="another error"):
        find_executable_batch_size(fail)()


def test_released_objects_are_gone() -> None:
    first, second = torch.ones(1), nn.Linear(1, 1)
    gone = weakref.ref(second)
    first, second = release_memory(first, second)
    assert first is second is gone() is None


# --- on ranks --------------------------------------------------------------------------------------------------------


def _mismatch(operation: str) -> tuple[str, str]:
    os.environ["ACCELERATE_DEBUG_MODE"] = "true"
    accelerator = Accelerator()
    rank = accelerator.process_index
    data: Any = {"x": [torch.zeros(2, 1 + rank)]}
    if operation == "pad_across_processes":
        data = torch.zeros((2,) * (1 + rank))
    assert accelerator.gather(torch.ones(1)).tolist() == [1, 1]
    try:
        getattr(accelerator, operation)(data)
    except DistributedOperationException as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("operation", ["gather", "reduce", "broadcast", "pad_across_processes"])
def test_debug_mode_lists_shapes_of_all_ranks(operation: str) -> None:
    found = {rank: f"{{x: [[2, {rank + 1}] torch.float32]}}" for rank in range(2)}
    if operation == "pad_across_processes":
        found = {rank: f"{rank + 1} dimensions torch.float32" for rank in range(2)}
    hint = "\nCall pad_across_processes first, or use even_batches=True for loaders."
    for name, message in ranks.run(_mismatch, 2, operation):
        assert name == "DistributedOperationException"
        assert message == (
            f"{operation} got tensors that don't match across ranks:\n"
            f"  rank 0: {found[0]}\n  rank 1: {found[1]}{'' if operation == 'pad_across_processes' else hint}"
        )


def _synchronise() -> list[float]:
    torch.manual_seed(context.current().topology.rank)
    accelerator = Accelerator()
    synchronize_rng_states(["torch", "generator"])
    return [torch.rand(1).item(), accelerator.reduce(torch.ones(1)).item()]


def test_ranks_draw_alike_once_synchronised() -> None:
    zero, one = ranks.run(_synchronise, 2)
    assert zero == one
    assert zero[1] == 2


def _join_elsewhere(path: str) -> tuple[int, str | None]:
    state = PartialState(backend="gloo", init_method=f"file://{path}")
    state.wait_for_everyone()
    return state.num_processes, state.backend


def test_a_group_may_meet_where_the_script_says(tmp_path: Any) -> None:
    assert ranks.run(_join_elsewhere, 2, str(tmp_path / "meeting")) == [(2, "gloo")] * 2
