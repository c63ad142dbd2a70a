"""Settings of a launch: the table of all settings, configuration files, and the steps from settings to a launch.

    command line ─┐
    file ─────────┼──> Resolved: a value for each setting, with its source ──> LaunchSpec
    defaults ─────┘

settings.py     the table of settings, which defines the options of ``nblaunch launch``; code to merge and check values
files.py        reads and writes settings as YAML
accelerate_variables.py    variables that pass settings to Accelerate's own Accelerator
launching.py    turns the result into a :class:`~nblaunch.spec.LaunchSpec`

Nothing here reads devices or starts processes.
"""
