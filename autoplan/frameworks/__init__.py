"""What autoplan knows of a framework, one package each: what it reads of a training, how it applies and watches a plan.

These packages stand above the planner. What is below finds them by name: strategies/workloads/frameworks.py.
"""
