"""Benchmarks on a local stack or a running deployment: paired runs, peers, step accounting, advice."""
