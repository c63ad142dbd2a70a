"""Sessions: workers that persist between cells and execute commands one after the other.

    Session ── command ──> CommandConnection of each rank ──> serve: run it in ``__main__`` ── Reply ──> Session
       └── JobRunner: starts and supervises the workers, as a job whose function is ``serve``

session.py       Session: the caller's object
rank_commands.py commands to all or some ranks: code, variables
client.py        in the kernel: sends commands and variables to the ranks, waits for replies, keeps failures
server.py        in each worker: executes commands, code as a notebook cell
magics.py        ``%%ranks`` and ``%ranks``
output.py        shows the output of ranks in the cell while a command runs

Once torch is used, the ranks join a process group before a command to all of them. A command to some ranks does not
form a group; these ranks stay in the group that they have joined, if any. An interrupt goes directly from the client
to the ranks (SIGINT). Their server raises it only in the command, so the workers survive; an interrupt through the
supervisor would end them.
"""
