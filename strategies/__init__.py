"""Workloads, and how they are trained: config, one file per technique, prepare()."""

if __name__ != "autoplan.strategies":
    raise ImportError(
        "this folder is part of autoplan and is imported as 'autoplan.strategies', not as '"
        + __name__
        + "'. Write 'import autoplan.strategies', and start Python outside the repository or install autoplan."
    )
