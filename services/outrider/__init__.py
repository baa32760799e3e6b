"""Outrider: speculative decoding as a distributed service, without changing the distribution.

This package holds everything that runs without Ray. `outrider_cluster` deploys it.
"""

__version__ = "0.1.0"
