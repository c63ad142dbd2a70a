"""Explains failures with evidence: hangs while a job is running, and the root cause after it has failed.

While a job runs, the launcher calls ``hang.HangDetector`` a few times a second to check the workers' progress, and
``memory.MemoryRecord`` to read the host's memory. After an attempt, the supervisor's ``report.AttemptReport`` holds the
facts.

hang.py                 whether the job hangs, and which rank is waiting for which
disagreements.py        calls that must be equal on all ranks but are not; which ranks are at fault
stalls.py               ranks that are waiting although their calls agree: which rank is missing, alone or past the loop
transfers.py            ranks that are waiting in send or recv: the missing half, or ranks that wait for each other
backward_passes.py      ranks that are waiting in a backward pass: how another rank's step differs
source_blocks.py        loops and conditions around a line of user code
long_waits.py           which ranks are waiting for a thread that their process does not have, or for a queue's reader
stacks.py               the ranks' Python stacks, collected when one makes no progress
report.py               the facts about an attempt
root_cause.py           the earliest failure that no other failure explains, and its meaning
memory.py               the host's memory; evidence that it ran out
failure.py              which exception the kernel raises, with its evidence
silent_errors.py        mistakes that raise no exception: compares the observations of all ranks
slow_steps.py           why steps are slow: judges how ranks spend their time
exceptions.py           rebuilds the worker's exception in the kernel with its frames and variables; chooses frames
                        for IPython
"""
