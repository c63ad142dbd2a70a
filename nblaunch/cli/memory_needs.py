"""Memory for training and inference, computed as bytes per parameter times parameters per device.

The table shows the bytes that a training step needs on each device. Ψ is the number of parameters, Ψt the number of
trained parameters, N the number of devices, and k the number of optimizer states per trained parameter (2 for Adam).
``p`` is the size of a stored weight and ``g`` the size of a gradient, in bytes.

    strategy   parameters  gradients  optimizer     buffers                                precision
    single     pΨ          gΨt        4kΨt          -                                      p = g = 4, even in autocast
    ddp        pΨ          gΨt        4kΨt          gΨt  (buckets of the all-reduce)       p = g = 4
    fsdp2      pΨ/N        gΨt/N      4kΨt/N        c(root + 2 blocks) + g block, c: 4|2   p = g = 4
    zero1      pΨ          gΨt        (4k+4)Ψt/N    g min(Ψt, 5e8)                         p = g = 2 (fp32: 4)
    zero2      pΨ          gΨt/N      (4k+4)Ψt/N    g min(Ψt, 5e8)                         p = g = 2 (fp32: 4)
    zero3      pΨ/N        gΨt/N      (4k+4)Ψt/N    p min(Ψ, 1e9) + g min(Ψt, 5e8)         p = g = 2 (fp32: 4)
    xla        pΨ          gΨt        pkΨt          -                                      bf16: p = g = 2 (fp32: 4)

Autocast frees its 16-bit copies of weights before gradients are allocated, so they do not add to the peak. On GPUs the
default implementation of optimizers (foreach) needs another 4Ψt (fsdp2: 4Ψt/N) during a step. Activations, the Python
process and the device's runtime are not counted, because they depend on the batch, the code and the driver.

Sources: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 3
and figure 1, for the three stages; DeepSpeed's configuration reference for the sizes of its buffers
(``reduce_bucket_size`` 5e8, ``stage3_max_live_parameters`` 1e9, in elements); PyTorch's documentation for
DistributedDataParallel (``gradient_as_bucket_view`` saves the memory of all gradients, and is not the default),
``fully_shard`` (gathers the root, the unit that computes, and the next unit) and ``torch.optim.Adam`` (``foreach``
needs about as much memory as the parameters). ``tests/cli/test_estimate.py`` (single, ddp, fsdp2) and
``tests/xla/test_estimate.py`` compare the estimates with real training on CPU cores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.5}
PRECISIONS = ("no", "bf16", "fp16")
OPTIMIZER_STATES = {"adam": 2, "adamw": 2, "momentum": 1, "sgd": 0}

_FP32 = 4
_HALF = 2
_REDUCE_BUCKET = 500_000_000
_MAX_LIVE = 1_000_000_000


@dataclass(frozen=True)
class ModelSize:
    """Size of a model, counted in elements.

    Args:
        parameters: number of parameters; shared ones count once.
        trainable: parameters with gradients.
        buffers: elements of buffers such as running means.
        block: parameters of the largest block; a sharded model gathers one block at a time.
        root: parameters outside all blocks, such as embeddings.
    """

    parameters: int
    trainable: int
    buffers: int = 0
    block: int = 0
    root: int = 0


@dataclass(frozen=True)
class Need:
    """Bytes on one device, by purpose."""

    parameters: int
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0

    @property
    def device(self) -> int:
        """All bytes on one device."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


@dataclass(frozen=True)
class JobSettings:
    """Devices and settings of a job.

    Args:
        num_devices: number of devices of the whole job.
        precision: ``mixed_precision`` of training.
        optimizer_states: values per parameter that the optimizer keeps.
        device: ``"gpu"``, ``"cpu"`` (devices are cores) or ``"tpu"``.
    """

    num_devices: int = 1
    precision: str = "no"
    optimizer_states: int = 2
    device: str = "gpu"


def _single(model: ModelSize, settings: JobSettings) -> Need:
    return Need(
        parameters=_FP32 * (model.parameters + model.buffers),
        gradients=_FP32 * model.trainable,
        optimizer=_FP32 * settings.optimizer_states * model.trainable,
        buffers=_foreach(model, settings),
    )


def _ddp(model: ModelSize, settings: JobSettings) -> Need:
    alone = _single(model, settings)
    return Need(alone.parameters, alone.gradients, alone.optimizer, alone.buffers + _FP32 * model.trainable)


def _fsdp2(model: ModelSize, settings: JobSettings) -> Need:
    count = settings.num_devices
    compute = _FP32 if settings.precision == "no" else _HALF
    whole = compute * (model.root + 2 * model.block) + _FP32 * model.block
    return Need(
        parameters=_share(_FP32 * model.parameters, count) + _FP32 * model.buffers,
        gradients=_share(_FP32 * model.trainable, count),
        optimizer=_share(_FP32 * settings.optimizer_states * model.trainable, count),
        buffers=_share(_foreach(model, settings), count) + (whole if count > 1 else 0),
    )


def _zero(stage: int) -> Callable[[ModelSize, JobSettings], Need]:
    def need(model: ModelSize, settings: JobSettings) -> Need:
        count = settings.num_devices
        stored = _FP32 if settings.precision == "no" else _HALF
        live = stored * min(model.parameters, _MAX_LIVE) if stage == 3 and count > 1 else 0
        return Need(
            parameters=_share(stored * model.parameters, count if stage == 3 else 1) + stored * model.buffers,
            gradients=_share(stored * model.trainable, count if stage >= 2 else 1),
            # The optimizer also keeps fp32 weights; the 16-bit weights are copies of them.
            optimizer=_share(_FP32 * (settings.optimizer_states + 1) * model.trainable, count),
            buffers=live + stored * min(model.trainable, _REDUCE_BUCKET),
        )

    return need


def _xla(model: ModelSize, settings: JobSettings) -> Need:
    stored = _FP32 if settings.precision == "no" else _HALF
    return Need(
        parameters=stored * (model.parameters + model.buffers),
        gradients=stored * model.trainable,
        optimizer=stored * settings.optimizer_states * model.trainable,
    )


TRAINING: dict[str, Callable[[ModelSize, JobSettings], Need]] = {
    "single": _single,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "zero1": _zero(1),
    "zero2": _zero(2),
    "zero3": _zero(3),
    "xla": _xla,
}
"""Strategy -> memory of a training step on each device."""

SHARDED = ("fsdp2", "zero3")
"""Strategies that shard the weights."""


def training_need(strategy: str, model: ModelSize, settings: JobSettings) -> Need:
    """Return how much memory training needs on each device."""
    return TRAINING[strategy](model, settings)


def inference_need(strategy: str, model: ModelSize, settings: JobSettings, dtype: str) -> Need:
    """Return how much memory the weights need for inference in ``dtype``, a key of :data:`DTYPE_BYTES`."""
    width = DTYPE_BYTES[dtype]
    weights = int(width * (model.parameters + model.buffers))
    if strategy in SHARDED and settings.num_devices > 1:
        whole = int(width * (model.root + 2 * model.block))
        return Need(parameters=_share(weights, settings.num_devices), buffers=whole)
    return Need(parameters=weights)


def _foreach(model: ModelSize, settings: JobSettings) -> int:
    has_temporaries = settings.device == "gpu" and settings.optimizer_states > 0
    return _FP32 * model.trainable if has_temporaries else 0


def _share(num_bytes: int, count: int) -> int:
    """Return the size in bytes of one of ``count`` shards, rounded up for padding."""
    return -(-num_bytes // count)
