"""Servers to ask: ours and mlx-lm's, in this process, on a tiny pair in folders."""

import http.client
import json
import shutil
import ssl
import string
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import mlx.core as mx
from checkpoints import CONFIG, as_midlayer, eagle3_tensors, write_safetensors
from helpers import tiny_llama
from mlx.utils import tree_map
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.server import APIHandler, ModelProvider, ResponseGenerator
from mlx_lm.utils import save_model
from openai import DefaultHttpxClient, OpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mlx_eagle.convert import convert
from mlx_eagle.server.access import read_access
from mlx_eagle.server.caches import open_prompt_cache
from mlx_eagle.server.collect import open_collector
from mlx_eagle.server.engine import PairGenerator
from mlx_eagle.server.flags import build_parser
from mlx_eagle.server.handler import PairHandler
from mlx_eagle.server.listener import PairServer
from mlx_eagle.server.provider import PairProvider
from mlx_eagle.server.routes import DOCUMENTS, ROUTES

# Reading a machine's certificates takes each client 30 ms, and nobody here speaks TLS.
NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
START, END = "<|im_start|>", "<|im_end|>"
# A token a character: what was generated is tokenized in the same way in the next turn. The
# last two are the bytes of one letter.
CHARACTERS = string.ascii_letters + string.digits + ".,:;?!'-()" + "\u0120\u010a" + "\u00c3\u00a9"
NUM_CHARACTERS = len(CHARACTERS)
# No end and no half letters: long texts that are tokenized again as they were generated.
ENDLESS = {str(token): -100 for token in range(NUM_CHARACTERS - 2, NUM_CHARACTERS + 2)}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, thinks: bool = False) -> int:
    """A tokenizer of single characters with a chat template; its number of tokens."""
    template = TEMPLATE + ("<think>" if thinks else "")
    vocab = {character: i for i, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([START, END, *(["<think>", "</think>"] if thinks else [])])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return tokenizer.get_vocab_size()


def write_model(folder: Path, num_tokens: int, blur: float = 0.0, **changes) -> Path:
    """A tiny random llama; ``blur`` makes it another, often of one mind with the first."""
    sizes = {"vocab_size": num_tokens, "head_dim": 32, "num_hidden_layers": 2} | changes
    model = tiny_llama(**sizes)
    if blur:
        mx.random.seed(1)
        model.update(tree_map(lambda w: w + blur * mx.random.normal(w.shape), model.parameters()))
    save_model(folder, model)
    config = {k: v for k, v in vars(model.args).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": NUM_CHARACTERS + 1}))
    return folder


def write_pair(folder: Path, context: int = 2000) -> dict[str, str]:
    """What --model and --draft-model may name, by kind of drafter; a target of that context."""
    target, draft = folder / "target", folder / "draft"
    for each in (target, draft):
        each.mkdir()
        num_tokens = write_tokenizer(each)
    write_model(target, num_tokens, max_position_embeddings=context)
    write_model(draft, num_tokens, blur=0.01)
    sizes = {"vocab": num_tokens, "draft": num_tokens // 2}
    config = CONFIG | {"vocab_size": num_tokens, "draft_vocab_size": sizes["draft"]}
    config |= {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    tensors = as_midlayer(eagle3_tensors(**sizes))
    checkpoint = write_safetensors(folder / "checkpoint", config, tensors)
    convert(str(checkpoint), str(folder / "head"))
    shutil.rmtree(folder / "checkpoint")
    return {"target": str(target), "model": str(draft), "head": str(folder / "head")}


class Asked:
    """A running server and a client of it."""

    def __init__(self, server, generator):
        self.server, self.generator = server, generator
        self.address = server.server_address[:2]
        self.url = "http://{}:{}/v1".format(*self.address)
        plain = DefaultHttpxClient(verify=NO_CERTIFICATES)
        options = {"api_key": "none", "max_retries": 0, "timeout": 60, "http_client": plain}
        self.client = OpenAI(base_url=self.url, **options)

    def chat(self, *messages: str, **options):
        """An answer to messages, which are the user's and the assistant's in turn."""
        roles = ("user", "assistant")
        said = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
        return self.complete(messages=said, **options)

    def complete(self, **options):
        """One answer, whole; fields that the client does not know go through unchanged."""
        known = {"messages", "prompt", "model", "max_tokens", "temperature", "stop", "logprobs"}
        known |= {"top_logprobs", "seed", "stream", "stream_options"}
        extra = {name: options.pop(name) for name in list(options) if name not in known}
        kind = self.client.chat.completions if "messages" in options else self.client.completions
        options = {"model": "default_model", "max_tokens": 24, "temperature": 0} | options
        return kind.create(**options, extra_body=extra)


@contextmanager
def running(server, generator) -> Iterator[Asked]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    asked = Asked(server, generator)
    try:
        with closing(asked.client):
            yield asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=30)
        generator.stop_and_join()
        # A thread that has used MLX needs the interpreter for a moment after it was joined.
        time.sleep(0.05)


def parse(*flags: str):
    return build_parser().parse_args([str(flag) for flag in flags])


def ours(*flags: str):
    """Our server, as the flags say, at a free port; rounds of three drafts if they say nothing."""
    args = parse("--port", "0", "--num-draft-tokens", "3", *flags)
    generator = PairGenerator(PairProvider(args), open_prompt_cache(args))
    try:
        assert generator.model_provider.loaded.wait(60)
        generator.check_loaded()
    except ValueError:
        generator.stop_and_join()
        raise
    access = read_access(args)
    collector = open_collector(args)
    server = PairServer(PairHandler, ROUTES, DOCUMENTS, generator, access, collector)
    return running(server, generator)


def theirs(target: str):
    """mlx_lm.server on the target, without a drafter."""
    args = parse("--model", target, "--num-draft-tokens", "0")  # mlx-lm knows no "auto"
    generator = ResponseGenerator(ModelProvider(args), LRUPromptCache(10))
    address = ("127.0.0.1", 0)
    server = ThreadingHTTPServer(
        address, lambda *args: APIHandler(generator, *args, system_fingerprint="")
    )
    return running(server, generator)


def ask_json(
    asked, path: str, body: object, method: str = "POST", head: dict[str, str] | None = None
) -> tuple[int, dict]:
    """The status and the document that a server answers ``body`` with, of a GET without one."""
    connection = http.client.HTTPConnection(*asked.address, timeout=30)
    try:
        raw = json.dumps(body) if method == "POST" else None
        connection.request(method, path, raw, head or {})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()
