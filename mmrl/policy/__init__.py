"""The policy: loading, encoding of prompts, and log-probs by the shared-prefix forward."""
