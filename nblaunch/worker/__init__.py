"""The child side of a launch: what happens in a worker process before, around and after the user's function.

bootstrap       the life of a worker: set-up, the function, results, end
guard           session, end with the parent, signals and interrupts, stacks on request
inherited       what a forked worker must forget of the kernel
output          output to the log file, displays to the launcher
progress        steps, bars and parameters of code that does not use nblaunch
delivery        the return value, then the weights
failure         the user's exception, made ready to travel
script          a Python script as the function
"""
