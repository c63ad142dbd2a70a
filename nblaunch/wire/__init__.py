"""The data that a job's processes exchange: formats and shared memory.

To a worker:

    assignment.py       the call, and the task of one worker
    accelerate_states.py  states of Hugging Face Accelerate, which a worker rebuilds

From a worker:

    channel.py          events on a pipe; values in them have Python's own types
    board.py            progress in shared memory; the losses as a bounded number of means
    collective_calls.py the last collectives of each rank, behind the board
    spans.py            how each rank spent its time, behind the board
    outbox.py           return value, weights, optimizer states
    originals.py        which weights have not changed
    exceptions.py       an exception with its causes, as text and as an object

In both directions between launcher and workers:

    pickling/           values in memory files, pickled
    argument_paths.py   torch modules and optimizers in the arguments, by argument path
    worker_commands.py  commands to a session or the debugger, and replies, on a socket pair
    stop_agreement.py   the step at which all ranks stop, agreed on through the board

Between ranks and between nodes:

    locks.py            shared by the workers of a job on one machine
    signing.py          pickles signed with the job's key
    schema.py           dataclasses as JSON, which is never unpickled
"""
