"""Techniques: one file each, which says what it offers here and how it changes a run."""
