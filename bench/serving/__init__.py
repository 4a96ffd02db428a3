"""The server measured over HTTP: ``mlx_lm.server`` and ours, each with several clients at once."""
