"""Metrics of training: trackers of experiments, and what the dashboard shows of progress."""
