"""The search: decides which candidate is measured next, when to stop, and which one becomes the plan.

In the order of the data:

- options.py: what a user asks of a search, and what it returns;
- run.py: the entry; a new search, a resumed one, or the answer of a finished one;
- setup.py: what is prepared before the first trial: hardware, model profile, cost model, candidates;
- session.py: the state of a running search, its clock and its trials;
- stages.py: baseline, manual setting, trials, finalists, parity check;
- sampler.py: picks the next candidate;
- surrogate.py: predicts all candidates from the cost model and the trials;
- trial_cost.py: predicts how long a trial takes;
- selection.py: ranks the measured configurations;
- plan_maker.py: makes the plan of the winner;
- reasons.py: explains the value of each knob.
"""
