"""A worker's ranks, the sizes of its job, and the environment variables for them, as in ``torchrun``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OF_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def missing_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the variables that a process needs to find the other ranks and that are not set."""
    return [name for name in _OF_RENDEZVOUS if not environ.get(name)]


@dataclass(frozen=True)
class Topology:
    """One worker's ranks, and the sizes of its job. All ranks are numbered from 0.

    Args:
        rank: rank among all workers in the job.
        local_rank: rank among the workers on this node.
        node_rank: rank of this node.
        world_size: number of workers in the job.
        local_world_size: number of workers on this node.
        num_nodes: number of nodes.
        master_addr: host name or address of the workers' store.
        master_port: TCP port of the store. 0 = no store (a single process without a launcher), or the launcher has not
            opened it yet.

    Raises:
        ValueError: a rank is out of range.
    """

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    num_nodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    def __post_init__(self) -> None:
        for rank, size in (
            ("rank", "world_size"),
            ("local_rank", "local_world_size"),
            ("node_rank", "num_nodes"),
        ):
            if not 0 <= getattr(self, rank) < getattr(self, size):
                raise ValueError(
                    f"{rank}={getattr(self, rank)} must be at least 0 and less than {size}={getattr(self, size)}"
                )

    def to_env(self, restart_count: int = 0, max_restarts: int = 0) -> dict[str, str]:
        """Return the variables that ``torchrun`` sets (source: torch/distributed/run.py, "Environment Variables").

        With ``TORCHELASTIC_USE_AGENT_STORE``, every rank connects to the launcher's store in
        ``init_process_group("env://")``. ``TORCHELASTIC_RUN_ID`` informs frameworks that a launcher started the
        process.

        Args:
            restart_count: how many times the job's workers have been restarted.
            max_restarts: how many times they may be restarted.
        """
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "GROUP_RANK": str(self.node_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
            "NODE_RANK": str(self.node_rank),
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "ROLE_NAME": "default",
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(restart_count),
            "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
            "TORCHELASTIC_RUN_ID": "nblaunch",
        }

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Topology:
        """Read the variables of ``torchrun`` or this launcher; assume a single process if no rank or size is set.

        Batch scripts often export the address of the rendezvous (``MASTER_ADDR``, ``MASTER_PORT``) for all programs
        that they start. Without ``RANK`` and ``WORLD_SIZE``, no store is expected there.

        Raises:
            ValueError: a variable is not a whole number, or the variables contradict each other.
        """
        if not any(map(environ.get, _OF_RANKS)):
            return cls()

        def number(name: str, default: int) -> int:
            text = environ.get(name, "")
            try:
                return int(text) if text else default
            except ValueError:
                raise ValueError(f"environment variable {name}={text!r} must be a whole number") from None

        world_size = number("WORLD_SIZE", 1)
        rank = number("RANK", 0)
        local_world_size = number("LOCAL_WORLD_SIZE", world_size)
        master_port = number("MASTER_PORT", 0)
        try:
            return cls(
                rank=rank,
                local_rank=number("LOCAL_RANK", rank % local_world_size if local_world_size else 0),
                node_rank=number("GROUP_RANK", rank // local_world_size if local_world_size else 0),
                world_size=world_size,
                local_world_size=local_world_size,
                num_nodes=number(
                    "GROUP_WORLD_SIZE", max(1, world_size // local_world_size) if local_world_size else 1
                ),
                master_addr=environ.get("MASTER_ADDR") or "127.0.0.1",
                master_port=0 if missing_variables(environ) else master_port,
            )
        except ValueError as error:
            named = ", ".join(f"{name}={environ[name]}" for name in _OF_RANKS if environ.get(name))
            raise ValueError(
                f"the environment ({named}) describes no rank of a job: {error}. Start the script with torchrun or "
                "nblaunch launch, which set all variables, or remove these"
            ) from None
