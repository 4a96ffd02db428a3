"""mlx-lm's HTTP server with a drafter: the command ``mlx_eagle.server``.

HTTP, chat templates, tools, reasoning and batching are mlx-lm's own. Here is what a drafter
adds: opening the pair, speculating while one request is alone, caches that hold both models'
parts, and refusing bad requests without harm.
"""
