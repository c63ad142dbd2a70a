"""Settings of a launch: the table of all settings, configuration files, and the way from settings to a launch.

    command line ─┐
    file ─────────┼──> Resolved: a value for each setting, with its source ──> LaunchSpec
    defaults ─────┘

``settings`` is the table, with a kind of value (``kinds``) for each row. ``nblaunch launch`` makes its options from it,
``files`` reads and writes it as YAML, ``resolving`` merges the layers and checks them, ``launching`` turns the result
into a :class:`~nblaunch.spec.LaunchSpec`. Nothing here reads devices or starts processes.
"""
