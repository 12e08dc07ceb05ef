"""The search: which candidate is measured next, when to stop, and which one becomes the plan."""
