"""What a worker inherits from the kernel, and what becomes of it.

inventory.py      the table: every kind of state, and its treatment under each start method
random_states.py  gives workers the kernel's random states, and moves the kernel's on
files.py          files that the kernel has open; positions.py and written_files.py are its parts
kernel_only.py    undoes in a worker what belongs to the kernel alone: input(), exit handlers, open figures
"""
