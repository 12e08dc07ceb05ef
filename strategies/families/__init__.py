"""Model families: published configurations as JSON, and how a language model of transformers is trained.

Each JSON file holds `config` (the fields of the published config.json that decide the architecture), `source` (where
it was published) and `aliases` (other names it goes by).
"""
