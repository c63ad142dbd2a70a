"""The kernel's side of a launch: checks, start and supervision of the workers, and the job that the caller holds.

    plan               can it work here, and how? -> LaunchPlan; fork_safety: whether the kernel can be forked
    runner             runs a job to its end, attempt after attempt; its listeners receive the events
      attempt          starts the workers of one attempt, each with an assignment; store: of the process group
      supervisor       waits for everything that may happen until the workers have ended
        escalation     which signal which rank gets when; termination: at SIGTERM; guardian: if the kernel dies
        monitor        memory and devices of the workers, read from outside
        joblog         the log files of a job; logtail follows them, log_limit keeps them small
      results          outcome and values of a job that has ended; weights: into the kernel's modules
        unpassed       modules that were trained without being passed; metrics: what was logged, as a table
    job                Job: what the caller holds, a future; requests: what it asks of the running job
    peers              what a supervisor needs of the other nodes, where there are any

Why a job failed or makes no progress is explained by :mod:`nblaunch.diagnosis`.
"""
