"""What travels between a launcher and its workers, and between ranks.

to a worker     assignment: the call and what one worker has to do; payload: values in memory files, pickled
                modules: torch modules in the arguments, by argument path; pickle_errors: what can't be pickled
from a worker   channel: events on a pipe, in Python's own types (plain); board: progress in shared memory
                outbox: return value and weights; originals: which weights have not changed
                exceptions: an exception with its causes, as text and as object
between ranks   stop_agreement: the step at which all ranks stop; sealing: pickles under the key of the job
between nodes   schema: dataclasses as JSON, never unpickled
descriptors     file descriptors: which children must not keep, and waiting for any
"""
