"""Set-up, launch scripts and benchmarks; run them from the repository root. Not part of the installed package."""
