"""Domain types: requests, sequences, proposals, verdicts, messages and errors.

Standard library only. Everything here is a frozen value, except `Sequence`, which only
`Sequence.commit` changes.
"""
