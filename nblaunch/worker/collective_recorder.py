"""The state that is needed to record this rank's collectives: its groups, the forms of tensors, and the lines of user
code that make the calls.

``collective_hooks.py`` calls this module; ``wire/collective_calls.py`` defines the format. Nothing here waits for or
communicates with other ranks.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

from nblaunch.wire.collective_calls import NEW_GROUP, UNCOUNTED, CallWriter, Group, WrittenSite
from nblaunch.worker.user_lines import Key, UserLine, UserLines

_MAX_KNOWN = 1024
"""Maximum number of tensor forms that are kept."""

_HOOKS = tuple(f"{Path(__file__).parents[1] / folder}/" for folder in ("worker", "progress"))
"""Folders that contain nblaunch's hooks into libraries."""

_NUM_OWN_FRAMES = 4
"""Number of frames that a collective's hook adds: the finder, a method of the recorder, two functions of the hook."""

Form = tuple[int, str, int, tuple[int, int, int, int]]
"""Number of elements, type, number of dimensions, and the first four dimensions of a tensor."""

NO_FORM: Form = (UNCOUNTED, "", 0, (0, 0, 0, 0))


class OpenGroup:
    """A process group that includes this process.

    Attributes:
        handle: number that identifies the group in a site.
        ranks: the members, as ranks of the job.
        number: how many collectives this process has called in the group.
        chain: digest of these calls.
        serial: number of the last of these calls, counting the calls in all groups.
    """

    __slots__ = ("chain", "handle", "number", "ranks", "reference", "serial")

    def __init__(self, handle: int, ranks: tuple[int, ...], reference: weakref.ref[Any]) -> None:
        self.handle = handle
        self.ranks = ranks
        self.reference = reference
        self.number = self.chain = self.serial = 0


class CollectiveRecorder:
    """The recorder of this process.

    Args:
        writer: writes to this process's region.

    Attributes:
        is_active: whether this process has used a process group.
        last_group: the group that :meth:`group_of` returned last.
    """

    def __init__(self, writer: CallWriter) -> None:
        self._writer = writer
        self._groups: dict[int, OpenGroup] = {}
        self.is_active = False
        self._seen_groups: dict[tuple[int, ...], int] = {}
        self._forms: dict[tuple[Any, Any], Form] = {}
        self._codes: dict[str, int] = {}
        self._num_new_groups = 0
        self._lines = UserLines(_HOOKS)
        self._finders: dict[str, Callable[[Key], WrittenSite]] = {}
        self.last_group: OpenGroup | None = None
        self.last_kind = ""
        """Kind of the last recorded collective."""

    def num_collectives(self) -> int:
        """Return how many collectives this process has called, in all of its groups."""
        return sum(group.number for group in self._groups.values())

    def record(
        self,
        pg: Any,
        kind: str,
        form: Form = NO_FORM,
        num_tensors: int = 1,
        size: int = UNCOUNTED,
        reduction: str = "",
        root: int = -1,
        detail: str = "",
    ) -> None:
        """Record a collective if torch lists its group.

        Args:
            pg: the process group.
            kind: kind of the collective.
            form: form of the first tensor.
            num_tensors: number of tensors of this form, if known.
            size: number of elements, which must be the same on all ranks.
            reduction: name of the reduction; empty if there is none.
            root: rank of the root in the group; -1 if there is none.
            detail: any other property that must be the same on all ranks.
        """
        group = self.group_of(pg)
        if group is None:
            return
        _, dtype, num_dimensions, shape = form
        if root >= 0:
            root = group.ranks[root]
        code = self._code
        self.last_kind = kind
        group.number += 1
        group.chain = hash((group.chain, code(kind), size, code(dtype), code(reduction), root, code(detail)))
        properties = group.handle, dtype, num_tensors, num_dimensions, reduction, root, detail
        site = self._finder(kind)(properties)
        group.serial = self._writer.put(site, group.number, group.chain, size, shape)

    def take_back(self, group: OpenGroup, before: tuple[int, int]) -> None:
        """Remove a group's last call, which torch rejected. The next call reuses its number.

        Args:
            group: the group.
            before: the group's number and chain before the call.
        """
        if group.number > before[0]:
            group.number, group.chain = before
            self._writer.withdraw(group.serial)

    def note(
        self, kind: str, number: int, group: OpenGroup | None, form: Form, root: int, detail: str = ""
    ) -> None:
        """Record a call that takes a tensor but is not a collective.

        Args:
            kind: kind of the call.
            number: number of calls of this kind so far.
            group: group of the call.
            form: form of its tensor.
            root: the group rank of the process at the other end; -1 if it may be any process.
            detail: any other property of the call.
        """
        _, dtype, num_dimensions, shape = form
        handle = -1
        if group is not None:
            handle = group.handle
            root = group.ranks[root] if root >= 0 else root
        site = self._finder(kind)((handle, dtype, 1, num_dimensions, "", root, detail))
        self._writer.put(site, number, shape=shape)

    def note_new_group(self, ranks: tuple[int, ...]) -> None:
        """Record that this process has begun to create a group.

        Args:
            ranks: the members' ranks in the job.
        """
        self._num_new_groups += 1
        handle = self._writer.add_group(Group(ranks, self._seen_groups.get(ranks, -1) + 1))
        site = self._finder(NEW_GROUP)((handle, "", 0, 0, "", -1, ""))
        self._writer.put(site, self._num_new_groups)

    def _finder(self, kind: str) -> Callable[[Key], WrittenSite]:
        find = self._finders.get(kind)
        if find is None:
            find = self._finders[kind] = self._lines.finder(partial(_site, kind), _NUM_OWN_FRAMES)
        return find

    def notes_of(
        self, kind: str, num_frames: int, compared: int
    ) -> tuple[Callable[[Key], WrittenSite], Callable[[WrittenSite, float], None]]:
        """Return two functions that record calls of one kind; such calls have no tensors and happen at every step.

        The first takes the group's handle (-1 = no group) and a detail, and returns the site of a call. The second
        records the call, with its value.

        Args:
            kind: kind of the calls.
            num_frames: number of frames that the hook adds.
            compared: as for :meth:`UserLines.quick_finder`.
        """

        def site_of(line: UserLine, key: Key) -> WrittenSite:
            handle, detail = key
            return _site(kind, line, (handle, "", 1, 0, "", -1, detail))

        return self._lines.quick_finder(site_of, 1 + num_frames, compared), self._writer.notes()

    def note_splits(self, pg: Any, sent: Any, received: Any) -> None:
        """Store the parts of the ``all_to_all`` that is recorded next.

        Args:
            pg: its process group.
            sent: number of rows for each rank of the group, or a tensor that is sent in equal parts.
            received: number of rows from each rank of the group, or a tensor that is received in equal parts.
        """
        group = self.group_of(pg)
        if group is not None:
            size = len(group.ranks)
            parts = (
                rows if isinstance(rows, (list, tuple)) else [len(rows) // size] * size
                for rows in (sent, received)
            )
            self._writer.put_splits(group.number + 1, *parts)

    def _code(self, text: str) -> int:
        """Return a number that identifies a string in all processes."""
        code = self._codes.get(text)
        if code is None:
            if len(self._codes) >= _MAX_KNOWN:
                self._codes.clear()
            code = self._codes[text] = crc32(text.encode())
        return code

    def group_of(self, pg: Any) -> OpenGroup | None:
        """Return the record of a process group; None if torch does not list the group."""
        group = self.last_group
        if group is not None and group.reference() is pg:  # most jobs have one group
            return group
        self.last_group = group = self._groups.get(id(pg))
        if group is not None and group.reference() is pg:
            return group
        c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
        # Add all new groups in order of creation, which is the same on all of their ranks.
        for listed, members in list(c10d._world.pg_group_ranks.items()):
            if isinstance(listed, int):
                continue  # a placeholder: this rank is not in the group
            group = self._groups.get(id(listed))
            if group is None or group.reference() is not listed:
                self._groups[id(listed)] = self._opened(listed, members, listed is c10d.GroupMember.WORLD)
        return self._groups.get(id(pg))

    def _opened(self, pg: Any, members: dict[int, int], is_default: bool) -> OpenGroup:
        ranks = tuple(sorted(members, key=members.__getitem__))
        number = self._seen_groups[ranks] = self._seen_groups.get(ranks, -1) + 1
        handle = self._writer.add_group(Group(ranks, number, is_default))
        self.is_active = True
        return OpenGroup(handle, ranks, weakref.ref(pg, self._forgetter(id(pg))))

    def _forgetter(self, key: int) -> Callable[[Any], None]:
        def forget(reference: Any) -> None:
            group = self._groups.get(key)
            if group is not None and group.reference is reference:
                del self._groups[key]
                self.is_active = bool(self._groups)

        return forget

    def form_of(self, tensor: Any) -> Form:
        """Return the form of a tensor.

        Raises:
            ValueError: the tensor has no data, so no collective begins.
        """
        if tensor.is_meta:
            raise ValueError("a tensor without data can't be exchanged")
        key = tensor.shape, tensor.dtype
        form = self._forms.get(key)
        if form is None:
            if len(self._forms) >= _MAX_KNOWN:
                self._forms.clear()
            shape = tuple(int(size) for size in key[0])
            first, second, third, fourth = (*shape, 0, 0, 0, 0)[:4]
            dtype = str(key[1]).removeprefix("torch.")
            form = int(tensor.numel()), dtype, len(shape), (first, second, third, fourth)
            self._forms[key] = form
        return form


def _site(kind: str, line: UserLine, properties: Key) -> WrittenSite:
    *others, detail = properties
    return WrittenSite(kind, *others, line.name, line.filename, line.line, detail)
