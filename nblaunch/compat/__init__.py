"""Public names, imported at their first use: nblaunch's own, and the names in Hugging Face Accelerate's modules.

names.py    the tables: which module of nblaunch defines a name, which names an installed Accelerate serves, and what to
            use instead of those that nblaunch does not have
finder.py   what serves them: ``import nblaunch.utils`` creates a module whose names are imported at their first use
"""
