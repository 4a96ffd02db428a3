"""Answer questions with mlx-lm in every way that its README shows.

Somebody else's script: it uses mlx-lm alone. A test runs it as it is.
"""

import argparse
import json
from pathlib import Path

from mlx_lm import batch_generate, convert, generate, load, stream_generate
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

QUESTIONS = ["Write a story about Einstein", "How tall is Mt Everest?", "And in feet?"]
MAX_TOKENS = 24


def to_prompt(tokenizer, question):
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)


def answer(model, tokenizer, draft_model=None):
    """One text, printed as it comes."""
    prompt = to_prompt(tokenizer, QUESTIONS[0])
    return generate(
        model,
        tokenizer,
        prompt=prompt,
        verbose=True,
        max_tokens=MAX_TOKENS,
        draft_model=draft_model,
    )


def stream(model, tokenizer, draft_model=None):
    """Piece by piece, with a sampler and logits processors."""
    pieces = []
    for response in stream_generate(
        model,
        tokenizer,
        to_prompt(tokenizer, QUESTIONS[1]),
        max_tokens=MAX_TOKENS,
        sampler=make_sampler(temp=0.0, top_p=0.9, top_k=20),
        logits_processors=make_logits_processors(
            logit_bias={7: 2.0}, repetition_penalty=1.2, repetition_context_size=10
        ),
        draft_model=draft_model,
        num_draft_tokens=2,
    ):
        pieces.append(response.text)
    assert response.finish_reason in ("length", "stop")
    return "".join(pieces)


def converse(model, tokenizer, file, draft_model=None):
    """Several turns on one prompt cache, which is saved and loaded between them."""
    cache = make_prompt_cache(model)
    if draft_model is not None:
        cache += make_prompt_cache(draft_model)
    answers = []
    for question in QUESTIONS:
        save_prompt_cache(str(file), cache, metadata={"question": question})
        cache = load_prompt_cache(str(file))
        prompt = to_prompt(tokenizer, question)
        options = {"max_tokens": MAX_TOKENS, "prompt_cache": cache, "draft_model": draft_model}
        answers.append(generate(model, tokenizer, prompt=prompt, **options))
    return answers


def answer_all(model, tokenizer):
    """All questions in one batch, which takes no draft model."""
    prompts = [to_prompt(tokenizer, question) for question in QUESTIONS]
    return batch_generate(model, tokenizer, prompts, max_tokens=MAX_TOKENS).texts


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    convert(args.model, mlx_path=str(args.out / "converted"))
    model, tokenizer = load(str(args.out / "converted"))
    draft_model = load(args.draft_model)[0] if args.draft_model else None
    texts = {
        "answer": answer(model, tokenizer, draft_model),
        "stream": stream(model, tokenizer, draft_model),
        "converse": converse(model, tokenizer, args.out / "cache.safetensors", draft_model),
        "answer_all": answer_all(model, tokenizer),
    }
    (args.out / "texts.json").write_text(json.dumps(texts))


if __name__ == "__main__":
    main()
