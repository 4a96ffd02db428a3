"""The command ``mlx_eagle.doctor``: what this machine is, what is wrong, and a test of it all."""
