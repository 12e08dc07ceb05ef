"""What the machine can do: readings with units and provenance. Knows nothing of models or plans."""

if __name__ != "autoplan.probes":
    raise ImportError(
        "this folder is part of autoplan and is imported as 'autoplan.probes', not as '"
        + __name__
        + "'. Write 'import autoplan.probes', and start Python outside the repository or install autoplan."
    )
