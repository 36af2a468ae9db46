"""What is wrong, and how it is known: doctor, task conformance, memory estimates, timelines, trial steps."""
