"""More than one process: the ranks of a run (world), training engines (engines), Ray actors (cluster)."""
