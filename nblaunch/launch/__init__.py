"""The parent side of a launch: checking, supervising, diagnosing, and the job that a person holds."""
