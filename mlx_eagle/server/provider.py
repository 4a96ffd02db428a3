"""Pair that a server serves: target, tokenizer and drafter, opened in its own thread."""

from argparse import Namespace
from datetime import UTC, datetime
from pathlib import Path
from threading import Event

import mlx_lm
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.server import ModelProvider
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer, _byte_decoder

from .. import __version__
from ..decoding.setup import AUTO, check_tree_drafter, read_tree
from ..demo.pair import load_demo
from ..draft_models import open_beside, split_name
from ..drafters.earlier_answers import EarlierAnswers
from ..drafters.target_parts import find_embedding
from ..system.exit_codes import USER_ERRORS
from ..system.loading import context_size, load
from ..target_model.probe import check_trees
from ..target_model.sharding import in_any_process
from .answer_stream import Document, RequestError
from .body import MAX_TOP, shortened
from .caches import is_always_trimmable
from .identity import adapter_digest, digest, module_digest

DEFAULT = "default_model"  # what mlx-lm calls the model and the draft model of the command line
DEMO = "mlx-eagle-demo"
DEMO_HEAD = "demo-head"
FINGERPRINT = f"mlx-eagle-{__version__}"


class PairProvider(ModelProvider):
    """mlx-lm's provider, with one of our drafters as ``draft_model``.

    Unlike mlx-lm's it loads no other model on a client's request: a drafter belongs to its
    target.
    """

    def __init__(self, args: Namespace):
        super().__init__(args)
        self.loaded = Event()  # also where it never will be
        self.vocab_size = 0
        self.needs_snapshots = False  # as the target's caches cannot always be trimmed
        self.context: int | None = None  # tokens of a text, where the model says so
        self.error: Exception | None = None
        self.answers = EarlierAnswers(args.copy_answers or 0)
        self.model_names = {DEFAULT, self.name}
        if args.model is not None and Path(args.model).exists():
            self.model_names.add(str(Path(args.model).resolve()))
        self.draft_names = {DEFAULT, args.draft_model}

    def check_tree(self, tree: str) -> None:
        """Raise ValueError if the pair cannot draft trees of that shape."""
        check_tree_drafter(self.draft_model, read_tree(tree))
        check_trees(self.model, make_prompt_cache(self.model))

    def spelling(self, token: int) -> bytes:
        """Return the bytes that a token stands for."""
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
        """Name of the target for clients."""
        return self.cli_args.model or DEMO

    def load_default(self) -> None:
        """Open the pair; a mistake of the user goes to ``error``."""
        try:
            self._open()
        except USER_ERRORS as err:
            self.error = err
        finally:
            self.loaded.set()

    def _open(self) -> None:
        args = self.cli_args
        drafter = None
        if args.model is None:
            self.model, self.tokenizer, drafter = load_demo(dtype=args.dtype)
        else:
            self.model, self.tokenizer = load(
                args.model,
                self._tokenizer_config,
                dtype=args.dtype,
                pipeline=args.pipeline,
                adapter_path=args.adapter_path,
                trust_remote_code=args.trust_remote_code,
            )
            if args.use_default_chat_template and self.tokenizer.chat_template is None:
                self.tokenizer.chat_template = self.tokenizer.default_chat_template
        name, self.draft_model = open_beside(
            drafter,
            args.draft_model,
            self.model,
            self.tokenizer,
            quantize_bits=args.quantize_draft,
            draft_window=args.draft_window,
            draft_vocab=args.draft_vocab,
            target=args.model,
        )
        if drafter is not None and name is not None and split_name(name)[0] == AUTO:
            name = name.replace(AUTO, DEMO_HEAD)
        args.draft_model = name  # of what "auto" stands for
        self.draft_names.add(name)
        if self.draft_model is not None and self.draft_model.copies is not None:
            self.draft_model.copies.answers = self.answers
        if args.tree is not None:
            self.check_tree(args.tree)
        self.vocab_size = find_embedding(self.model)[1]
        self.context = context_size(self.model)
        self.needs_snapshots = not is_always_trimmable(make_prompt_cache(self.model))
        if args.pipeline and in_any_process(self.needs_snapshots):
            raise ValueError(
                "this target has windows or recurrent states in some layers, whose prompt caches "
                "only some ranks of a pipeline could continue: leave --pipeline out."
            )
        # Settles what a tokenizer keeps between calls, before several threads use it.
        self.tokenizer.encode("")

    def describe(self) -> dict[str, str]:
        """Describe what caches depend on besides the tokens; only an equal pair can use them.

        Neither names nor dates of files matter.
        """
        drafter = self.draft_model
        args = self.cli_args
        drafting = []
        if drafter is not None:
            drafting = [drafter.cost_key, *map(module_digest, drafter.modules())]
        return {
            "model": digest(module_digest(self.model), adapter_digest(args.adapter_path)),
            "draft_model": digest(*drafting, repr(args.draft_window)),
            "chat_template": digest(str(self.tokenizer.chat_template)),
            "quantization": repr((args.kv_bits, args.kv_group_size, args.quantized_kv_start)),
            "versions": f"mlx-eagle {__version__}, mlx-lm {mlx_lm.__version__}",
        }


def properties(provider: PairProvider) -> Document:
    """Properties of the served pair for ``/props``, named as in llama-server if it has them."""
    flags = provider.cli_args
    names = ("temp", "top_p", "top_k", "min_p", "max_tokens", "num_draft_tokens", "tree")
    return {
        "model_alias": provider.name,
        "model_path": provider.name,
        "draft_model": flags.draft_model,
        "chat_template": provider.tokenizer.chat_template or "",
        "default_generation_settings": {
            "n_ctx": provider.context,
            "params": {name: getattr(flags, name) for name in names},
        },
        "total_slots": flags.decode_concurrency,
        "max_logprobs": MAX_TOP,
        "build_info": FINGERPRINT,
    }


def models(provider: PairProvider, created: int, wanted: str) -> Document:
    """Return the list with the one model, or its entry if it is ``wanted``.

    With the fields of OpenAI's API and of Anthropic's, and the length of the context under the
    names that vLLM, routers and llama-server have for it.
    """
    name = provider.name
    context = provider.context
    model: Document = {"id": name, "object": "model", "created": created}
    model |= {"owned_by": "mlx-eagle", "type": "model", "display_name": name}
    model["created_at"] = datetime.fromtimestamp(created, UTC).isoformat()
    if context is not None:
        model |= {"max_model_len": context, "context_length": context, "meta": {"n_ctx": context}}
    if not wanted:
        page = {"has_more": False, "first_id": name, "last_id": name}
        return {"object": "list", "data": [model], **page}
    if wanted in (name, name.strip("/")):
        return model
    raise RequestError(f"{shortened(wanted)} is not served here, but {name} is.", 404)
