"""Several prompts at once, verified in shared passes of the target."""
