"""Pickles in memory files, and extensions of pickle.

payload.py          pickled values in memory files; the notebook's own objects by value or by name
memory_file.py      writes and reads parts of memory files
blocks.py           tensors and arrays that share memory, and share it again after reading
hidden_classes.py   classes that claim a module that does not contain them
process_bound.py    objects of one process that a fresh process creates again: compiled functions, executors, loaders
pickle_errors.py    which part of a value can't be pickled
"""
