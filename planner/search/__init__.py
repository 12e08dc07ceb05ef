"""The search: decides what runs next, when to stop, and which configuration becomes the plan.

Read next_work.py first: it says what runs next and why. The loop:

- run.py: the entry; a new search, a resumed one, or the answer of a finished one;
- next_work.py: names the next piece of work; state.py: what it is told; work.py: does it;
- session.py: the trials of a running search, and what its pieces of work share.

What a user asks for, and what is known before the first trial:

- options.py: what a user asks of a search, and what it returns;
- inspection.py: inspects the workload in a rank;
- setup.py: the device, the ranks, rates, traces, candidates; what can wait comes later;
- preload.py: what the zygote imports before it forks ranks.

The candidates:

- candidate_model.py: what is known of them, and the order in which they are looked at; surrogate.py: the Gaussian
  process behind it; objective.py: what is looked for;
- trial_cost.py: predicts how long a trial and a parity check take;
- sampler.py: another sampler, of Optuna, as what draws the looks.

The proof and the answer:

- references.py: what a plan is compared with: your setting or the plain run, and the hand setting;
- selection.py: ranks the measured configurations; claim.py: how much faster the plan is, and whether that is claimed;
- loading.py: the loader of the training, measured beside the plan's step;
- plan_maker.py: makes the plan of the winner, with the reason for the value of each knob;
- answer.py: how a search ends: what is handed back, and what the record keeps.
"""
