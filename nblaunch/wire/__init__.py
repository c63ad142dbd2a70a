"""How things travel between a launcher and its workers."""
