"""The child side of a launch: what happens in a worker process before, around and after the user's function."""
