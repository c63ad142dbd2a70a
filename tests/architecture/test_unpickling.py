"""Reading a pickle runs its writer's code: where nblaunch does so, and why it has written those bytes itself."""

from __future__ import annotations

import ast

from tests.architecture.source import Module, modules

READERS = {
    "nblaunch.backends": "part of a worker's assignment, see nblaunch.start_methods.spawn",
    "nblaunch.detached.folder": "files under the signature of this user, in a folder of this user alone",
    "nblaunch.detached.job_process": "its launch in a memory file that it inherited from the launching process",
    "nblaunch.engines.channel": "under the seal of the job's key, which its node programs alone have",
    "nblaunch.engines.node": "its first message, from what has started it, through its standard input",
    "nblaunch.engines.ray_driver": "its task in a memory file that it inherited from the launching process",
    "nblaunch.nodes.agent": "its AgentConfig in a memory file that its launcher made and that it inherited",
    "nblaunch.nodes.rendezvous": "what torch has pickled in the same process a moment before",
    "nblaunch.start_methods.spawn": "assignments in an inherited memory file that its launcher made",
    "nblaunch.wire.channel": "a pipe between two of our processes, inherited; in files under the user's signature",
    "nblaunch.wire.worker_commands": "a pair of sockets between a worker and the kernel, inherited, without a name",
    "nblaunch.wire.exceptions": "an exception of a worker of this machine, which came through its pipe",
    "nblaunch.wire.pickling.payload": "memory files of our own processes, and others under the user's signature",
    "nblaunch.training.strategies.shard_files": "metadata of shards, of which no other classes are made than they need",
    "nblaunch.wire.signing": "under the signature of the job, where its ranks have a key",
    "nblaunch.worker.inheritance.sent_changes": "values in an assignment, see nblaunch.start_methods.spawn",
    "nblaunch.worker.inheritance.message_settings": "values in an assignment, see nblaunch.start_methods.spawn",
    "nblaunch.worker.inheritance.random_states": "with these assignments, or pickled in the same process",
}
"""Modules that read pickles, each with the reason why no other process can have written the pickle."""

_PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
_READING = {"load", "loads", "Unpickler", "_Unpickler", "open"}


def test_pickles_are_read_in_few_places() -> None:
    assert {module.name for module in modules() if _reads_pickles(module)} == set(READERS)


def _reads_pickles(module: Module) -> bool:
    return any(_is_reading(node) for node in ast.walk(module.tree))


def _is_reading(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.value.id in _PICKLES and node.attr in _READING
    if isinstance(node, ast.ImportFrom):
        names = {alias.name for alias in node.names}
        return (node.module in _PICKLES and bool(names & _READING)) or (
            node.module == "multiprocessing" and "connection" in names
        )
    if isinstance(node, ast.Import):
        return any(alias.name.startswith("multiprocessing.connection") for alias in node.names)
    return False
