"""The process from which ranks are forked imports this module last, so that their garbage collector skips imported
objects. They have all backends' modules, which each would otherwise import to choose one.
"""

import gc

from nblaunch import backends

backends.discover()
gc.freeze()
