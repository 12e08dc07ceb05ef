"""The store of a study: its folder, its journal, and the study of Optuna's that can be made from it."""
