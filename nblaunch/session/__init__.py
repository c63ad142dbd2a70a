"""Sessions: workers that stay between cells, and execute one command after the other.

    Session ── command ──> CommandConnection of each rank ──> serve: run it in ``__main__`` ── Reply ──> Session
       └── JobRunner: starts the workers, watches them, follows their logs, as for any job, of the function ``serve``

session.py       Session: what the caller holds
rank_commands.py commands to all ranks or to some: code, variables
client.py        in the kernel: sends commands and variables to the ranks, waits for replies, keeps what failed
server.py        in each worker: executes commands, code as a notebook cell
magics.py        ``%%ranks`` and ``%ranks``
output.py        what ranks print while a command runs, shown in the cell

The ranks join one process group before a command to all of them, as soon as torch is used; commands to some of them
form none: these ranks stay in the one that they have joined before, if any. An interrupt of a command goes from the
client to the ranks directly (SIGINT), whose server raises it in the command alone: the workers stay. The way by the
supervisor ends workers.
"""
