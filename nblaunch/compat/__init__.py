"""Public names that are imported on first use: nblaunch's own, and those in Hugging Face Accelerate's modules.

names.py    tables: the module that defines each name, the names that Accelerate serves if it is installed, and the
            replacements for names that nblaunch does not have
finder.py   serves the names: ``import nblaunch.utils`` creates a module whose names are imported on first use
"""
