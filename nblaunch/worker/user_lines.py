"""The user's lines that called a hook, recognised by the code between the line and the hook.

    hook <── library <── library <── the user's frame     first call: the files of the frames decide
    hook <── the same code, and the same instruction      later calls: no file names are compared

A training step calls the same hooks from the same lines over and over. Each frame that Python exposes costs a third of
a lookup, and examining the frame costs more. Later calls therefore compare code objects, and do not examine the frames
around the user's frame. A cell that has been edited or run again has new code objects, so its lines are searched again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

from nblaunch.user_code import is_user_file

_MAX_WAYS = 8
"""Maximum number of call paths to a hook that are kept; each one keeps code objects alive."""

_INNER = {"wrapper", "inner", "inner_func", "_fn", "decorate_context", "wrapped", "helper"}
"""Functions whose names do not identify the call."""

_MODULE_CALL = "_wrapped_call_impl"

_MAX_SITES = 256
"""Maximum number of sites that are kept for one line."""

Key = tuple[Any, ...]
Site = TypeVar("Site")


class UserLine:
    """A line of the user's code that calls a library.

    Args:
        name: the outermost library function, which the line calls.
        filename: file of the user's code; empty if unknown.
        line: line in that file.

    Attributes:
        sites: what finders have returned for this line.
    """

    __slots__ = ("filename", "line", "name", "sites")

    def __init__(self, name: str, filename: str, line: int) -> None:
        self.name = name
        self.filename = filename
        self.line = line
        self.sites: dict[Key, Any] = {}


class _Way(NamedTuple):
    """A call path from the user's code to a hook.

    Args:
        depth: how far the user's frame is from the finder's.
        users: code of the user's frame.
        lines: instruction in that code -> its line.
        compared: depths and code objects of the frames between the hook and the user's frame that must be the same.
    """

    depth: int
    users: CodeType
    lines: dict[int, UserLine]
    compared: tuple[tuple[int, CodeType], ...]

    def is_same(self, other: _Way) -> bool:
        """Return whether both call paths have identical code objects.

        If a cell runs again, its code objects are equal to the earlier ones, but not identical.
        """
        if self.depth != other.depth or self.users is not other.users:
            return False
        return all(here is there for (_, here), (_, there) in zip(self.compared, other.compared, strict=True))


class UserLines:
    """Finds the user's lines for the hooks of this process.

    Args:
        hooks: folders with hooks, each with a trailing separator; calls are not named after functions in them.
    """

    def __init__(self, hooks: tuple[str, ...]) -> None:
        self._hooks = hooks
        self._is_user: dict[str, bool] = {}
        self._last = UserLine("", "", 0)
        self._without_frame: dict[tuple[Any, ...], UserLine] = {}

    def finder(self, site_of: Callable[[UserLine, Key], Site], skipped: int) -> Callable[[Key], Site]:
        """Return a function that finds the site of a hook's call: the user's line, and the call's properties as a key.

        Autograd's threads have no frame of the user's code, so the last known line is used for them.

        Args:
            site_of: makes a site from a line and a key.
            skipped: number of frames to leave out (the function itself and the frames of the hook).
        """
        ways: list[_Way] = []
        frame_at = sys._getframe

        def find(key: Key) -> Site:
            for depth, users, lines, compared in ways:
                try:
                    frame = frame_at(depth)
                    if frame.f_code is not users:
                        continue
                    for place, code in compared:
                        if frame_at(place).f_code is not code:
                            break
                    else:
                        self._last = line = lines[frame.f_lasti]
                        site: Site = line.sites[key]
                        return site
                except (ValueError, KeyError):  # there are fewer frames; the instruction or the key is new
                    continue
            return self._new_site(site_of, key, skipped, None, ways)

        return find

    def quick_finder(
        self, site_of: Callable[[UserLine, Key], Site], skipped: int, compared: int
    ) -> Callable[[Key], Site]:
        """Return a quicker function than :meth:`finder`'s, for a hook that is called several times in each step.

        It compares only the depth and code of the user's frame, and one frame between that frame and the hook.

        Args:
            site_of: makes a site from a line and a key.
            skipped: number of frames to leave out.
            compared: index of the frame that is compared, and that differs if another of the user's functions is in
                between: 0 for the hook's caller, -1 for the function that the user calls.
        """
        ways: list[_Way] = []
        frame_at = sys._getframe

        def find(key: Key) -> Site:
            for depth, users, lines, ((place, code),) in ways:
                try:
                    frame = frame_at(depth)
                    if frame.f_code is users and frame_at(place).f_code is code:
                        self._last = line = lines[frame.f_lasti]
                        site: Site = line.sites[key]
                        return site
                except (ValueError, KeyError):
                    continue
            return self._new_site(site_of, key, skipped, compared, ways)

        return find

    def _new_site(
        self,
        site_of: Callable[[UserLine, Key], Site],
        key: Key,
        skipped: int,
        compared: int | None,
        ways: list[_Way],
    ) -> Site:
        try:
            innermost = sys._getframe(skipped + 1)
        except ValueError:  # a C library's thread called the hook
            innermost = None
        line, is_users = self._search(innermost, skipped, compared, ways)
        if not is_users:  # each hook has its own lines
            line = self._without_frame.setdefault((site_of, line.name, line.filename, line.line), line)
        if len(line.sites) >= _MAX_SITES:
            line.sites.clear()
        site: Site = line.sites.setdefault(key, site_of(line, key))
        return site

    def _search(
        self, frame: FrameType | None, depth: int, compared: int | None, ways: list[_Way]
    ) -> tuple[UserLine, bool]:
        """Return the user's line that led to a frame at a depth, and True. Remember the call path.

        If no frame is the user's, return the last known line, and False.
        """
        libraries: list[tuple[int, CodeType]] = []
        name = ""
        while frame is not None:
            code = frame.f_code
            if self._is_users(code.co_filename):
                frames = libraries if compared is None else [(libraries or [(depth, code)])[compared]]
                new = _Way(depth, code, {}, tuple(frames))
                way = next(filter(new.is_same, ways), new)
                self._last = line = way.lines.setdefault(
                    frame.f_lasti, UserLine(name, code.co_filename, frame.f_lineno)
                )
                if way is new:
                    ways.insert(0, way)
                    del ways[_MAX_WAYS:]
                return line, True
            if code.co_name == _MODULE_CALL:
                name = "forward"
            elif self._is_name(code):
                name = code.co_name
            libraries.append((depth, code))
            frame, depth = frame.f_back, depth + 1
        return UserLine(name, self._last.filename, self._last.line), False

    def _is_users(self, filename: str) -> bool:
        is_user = self._is_user.get(filename)
        if is_user is None:
            is_user = self._is_user[filename] = is_user_file(filename)
        return is_user

    def _is_name(self, code: CodeType) -> bool:
        """Return whether users would recognise a call by the name of a library's function."""
        name = code.co_name
        return name[0] not in "_<" and name not in _INNER and not code.co_filename.startswith(self._hooks)
