"""Readings of the host that a job runs on: what there is, what is used, what refuses and why."""
