"""One package for each framework: what autoplan reads of a training in it, and how it applies and watches a plan.

These packages stand above the planner. The packages below find them by name: strategies/workloads/frameworks.py.
"""
