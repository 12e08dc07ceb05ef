"""The parity check: does a configuration train the same thing as one plain fp32 process?

In the order of the data:

- compare.py: runs the reference and the candidate, compares them, gives the verdict (runs in the planner);
- records.py: what a run of the check is asked, and what it measures;
- worker.py: one run of the check, in a rank.
"""
