"""Held-out data: no prompt that a head is evaluated on, nor one like it, was learnt from."""

import re

import mlx_lm
import pytest
from training import write_data, write_target

from mlx_eagle.train import train
from mlx_eagle.train.data import read_data, read_examples

ANIMALS = "owl fox hen cat dog ant bee cow pig ram elk emu yak gnu eel cod bat rat doe ewe"
ANIMALS = re.findall(r"\w+", ANIMALS)
TEMPERATURES = (0.0, 0.6, 1.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("held out") / "target")


def row(question: str, answer: str = "yes it does", **fields) -> dict:
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    return {"messages": messages, **fields}


def split(target, folder, train: list[dict], **files):
    """Read data; return the prompts to learn from, those held out, and the notes."""
    _, tokenizer = mlx_lm.load(str(target))
    data = read_data(str(write_data(folder, train=train, **files)))
    found = read_examples(data, tokenizer, 258, 400)
    texts = [
        [tokenizer.decode(list(x.tokens[: x.num_prompt])) for x in part]
        for part in (found.train, found.valid)
    ]
    return *texts, found.notes


def test_answers_at_several_temperatures_are_held_out_with_their_prompt(target, tmp_path):
    """Rows are in the order of --regenerate, in which the last ones are of many prompts."""
    questions = [f"where does the {a} sleep" for a in ANIMALS * 2]
    questions = [f"{q} number {i}" for i, q in enumerate(questions)]
    rows = [row(q, f"in {t} beds", temperature=t) for t in TEMPERATURES for q in questions]
    learnt, held_out, notes = split(target, tmp_path, rows)
    assert len(held_out) == 6 and len(set(held_out)) == 2
    assert not set(learnt) & set(held_out) and len(learnt) == len(rows) - 6
    assert any("6 of 120 sequences are held out" in note for note in notes)


def test_nearly_the_same_question_is_the_same(target, tmp_path):
    """Questions differ in letters, signs or a word, and some are alike only over several steps."""
    rows = [row(f"does the {a} that lives at place {i} sleep") for i, a in enumerate(ANIMALS * 5)]
    base = "can you explain to me why the sky over the sea looks so blue in summer"
    variants = [base, f"  {base.upper()}?!", f"Please, {base}", f"please {base} today"]
    variants.append(f"now please {base} today then")  # like the one before, not like the first
    rows = [row(variants[1]), row(variants[3]), *rows, *map(row, (variants[2], variants[4], base))]
    learnt, held_out, _ = split(target, tmp_path, rows)
    assert not [text for text in learnt if "sky" in text.lower()]
    assert len([text for text in held_out if "sky" in text.lower()]) == 5
    assert len(learnt) + len(held_out) == len(rows)


def test_questions_too_much_alike_are_all_learnt_from(target, tmp_path):
    long = " ".join(f"rule{i}" for i in range(40))
    rows = [row(f"{long} what does the {a} say") for a in ANIMALS]
    learnt, held_out, notes = split(target, tmp_path, rows)
    assert (len(learnt), held_out) == (20, [])
    assert any("too much alike to hold any out" in note for note in notes)


def test_short_questions_that_differ_in_a_word_differ(target, tmp_path):
    learnt, held_out, _ = split(target, tmp_path, [row(f"say {a}") for a in ANIMALS])
    assert (len(learnt), len(held_out)) == (19, 1)


def test_a_validation_file_that_asks_the_same_is_said_to(target, tmp_path):
    rows = [row(f"say {a}") for a in ANIMALS]
    *_, notes = split(target, tmp_path, rows[:10], valid=[*rows[8:], row("SAY  owl!")])
    assert any("3 of 13 sequences of valid.jsonl ask what train.jsonl asks" in n for n in notes)
    *_, notes = split(target, tmp_path, rows[:10], valid=rows[10:])
    assert notes == ()


def test_one_truth_is_said_about_validation(target, tmp_path, capsys):
    """Answers, which take a while, are announced."""
    data = write_data(tmp_path / "data", train=[row(f"say {a}") for a in ANIMALS])
    run = {"iters": 1, "batch_size": 2, "ttt_steps": 2, "draft_vocab_size": 64, "test_prompts": 0}
    report = train(
        str(target),
        str(data),
        str(tmp_path / "head"),
        regenerate=True,
        answer_temps=TEMPERATURES,
        answer_tokens=4,
        **run,
    )
    said = capsys.readouterr().out
    assert report.evaluation.num_sequences == 3
    assert "without validation" not in said and "3 are held out" in said
    assert said.index("The target gives 60 answers") < said.index("60 answers of")
