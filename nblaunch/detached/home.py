"""Where the folders of detached jobs are, and the user's key.

    $NBLAUNCH_LOG_DIR/detached              if set
    $XDG_STATE_HOME/nblaunch/jobs           otherwise; by default ~/.local/state/nblaunch/jobs
    <temporary folder>/nblaunch-<uid>/detached      if the user has no home or can't write there

The temporary folder is the last resort: a restart may empty it, and tools that clean up temporary files remove old
files.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path

from nblaunch import env
from nblaunch.errors import LaunchError
from nblaunch.host import files
from nblaunch.launcher.joblog import log_root

KEY_NAME = ".key"
_KEY_BYTES = 32


@dataclass(frozen=True)
class Home:
    """The folder that contains the folders of new jobs.

    Args:
        path: path of the folder.
        key: the user's key, which signs the pickles in it.
        why_temporary: why the folder is temporary; empty if it is not.
    """

    path: Path
    key: bytes
    why_temporary: str = ""


def open_home() -> Home:
    """Return the folder for new jobs; create it if it does not exist.

    Raises:
        LaunchError: it can't be created.
        PermissionError: other users can change it.
    """
    if env.read("NBLAUNCH_LOG_DIR"):
        path = log_root() / "detached"
        return Home(path, _made_key(path))
    state, why = _state_folder()
    if state is not None:
        try:
            key = _made_key(state)
            if os.access(state, os.W_OK):
                return Home(state, key)
            why = f"{state} is not writable"  # although it has a key, from an earlier job
        except PermissionError as error:
            if error.errno is None:  # the folder exists and is open to other users
                raise
            why = f"{state} is not writable: {error.strerror}"
        except OSError as error:
            why = f"{state} is not writable: {files.reason_of(state, error)}"
    path = log_root() / "detached"
    return Home(path, _made_key(path), why)


def present_homes() -> list[Path]:
    """Return the folders that may contain jobs, whether they exist or not."""
    if env.read("NBLAUNCH_LOG_DIR"):
        return [log_root() / "detached"]
    state, _ = _state_folder()
    try:
        temporary = Path(tempfile.gettempdir()) / f"nblaunch-{os.getuid()}"
    except FileNotFoundError:  # no temporary folder is writable
        return [state] if state is not None else []
    if state is None:
        return [temporary / "detached"]
    # Another user may have created the temporary folder, which has jobs only if the state folder could not be used.
    is_own = temporary.is_dir() and temporary.stat().st_uid == os.getuid()
    return [state, temporary / "detached"] if is_own else [state]


def private_problem(path: Path, error: PermissionError) -> PermissionError:
    """Return the error for a folder that :func:`files.open_private` rejected, with advice."""
    if error.errno is not None:  # a system error: this user may not enter it
        return error
    advice = (
        f"If only you have written to this folder: chmod 700 {path}"
        if path.stat().st_uid == os.getuid() and path.is_dir()
        else "Choose another place for jobs with NBLAUNCH_LOG_DIR."
    )
    return PermissionError(
        f"{path} {error}, so nothing in it was read: jobs are private to their user. {advice}"
    )


def _state_folder() -> tuple[Path | None, str]:
    """Return the jobs folder in the user's state folder; if there is none, return None and the reason."""
    chosen = Path(env.read("XDG_STATE_HOME"))
    if chosen.is_absolute():  # relative paths are ignored (XDG Base Directory Specification)
        return chosen / "nblaunch" / "jobs", ""
    try:
        home = Path.home()
    except RuntimeError:
        return (
            None,
            f"HOME is not set, and user {os.getuid()} has no home folder in the system's user database",
        )
    if not home.is_absolute():
        return None, f"HOME={str(home)!r} is not an absolute path"
    return home / ".local" / "state" / "nblaunch" / "jobs", ""


def _made_key(path: Path) -> bytes:
    """Return the user's key in the jobs folder; create both if they are missing.

    Raises:
        OSError: the folder or the key can't be created. An error without an errno means that the folder exists but
            other users can change it.
        LaunchError: the key is damaged.
    """
    files.make_private_folder(path)
    try:
        with files.private_folder(path) as fd:
            key = files.make_once(fd, KEY_NAME, secrets.token_bytes(_KEY_BYTES))
    except PermissionError as error:
        raise private_problem(path, error) from None
    if len(key) != _KEY_BYTES:
        raise LaunchError(
            f"the key {path / KEY_NAME} is damaged ({len(key)} bytes, not {_KEY_BYTES}): remove it. Results of "
            "earlier jobs can't be read after that"
        )
    return key
