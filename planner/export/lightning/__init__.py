"""The targets `lightning` and `fabric`.

- lightning_module.py: the targets;
- lightning_source.py: the functions of the module that they write;
- lightning_check.py: its check by a real Trainer or Fabric.
"""
