"""Sessions: workers that persist between cells and execute commands one at a time.

    Session ── command, outbox ──> CommandConnection of each rank ──> serve: run it in ``__main__``
       ^                                                                └── CommandEvents: start, results, end ──┐
       └────────────── CommandReport <── SessionOutput <── JobRunner: supervises the workers <──────────────────┘

The job runs the function ``serve``. A rank reports on a command as a worker reports on its function, with the same
events through the same pipe.

session.py       Session: the caller's object
client.py        in the kernel: commands to all or some ranks; sends them and variables, waits until they end, keeps
                 failures
release.py       in the kernel: frees ranks that do not end after a failure or an interrupt, and kills them in the end
server.py        in each worker: executes commands, and runs code like a notebook cell
interrupts.py    in each worker: raises a command's interrupt, and frees code that waits for other ranks
magics.py        ``%%ranks`` and ``%ranks``
output.py        collects the report and the results of a command; shows its output in the cell

Once torch is used, the ranks join a process group before they run a command that goes to all of them. No group is
formed for a command that is sent to only some ranks; these stay in the group that they are in, if any. An interrupt
goes directly from the client to the ranks (SIGINT). Each rank's server raises it only in the command, so the workers
survive; an interrupt through the supervisor would end the workers.
"""
