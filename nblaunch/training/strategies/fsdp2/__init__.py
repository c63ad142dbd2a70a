"""Models sharded over ranks with torch's ``fully_shard``.

``plugin`` has the user's settings, ``strategy`` is what ``prepare`` uses. ``units`` chooses the modules that are
gathered as one, ``weights`` fills their shards, ``checkpoint`` saves them.
"""
