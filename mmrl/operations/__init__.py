"""How a run lives with what runs it: signals, locks, restarts, monitoring (config: operations)."""
