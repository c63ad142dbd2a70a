"""The cost of displaying many ranks: simulated ranks with loss curves and 20 events per second each, shown with widgets
in a kernel.

    python -m tests.benchmarks many_ranks [--num_ranks 512] [--seconds 20]

Half of the events are lines, half are redrawn progress bars; the board is read ten times a second. No worker is
started, so only the dashboards use the measured share of a core. In the middle, one rank's steps become four times as
long; the rows must name it within four seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from tests.benchmarks.bench import CELL_TIMEOUT_S, Row, at_most, kernel, sent_s
from tests.dashboard.feed import FEED
from tests.dashboard.front_end import size

NUM_RANKS, SECONDS = 512, 20.0
MAX_PERCENT, MAX_MB, MAX_KB_S, MAX_NAMED_S = 15, 150, 100, 4
SLOW_RANK = 300

_DRIVE = """
import json, resource
def drive(num_ranks, seconds, slow_rank):
    before_kb, spent_s, slow_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0.0, None
    boards, tick, start_s = dashboard.choose("widgets"), threading.Event(), time.monotonic()
    emit(boards, begin(num_ranks))
    steps, last_s, count = [0.0] * num_ranks, 0.0, 0
    while (now_s := time.monotonic() - start_s) < seconds:
        if slow_s is None and now_s >= seconds / 2:
            slow_s = time.time()
        for rank in range(num_ranks):
            steps[rank] += (now_s - last_s) * (5 if slow_s and rank == slow_rank else 20)
        last_s, count = now_s, count + 1
        ranks, bar = range(num_ranks), f"epoch 1: 5%|#| {count}/999 [00:01<00:02]"
        events = [LogLines(rank, time.time(), (f"step {count} of rank {rank}",)) for rank in ranks]
        events += [StatusLine(rank, time.time(), bar) for rank in ranks]
        readings = [SlotReading(rank, WorkerState.TRAINING, int(step), 99_999, 1, int(step) * 32, 0.5,
                                step_time_s=now_s + 5, num_epochs=4, loop=1, steps_done=int(step),
                                losses=LossCurve(count, 4, tuple(1 / (1 + bin) for bin in range(count // 4))))
                    for rank, step in enumerate(steps)]
        begun_s = time.thread_time()
        emit(boards, events)
        look(boards, readings)
        spent_s += time.thread_time() - begun_s
        tick.wait(max(start_s + 0.1 * count - time.monotonic(), 0))
    after_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    emit(boards, end(num_ranks))
    close(boards)
    return json.dumps({"percent": 100 * spent_s / seconds, "mb": (after_kb - before_kb) / 1000, "slow_s": slow_s,
                       "events_s": 2 * num_ranks * count / seconds})
"""


def measure(num_ranks: int = NUM_RANKS, seconds: float = SECONDS) -> Iterator[Row]:
    with kernel(FEED + _DRIVE) as started:
        cell = started.submit(f"drive({num_ranks}, {seconds}, {SLOW_RANK})", allow_stdin=True).wait(
            CELL_TIMEOUT_S
        )
        assert cell.error is None, cell.describe()
        found = json.loads(str(cell.result).strip("'"))
        kinds = ("display_data", "update_display_data", "comm_open", "comm_msg", "stream")
        sent = [message for message in cell.messages if message["msg_type"] in kinds]
    what = f"{num_ranks} ranks, {found['events_s']:,.0f} events a second"
    yield at_most(f"{what}: share of a core", found["percent"], MAX_PERCENT, "%", 1)
    yield at_most(f"{what}: memory", found["mb"], MAX_MB, " MB", 0)
    live = [message for message in sent if message["msg_type"] == "comm_msg"]
    yield at_most(f"{what}: kB a second", sum(map(size, live)) / 1000 / seconds, MAX_KB_S, digits=1)
    yield Row(f"{what}: messages a second", f"{len(live) / seconds:.1f}")
    named_s = [sent_s(message) for message in live if f"rank {SLOW_RANK}: " in json.dumps(message["content"])]
    delay_s = min(named_s, default=float("inf")) - found["slow_s"]
    yield at_most(f"{what}: seconds until the slow rank is named", delay_s, MAX_NAMED_S, " s", 1)
