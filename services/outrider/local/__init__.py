"""One engine, its draft and its router without Ray: for scripts, notebooks, benchmarks and soak tests."""
