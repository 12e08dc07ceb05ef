"""The search: trace, cost model, space, study, trials, plan, exports."""

if __name__ != "autoplan.planner":
    raise ImportError(
        "this folder is part of autoplan and is imported as 'autoplan.planner', not as '"
        + __name__
        + "'. Write 'import autoplan.planner', and start Python outside the repository or install autoplan."
    )
