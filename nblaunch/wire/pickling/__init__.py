"""Pickles in memory files, and what pickle does not do by itself.

payload.py          values in memory files, pickled; objects of the notebook itself by value or by name
memory_file.py      parts of memory files, written and read
blocks.py           tensors and arrays that share memory, which they do again when they are read
hidden_classes.py   classes that claim a module in which they are not to be found
process_bound.py    objects of one process, which a fresh one makes anew: compiled functions, executors, loaders
pickle_errors.py    which part of a value can't be pickled
"""
