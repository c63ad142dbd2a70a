"""What a training function calls: the :class:`Accelerator` and its relatives.

It meets the launcher only in ``nblaunch.context``, so that the same function runs in a notebook, under ``torchrun``
and in plain ``python``.
"""
