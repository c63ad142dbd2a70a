"""Options of DistributedDataParallel on real ranks: exact options train like one process, lossy ones similarly."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from nblaunch import Accelerator
from nblaunch.training.options import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    TorchDynamoPlugin,
)
from nblaunch.training.shared_state import get_shared_state
from nblaunch.training.strategies.replicated import DdpStrategy
from tests.training import ranks

Hook = DDPCommunicationHookType
ROWS, BATCH = 64, 16


class _Network(nn.Module):
    """Two layers wide enough for a low-rank approximation to pay off, and one that may be unused."""

    def __init__(self, uses_side: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.head = nn.Linear(16, 1)
        self.side = nn.Linear(16, 1)
        self.uses_side = uses_side

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x) + self.side(x) if self.uses_side else self.head(x)


def _train(
    options: dict[str, Any],
    accumulation: int = 1,
    uses_side: bool = True,
    dynamo: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Take twelve steps on global batches of 16 rows; return losses of full batches, weights, and the prepared
    model's type.
    """
    accelerator = Accelerator(
        gradient_accumulation_steps=accumulation,
        kwargs_handlers=[DistributedDataParallelKwargs(**options)],
        dynamo_plugin=None if dynamo is None else TorchDynamoPlugin(**dynamo),
    )
    torch.manual_seed(3)
    module = _Network(uses_side)
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(ROWS, 16, generator=generator)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin())
    loader = DataLoader(data, batch_size=BATCH // accelerator.num_processes)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    losses = []
    for _ in range(3):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - y).pow(2).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return {"losses": losses, "weights": module.state_dict(), "kind": type(model).__name__}


def _compare(answers: list[dict[str, Any]], expected: dict[str, Any], rtol: float = 1e-4) -> None:
    for answer in answers:
        torch.testing.assert_close(answer["losses"], expected["losses"], rtol=rtol, atol=1e-6)
        torch.testing.assert_close(answer["weights"], expected["weights"], rtol=rtol, atol=rtol / 100)
        for name, weight in answer["weights"].items():
            assert torch.equal(weight, answers[0]["weights"][name]), f"{name} differs between ranks"


@pytest.fixture(scope="module")
def alone() -> dict[int, dict[str, Any]]:
    """Return one process's results by number of micro-steps."""
    return {number: ranks.run(_train, 1, {}, number)[0] for number in (1, 2)}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 1, "broadcast_buffers": False},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
    ],
    ids=lambda options: "+".join(options),
)
def test_exact_options_train_as_one_process(
    options: dict[str, Any], accumulation: int, alone: dict[int, dict[str, Any]]
) -> None:
    _compare(ranks.run(_train, 2, options, accumulation), alone[accumulation])


@pytest.mark.alarms("parameters_without_gradients")
def test_unused_parameters_can_be_found() -> None:
    expected = ranks.run(_train, 1, {}, 1, False)[0]
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        _compare(ranks.run(_train, 2, options, 1, False), expected)
    with pytest.raises(ranks.RankFailed, match="find_unused_parameters=True"):
        ranks.run(_train, 2, {}, 1, False)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_half_precision_gradients_are_close(accumulation: int, alone: dict[int, dict[str, Any]]) -> None:
    answers = ranks.run(_train, 2, {"comm_hook": Hook.FP16}, accumulation)
    _compare(answers, alone[accumulation], rtol=0.03)
    exact = alone[accumulation]["weights"]["head.weight"]
    assert not torch.allclose(answers[0]["weights"]["head.weight"], exact, rtol=1e-6, atol=1e-8), (
        "not compressed"
    )


@pytest.mark.parametrize("wrapper", ["no", "fp16"])
def test_low_rank_approximations_learn(wrapper: str, alone: dict[int, dict[str, Any]]) -> None:
    # Start at the second step; the default is after a thousand.
    state = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}
    options = {"comm_hook": Hook.POWER_SGD, "comm_wrapper": Hook(wrapper), "comm_state_option": state}
    answers = ranks.run(_train, 2, options)
    losses = answers[0]["losses"]
    assert losses == pytest.approx(answers[1]["losses"])
    assert losses[0] == pytest.approx(alone[1]["losses"][0], rel=1e-4)
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    assert losses[-1] != pytest.approx(alone[1]["losses"][-1], rel=1e-5), "nothing was approximated"
    for name, weight in answers[0]["weights"].items():
        assert torch.equal(weight, answers[1]["weights"][name]), f"{name} differs between ranks"


def _registered_without_nccl(options: dict[str, Any]) -> str:
    torch.distributed.is_nccl_available = lambda: False  # a GPU build has it
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**options)])
    try:
        accelerator.prepare(nn.Linear(2, 1))
    except ValueError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    "options",
    [{"comm_hook": Hook.BF16}, {"comm_hook": Hook.POWER_SGD, "comm_wrapper": Hook.BF16}],
    ids=["hook", "wrapper"],
)
def test_bf16_without_nccl_is_rejected_with_a_way_out(options: dict[str, Any]) -> None:
    for message in ranks.run(_registered_without_nccl, 2, options):
        assert message.startswith(f"comm_hook='{options['comm_hook']}' with comm_wrapper=")
        assert "fp16" in message
        assert "NCCL" in message


@pytest.mark.parametrize(
    ("hook", "wrapper", "expected"),
    [
        ("bf16", "no", "bf16_compress_hook"),
        ("fp16", "bf16", "bf16_compress_wrapper_hook"),
        ("power_sgd", "bf16", "bf16_compress_wrapper_hook"),
    ],
)
def test_bf16_hooks_are_registered_where_there_is_nccl(
    hook: str, wrapper: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test records the call that registers a hook, because DDP requires GPUs for it."""
    registered: list[tuple[Any, Any]] = []

    class Recorded(DistributedDataParallel):
        def __init__(self, module: nn.Module, **options: Any) -> None:
            nn.Module.__init__(self)

        def register_comm_hook(self, state: Any, hook: Any) -> None:
            registered.append((state, hook))

    monkeypatch.setattr("nblaunch.training.strategies.replicated.DistributedDataParallel", Recorded)
    options = DistributedDataParallelKwargs(comm_hook=Hook(hook), comm_wrapper=Hook(wrapper))
    process = dataclasses.replace(get_shared_state().process, device=torch.device("cuda", 0))
    DdpStrategy({DistributedDataParallelKwargs: options}).setup_module(nn.Linear(1, 1), process)
    ((state, called),) = registered
    assert called.__name__ == expected
    assert (type(state).__name__ == "PowerSGDState") == (hook == "power_sgd")


@pytest.mark.parametrize(
    ("dynamo", "kind"),
    [
        ({"backend": "aot_eager"}, "OptimizedModule"),
        ({"backend": "aot_eager", "use_regional_compilation": True}, "DistributedDataParallel"),
    ],
    ids=["whole", "regional"],
)
@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=["plain", "static_graph"])
def test_compiled_models_train_as_one_process(
    options: dict[str, Any], dynamo: dict[str, Any], kind: str, alone: dict[int, dict[str, Any]]
) -> None:
    answers = ranks.run(_train, 2, options, 2, True, dynamo)
    assert answers[0]["kind"] == kind
    _compare(answers, alone[2])


def test_settings_of_an_unused_hook_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"comm_state_option=.*POWER_SGD.*comm_hook is 'fp16'"):
        DistributedDataParallelKwargs(comm_hook=Hook.FP16, comm_state_option={"start_powerSGD_iter": 2})


def test_a_broken_hook_is_rejected_with_an_alternative() -> None:
    with pytest.raises(ValueError, match=r"batched_power_sgd.*AssertionError.*POWER_SGD"):
        DistributedDataParallelKwargs(
            comm_hook=Hook.BATCHED_POWER_SGD, comm_state_option={"start_powerSGD_iter": 2}
        )


def _assigned_after_the_constructor() -> tuple[bool, bool]:
    accelerator = Accelerator()
    before = accelerator.prepare(nn.Linear(1, 1))
    accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    after = accelerator.prepare(nn.Linear(1, 1))
    assert accelerator.ddp_handler.find_unused_parameters
    return before.find_unused_parameters, after.find_unused_parameters


def test_assigned_handlers_apply_to_later_models() -> None:
    assert ranks.run(_assigned_after_the_constructor, 2) == [(False, True)] * 2


def test_handlers_of_another_kind_are_not_assigned() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    accelerator.profile_handler = accelerator.autocast_handler = accelerator.scaler_handler = None
    with pytest.raises(TypeError, match="DistributedDataParallelKwargs"):
        accelerator.ddp_handler = AutocastKwargs()
    accelerator.autocast_handler = AutocastKwargs(enabled=False)
    assert accelerator.autocast_handler == AutocastKwargs(enabled=False)
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
