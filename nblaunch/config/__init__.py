"""Settings of a launch: the table of all settings, configuration files, and the way from settings to a launch.

    command line ─┐
    file ─────────┼──> Resolved: a value for each setting, with its source ──> LaunchSpec
    defaults ─────┘

settings.py     the table of settings, from which ``nblaunch launch`` makes its options
files.py        read and write settings as YAML
resolving.py    merge the layers and check them
launching.py    turn the result into a :class:`~nblaunch.spec.LaunchSpec`

Nothing here reads devices or starts processes.
"""
