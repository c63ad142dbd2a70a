"""Prepared data loaders: ``sharding`` decides which samples a rank gets, ``loader`` and ``dispatcher`` bring them.

``prepare`` makes a prepared loader out of the user's, ``resuming`` one that begins further on in its epoch.
"""
