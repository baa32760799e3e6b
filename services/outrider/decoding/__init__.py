"""Exactness: the target's law, the noise, the acceptance rules, the draft's draw, n-gram proposals.

Pure functions over tensors. `keys` and `ngram` need the standard library only, so the router can
import them without torch; nothing is re-exported here for that reason.
"""
