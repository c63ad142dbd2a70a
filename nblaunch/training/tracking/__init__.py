"""Metrics that the training function logs.

hub.py        from ``log`` to the trackers and to the launcher
trackers.py   experiment trackers
"""
