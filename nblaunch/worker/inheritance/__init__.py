"""What a worker inherits from the kernel, and what becomes of it.

inventory.py      the table: every kind of state, and its treatment under each start method
modules.py        the user's modules that a fresh process would not find
settings.py       settings of Python, torch and other libraries, for workers that are not forked from the kernel
message_settings.py  warning filters and logger settings, for the same workers
child_processes.py  lets workers see whether programs run that the kernel has started
connections.py    opens connections of HTTP anew; leaves others to other machines to the first rank
connected_engines.py  keeps forks away from a connection to Ray; fresh workers get the kernel's cluster
random_states.py  gives workers the kernel's random states, and moves the kernel's on
files.py          files that the kernel has open; positions.py and written_files.py are its parts
unfinished_files.py  refuses writes to archives and other files of which the kernel holds a part in memory
pools.py          makes pools of the standard library and of joblib anew when a worker uses them
queues.py         waits for readers of what the function has put into queues between processes
studies.py        reports what is written to copies of optuna's studies
loaders.py        has data loaders read afresh, and refuses iterators that the kernel has begun
kernel_threads.py restarts listeners of logs, and reports joins of threads that are not in a worker
kernel_only.py    undoes in a worker what belongs to the kernel alone: input(), exit handlers, open figures
"""
