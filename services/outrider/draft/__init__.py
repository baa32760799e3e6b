"""The draft side: hold the text of many sequences over many links, draft blocks ahead of the target.

Bottom up: `sequence` (state of one sequence), `branch` (drafting blocks in lockstep), `link` (one
target), `residents` (who holds KV), `intake` (events to state), `drafter` (what to compute next),
`loop` (the thread around it).
"""
