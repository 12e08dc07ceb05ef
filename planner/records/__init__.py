"""Records: what trials, predictions, checks and plans leave, and what is read of a plan's file; below all stages."""
