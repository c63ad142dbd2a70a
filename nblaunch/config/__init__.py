"""The settings of a launch: their names, where they come from, and the files that keep them.

    command line ─┐
    file ─────────┼──> Resolved: a value for each setting, and where it came from ──> LaunchSpec
    defaults ─────┘

Owns the one table of settings, from which options, files, comments and checks are made. Never looks at devices, never
starts anything.
"""
