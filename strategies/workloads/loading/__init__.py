"""How a training gets its own data: the dataset that was handed in, the settings of its loader, the order of samples.

In: a dataset, a DataLoader, or a function that makes one. Out: a DataLoader for a run's batches.
"""
