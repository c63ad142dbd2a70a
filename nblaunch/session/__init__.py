"""Sessions: workers that stay, and run what they are sent, one command after the other.

    Session ── command ──> Link of each rank ──> serve: run it in ``__main__`` ── Reply ──> Session
       └── JobRunner: starts the workers, watches them, follows their logs, as for any job, of the function ``serve``

session.py       Session: what the caller holds
exchange.py      a command to the ranks, and their answers
server.py        the loop of a worker
  cells.py       code that runs like a notebook cell
values.py        values by rank
magics.py        ``%%ranks`` and ``%ranks``
output.py        what ranks print while a command runs, shown in the cell
"""
