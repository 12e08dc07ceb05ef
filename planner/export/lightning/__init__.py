"""Targets for Lightning: lightning_module.py has `lightning` and `fabric`, lightning_check.py asks a real one."""
