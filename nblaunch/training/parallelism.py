"""Divides a job's ranks among forms of parallelism: :class:`ParallelismConfig`, and its device mesh.

    dp_replicate x dp_shard x cp x tp     the sizes' product is the number of ranks; the last dimension varies fastest
    dp_replicate, dp_shard                ranks read different data
    cp, tp                                ranks read the same data

Fields, mesh dimensions and environment variables have the same names as in Hugging Face Accelerate. Strategies and
loaders read the configuration and its mesh. torch shards sequences over ranks (:func:`context_parallel`).
"""

from __future__ import annotations

import math
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch

from nblaunch import context, env, formatting
from nblaunch.env import CP_STRATEGIES
from nblaunch.errors import warn
from nblaunch.training.options import check_choice

_ORDER = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
_SEQUENCE = (
    "DeepSpeed's sequence parallelism (sp_size) is not available in nblaunch. ParallelismConfig(cp_size=...) "
    "shards sequences over ranks with torch's context parallelism, on NVIDIA GPUs; for DeepSpeed's sequence "
    "parallelism, use Hugging Face Accelerate inside the function"
)


@dataclass
class TorchTensorParallelConfig:
    """Settings for tensor parallelism.

    Args:
        enable_async_tp: has no effect, as in Accelerate.
    """

    enable_async_tp: bool = False

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            warn("TorchTensorParallelConfig(enable_async_tp=True) has no effect")


@dataclass
class TorchContextParallelConfig:
    """Settings for context parallelism.

    Args:
        cp_comm_strategy: how ranks exchange keys and values: ``"allgather"`` (the default) or ``"alltoall"``.

    Raises:
        ValueError: the strategy is unknown.
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        launched = context.launched_fields("parallelism_config").get("cp_comm_strategy")
        self.cp_comm_strategy = (
            self.cp_comm_strategy or launched or env.read("PARALLELISM_CONFIG_CP_COMM_STRATEGY")
        )
        check_choice("cp_comm_strategy", self.cp_comm_strategy, CP_STRATEGIES)


@dataclass
class TorchTensorParallelPlugin:
    """The older way to set ``tp_size``.

    Args:
        tp_size: number of ranks that share a model.
        torch_device_mesh: not used; the Accelerator creates a mesh.
    """

    tp_size: int = 1
    torch_device_mesh: Any = None


@dataclass
class ParallelismConfig:
    """Divides a job's ranks: ``Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2))``.

    The product of the sizes must equal the number of processes. Sizes that are not set come from the
    launch, or from the variables ``PARALLELISM_CONFIG_DP_REPLICATE_SIZE`` and so on, or are 1.

    Args:
        dp_replicate_size: number of replicas of the model; each reads its own data.
        dp_shard_size: number of ranks over which FSDP2 shards a replica; each reads its own data. Set it together with
            ``dp_replicate_size`` for hybrid sharding.
        tp_size: number of ranks that compute every layer together on the same data. Shard the model over them before
            ``prepare``: with torch's ``parallelize_module(model, accelerator.torch_device_mesh["tp"], plan)``, or, if
            no other size is set, with transformers' ``from_pretrained(..., tp_plan="auto")``, which creates a mesh.
        cp_size: number of ranks that shard a sequence, on NVIDIA GPUs; see ``Accelerator.maybe_context_parallel``.
        cp_backend: ``"torch"``.
        sp_size: DeepSpeed's sequence parallelism; only 1 is supported.
        sp_backend: ``"deepspeed"``.
        tp_handler: settings for tensor parallelism.
        cp_handler: settings for context parallelism.
        sp_handler: settings for DeepSpeed's sequence parallelism.

    Attributes:
        device_mesh: torch's mesh; None until an Accelerator creates it.

    Raises:
        ValueError: a size is not positive, or the sizes can't be combined.
        NotImplementedError: ``sp_size`` is more than 1.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: Literal["torch"] | None = None
    sp_size: int | None = None
    sp_backend: Literal["deepspeed"] | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: Any = None

    device_mesh: Any = field(init=False, default=None, repr=False, compare=False)
    _joint: dict[str, Any] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        launched = context.launched_fields("parallelism_config")
        for name in (f"{dimension}_size" for dimension in _ORDER):
            if getattr(self, name) is None:
                setattr(self, name, launched.get(name) or env.read(f"PARALLELISM_CONFIG_{name.upper()}"))
        self.cp_backend = self.cp_backend or launched.get("cp_backend", "torch")
        self.sp_backend = self.sp_backend or "deepspeed"
        if self.tp_enabled and self.tp_handler is None:
            self.tp_handler = TorchTensorParallelConfig()
        if self.cp_enabled and self.cp_handler is None:
            self.cp_handler = TorchContextParallelConfig()
        self.check()

    def check(self) -> None:
        """Raise the same errors as the constructor if fields that were assigned later are invalid."""
        for name, size in self._sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}_size={size!r} must be a whole number of at least 1")
        check_choice("cp_backend", self.cp_backend, ("torch",))
        if self.cp_enabled and not isinstance(self.cp_handler, TorchContextParallelConfig):
            raise ValueError(
                "cp_backend='torch' requires a TorchContextParallelConfig, but cp_handler was set to "
                f"{self.cp_handler!r:.80}"
            )
        if self.sp_enabled:
            raise NotImplementedError(_SEQUENCE)
        if (self.tp_enabled or self.cp_enabled) and self.dp_replicate_enabled and not self.dp_shard_enabled:
            raise ValueError(
                f"tp_size={self.tp_size} and cp_size={self.cp_size} can't be combined with dp_replicate_size="
                f"{self.dp_replicate_size} alone. Set dp_shard_size to more than 1, with or without dp_replicate_size"
            )

    def fit(self, num_processes: int, is_sharded: bool) -> None:
        """Check the sizes against the number of ranks; if all sizes are 1, use all ranks for data parallelism.

        Args:
            num_processes: number of ranks in the job.
            is_sharded: whether an ``fsdp_plugin`` shards models.

        Raises:
            ValueError: the sizes do not match the number of ranks, or an ``fsdp_plugin`` has no ranks to shard over.
        """
        self.check()
        if self.total_size == 1:
            setattr(self, "dp_shard_size" if is_sharded else "dp_replicate_size", num_processes)
        if self.total_size != num_processes:
            raise ValueError(
                f"ParallelismConfig total_size ({self.total_size}) does not match num_processes ({num_processes}): "
                f"{' x '.join(f'{name}_size={size}' for name, size in self._sizes.items() if size > 1)}. Change one of "
                f"the sizes, or start {formatting.count(self.total_size, 'process')}"
            )
        if is_sharded and num_processes > 1 and not self.is_for_fsdp:
            raise ValueError(
                "fsdp_plugin shards over the ranks of dp_shard_size and cp_size, which are both 1; set dp_shard_size, "
                "or leave fsdp_plugin out"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain numbers, strings and dicts."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.init}
        return {
            name: dict(vars(item)) if hasattr(item, "__dict__") else item for name, item in values.items()
        }

    # --- sizes -------------------------------------------------------------------------------------------------------

    @property
    def _sizes(self) -> dict[str, int]:
        return {name: getattr(self, f"{name}_size") for name in _ORDER}

    @property
    def total_size(self) -> int:
        """Number of ranks in the job."""
        return math.prod(self._sizes.values())

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks, or groups of ranks, that read different data."""
        return self._sizes["dp_replicate"] * self._sizes["dp_shard"]

    @property
    def non_data_parallel_size(self) -> int:
        """Number of ranks that read the same data."""
        return self.total_size // self.data_parallel_size

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are several replicas."""
        return self._sizes["dp_replicate"] > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether replicas are sharded over ranks with different data."""
        return self._sizes["dp_shard"] > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are sharded over ranks."""
        return self._sizes["tp"] > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are sharded over ranks."""
        return self._sizes["cp"] > 1

    @property
    def is_for_fsdp(self) -> bool:
        """Whether FSDP2 shards each replica, over the ranks of ``dp_shard_size`` and ``cp_size``."""
        return self.dp_shard_enabled or self.cp_enabled

    @property
    def sp_enabled(self) -> bool:
        """Whether DeepSpeed's sequence parallelism is requested, which is not supported."""
        return self._sizes["sp"] > 1

    # --- names of mesh dimensions ------------------------------------------------------------------------------------

    def _enabled(self, *names: str) -> list[str]:
        return [name for name in names if self._sizes[name] > 1]

    @property
    def dp_dim_names(self) -> list[str]:
        """Dimensions along which data differs."""
        return self._enabled("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Dimensions along which data is the same."""
        return self._enabled("tp", "cp", "sp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Dimensions over which weights are sharded."""
        return self._enabled("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Dimensions over which losses are averaged."""
        return self._enabled("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Dimensions of FSDP2's mesh."""
        return [*self._enabled("dp_replicate"), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """All dimensions of the mesh."""
        return self.dp_dim_names + self.non_dp_dim_names

    # --- the mesh ----------------------------------------------------------------------------------------------------

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        names = tuple(self._enabled(*_ORDER))
        return names, tuple(self._sizes[name] for name in names)

    def build_device_mesh(self, device_type: str) -> Any:
        """Return a new mesh over all ranks, with the joint dimensions ``dp``, ``dp_shard_cp`` and ``dp_cp``.

        This is a collective. It returns None if no dimension has more than one rank.
        """
        from torch.distributed.device_mesh import init_device_mesh

        names, shape = self._get_mesh()
        if not names:
            return None
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
        for joint, parts in (
            ("dp", self.dp_dim_names),
            ("dp_shard_cp", self.dp_shard_cp_dim_names),
            ("dp_cp", self.dp_cp_dim_names),
        ):
            if parts:
                self._joint[joint] = mesh[tuple(parts)]._flatten(joint)
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        """Return the mesh; the first call creates it.

        Raises:
            ValueError: ``device_type`` is missing from the first call, or differs from the mesh's.
        """
        if self.device_mesh is None:
            if device_type is None:
                raise ValueError("the first call needs a device_type, such as 'cuda'")
            self.device_mesh = self.build_device_mesh(device_type)
        elif device_type is not None and self.device_mesh.device_type != device_type:
            raise ValueError(
                f"device_type={device_type!r}, but the device mesh was built for {self.device_mesh.device_type!r}"
            )
        return self.device_mesh

    def fsdp_mesh(self) -> Any:
        """Return the part of the mesh over which FSDP2 shards and replicates."""
        if not self.dp_replicate_enabled:
            return self._joint["dp_shard_cp"] if self.cp_enabled else self.device_mesh["dp_shard"]
        if not self.cp_enabled:
            return self.device_mesh["dp_replicate", "dp_shard"]
        with warnings.catch_warnings():
            # torch 2.11 and later warn about this, but have no other way to combine these two dimensions.
            warnings.filterwarnings("ignore", "Slicing a flattened dim", UserWarning)
            return self.device_mesh["dp_replicate", "dp_shard_cp"]

    @property
    def data_parallel_mesh(self) -> Any:
        """The ranks with different data, as a one-dimensional mesh; None if all read the same data."""
        return self._joint.get("dp")

    def coordinate(self, name: str) -> int:
        """Return this rank's position along a dimension of the mesh; 0 if the mesh does not have the dimension."""
        mesh = self.device_mesh
        is_there = mesh is not None and name in (mesh.mesh_dim_names or ())
        return int(mesh.get_local_rank(name)) if is_there else 0


def check_context_parallel(config: ParallelismConfig, device: torch.device) -> None:
    """Raise ValueError if torch's attention can't exchange keys and values on this device type."""
    if config.cp_enabled and device.type != "cuda":
        raise ValueError(
            f"cp_size={config.cp_size} can't be used on {device.type}: torch shards sequences only in its flash, "
            "efficient and cuDNN attention, which need NVIDIA GPUs. Leave cp_size out"
        )


def context_parallel(
    config: ParallelismConfig | None,
    buffers: list[torch.Tensor] | None,
    dims: list[int] | None,
    no_restore: set[torch.Tensor] | None,
) -> AbstractContextManager[None]:
    """Return torch's context manager for one step; without context parallelism, return one that does nothing."""
    if config is None or not config.cp_enabled:
        return nullcontext()
    from torch.distributed.tensor import experimental
    from torch.distributed.tensor.experimental._attention import set_rotate_method  # no public equivalent

    assert config.cp_handler is not None  # the configuration creates it
    set_rotate_method(str(config.cp_handler.cp_comm_strategy))  # how ranks exchange keys and values
    sharded: AbstractContextManager[None] = experimental.context_parallel(
        config.device_mesh["cp"], buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=no_restore
    )
    return sharded
