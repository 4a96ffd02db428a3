"""What mlx-lm answers to the first questions of ``--check``: writes data/check_answers.json.

Recorded because answering takes a minute; test_check.py makes sure that they still are the
target's. ``python tests/support/check_answers.py`` makes them again.
"""

import json
from pathlib import Path

import mlx.core as mx
import mlx_lm
from mlx_lm.utils import dequantize_model

from mlx_eagle.convert.check import QUESTIONS
from mlx_eagle.demo.pair import demo_target_path

FILE = Path(__file__).parents[1] / "data" / "check_answers.json"
NUM_QUESTIONS, NUM_TOKENS = 4, 128


def recorded() -> list[list[int]]:
    return json.loads(FILE.read_text())


def main() -> None:
    model, tokenizer = mlx_lm.load(str(demo_target_path()))
    model = dequantize_model(model)
    model.set_dtype(mx.float32)
    messages, answers = [], []
    for question in QUESTIONS[:NUM_QUESTIONS]:
        messages.append({"role": "user", "content": question})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        responses = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=NUM_TOKENS)
        answers.append([response.token for response in responses])
        said = [token for token in answers[-1] if token not in tokenizer.eos_token_ids]
        messages.append({"role": "assistant", "content": tokenizer.decode(said)})
    FILE.write_text(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
