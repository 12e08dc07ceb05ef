"""The search: decides what runs next, when to stop, and which configuration becomes the plan.

Read next_work.py first: it says what runs next and why. In the order of the data:

- options.py: what a user asks of a search, and what it returns;
- run.py: the entry; a new search, a resumed one, or the answer of a finished one;
- target.py: the device, the ranks, what a trial may take;
- setup.py: what is known before the first trial, and what is found out later: rates, traces, candidates;
- preload.py: what the zygote imports before it forks ranks;
- inspection.py: inspects the workload in a rank, for setup.py;
- session.py: the trials of a running search, and what its pieces of work share;
- next_work.py: names the next piece of work; state.py: what it is told; work.py: does it;
- references.py: the plain run and the hand setting;
- compile_ahead.py: compiles the next candidates side by side before they are measured;
- candidate_model.py: what is known of the candidates: predictions, corrected by the trials so far;
- sampler.py: our sampler in a user's own study, and any other of Optuna's as what draws the looks;
- surrogate.py: predicts all candidates from the cost model and the trials;
- trial_cost.py: predicts how long a trial and a parity check take;
- selection.py: ranks the measured configurations;
- claim.py: how much faster the plan is, and whether that may be claimed;
- untried.py: what was not tried, and how much faster it could be;
- plan_maker.py: makes the plan of the winner;
- reasons.py: explains the value of each knob;
- answer.py: the result that is handed back, and what the record keeps of it.
"""
