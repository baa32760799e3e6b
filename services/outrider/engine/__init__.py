"""Model forward passes: loading, sharding, paged KV, and fakes with the same interface.

Import the submodule that you need: some of them load torch, some only the standard library.
"""
