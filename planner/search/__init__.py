"""The search: decides which candidate is measured next, when to stop, and which one becomes the plan.

In the order of the data:

- options.py: what a user asks of a search, and what it returns;
- run.py: the entry; a new search, a resumed one, or the answer of a finished one;
- setup.py: what is prepared before the first trial: hardware, model profile, cost model, candidates;
- preload.py: what the zygote imports before it forks ranks;
- inspection.py: inspects the workload in a rank, for setup.py;
- session.py: the state of a running search, its clock and its trials;
- stages.py: baseline, manual setting, trials, parity check;
- compile_ahead.py: compiles the next candidates side by side before they are measured; compile_choice.py: how many;
- rounds.py: the rounds after the trials, of the finalists and of the claim;
- candidate_model.py: what is known of the candidates: predictions, corrected by the trials so far;
- sampler.py: picks the next candidate;
- surrogate.py: predicts all candidates from the cost model and the trials;
- trial_cost.py: predicts how long a trial takes;
- parity_time.py: the time that is kept free for the parity check;
- selection.py: ranks the measured configurations;
- claim.py: how much faster the plan is, and whether that may be claimed;
- untried.py: what was not tried, and how much faster it could be;
- plan_maker.py: makes the plan of the winner;
- reasons.py: explains the value of each knob;
- answer.py: the result that is handed back, and what the record keeps of it.
"""
