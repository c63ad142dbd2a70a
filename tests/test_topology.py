"""Ranks, and the environment variables that torchrun uses for them."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.topology import Topology


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    num_nodes, local_world_size = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    node_rank, local_rank = draw(st.integers(0, num_nodes - 1)), draw(st.integers(0, local_world_size - 1))
    return Topology(
        rank=node_rank * local_world_size + local_rank,
        local_rank=local_rank,
        node_rank=node_rank,
        world_size=num_nodes * local_world_size,
        local_world_size=local_world_size,
        num_nodes=num_nodes,
        master_addr=draw(st.sampled_from(["127.0.0.1", "::1", "node0"])),
        master_port=draw(st.integers(0, 65535)),
    )


@given(topologies())
def test_the_environment_defines_the_topology(topology: Topology) -> None:
    assert Topology.from_env(topology.to_env()) == topology


@given(topologies())
def test_missing_variables_get_defaults(topology: Topology) -> None:
    """srun and old launchers leave out the node's number and size, which follow from ranks and sizes."""
    environ = topology.to_env()
    for name in ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK"):
        del environ[name]
    assert Topology.from_env(environ) == topology


def test_without_a_launcher_the_world_size_is_one() -> None:
    assert Topology.from_env({}) == Topology()
    assert Topology.from_env({"RANK": "", "WORLD_SIZE": ""}) == Topology()


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_WORLD_SIZE"])
def test_invalid_values_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='many'"):
        Topology.from_env({"RANK": "0", name: "many"})


@pytest.mark.parametrize(
    "environ",
    [
        {"MASTER_PORT": "29500"},
        {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
        {"MASTER_PORT": "many"},
        {"GROUP_RANK": "1", "NODE_RANK": "1"},
        {"WORLD_SIZE": "1", "MASTER_PORT": "29500"},
        {"RANK": "0", "MASTER_PORT": "29500"},
        {"LOCAL_RANK": "0", "MASTER_PORT": "29500"},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29500"},
    ],
)
def test_an_address_without_ranks_is_not_used(environ: dict[str, str]) -> None:
    topology = Topology.from_env(environ)
    assert (topology.rank, topology.world_size, topology.node_rank, topology.master_port) == (0, 1, 0, 0)


@pytest.mark.parametrize("environ", [{"RANK": "1"}, {"LOCAL_RANK": "1"}, {"RANK": "0", "WORLD_SIZE": "0"}])
def test_variables_that_describe_no_rank_are_named(environ: dict[str, str]) -> None:
    named = ", ".join(f"{name}={value}" for name, value in environ.items())
    with pytest.raises(
        ValueError, match=rf"^the environment \({named}\) describes no rank of a job: .*torchrun"
    ):
        Topology.from_env(environ)


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [("rank", 4, "world_size=4"), ("rank", -1, "world_size=4"), ("local_rank", 2, "local_world_size=2"),
     ("node_rank", 2, "num_nodes=2")],
)  # fmt: skip
def test_ranks_out_of_range_are_named(field: str, value: int, limit: str) -> None:
    good = Topology(rank=3, local_rank=1, node_rank=1, world_size=4, local_world_size=2, num_nodes=2)
    with pytest.raises(ValueError, match=f"^{field}={value} must be at least 0 and less than {limit}"):
        dataclasses.replace(good, **{field: value})
