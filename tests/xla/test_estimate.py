"""``nblaunch estimate-memory`` compared with training on XLA devices."""

from __future__ import annotations

import pytest

from nblaunch.cli.estimate import JobSettings, ModelSize, training_need
from tests.cli.measured_training import NUM_PARAMETERS
from tests.xla.conftest import StartKernel


@pytest.mark.thorough
def test_estimate_agrees_with_measured_training(start_xla: StartKernel) -> None:
    kernel = start_xla()
    measured = kernel.run("from tests.xla.measured_training import measure\nmeasure()").value
    size = ModelSize(NUM_PARAMETERS, NUM_PARAMETERS)
    for precision, ranks in measured.items():
        need = training_need("xla", size, JobSettings(2, precision, 2, "tpu"))
        # The runtime keeps a few more buffers; autocast would need twice the memory of bf16 on the device.
        assert ranks == [pytest.approx(need.device / NUM_PARAMETERS, rel=0.25)] * 2, precision
