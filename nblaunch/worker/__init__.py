"""The worker process: what it does before, during and after the user's function.

bootstrap.py         the life of a worker: set-up, the function, results, end
process_control.py   POSIX session, death of the parent, signals and interrupts, stacks on request
optimizer_steps.py   counts optimizer steps, which interrupts never split
inheritance/         the state that a worker inherits from the kernel, and how each kind is handled
collective_hooks.py  hooks on torch's collectives
collective_recorder.py  records collectives, with the user's lines
user_lines.py        finds the user's line that called a hook
import_times.py      slow imports, which a note explains
file_writes.py       saves, files that several ranks may write at the same time, and files that the function leaves open
output.py            sends output to the log file and displays to the launcher; makes bars and consoles write plain
                     text; input() and getpass() of a script's rank 0, whose prompts the launcher writes
delivery.py          sends the return value, then trained weights and optimizer states
failure.py           prepares the user's exception for the launcher
debugger.py          answers the kernel's questions about this worker's frames; pdb
frames.py            the user's current line and variables; where printed stacks begin
script.py            a Python script as the function
"""
