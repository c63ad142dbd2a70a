"""The kernel's side of a launch: checks, start and supervision of the workers, and the job that the caller holds.

The kernel is the process that calls the launcher: a Jupyter kernel, or a script; never a CUDA kernel. The launcher is
this code in the kernel, or in the process of a detached job (:mod:`nblaunch.detached`).

    plan.py              whether and how to launch on this machine -> LaunchPlan
      fork_safety.py     whether the kernel can be forked
      copied_variables.py  names variables of which each worker has a copy that goes on by itself
    job.py               Job: what the caller holds, a future; its state, its listeners
    runner.py            JobRunner: runs a job to its end, attempt after attempt
      joblog.py          the log files of a job; logs of old jobs are pruned at the first tick
        logtail.py       follows them, and keeps them small
      requests.py        SIGINT while a launch runs; stop, interrupt, kill, show stacks; the supervisor reads them
      attempt.py         starts the workers of one attempt, each with an assignment
        store.py         the TCPStore through which workers form their process group
      supervisor.py      waits for whatever happens until the workers have ended; reads what they returned
        escalation.py    which signal which rank gets when; an orderly end with time for a checkpoint
        sending.py       ranks that still send values or weights at an interrupt
        hang_watch.py    finds ranks without progress; where the ranks are
        unread_queues.py  keeps what ranks have put into queues of the kernel
        collective_watch.py  finds ranks that call different collectives
        slow_watch.py    names what makes steps slow
        span_recorder.py  what ranks spend their time on, in a file of the attempt
        guardian.py      the end of the workers if the kernel dies; started at the first tick
        monitor.py       memory and devices of the workers, read from outside
      interruption.py  the weights of an interrupted job
      outcome.py         JobOutcome: values, or the error; loads what the workers left into the kernel's modules
        weights.py       trained weights on their way into the kernel's modules
    timeline.py          that file as slices of a track per rank, for Perfetto
    debug_client.py      the debugger's client: commands to the workers, and prompts from them; kept failures

The supervisor returns an ``AttemptReport`` (:mod:`nblaunch.diagnosis.report`) about each attempt, which ``outcome.py``
reads. :mod:`nblaunch.diagnosis` explains why a job failed or makes no progress.
"""
