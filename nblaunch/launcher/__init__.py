"""The kernel's side of a launch: checks, start and supervision of the workers, and the job that the caller gets.

The kernel is the process that calls the launcher, a Jupyter kernel or a script; the word never means a CUDA kernel. The
launcher is this code in the kernel, or in the process of a detached job (:mod:`nblaunch.detached`).

    plan.py              whether and how to launch on this machine -> LaunchPlan; whether the kernel can be forked
      copied_variables.py  warns about variables that every worker copies
    job.py               Job: the caller's future, with state and listeners
    runner.py            JobRunner: runs a job until it ends, attempt after attempt
      joblog.py          the log files of a job; logs of old jobs are pruned at the first tick
        logtail.py       follows the files and limits their size
      requests.py        stop, interrupt, kill, show stacks, SIGINT during a launch; read by the supervisor; waits that
                         interrupts can't damage
      attempt.py         starts the workers of one attempt, each with an assignment
        store.py         the TCPStore through which workers form their process group
      supervisor.py      the wait loop until the workers have ended; reads their results
        escalation.py    decides when each rank gets which signal; waits for checkpoints and for trained weights
        hang_watch.py    finds ranks without progress, and shows where ranks are
        collective_watch.py  finds ranks that call different collectives
        slow_watch.py    explains slow steps
        guardian.py      kills the workers if the kernel dies; started at the first tick
        monitor.py       reads the workers' use of memory and devices from outside
      outcome.py         JobOutcome: values, or the error; loads weights, or says why they are lost
        weights.py       merges trained weights, and loads them if they fit the kernel's modules
    timeline.py          records how ranks spend their time, and converts the record for Perfetto, with traces of
                         torch's profiler; draws a typical step and the slowest step of each rank
    debug_client.py      the debugger's client: sends commands, receives prompts, keeps failures

The supervisor returns an ``AttemptReport`` (:mod:`nblaunch.diagnosis.report`) for each attempt, which ``outcome.py``
reads. :mod:`nblaunch.diagnosis` explains why a job failed or is making no progress.
"""
