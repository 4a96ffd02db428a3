"""``python -m mlx_eagle.chat``: see ``commands/chat.py``."""

from .commands.chat import main

if __name__ == "__main__":
    main()
