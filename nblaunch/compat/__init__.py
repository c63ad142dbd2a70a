"""Names of Hugging Face Accelerate's modules: where they are here, and what to use instead of those that are not."""
