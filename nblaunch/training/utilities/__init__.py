"""What scripts import beside the Accelerator. Nothing else in ``nblaunch.training`` imports it."""
