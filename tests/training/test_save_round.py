"""Saving is a collective: rank 0 waits for late ranks and recognises absent ones, and foreign data is never
executed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from nblaunch import (
    Accelerator,
    CheckpointError,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    PartialState,
    context,
)
from nblaunch.events import WorkerState
from nblaunch.training.checkpoints import files, save_round
from nblaunch.training.checkpoints.save_round import Report, Round, SaveOutcome, Whereabouts
from tests.training import ranks

KINDS = {
    "ddp": dict,
    "fsdp2": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT")},
    "stateful": lambda: {"dataloader_config": DataLoaderConfiguration(use_stateful_dataloader=True)},
}  # fmt: skip


def _prepare(kind: str = "ddp") -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(**KINDS[kind]())
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return accelerator, *accelerator.prepare(model, optimizer, DataLoader(torch.ones(8, 3), batch_size=2))


def _step(accelerator: Accelerator, model: Any, optimizer: Any, batch: torch.Tensor) -> None:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def _wait_until_asked(accelerator: Accelerator, number: int) -> None:
    """Be so late that rank 0 has queried this rank, and knows that it has not arrived."""
    mail = save_round._side._mail
    while True:
        found = mail.read(f"rank/{accelerator.process_index}", Whereabouts)
        if found is not None and found.number == number:
            return
        time.sleep(0.005)


def _save_late(folder: str, kind: str) -> list[set[str]]:
    accelerator, model, optimizer, loader = _prepare(kind)
    for number, batch in enumerate(loader, 1):
        _step(accelerator, model, optimizer, batch)
        if accelerator.process_index == 1:
            _wait_until_asked(accelerator, number)
        accelerator.save_state(f"{folder}_{number}", asynchronous=number == 2)
    accelerator.wait_for_checkpoint()
    accelerator.load_state(f"{folder}_2")
    return [set(files.read_manifest(Path(f"{folder}_{number}")).files) for number in (1, 2)]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_a_late_rank_is_waited_for(tmp_path: Path, kind: str) -> None:
    for checkpoints in ranks.run(_save_late, 2, str(tmp_path / "state"), kind):
        for found in checkpoints:
            assert {"random_states_0.pkl", "random_states_1.pkl"} <= found
            assert (kind == "fsdp2") == ("pytorch_model_fsdp_0/__1_0.distcp" in found)
            assert kind != "stateful" or "dl_state_dict.bin" in found


def _save_and_note_sums(folder: str, kind: str) -> list[str]:
    """Save; return the files whose checksums this rank has computed."""
    accelerator, *_ = _prepare(kind)
    checksums, read = files.checksums, []

    def noting(folder: Path, names: Any) -> dict[str, str]:
        read.extend(names)
        return checksums(folder, names)

    files.checksums = noting
    accelerator.save_state(folder)
    files.checksums = checksums
    accelerator.load_state(folder)
    return sorted(read)


def test_each_rank_writes_its_own_checksums(tmp_path: Path) -> None:
    """On the rank that wrote them, the files are still in the system's cache."""
    main, other = ranks.run(_save_and_note_sums, 2, str(tmp_path / "state"), "fsdp2")
    assert other == [
        "optimizer_0/__1_0.distcp",
        "pytorch_model_fsdp_0/__1_0.distcp",
        "random_states_1.pkl",
    ]
    manifest = files.read_manifest(tmp_path / "state")
    assert manifest is not None
    assert sorted([*main, *other]) == sorted(manifest.files) == sorted(manifest.checksums)


# --- ranks that never come -------------------------------------------------------------------------------------------


def _save_without_some(folder: str) -> list[str]:
    accelerator, model, optimizer, _ = _prepare()
    rank = accelerator.process_index

    def save(name: str, is_here: bool, asynchronous: bool = False) -> None:
        if is_here:
            accelerator.save_state(f"{folder}_{name}", asynchronous=asynchronous)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save("backward", rank == 0, asynchronous=True)
        _step(accelerator, model, optimizer, torch.ones(1, 3))
        save("barrier", rank == 0)
        dist.barrier()  # a collective inside torch, which nblaunch does not see
        save("two", rank != 1)
        accelerator.wait_for_everyone()
        save("backward", True)  # all ranks save to the same folder again
        save("ended", rank == 0)
    return [str(one.message) for one in caught if "save_state" in str(one.message)]


def test_ranks_that_went_on_to_a_collective_or_ended_are_not_waited_for(tmp_path: Path) -> None:
    (warned, *others) = ranks.run(_save_without_some, 3, str(tmp_path / "state"))
    assert len(warned) == 1
    assert "save_state was called only on the main process" in warned[0]
    assert others == [[], []]
    found = {
        path.name: sorted(name[14] for name in os.listdir(path) if name.startswith("random_states"))
        for path in tmp_path.iterdir()
    }
    assert found == {
        "state_backward": ["0", "1", "2"],
        "state_barrier": ["0"],
        "state_two": ["0", "2"],
        "state_ended": ["0"],
    }


def _save_parts_alone(folder: str) -> str:
    accelerator, model, optimizer, _ = _prepare("fsdp2")
    message = ""
    if accelerator.is_main_process:
        with pytest.raises(CheckpointError) as caught:
            accelerator.save_state(folder)
        message = str(caught.value)
    _step(accelerator, model, optimizer, torch.ones(1, 3))
    with pytest.raises(ValueError, match="fsdp2"):
        accelerator.save_state(folder, main_process_only=True)
    accelerator.save_state(folder)
    return message


def test_sharded_saves_need_all_ranks(tmp_path: Path) -> None:
    message, _ = ranks.run(_save_parts_alone, 2, str(tmp_path / "state"))
    assert message.startswith(
        "save_state was called only on the main process, but with fsdp2 every rank holds"
    )
    assert (tmp_path / "state" / "pytorch_model_fsdp_0" / "__1_0.distcp").is_file()


def _save_on_main_only(folder: str) -> list[str]:
    accelerator, *_ = _prepare()
    for name in ("a", "b"):
        if name == "b" or accelerator.is_main_process:
            accelerator.save_state(f"{folder}_{name}", main_process_only=True)
        while not Path(
            f"{folder}_{name}"
        ).is_dir():  # rank 0 must not wait for a rank that waits for its checkpoint
            time.sleep(0.005)
    return sorted(os.listdir(f"{folder}_b"))


def test_main_process_only_does_not_wait(tmp_path: Path) -> None:
    for found in ranks.run(_save_on_main_only, 2, str(tmp_path / "state")):
        assert "random_states_0.pkl" in found
        assert "random_states_1.pkl" not in found


def _save_with_a_slow_rank(folder: str) -> str:
    """Return the state on rank 0's slot while it waits for the files of rank 1, and afterwards."""
    accelerator = Accelerator()
    seen, slot = Path(f"{folder}_is_waited_for"), context.current().slot

    def look() -> None:
        while slot.state is not WorkerState.WAITING:
            time.sleep(0.005)
        seen.touch()

    looking = threading.Thread(target=look, daemon=True)

    def hook(*_: Any) -> None:  # after the ranks have met, where rank 0 also waits
        if accelerator.is_main_process:
            looking.start()
        while not accelerator.is_main_process and not seen.exists():
            time.sleep(0.005)

    accelerator.register_save_state_pre_hook(hook)
    before = slot.state
    accelerator.save_state(folder)
    return f"{before.name}, then {slot.state.name}"


def test_the_main_process_says_that_it_waits_for_the_files_of_others(tmp_path: Path) -> None:
    states = ranks.run(_save_with_a_slow_rank, 2, str(tmp_path / "state"))
    assert states == ["STARTING, then STARTING"] * 2


class Stream(IterableDataset):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(24))


def _save_to_folders_of_their_own(folder: str) -> tuple[str, list[list[int]], list[list[int]]]:
    configuration = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(dataloader_config=configuration)
    loader = accelerator.prepare(DataLoader(Stream(), batch_size=2))
    own = Path(f"{folder}_of_rank_{accelerator.process_index}")
    own.mkdir()
    rest = []
    for number, batch in enumerate(loader):
        if number == 2:
            saved = accelerator.save_state(own)
        elif number > 2:
            rest.append(batch.tolist())
    accelerator.load_state(own)
    return saved, rest, [batch.tolist() for batch in loader]


def test_ranks_can_name_different_folders(tmp_path: Path) -> None:
    """The main process's folder counts, for example if scripts save to ``tempfile.mkdtemp()`` on each rank."""
    for saved, rest, resumed in ranks.run(_save_to_folders_of_their_own, 2, str(tmp_path / "state")):
        assert saved == str(tmp_path / "state_of_rank_0")
        assert resumed == rest != []


def _save_afterwards(folder: str) -> str:
    accelerator = Accelerator()
    accelerator.end_training()
    try:
        accelerator.save_state(folder)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_rank_that_has_left_says_so(tmp_path: Path) -> None:
    first, second = ranks.run(_save_afterwards, 2, str(tmp_path / "state"))
    assert first == "saved"
    assert second.startswith("rank 1 has left the process group and can no longer save")


class Noted(os.PathLike):  # type: ignore[type-arg]
    """A path that creates a file when it is converted to text, which ``save_state`` does first."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __fspath__(self) -> str:
        Path(f"{self.path}_is_read").touch()
        return self.path


def _save_before_and_after_a_reset(folder: str) -> str:
    accelerator = Accelerator()
    accelerator.save_state(f"{folder}_0")
    PartialState._reset_state()  # for example, between the folds of a cross-validation
    accelerator = Accelerator()
    while accelerator.is_main_process and not Path(f"{folder}_1_is_read").exists():
        time.sleep(0.005)  # the other rank arrives first
    return accelerator.save_state(Noted(f"{folder}_1"))  # type: ignore[arg-type]


def test_ranks_save_together_after_the_state_was_reset(tmp_path: Path) -> None:
    saved = ranks.run(_save_before_and_after_a_reset, 2, str(tmp_path / "state"))
    assert saved == [str(tmp_path / "state_1")] * 2
    assert (tmp_path / "state_1" / "random_states_1.pkl").is_file()


# --- failures ---------------------------------------------------------------------------------------------------------


def _fill_disk(folder: str, asynchronous: bool) -> tuple[str, bool]:
    accelerator, *_ = _prepare()
    accelerator.save_state(folder)
    write = files.write_object
    if accelerator.process_index == 1:
        files.write_object = _disk_full
    try:
        accelerator.save_state(folder, asynchronous=asynchronous)
        accelerator.wait_for_checkpoint()
    except CheckpointError as error:
        message = str(error)
    files.write_object = write
    accelerator.load_state(folder)
    accelerator.save_state(folder)
    return message, Path(folder, "random_states_1.pkl").is_file()


def _disk_full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def _leave_in_the_middle(folder: str) -> str:
    accelerator, *_ = _prepare()
    if accelerator.process_index == 1:
        participant = save_round._side
        # Pretend that the process ended before it could report.
        participant.report = lambda *_: participant.leave()
        accelerator.register_save_state_pre_hook(_disk_full)
    with pytest.raises((CheckpointError, OSError)) as caught:
        accelerator.save_state(folder)
    return str(caught.value)


def test_a_rank_that_ends_in_the_middle_is_named(tmp_path: Path) -> None:
    message, _ = ranks.run(_leave_in_the_middle, 2, str(tmp_path / "state"))
    assert message == (
        f"checkpoint {tmp_path / 'state'} was not saved; nothing was changed. Rank 1 left while it was saving"
    )
    assert os.listdir(tmp_path) == []


def _fail_while_another_writes(folder: str) -> list[str]:
    accelerator, *_ = _prepare()
    accelerator.save_state(folder)
    if accelerator.process_index == 0:
        coordinator = save_round._side
        wait_until_known = coordinator.wait_until_known

        def wait() -> None:
            late = Path(folder, ".partial", "random_states_1.pkl")
            late.parent.mkdir(exist_ok=True)
            late.touch()
            wait_until_known()

        coordinator.wait_until_known = wait
        accelerator.register_save_state_pre_hook(_disk_full)
    with pytest.raises((CheckpointError, OSError)):
        accelerator.save_state(folder)
    return os.listdir(folder)


def test_late_files_of_a_failed_save_are_removed(tmp_path: Path) -> None:
    names, _ = ranks.run(_fail_while_another_writes, 2, str(tmp_path / "state"))
    assert ".partial" not in names


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_of_another_rank_leaves_the_old_checkpoint(tmp_path: Path, asynchronous: bool) -> None:
    reason = f"checkpoint {tmp_path / 'state'} was not saved; nothing was changed. Rank 1: OSError: [Errno 28] No space"
    for message, is_whole in ranks.run(_fill_disk, 2, str(tmp_path / "state"), asynchronous):
        assert message.startswith(reason)
        assert is_whole
    assert os.listdir(tmp_path) == ["state"]


def test_a_disk_without_inodes_is_reported_as_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "mkdir", _disk_full)
    with pytest.raises(CheckpointError, match=r"was not saved.* Rank 0: OSError: \[Errno 28\]"):
        Accelerator().save_state(tmp_path / "state")


def _outlive_the_store(folder: str, port: int) -> int:
    """Save on ranks of which rank 0 hosts the store and ends as soon as it can."""
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
    init = InitProcessGroupKwargs(init_method=f"tcp://127.0.0.1:{port}")
    accelerator = Accelerator(kwargs_handlers=[init])
    accelerator.save_state(f"{folder}_0")
    accelerator.save_state(f"{folder}_1", asynchronous=True)
    if not accelerator.is_main_process:
        store = dist.distributed_c10d._get_default_store()
        while not _is_gone(store):
            time.sleep(0.005)
        accelerator.wait_for_checkpoint()
        with pytest.raises(CheckpointError, match=r"save_state can.t reach .* store has ended"):
            accelerator.save_state(f"{folder}_2")
    return len(files.read_manifest(Path(f"{folder}_1")).files) if not accelerator.is_main_process else 0  # type: ignore[union-attr]


def _is_gone(store: Any) -> bool:
    try:
        store.check(["any"])
    except RuntimeError:
        return True
    return False


def test_the_outcome_arrives_before_the_store_ends(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert ranks.run(_outlive_the_store, 2, str(tmp_path / "state"), port) == [0, 2]


# --- what comes from the store ----------------------------------------------------------------------------------------


class Malicious:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def _attack(folder: Path, payload: bytes) -> None:
    """Replace all messages of a save by ``payload`` once rank 0 has begun it."""
    while not (folder / "port").exists():
        time.sleep(0.01)
    port = int((folder / "port").read_text())
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    found: list[str] = []
    while not any(key.endswith(("round", "folder")) for key in found):
        time.sleep(0.01)
        found = [key for key in store.list_keys() if "nblaunch" in key]
    for key in found:
        store.set(key, payload)
    (folder / "attacked").touch()


def _save_under_attack(folder: Path, comes_late: bool) -> str:
    accelerator = Accelerator()
    if accelerator.process_index == 1:
        (folder / "text").write_text(os.environ["MASTER_PORT"])
        (folder / "text").rename(folder / "port")
        while not (folder / ("given up" if comes_late else "attacked")).exists():
            time.sleep(0.01)
    warnings.simplefilter("ignore")  # rank 0 may notice that rank 1 has given up
    try:
        accelerator.save_state(folder / "state")
    except CheckpointError as error:
        return str(error)
    finally:
        (folder / "given up").touch()
    return "saved"


@pytest.mark.parametrize("comes_late", [False, True])
def test_messages_in_the_store_are_never_executed(comes_late: bool, tmp_path: Path) -> None:
    """The attacker is not part of the job: it connects to the store's loopback port, as any user can.

    Rank 1 has read it, even if it arrives after rank 0 has given up and restored its own messages.
    """
    payload = pickle.dumps(Malicious(str(tmp_path / "executed")))
    attacker = multiprocessing.get_context("forkserver").Process(target=_attack, args=(tmp_path, payload))
    attacker.start()
    try:
        _, message = ranks.run(_save_under_attack, 2, tmp_path, comes_late)
    finally:
        attacker.kill()
        attacker.join()
        attacker.close()
    assert not (tmp_path / "executed").exists()
    assert "that no rank wrote" in message
    pickle.loads(payload)
    assert (tmp_path / "executed").exists(), "the attack itself works"


@pytest.mark.parametrize(
    "message",
    [
        Round(3, True, (1, 2), "a\udc80b", "c", 4),
        Whereabouts(3, True, False, {"0/cpu": 7}),
        Report(3, "a problem", True, {"a file": "crc32:00000000"}),
        SaveOutcome("ValueError", "ünlucky"),
    ],
)
def test_messages(message: Any) -> None:
    store = dist.HashStore()
    mail = save_round._Mail(store)
    assert mail.read("key", type(message)) is None
    mail.post("key", message)
    assert mail.read("key", type(message)) == message
    values = json.loads(dist.PrefixStore("nblaunch/saves", store).get("key"))
    wrong: list[Any] = [[], 1, {}, {**values, "more": 1}]
    wrong += [{key: item for key, item in values.items() if key != name} for name in values]
    wrong += [{**values, name: other} for name in values for other in (None, 1.5, [[]], {"": None}, [None])]
    for other in ["", "{", b"\xff", pickle.dumps(message), "[" * 100_000, *map(json.dumps, wrong)]:
        dist.PrefixStore("nblaunch/saves", store).set("key", other)
        with pytest.raises(CheckpointError, match=r"nblaunch/saves/key"):
            mail.read("key", type(message))


def _wait_in_a_collective(folder: str) -> tuple[int, set[str]]:
    """Return how often rank 1 has read the store before it was queried, and the files of a later save."""
    read, wait = save_round._Mail.read, save_round._Mail.wait_for_ring
    looks: list[Any] = []
    waits_inside = threading.Event()

    def counting(*args: Any) -> Any:
        looks.append(args)
        return read(*args)

    def noting(*args: Any) -> None:
        waits_inside.set()
        wait(*args)

    save_round._Mail.read, save_round._Mail.wait_for_ring = counting, noting  # type: ignore[method-assign]
    accelerator = Accelerator()
    if accelerator.is_main_process:
        waits_inside.set()
    assert waits_inside.wait(180)
    num_looks = len(looks)
    accelerator.wait_for_everyone()
    for _ in range(3):  # each rank is rung
        accelerator.save_state(folder)
    return num_looks, set(os.listdir(folder))


def test_other_ranks_wait_in_the_store(tmp_path: Path) -> None:
    for num_looks, names in ranks.run(_wait_in_a_collective, 3, str(tmp_path / "state")):
        assert num_looks <= 1, "it looks when it begins"
        assert {f"random_states_{rank}.pkl" for rank in range(3)} <= names


def test_a_single_process_starts_no_thread() -> None:
    Accelerator()
    assert "nblaunch-saves" not in {thread.name for thread in threading.enumerate()}
