"""Checks for errors of a training loop that raise nothing: the training goes on, and its result is wrong.

    watch.py       when the checks look: at the first steps, and now and then later
    check.py       what a check is
    gradients.py   gradients that are never cleared, never computed, or clipped too late
    schedules.py   learning rates of 0, schedulers that advance between steps
    replicas.py    ranks whose gradients, weights or statistics differ
    data.py        loaders that were not prepared
    noise.py      loaders whose processes draw equal random numbers
    hints.py       what may be meant, for those who ask
    scaling.py     a gradient scaler that has collapsed

A check sends an :class:`~nblaunch.events.Observation`. The launcher compares the observations of all ranks, and says
what is wrong once, with the ranks, the line and what to do (:mod:`nblaunch.diagnosis.silent_errors`). Ranks do not
communicate for a check, and nothing is added to the steps between its looks.
"""
