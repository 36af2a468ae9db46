"""Workers on other machines, through Ray: engine.workers ray."""
