"""Output for people: progress and tables on a terminal, plain lines elsewhere, and a page of HTML.

facts.py     what a plan says, as rows of text
terminal.py  those rows as tables, or as plain lines
html.py      those rows as one page, with drawings
svg.py       the drawings
progress.py  a search while it runs
estimate.py  the document of `autoplan estimate`
screen.py    whether the output is a terminal
"""
