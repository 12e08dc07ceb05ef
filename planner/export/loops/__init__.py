"""Targets for loops that the user writes, with a library's engine.

- accelerate_config.py, accelerate_companion.py: the target `accelerate`;
- deepspeed_config.py, deepspeed_companion.py: the target `deepspeed`;
- loop_companion.py: what the modules of both share.
"""
