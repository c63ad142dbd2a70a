"""Prepared data loaders: ``sharding`` decides which samples a rank gets, ``own_share`` and ``dispatcher`` bring them.

``samplers`` has the order that is shared, ``loader`` what all prepared loaders do, ``loading`` makes one out of a
person's, ``skipping`` one that begins further on; ``loader_states`` says where in its epoch one is.
"""
