"""The command ``mlx_eagle.doctor``: checks of this machine, and a test of its kernels."""
