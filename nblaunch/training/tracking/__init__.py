"""Metrics that the training function logs.

hub.py        from ``log`` to the trackers and to the launcher
trackers.py   trackers of experiments
services.py   trackers of Comet, SwanLab and trackio
"""
