"""Prepared data loaders: ``sharding`` decides which samples a rank gets, ``loader`` and ``dispatcher`` bring them,
``loading`` makes a prepared loader out of a person's, ``loader_states`` says where in its epoch one is.
"""
