"""The command ``mlx_eagle.generate``, and the flags that it shares with the other commands."""
