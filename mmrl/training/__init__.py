"""Training: from closed groups to optimizer steps."""
