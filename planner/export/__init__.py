"""Exports: a plan written for another trainer, each checked before it is kept. One file per target."""
