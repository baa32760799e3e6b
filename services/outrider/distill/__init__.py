"""Make a draft for a target: sample its answers, label them, train a small model on them, measure it."""
