"""The one pair a server serves: target, tokenizer and drafter, opened in its own thread."""

from argparse import Namespace
from pathlib import Path
from threading import Event

from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.server import ModelProvider
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    _byte_decoder,
)
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from ..commands.loading import check_target, context_size
from ..decoding.setup import check_tree_drafter, read_tree
from ..demo.pair import load_demo
from ..draft_models import open_beside
from ..drafters.target_parts import find_embedding
from ..system.command import USER_ERRORS
from ..system.device import set_precision
from ..system.hub import locate
from ..target.tree_attention import check_trees

DEFAULT = "default_model"  # what mlx-lm calls the model and the draft model of the command line
DEMO = "mlx-eagle-demo"


class PairProvider(ModelProvider):
    """mlx-lm's provider, with one of our drafters as ``draft_model``.

    Unlike mlx-lm's it loads no other model on a client's request: a drafter belongs to its
    target. ``is_batchable`` says whether the target could decode several sequences at once.
    """

    def __init__(self, args: Namespace):
        super().__init__(args)
        self.loaded = Event()
        self.vocab_size = 0
        self.context: int | None = None  # tokens of a text, where the model says so
        self.error: Exception | None = None
        self.model_names = {DEFAULT, self.name}
        if args.model is not None and Path(args.model).exists():
            self.model_names.add(str(Path(args.model).resolve()))
        self.draft_names = {DEFAULT, args.draft_model}

    def check_tree(self, tree: str) -> None:
        """Raise ValueError where the pair cannot draft trees of that shape."""
        check_tree_drafter(self.draft_model, read_tree(tree))
        check_trees(self.model, make_prompt_cache(self.model))

    def spelling(self, token: int) -> bytes:
        """The bytes that a token stands for."""
        tokenizer = self.tokenizer
        word = tokenizer.convert_ids_to_tokens(token)
        if word is None:  # beyond the vocabulary, where a model's matrices are padded
            return b""
        spelled = tokenizer.detokenizer
        if isinstance(spelled, BPEStreamingDetokenizer):
            letters = _byte_decoder()
            return b"".join(
                bytes([letters[x]]) if x in letters else x.encode("utf-8", "replace") for x in word
            )
        if isinstance(spelled, SPMStreamingDetokenizer):
            return bytes(spelled.tokenmap[token]).replace("\u2581".encode(), b" ")
        return tokenizer.decode([token]).encode("utf-8", "replace")

    @property
    def name(self) -> str:
        """How clients call the target."""
        return self.cli_args.model or DEMO

    def load_default(self) -> None:
        """Open the pair; a mistake of the user's goes to ``error``."""
        try:
            self.load(DEFAULT, None, DEFAULT)
        except USER_ERRORS as err:
            self.error = err
        finally:
            self.loaded.set()

    def _load(
        self,
        model_path: str | None,
        adapter_path: str | None = None,
        draft_model_path: str | None = None,
    ) -> None:
        if self.is_distributed:
            raise ValueError("drafting is for one machine: start the server without a launcher.")
        drafter = None
        if model_path is None:
            self.reset()
            self.model, self.tokenizer, drafter = load_demo(dtype=self.cli_args.dtype)
            caches = make_prompt_cache(self.model)
            self.is_batchable = all(hasattr(cache, "merge") for cache in caches)
        else:
            check_target(locate(model_path, DEFAULT_ALLOW_PATTERNS))
            super()._load(model_path, adapter_path)
            self.model = set_precision(self.model, self.cli_args.dtype)
        self.draft_model = open_beside(
            drafter,
            draft_model_path,
            self.model,
            self.tokenizer,
            quantize_bits=self.cli_args.quantize_draft,
            draft_window=self.cli_args.draft_window,
            target=model_path,
        )
        if self.cli_args.tree is not None:
            self.check_tree(self.cli_args.tree)
        self.vocab_size = find_embedding(self.model)[1]
        self.context = context_size(self.model)
        # Settles what a tokenizer keeps between calls, before several threads use it.
        self.tokenizer.encode("")
        self.model_key = (model_path, adapter_path, draft_model_path)
