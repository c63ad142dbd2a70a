"""Checks for errors in a training loop that raise no exception: training continues, but its result is wrong.

    watch.py       runs the checks in the first steps, and in a few later ones
    check.py       the interface of a check
    gradients.py   gradients that are never cleared, never computed, overflow in every step, or are clipped too late
                   or while they still contain fp16's scale
    schedules.py   learning rates of 0, schedulers that advance between steps
    replicas.py    ranks whose gradients, weights or statistics differ
    data.py        loaders that were not prepared, or whose processes draw the same random numbers
    hints.py       behaviour that is often a mistake but may be intended; shown on request

A check sends an :class:`~nblaunch.events.Observation`. The launcher compares the observations of all ranks, and reports
each error once, with the ranks, the line and advice (:mod:`nblaunch.diagnosis.silent_errors`). Ranks do not
communicate for a check, and steps without checks take no extra time.
"""
