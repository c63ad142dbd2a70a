"""How far a job is, in one line: for terminals, where it is redrawn in place, and for logs, where it is repeated."""

from __future__ import annotations

from nblaunch.dashboard import wording
from nblaunch.dashboard.table import headline, tabulate
from nblaunch.dashboard.view import JobView, RankView
from nblaunch.dashboard.wording import percent, rate, whole_duration
from nblaunch.events import WorkerState

_MIN_BAR_WIDTH, _MAX_BAR_WIDTH = 5, 30


def live_line(view: JobView, width: int, *, has_blocks: bool = True) -> str:
    """All ranks in one line as tqdm would draw it, told by the one that is furthest behind.

        train:  45%|█████████▏          | 450/1,000 [0:45<0:55, 10.0 steps/s, loss 0.0321, 3 training, 1 waiting]

    Args:
        view: what to tell.
        width: columns that it may take.
        has_blocks: whether the bar may be drawn with block characters; else ``#``.
    """
    behind = _furthest_behind(view)
    name = view.function_name or "job"
    parts = [_times(view)]
    parts += [f"{rate(behind.steps_per_s)} steps/s"] if behind.steps_per_s else []
    parts += [f"loss {wording.loss(behind.loss)}"] if behind.loss is not None else []
    words = f"[{', '.join([*parts, _states(view)])}]"
    if behind.fraction is None:
        # Without a length there is nothing to draw; the bar of a worker says more than nothing.
        done = behind.status_line or (f"step {behind.step:,}" if behind.step else "")
        return f"{name}: {words} {done}".rstrip()
    epoch = f" epoch {behind.epoch}" if behind.epoch else ""
    before = f"{name}{epoch}: {percent(behind.fraction):>4}"
    after = f"{behind.step:,}/{behind.total:,} {words}"
    room = min(width - len(before) - len(after) - 3, _MAX_BAR_WIDTH)
    bar = f"|{_bar(behind.fraction, room, has_blocks=has_blocks)}|" if room >= _MIN_BAR_WIDTH else ""
    return f"{before}{bar} {after}"


def _times(view: JobView) -> str:
    left_s = view.left_s
    return whole_duration(int(view.elapsed_s)) + ("" if left_s is None else f"<{whole_duration(left_s)}")


def _states(view: JobView) -> str:
    """``4 training``, ``3 training, 1 waiting``; a single process: its state."""
    if len(view.ranks) == 1:
        return view.ranks[0].state.name.lower()
    states: dict[WorkerState, int] = {}
    for rank in view.ranks:
        states[rank.state] = states.get(rank.state, 0) + 1
    return ", ".join(f"{number} {state.name.lower()}" for state, number in sorted(states.items()))


def _bar(fraction: float, width: int, *, has_blocks: bool) -> str:
    if not has_blocks:
        return ("#" * int(fraction * width)).ljust(width)
    eighths = int(fraction * width * 8)
    part = "▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else ""
    return ("█" * (eighths // 8) + part).ljust(width)


def _furthest_behind(view: JobView) -> RankView:
    live = [rank for rank in view.ranks if not rank.state.is_final] or list(view.ranks)
    return min(live, key=lambda rank: (rank.epoch, rank.step, rank.rank))


def progress_line(view: JobView) -> str:
    """All ranks in one line, told by the one that is furthest behind."""
    behind = _furthest_behind(view)
    table = tabulate(JobView(num_processes=1, ranks=(behind,)))
    row = table.rows[0]
    parts = [f"{name} {cell}" for name, cell in zip(table.columns, row.cells, strict=True) if cell]
    about = f"rank {behind.rank} " if len(view.ranks) > 1 else ""
    return f"{view.function_name or 'job'}: {headline(view)}; {about}{', '.join([row.state_text, *parts])}"
