"""mlx-lm's HTTP server with a drafter: the command ``mlx_eagle.server``.

HTTP, chat templates, tools and reasoning are mlx-lm's own. Here is what a drafter adds: opening
the pair, drafting for all who ask at a time, caches that hold both models' parts, and refusing
bad requests without harm.
"""
