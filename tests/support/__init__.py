"""Fakes and builders that several test packages share."""
