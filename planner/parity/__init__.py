"""The parity check: does a configuration train the same thing as one plain process?

In the order of the data:

- check.py: the check of a workload: a whole training's is in compare.py, a step function's compares losses alone;
- compare.py: starts the reference and the candidate, gives the verdict and says what it rests on (in the planner);
- records.py: what a run of the check is asked, and what it measures;
- worker.py: one run of the check, in a rank: reference.py or candidate.py, on the small workload of batches.py;
- recorder.py, replay.py, rounded_products.py: what both keep of each step, the optimizer run again by itself, fp8;
- judge.py, tolerances.py: the comparisons, and what passes.
"""
