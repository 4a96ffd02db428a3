"""``python -m mlx_eagle.generate``: see ``commands/generate.py``."""

from ..commands.generate import main

if __name__ == "__main__":
    main()
