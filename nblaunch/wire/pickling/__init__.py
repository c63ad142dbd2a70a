"""Pickles in memory files, and extensions of pickle.

payload.py          pickled values in memory files; the notebook's own objects by value or by name
memory_file.py      writes and reads parts of memory files; arrays that share memory share it again after reading
reductions.py       pickles what ``pickle`` alone can't: compiled functions, executors, loaders, hidden classes
pickle_errors.py    names the parts of a value that can't be pickled
"""
