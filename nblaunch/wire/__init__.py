"""What travels between a launcher and its workers, and between ranks.

To a worker:

    assignment.py       the call, and what one worker has to do
    payload.py          values in memory files, pickled
    modules.py          torch modules in the arguments, by argument path; shards of their weights
    pickle_errors.py    what can't be pickled

From a worker:

    channel.py          events on a pipe
    plain.py            and values in them, in Python's own types
    board.py            progress in shared memory
    outbox.py           return value and weights
    originals.py        which weights have not changed
    exceptions.py       an exception with its causes, as text and as object

Between ranks and between nodes:

    stop_agreement.py   the step at which all ranks stop
    sealing.py          pickles under the key of the job
    schema.py           dataclasses as JSON between nodes, never unpickled

descriptors.py has file descriptors: which ones children must not keep, and waiting for any of several.
"""
