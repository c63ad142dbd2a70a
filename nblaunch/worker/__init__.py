"""What happens in a worker process before, around and after the user's function.

bootstrap.py         the life of a worker: set-up, the function, results, end
process_control.py   POSIX session, end with the parent, signals and interrupts, stacks on request
optimizer_steps.py   steps of optimizers, which an interrupt leaves whole
inheritance/         what a worker inherits from the kernel: the inventory, and what is made right
libraries.py         hooks on libraries: progress, plain text, Trainers that were made in the notebook
collective_hooks.py  hooks on torch's collectives
collective_recorder.py  records them, with the user's lines
saves.py             hooks on functions that save
span_hooks.py        times of saves and garbage collections
file_writes.py       files that several ranks may save at once
output.py            output to the log file, displays to the launcher
open_files.py        files that the function leaves open
delivery.py          the return value, then trained weights and states of optimizers
failure.py           the user's exception, made ready to travel
debugger.py          answers the kernel about the frames of this worker; pdb
frames.py            where the user's code stands, and its variables
script.py            a Python script as the function
"""
