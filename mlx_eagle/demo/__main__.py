"""``python -m mlx_eagle.demo``: see ``compare.py``."""

from .compare import main

if __name__ == "__main__":
    main()
