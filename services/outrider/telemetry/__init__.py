"""Metric and span definitions behind ports: what is counted and traced, never where it goes.

Just above core: standard library and OpenTelemetry only. Ray's metrics are an adapter in `cluster/`.
"""
