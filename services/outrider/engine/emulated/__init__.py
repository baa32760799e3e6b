"""Emulated devices: real step times and a synthetic text instead of a model. Nothing here is measured."""
