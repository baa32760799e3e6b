"""Metric and span definitions behind a port; adapters (Ray, OpenTelemetry) live with their owners."""
