"""Model folders: names resolved to folders, and packaged models prepared without a model hub."""
