"""What went wrong in a job, with evidence: hangs while it runs, the root cause after it has failed.

While a job runs, the launcher has ``hang.HangDetector`` check the workers' progress a few times a second, and
``memory.MemoryRecord`` read the memory of the host. After an attempt, the supervisor's ``report.AttemptReport`` holds
the facts.

hang.py                 whether the job hangs, and which rank waits for which
disagreements.py        calls in which ranks differ that must be the same, and who is at fault
standstill.py           ranks that wait though no call differs: who is missing, came alone, or left a loop
source_blocks.py        loops and conditions around a line of the user's
collective_failures.py  failures that one of these explains
deadlock.py             which ranks wait for a thread that their process does not have
full_queues.py          which ranks wait for room in a queue that only the kernel could read
stacks.py               the ranks' Python stacks, collected when one makes no progress
report.py               the facts of an attempt
root_cause.py           the earliest failure that no other failure explains; what it means
memory.py               memory of the host; the evidence where it ran out
failure.py              which exception the kernel raises, with its evidence
silent_errors.py        errors that raise nothing: what ranks have seen, compared
exceptions.py           the worker's exception, made again in the kernel with its frames; which of them IPython shows
"""
