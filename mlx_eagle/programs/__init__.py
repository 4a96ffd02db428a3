"""The command ``mlx_eagle.with``: programs that are written for mlx-lm, with a drafter."""
