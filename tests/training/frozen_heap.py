"""The process from which ranks are forked imports this module last, so that their garbage collector skips imported
objects.
"""

import gc

gc.freeze()
