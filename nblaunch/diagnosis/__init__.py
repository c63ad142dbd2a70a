"""What went wrong in a job, and how it is reported: evidence, root cause, and the exception that the kernel raises.

while it runs   inspection (memory, progress) -> watchdog; stackdump -> hang (who waits for whom) -> stacks
afterwards      report -> root_cause + memory -> failure -> reraise -> rendering
"""
