"""What is trained: workloads, and where they come from."""
