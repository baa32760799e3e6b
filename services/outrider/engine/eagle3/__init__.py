"""EAGLE-3: a draft of one decoder layer that reads the target's features (Li et al. 2025, arXiv 2503.01840)."""
