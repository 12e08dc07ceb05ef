"""Targets that train language models of their own.

- torchtitan_recipe.py: the target `torchtitan`;
- megatron_flags.py, megatron_model.py: the target `megatron`;
- shared.py: what both share.
"""
