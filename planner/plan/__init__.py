"""A plan: what a search hands over, and what applies it.

plan.py (`Plan`); prepare.py (`plan.prepare`), parts.py (the workload of a plan), loader.py (`plan.loader`), and what
`plan.apply_to` does; current.py: the plan that a script is run with; surroundings.py: what is installed and set here.
"""
