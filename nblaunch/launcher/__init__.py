"""The kernel's side of a launch: checks, start and supervision of the workers, and the job that the caller holds.

    preflight            can it work here, and how? -> LaunchPlan
    runner               runs a job to its end, attempt after attempt; its listeners receive the events
      supervisor         starts the workers of one attempt, and waits for everything that may happen until they ended
        assignments      what each worker is given; rendezvous (the store), joblog and logtail (its log files)
        escalation       which signal which rank gets when; termination (on SIGTERM), guardian (if the kernel dies)
        monitor          memory and devices of the workers, read from outside
      results            outcome, values, weights (loaded into the kernel's modules) and metrics of a job that has ended
    job                  Job: what the caller holds, a future; requests: what it asks of the running job
    peers                what a supervisor needs of the other nodes, where there are any

Why a job failed or makes no progress is explained by :mod:`nblaunch.diagnosis`.
"""
