"""The parent side of a launch: checking, supervising, and the job that the caller holds.

    preflight               can it work here, and how?
    job                     what the caller holds: a future
      course                its attempts, one after the other, until one counts; then the trained weights
        attempt             one start of the workers: their store (rendezvous), pipes, engine and logs (joblog)
          supervisor        the one wait loop while they run: requests, escalation of stops, SIGTERM
                            (termination), what they take of the host and its devices (monitor)

Why a job failed or makes no progress is explained by :mod:`nblaunch.diagnosis`.
"""
