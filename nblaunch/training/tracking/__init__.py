"""Metrics of training.

hub.py        from ``log`` to the trackers and to the launcher
trackers.py   trackers of experiments
progress.py   what a rank reports on the progress board: loops, loss, memory, own time
"""
