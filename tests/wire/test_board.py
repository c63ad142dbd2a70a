"""The board: one process reads what another has written."""

from __future__ import annotations

import math
import os
import time

from nblaunch.events import WorkerState
from nblaunch.wire.board import MAX_BINS, Board, LossCurve, private_slot


def test_slots_are_readable_in_other_processes() -> None:
    board = Board.create(3)
    begun_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        slot = board.slot(1)
        slot.start_loop(total=10, epoch=2, state=WorkerState.TRAINING, step=4, number=3, num_epochs=6)
        slot.end_training(4, 10, 2)
        slot.advance(32)
        slot.set_loss(0.25)
        slot.set_losses(LossCurve(3, 2, (0.5, 0.25)))
        slot.note_interrupt()
        slot.built_bytes += 1 << 40
        slot.set_device_memory(2, 3, 5)
        slot.add_busy_time(0.5)
        slot.add_busy_time(0.25)
        os._exit(0)
    os.waitpid(pid, 0)
    zero, one, two = board.read()
    board.close()
    assert (zero.step, zero.total, zero.loss, zero.state) == (0, -1, None, WorkerState.STARTING)
    assert (one.step, one.total, one.epoch, one.samples) == (5, 10, 2, 32)
    assert (one.loss, one.interrupts, one.built_bytes) == (0.25, 1, 1 << 40)
    assert (one.device_bytes, one.device_peak_bytes, one.device_limit_bytes) == (2, 3, 5)
    assert (one.loop, one.num_epochs, one.trained) == (3, 6, (4, 10, 2))
    assert one.losses == LossCurve(3, 2, (0.5, 0.25))
    assert (zero.losses, two.losses) == (LossCurve(), LossCurve())
    assert (one.busy_time_s, one.busy_steps) == (0.75, 2)
    assert (one.state, two.step) == (WorkerState.TRAINING, 0)
    assert begun_s <= one.step_time_s <= time.monotonic()  # all processes have the same clock


def test_a_fresh_process_maps_it_by_its_descriptor() -> None:
    board = Board.create(2)
    other = Board(2, os.dup(board.fd))
    other.slot(1).advance()
    assert board.read()[1].step == 1
    other.close()
    board.close()


def test_closing_a_referenced_board_leaves_no_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))
    board = Board.create(8)
    held = [board, board.slot(3)]
    board.read()
    board.close()
    assert set(os.listdir("/proc/self/fd")) == before
    assert held


def test_a_process_without_launcher_writes_the_same_way() -> None:
    slot = private_slot()
    slot.advance(3)
    assert slot.read(0).samples == 3


def test_a_curve_that_does_not_change_is_read_once() -> None:
    slot = private_slot()
    slot.set_losses(LossCurve(MAX_BINS, 1, tuple(map(float, range(MAX_BINS)))))
    assert slot.read(0).losses is slot.read(0).losses
    slot.set_losses(LossCurve(2, 1, (1.0, math.nan)))
    assert str(slot.read(0).losses.means) == "(1.0, nan)"


def test_a_board_can_close_while_a_traceback_uses_it() -> None:
    before = set(os.listdir("/proc/self/fd"))
    board = Board.create(2)
    board.slot(1)._ints[0] = 99  # a process has overwritten it
    try:
        board.read()
    except ValueError:
        board.close()
    assert board.fd == -1
    assert set(os.listdir("/proc/self/fd")) == before
