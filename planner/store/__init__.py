"""The store of a study: its folder, its journal, and the Optuna study that is made from it."""
