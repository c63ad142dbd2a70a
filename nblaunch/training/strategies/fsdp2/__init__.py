"""Models sharded over ranks with torch's ``fully_shard``.

``strategy`` is what ``prepare`` uses; ``units`` says which modules are gathered as one, ``weights`` where the parts
come from, ``files`` how they are saved, and ``watch`` is the only one that looks inside torch.
"""
