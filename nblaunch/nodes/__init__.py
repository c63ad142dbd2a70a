"""Several machines: each has a launcher and an agent; imported only by a launch on more than one of them."""
