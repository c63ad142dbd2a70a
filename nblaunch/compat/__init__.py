"""Module names of Hugging Face Accelerate.

names.py         the table: module -> public name -> module of nblaunch that defines it
finder.py        the import hook that serves it: ``import nblaunch.utils`` creates a module whose names are imported at
                 their first use
delegated.py     the names that an installed Accelerate serves
unsupported.py   the names that nblaunch does not have, with what to use instead
systems.py       systems that can run no job, and what they get instead
"""
