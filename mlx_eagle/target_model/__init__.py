"""The target: an unmodified mlx-lm model, its taps, and its caches cut back to what was kept."""
