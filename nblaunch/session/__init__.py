"""Sessions: workers that stay between cells, and execute one command after the other.

    Session ── command ──> CommandConnection of each rank ──> serve: run it in ``__main__`` ── Reply ──> Session
       └── JobRunner: starts the workers, watches them, follows their logs, as for any job, of the function ``serve``

session.py       Session: what the caller holds
rank_commands.py commands to all ranks or to some: code, variables
client.py        in the kernel: sends commands and variables to the ranks, waits for replies, keeps failures
server.py        in each worker: executes commands, code as a notebook cell
magics.py        ``%%ranks`` and ``%ranks``
output.py        shows the output of ranks in the cell while a command runs

Once torch is used, the ranks join a process group before a command to all of them. A command to some ranks forms no
group; these ranks stay in the group that they have joined, if any. An interrupt goes directly from the client to the
ranks (SIGINT). Their server raises it only in the command, so the workers stay; an interrupt through the supervisor
would end them.
"""
