"""The state that a worker inherits from the kernel, and what happens to it.

The tables in ``docs/what-a-worker-inherits.md`` list every kind of state and say what a worker gets under
each start method. Each row has a contract test.

A forked worker has copies of the kernel's objects. Where a copy can't work, ``packages.before_first_use`` repairs or
reports it when the function first uses it:

kernel_only.py    removes the kernel's input(), exit handlers, open figures and profiler; lets workers query programs
                  that the kernel has started; adapts Trainers that a cell has created
threads.py        libraries with threads of their own, which fail in a fork: grpc, polars, TensorFlow; restarts log
                  listeners, and reports joins of threads that the fork left behind
pools.py          recreates pools of the standard library and joblib, and restarts data loaders
tracker_runs.py   connects workers to the kernel's runs of MLflow, wandb, trackio and TensorBoard; reports what Comet's
                  and optuna's would lose
connections.py    reconnects HTTP clients; leaves connections to databases and other machines to the first rank; reports
                  reads by several ranks from one pipe to a child of the kernel; finds the kernel's Ray cluster
files.py          files that the kernel has open, with positions.py
unfinished_files.py  rejects writes to archives and other files that the kernel keeps partly in memory

A fresh process gets the call, and repeats the changes that cells have made (``SentChange``) once it has imported the
changed module:

sent_changes.py   one change to a module
settings.py       settings of Python, torch and other libraries
message_settings.py  warning filters and logger settings
cell_assignments.py  attributes of modules that cells have changed; with
                  cell_text.py       reads from the text of a cell what the cell may have changed
                  plain_values.py    values that can be copied, and how a worker takes them over
registrations.py  what cells have registered in libraries and modules
fresh_processes.py  modules that a fresh process would not find, and variables that only strings name

Every worker:

random_states.py  gets the kernel's random states, which then advance in the kernel
lost_changes.py   names variables of the notebook that the function fills or assigns, and new modules in the notebook's
                  objects; with
                  result_variables.py  finds variables and attributes in which a function may keep results
                  watched_values.py    detects results in containers, arrays, tables, tensors, attributes and
                                       trained objects of libraries
queues.py         waits until others have read the values that the function put into multiprocessing queues; in the
                  launcher, saves the values that no process reads
called_code.py    the functions and classes that a call reaches, and what they name and assign
"""
