"""Trials: one configuration measured for real, in processes of its own; every end is an outcome with a reason."""
