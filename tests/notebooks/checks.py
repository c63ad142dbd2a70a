"""Checks of each notebook's results, as code that the kernel runs after the last cell."""

from __future__ import annotations

CHECKS = {
    "01_quickstart": """
assert accuracy > 0.9, accuracy
""",
    "02_text_classification": """
assert history[-1]["pairs"] == len(test_pairs), "every pair of the test set counts exactly once"
assert history[-1]["f1"] > 0.75 or num_pairs < 400, history
""",
    "03_tpu": """
assert result["images"] == len(test_set), "every test image counts exactly once"
assert result["accuracy"] > 0.85, result["accuracy"]
assert abs(accuracy - result["accuracy"]) < 0.05, "the notebook's model is the trained one"
""",
    "04_when_things_go_wrong": """
assert num_workers == num_processes
""",
    "05_background_jobs": """
assert result["epochs"] < num_epochs, "the job was stopped before its last epoch"
assert error < 0.1, error
assert isinstance(failing.exception(), FileNotFoundError)
""",
    "06_big_models": """
plain = torch.tensor(results["DistributedDataParallel"]["losses"])
assert plain[-1] < plain[0] - 1, "the model learns"
assert trained_loss < plain[0] - 1, "the notebook's model is the trained one"
for name, result in results.items():
    assert torch.allclose(torch.tensor(result["losses"]), plain, atol=0.02), (name, result["losses"], plain)
""",
    "07_several_machines": """
assert len(losses_of_ranks) == num_ranks, "ranks of both nodes took part"
assert max(losses_of_ranks) < 0.1
weights = [float(number) for number in printed.rpartition("weights: [")[2].partition("]")[0].split(",")]
assert second_machine.returncode == 0, printed
assert len(losses) == 2 * processes_per_machine, "ranks of both machines took part"
assert weights == model.weight.flatten().tolist(), "both machines have the same weights"
assert max(losses) < 0.1
""",
    "08_your_framework": """
assert len(accuracies) == 5
assert min(accuracies.values()) > 0.9, accuracies
""",
    "09_sessions": """
assert 0 < loss < 0.1, loss
assert F.mse_loss(model(positions), heights).item() < 0.1, "the notebook's model is the trained one"
assert not session.is_running
""",
    "10_debugging": """
assert "batch.shape" in comparison.differing, comparison
assert loss < 0.1, loss
""",
    "11_slow_and_wrong": """
assert all(parts["data"] > 0.3 * sum(parts.values()) for parts in seconds.values()), seconds
assert slow_steps > 0 and fast_steps > 0
assert "float32[3]" in str(error) and "float32[4]" in str(error), error
""",
}
"""Name -> code that raises AssertionError if the notebook did not do what it says."""

RAISED = {
    "own-error": ("ValueError", "label -7 is not a class"),
    "killed": ("WorkerDied", "SIGKILL"),
    "memory": ("RuntimeError", "memory"),
    "hang": ("JobHung", "train_unevenly"),
    "interrupt": ("KeyboardInterrupt", ""),
}
"""Cell of 04_when_things_go_wrong -> the type of its error, and a word in its message."""

SMALL = {
    "02_text_classification": "epochs, num_pairs = 1, 80",  # see test_the_text_classifier_learns
    "03_tpu": "epochs = 4",
    "06_big_models": "num_processes, width, num_layers, num_steps, batch_size = 2, 64, 2, 20, 8\nlearning_rate = 3e-3",
    "07_several_machines": "processes_per_machine = 1",
}
"""Name -> parameters for the tests, if the notebook's own take too long."""
