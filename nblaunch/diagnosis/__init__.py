"""What went wrong in a job, with evidence: hangs while it runs, the root cause after it has failed.

While a job runs, the supervisor calls ``hang.Inspector`` a few times a second. It records the memory of the workers
(``memory``) and checks their progress. When a rank makes none, the supervisor collects the ranks' Python stacks
(``stacks``), and ``hang`` decides whether the job hangs and which rank waits for which.

After a failed attempt, the supervisor's ``report.AttemptReport`` holds the facts. ``root_cause`` finds the earliest
failure that no other failure explains, ``memory`` adds the evidence of memory that ran out, and ``failure`` makes the
exception that the kernel raises. ``rendering`` shows it in IPython with the user's frames only.
"""
