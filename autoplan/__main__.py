"""`python -m autoplan` is the autoplan command; torchrun starts it this way."""

from __future__ import annotations

from autoplan.cli import main

if __name__ == "__main__":
    main()
