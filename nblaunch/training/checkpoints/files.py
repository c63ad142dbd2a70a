"""The contents of a checkpoint folder: file names, the manifest, a check for damage, and files of single states.

File names are the same as in Hugging Face Accelerate:

    model.safetensors (or pytorch_model.bin), optimizer.bin, scheduler.bin, sampler.bin, scaler.pt,
    random_states_<rank>.pkl, custom_checkpoint_<i>.pkl; the second file of a kind has _1 in its name
    custom_checkpoint_<i>_rank<rank>.pkl, if a registered object's state differs from rank 0's

If ranks hold shards of models, there are folders instead, with one file per rank. For FSDP2, ``pytorch_model_fsdp_0``
contains the weights, and ``optimizer_0`` contains the optimizer's states.

``nblaunch_checkpoint.json`` lists every file with its size and a checksum. With this manifest, nblaunch detects an
incomplete folder or changed bytes before it loads anything. Checkpoints that other tools wrote have the same
file names but no manifest. nblaunch loads them without this check.

The checksum is CRC-32, which detects every flipped bit but does not protect against forgery. It is the fastest checksum
in the standard library (measured: 1.1 GB/s; Adler-32 0.8, BLAKE2b 0.7).
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from nblaunch import formatting
from nblaunch.errors import CheckpointError
from nblaunch.host.files import sync_file, sync_folder
from nblaunch.training.trusted_types import trusted_types, trusting

# Names that scripts for Hugging Face Accelerate use. ``{suffix}`` is a shard's number, or a rank.
MODEL_NAME = "pytorch_model"
SAFE_MODEL_NAME = "model"
OPTIMIZER_NAME = "optimizer"
SCHEDULER_NAME = "scheduler"
SAMPLER_NAME = "sampler"
RNG_STATE_NAME = "random_states"
SCALER_NAME = "scaler.pt"
PROFILE_PATTERN_NAME = "profile_{suffix}.json"

WEIGHTS_NAME = f"{MODEL_NAME}.bin"
WEIGHTS_PATTERN_NAME = f"{MODEL_NAME}{{suffix}}.bin"
WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
SAFE_WEIGHTS_NAME = f"{SAFE_MODEL_NAME}.safetensors"
SAFE_WEIGHTS_PATTERN_NAME = f"{SAFE_MODEL_NAME}{{suffix}}.safetensors"
SAFE_WEIGHTS_INDEX_NAME = f"{SAFE_WEIGHTS_NAME}.index.json"

MANIFEST = "nblaunch_checkpoint.json"
SAMPLER = f"{SAMPLER_NAME}.bin"
LOADER = "dl_state_dict.bin"
FSDP_WEIGHTS = f"{MODEL_NAME}_fsdp.bin"  # full weights, as written by Hugging Face Accelerate's FSDP
OPTIMIZER = f"{OPTIMIZER_NAME}.bin"
SCHEDULER = f"{SCHEDULER_NAME}.bin"

_VERSION = 2
_NUMBERED = re.compile(r"checkpoint_(\d+)")
_MAX_NAMED = 8  # files named in one message
_BLOCK_BYTES = 2**22  # one read: fits into the CPU's caches, and lets other threads run in between
_NUM_READERS = 8  # threads that read files at the same time


def numbered(name: str, index: int) -> str:
    """Return ``name`` for the n-th object of its kind: ``optimizer.bin``, ``optimizer_1.bin``."""
    stem, dot, suffix = name.rpartition(".")
    return name if index == 0 else f"{stem}_{index}{dot}{suffix}"


def custom(index: int, rank: int = 0) -> str:
    """Return the name of the file with the n-th registered object's state on ``rank``."""
    return f"custom_checkpoint_{index}.pkl" if rank == 0 else f"custom_checkpoint_{index}_rank{rank}.pkl"


def random_states(rank: int) -> str:
    """Return the name of the file with a rank's random states."""
    return f"{RNG_STATE_NAME}_{rank}.pkl"


def loader_state(index: int, rank: int) -> str:
    """Return the name of the file with the n-th stateful loader's state on ``rank``."""
    name = numbered(LOADER, index)
    return name if rank == 0 else f"{name.removesuffix('.bin')}_rank{rank}.bin"


def iteration_of(folder: Path) -> int | None:
    """Return the number of an automatically named checkpoint; None for any other folder."""
    match = _NUMBERED.fullmatch(folder.name)
    return int(match[1]) if match else None


def in_order(checkpoints: Path) -> list[Path]:
    """Return the automatically named checkpoints in a folder, oldest first."""
    by_number = {
        number: path
        for path in (checkpoints.iterdir() if checkpoints.is_dir() else ())
        if (number := iteration_of(path)) is not None and path.is_dir()
    }
    return [path for _, path in sorted(by_number.items())]


@dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint: ``nblaunch_checkpoint.json`` in its folder.

    Args:
        world_size: number of ranks in the job that wrote it.
        models: number of weight files; 0 if a hook saved the models.
        optimizers, schedulers, loaders, custom: number of each; ``custom`` counts registered objects.
        sharded_by: the strategy whose ranks wrote shards of weights and optimizers; empty for full states.
        files: size of every file in bytes, by its path in the folder.
        checksums: checksum of every file, by its path in the folder.
        places: the tensors of registered objects that ranks held in shards; see ``registered.py``.
    """

    world_size: int
    models: int = 0
    optimizers: int = 0
    schedulers: int = 0
    loaders: int = 0
    custom: int = 0
    sharded_by: str = ""
    files: dict[str, int] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    places: dict[str, dict[str, list[int | None]]] = field(default_factory=dict)

    def write(self, folder: Path, checksums_so_far: Mapping[str, str] | None = None) -> Manifest:
        """Write the manifest as the last file in ``folder``; return it with the files' sizes and checksums.

        Checksums in ``checksums_so_far`` are not computed again.
        """
        files = files_below(folder)
        sums = {name: value for name, value in (checksums_so_far or {}).items() if name in files}
        sums |= checksums(folder, files.keys() - sums.keys())
        manifest = replace(self, files=files, checksums=sums)
        values = {"version": _VERSION, **asdict(manifest)}
        text = json.dumps({**values, "checksum": _checksum_of(values)}, indent=2) + "\n"
        (folder / MANIFEST).write_text(text)
        return manifest


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a checkpoint; None if it has none, because another tool wrote it."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text())
        version = values["version"]
        if version > _VERSION:
            raise CheckpointError(
                f"{folder} was written by a newer nblaunch (format {version}; this version reads up to {_VERSION})"
            )
        if values.pop("checksum") != _checksum_of(values):
            raise ValueError("its checksum differs")
        del values["version"]
        return Manifest(**values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {folder} is damaged: {MANIFEST} can't be read ({type(error).__name__}: {error}). "
            f"{_other_than(folder)}"
        ) from error


def checksums(folder: Path, names: Collection[str]) -> dict[str, str]:
    """Return checksums, such as ``crc32:1a2b3c4d``, of files in ``folder``. Several threads read the files."""
    left = deque(names)
    sums: dict[str, str] = {}
    errors: list[Exception] = []

    def read() -> None:
        # Other threads may take the last file at any time.
        with suppress(IndexError):
            while not errors:
                name = left.popleft()
                try:
                    sums[name] = _checksum_of_file(folder / name)
                except Exception as error:
                    errors.append(error)

    # A pool would end only when the thread that manages it wakes up, up to 0.1 s later. An executor would reject work
    # once the interpreter is exiting, although a thread may still be writing a checkpoint.
    others = [threading.Thread(target=read) for _ in range(min(_NUM_READERS, len(names)) - 1)]
    for thread in others:
        thread.start()
    read()
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
    return sums


def _checksum_of_file(path: Path) -> str:
    value = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            value = zlib.crc32(block, value)
    return f"crc32:{value:08x}"


def check_files(folder: Path, manifest: Manifest, rank: int = 0, world_size: int = 1) -> None:
    """Raise CheckpointError, naming the files, if files are missing or have changed.

    Every rank checks the sizes of all files, and the contents of its share of them.
    """
    sizes = files_below(folder)
    wrong = []
    for name, size in manifest.files.items():
        if name not in sizes:
            wrong.append(f"{name} is missing")
        elif sizes[name] != size:
            wrong.append(f"{name} has {sizes[name]:,} bytes instead of {size:,}")
    by_size = sorted(manifest.checksums, key=lambda name: (-manifest.files.get(name, 0), name))
    share = by_size[rank::world_size] if not wrong else []
    try:
        read = checksums(folder, share)
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder} can't be read: {error}. {_other_than(folder)}") from error
    wrong += [
        f"{name} has the checksum {value} instead of {manifest.checksums[name]}: its bytes have changed since "
        "it was written, because of a faulty disk, faulty memory or a faulty copy"
        for name, value in read.items()
        if value != manifest.checksums[name]
    ]
    if wrong:
        raise CheckpointError(
            f"checkpoint {folder} is damaged: {formatting.first(wrong, _MAX_NAMED, '; ')}. {_other_than(folder)}"
        )


def _other_than(folder: Path) -> str:
    """Return advice for a ``folder`` that can't be loaded."""
    number = iteration_of(folder)
    older = [] if number is None else [p for p in in_order(folder.parent) if (iteration_of(p) or 0) < number]
    return f"Load an older one: load_state({str(older[-1])!r})" if older else "Load another checkpoint"


def _checksum_of(values: Mapping[str, Any]) -> str:
    return f"crc32:{zlib.crc32(json.dumps(values, sort_keys=True).encode()):08x}"


def latest(checkpoints: Path) -> Path:
    """Return the automatically named checkpoint with the highest number."""
    ordered = in_order(checkpoints)
    if not ordered:
        raise ValueError(f"{checkpoints} has no checkpoints (folders named checkpoint_<number>)")
    return ordered[-1]


def weights_file(folder: Path, index: int, manifest: Manifest | None) -> Path:
    """Return the file with the weights of the n-th model; prefer a file in the manifest to a leftover one."""
    candidates = [numbered(name, index) for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME, FSDP_WEIGHTS)]
    if manifest is not None:
        candidates.sort(key=lambda name: name not in manifest.files)
    for name in candidates:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(
        f"checkpoint {folder} has no weights for model {index}: there is no {' or '.join(candidates)}"
    )


def write_object(state: Any, path: Path) -> None:
    """Write a state dict, or its bytes."""
    with path.open("wb") as file:
        if isinstance(state, bytes):
            file.write(state)
        else:
            torch.save(state, file)


def read_object(
    path: Path, map_location: Any = "cpu", weights_only: bool = True, owner: Any = None, **options: Any
) -> Any:
    """Read a state dict with ``torch.load``; raise CheckpointError if that fails.

    Args:
        path: the file.
        map_location: where tensors go.
        weights_only: False: unpickle any object, which can execute code in the file.
        owner: the registered object that the state belongs to, if any; see ``trusted_types.py``.
        **options: other arguments of ``torch.load``.
    """
    try:
        with trusting(trusted_types(owner) if weights_only else []):
            return torch.load(path, map_location=map_location, weights_only=weights_only, **options)
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {path.parent} has no {path.name}") from None
    except Exception as error:
        advice = '. If you trust its source: load_state(..., load_kwargs={"weights_only": False})'
        raise unreadable(path, error, advice) from error


def unreadable(path: Path, error: Exception, advice: str = "") -> CheckpointError:
    """Return the error for an unreadable file; add ``advice`` if the file may have objects of untrusted classes."""
    # torch's message starts with suggestions such as weights_only=False.
    reason = str(error).partition("WeightsUnpickler error:")[2].strip().partition("\n")[0] or str(error)
    if isinstance(error, pickle.UnpicklingError):
        return CheckpointError(
            f"{path} is damaged, or contains objects of untrusted classes ({reason}){advice}"
        )
    return CheckpointError(f"{path} can't be read; is it damaged? ({type(error).__name__}: {reason})")


# --- atomic writes of folders -----------------------------------------------------------------------------------------

# A crash at any moment leaves the old files or the new ones, never a mixture. All files are first written to another
# path and forced to disk. Then a rename, which is atomic in the file system, moves them into place. (``host/files.py``
# replaces single files in the same way.)
#
#     a new folder       .name.partial/ ─────────── rename ──> name/
#     an existing one    name/.partial/ ─────────── rename ──> name/.committed/ ── each file moved up ──> name/
#
# In the last row, ``.committed`` is a journal: once it exists, the new files are valid, and :func:`finish_commit` moves
# the remaining ones up. Files in an existing folder that are not replaced stay unchanged. Only one process writes;
# callers choose which one.

_PARTIAL = ".partial"
_COMMITTED = ".committed"
_OBSOLETE = ".obsolete.json"
_DOOMED = ".doomed"


class Staging:
    """A temporary ``folder``, in which callers write files that :meth:`commit` moves to ``target``.

    ``folder`` exists from :meth:`create` to :meth:`commit`.
    """

    def __init__(self, target: Path) -> None:
        if target.exists() and not target.is_dir():
            raise ValueError(f"{target} is a file; a folder is needed")
        self.target = target
        # If the target exists, create the folder inside it, because the target may be a mount point.
        self.folder = target / _PARTIAL if target.is_dir() else target.with_name(f".{target.name}{_PARTIAL}")

    def create(self) -> None:
        """Create an empty folder, removing anything that a killed process left there."""
        finish_commit(self.target)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def commit(self, obsolete: Iterable[str] = ()) -> None:
        """Move the files into place, and remove the ``obsolete`` files of an existing target."""
        (self.folder / _OBSOLETE).write_text(json.dumps(sorted(obsolete)))
        for path in self.folder.rglob("*"):
            sync_folder(path) if path.is_dir() else sync_file(path)
        sync_folder(self.folder)
        if self.target.is_dir():
            os.rename(self.folder, self.target / _COMMITTED)
            sync_folder(self.target)
            finish_commit(self.target)
        else:
            (self.folder / _OBSOLETE).unlink()
            os.rename(self.folder, self.target)
            sync_folder(self.target.parent)

    def drop(self) -> None:
        """Remove the folder and all files in it; do nothing after :meth:`commit`."""
        shutil.rmtree(self.folder, ignore_errors=True)


def finish_commit(target: Path) -> None:
    """Finish an interrupted commit to an existing folder; do nothing if no commit was interrupted."""
    committed = target / _COMMITTED
    if not committed.is_dir():
        return
    with suppress(FileNotFoundError):  # this list is removed last, so without it the commit is complete
        for name in json.loads((committed / _OBSOLETE).read_text()):
            with suppress(FileNotFoundError):
                (target / name).unlink()
    for path in sorted(committed.rglob("*")):
        place = target / path.relative_to(committed)
        if path.is_dir():
            place.mkdir(exist_ok=True)
        elif path.name != _OBSOLETE:
            with suppress(FileNotFoundError):  # another rank may have moved it
                os.replace(path, place)
    sync_folder(target)
    shutil.rmtree(committed, ignore_errors=True)


def make_folder(path: Path) -> None:
    """Create a folder if it does not exist; raise ValueError if ``path`` is a file."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ValueError(f"{path} is a file; a folder is needed") from None


def remove_folder(path: Path) -> None:
    """Remove a folder; rename it first, so that no process finds it partially removed."""
    doomed = path.with_name(f".{path.name}{_DOOMED}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(folder: Path, is_ours: Callable[[str], bool]) -> None:
    """Remove incomplete folders that killed processes left in ``folder``, if ``is_ours`` accepts their names."""
    for path in folder.glob(".*"):
        name, dot, suffix = path.name[1:].rpartition(".")
        if dot + suffix in (_PARTIAL, _DOOMED) and is_ours(name) and not path.is_symlink() and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def files_below(folder: Path) -> dict[str, int]:
    """Return the size in bytes of every file in a folder and its subfolders, by relative path."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != _OBSOLETE
    }
