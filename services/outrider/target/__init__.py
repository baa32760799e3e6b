"""The target side: schedule, collect proposals, verify, commit, emit; the speculation gate."""
