"""``--collect``: what was asked and answered, as data that a head is trained on."""

import json
import logging
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mlx_lm.utils import load_tokenizer
from serving import ENDLESS, TEMPLATE, ours, parse
from training import small_files

from mlx_eagle.server.__main__ import announce
from mlx_eagle.server.collect import Collector, open_collector
from mlx_eagle.train import train
from mlx_eagle.train.data import MIN_ANSWER, read_data, read_examples

SOON = {"stop": list("ABCDEF"), "max_tokens": 200}  # ends in a few tokens


def serving(pair, file: Path, *flags: str):
    model = ("--model", pair["target"], "--draft-model", pair["head"])
    return ours(*model, "--collect", str(file), *flags)


def settle(asked) -> None:
    """A row is written once its answer was sent."""
    until = time.monotonic() + 30
    while asked.server.answering and time.monotonic() < until:
        time.sleep(0.01)
    assert not asked.server.answering


def rows_in(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_what_was_answered_is_what_is_trained_on(pair, tmp_path):
    """Whole and in pieces, drafted and in a batch; the very tokens, and a run on them."""
    file = tmp_path / "chats" / "train.jsonl"
    said = {}
    with serving(pair, file) as asked:
        said["One?"] = asked.chat("One?", **SOON).choices[0].message.content
        pieces = asked.chat("Two?", stream=True, temperature=0.7, logit_bias=ENDLESS, **SOON)
        said["Two?"] = "".join(piece.choices[0].delta.content or "" for piece in pieces)

        def ask(question: str) -> str:
            return (
                asked.chat(question, logit_bias=ENDLESS, **SOON).choices[0].message.content or ""
            )

        questions = ["Three?", "Four?", "Five?"]
        with ThreadPoolExecutor(3) as pool:
            said |= dict(zip(questions, pool.map(ask, questions), strict=True))
        asked.complete(prompt="no chat")
        asked.chat("One?", "Yes.", "More?", temperature=0.25, **SOON)
        settle(asked)
    assert file.stat().st_mode & 0o777 == 0o600
    rows = {row["messages"][-2]["content"]: row for row in rows_in(file)}
    assert rows.keys() == {*said, "More?"}
    tokenizer = load_tokenizer(Path(pair["target"]))
    for question, row in rows.items():
        size = row["prompt_length"]
        messages = row["messages"][:-1]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert row["tokens"][:size] == prompt
        answer = tokenizer.decode(row["tokens"][size:]).removesuffix("<|im_end|>")
        assert row["messages"][-1] == {"role": "assistant", "content": answer}
        assert said.get(question, answer) in (answer, answer[:-1])  # before a stop word
    assert [m["content"] for m in rows["More?"]["messages"][:-1]] == ["One?", "Yes.", "More?"]
    assert rows["Three?"]["finish_reason"] == "stop" and rows["More?"]["temperature"] == 0.25
    found = read_examples(read_data(str(file.parent)), tokenizer, 10**6, 2048)
    long_enough = [r for r in rows.values() if len(r["tokens"]) - r["prompt_length"] >= MIN_ANSWER]
    assert {x.tokens for x in found.train} == {tuple(row["tokens"]) for row in long_enough}
    assert len(long_enough) >= 5
    run = {"iters": 1, "batch_size": 2, "ttt_steps": 2, "test_prompts": 0}
    head = str(tmp_path / "head")
    train(pair["target"], str(file.parent), head, init=pair["head"], **run)


def test_tools_and_arguments_of_the_template_are_read_again(pair, tmp_path):
    file = tmp_path / "train.jsonl"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    template = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + TEMPLATE
    with serving(pair, file, "--chat-template", template) as asked:
        options = {"tools": [tool], "chat_template_kwargs": {"enable_thinking": False}}
        asked.complete(messages=[{"role": "user", "content": "Say"}], **options, **SOON)
        settle(asked)
    (row,) = rows_in(file)
    assert row["tools"] == [tool] and row["chat_template_kwargs"] == {"enable_thinking": False}
    tokenizer = load_tokenizer(Path(pair["target"]))
    tokenizer.chat_template = template
    assert read_examples(read_data(str(tmp_path)), tokenizer, 10**6, 2048).train[0].tokens


def test_what_is_not_finished_is_not_kept(pair, tmp_path, caplog):
    file = tmp_path / "train.jsonl"
    with serving(pair, file) as asked:
        body = {"messages": [{"role": "user", "content": "Go on"}], "stream": True}
        body |= {"max_tokens": 1500, "logit_bias": ENDLESS}
        data = json.dumps(body).encode()
        with socket.create_connection(asked.address, timeout=30) as client:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: {len(data)}\r\n\r\n"
            client.sendall(head.encode() + data)
            assert client.recv(1000)
        asked.chat("Then", **SOON)
        asked.chat("Cut off", max_tokens=3, logit_bias=ENDLESS)
        begun = [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": "It"}]
        asked.complete(messages=begun, continue_final_message=True, **SOON)
        with pytest.raises(Exception, match="400"):
            asked.chat("Wrong", temperature=-1)
        settle(asked)
    assert [row["messages"][0]["content"] for row in rows_in(file)] == ["Then"]
    assert "should not have" not in caplog.text


def test_a_full_disk_costs_no_answer_and_one_warning(pair, tmp_path, caplog):
    file = tmp_path / "train.jsonl"
    with serving(pair, file) as asked, caplog.at_level(logging.WARNING):
        asked.chat("One?", **SOON)
        settle(asked)
        before = file.read_bytes()
        with small_files(len(before) + 20):
            answers = [asked.chat(f"{n}?", **SOON).choices[0].message.content for n in (2, 3)]
            settle(asked)
        assert all(answers) and file.read_bytes() == before
        asked.chat("4?", **SOON)
        settle(asked)
    assert [r.getMessage() for r in caplog.records if "are not kept" in r.getMessage()] == [
        f"{file} cannot be written (File too large): answers are not kept until it can."
    ]
    assert [row["messages"][0]["content"] for row in rows_in(file)] == ["One?", "4?"]


def test_a_file_is_rotated_and_its_owner_alone_reads_it(tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text("")
    file.chmod(0o644)
    collector = Collector(file, max_bytes=50)
    for number in range(5):
        collector.keep({"number": number, "messages": f"\ud800{number}"})
    older = tmp_path / "chats.jsonl.1"
    assert [row["number"] for row in rows_in(older)] == [3]
    assert [row["number"] for row in rows_in(file)] == [4]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (file, older))
    file.rename(tmp_path / "taken")
    collector.keep({"number": 5})
    assert rows_in(file) == [{"number": 5}]


@pytest.mark.exhaustive
def test_a_conversation_is_kept_once(pair, tmp_path):
    """Also by the server that is started next; another answer to it is another one."""
    file = tmp_path / "train.jsonl"
    for _ in range(2):
        with serving(pair, file) as asked:
            for _ in range(2):
                asked.chat("One?", **SOON)
            asked.chat("Two?", **SOON)
            settle(asked)
    assert [row["messages"][0]["content"] for row in rows_in(file)] == ["One?", "Two?"]
    collector = Collector(file)
    for answer in "aab":
        collector.keep({"messages": [{"role": "user", "content": "c"}, {"content": answer}]})
    assert [row["messages"][-1]["content"] for row in rows_in(file)[2:]] == ["a", "b"]


def test_only_a_regular_file_of_ones_own_is_written(tmp_path):
    """Nothing hangs, nothing is followed, and no mode of anything else is changed."""
    other, link, second = tmp_path / "other", tmp_path / "link", tmp_path / "second"
    other.write_text("theirs")
    other.chmod(0o644)
    link.symlink_to(other)
    second.hardlink_to(other)
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "new")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o644)
    for path in (link, second, dangling, fifo, tmp_path, Path("/dev/null")):
        mode = path.stat().st_mode if path.exists() else None
        with pytest.raises(ValueError, match=r"--collect \S+ cannot be written \("):
            Collector(path)
        assert mode is None or path.stat().st_mode == mode
    assert other.read_text() == "theirs" and not (tmp_path / "new").exists()
    file = tmp_path / "file"
    collector = Collector(file)
    file.unlink()
    file.symlink_to(other)  # while the server runs
    collector.keep({"messages": []})
    assert other.read_text() == "theirs" and other.stat().st_mode & 0o777 == 0o644


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_file_of_another_user_is_left_alone(tmp_path):
    file = tmp_path / "theirs"
    file.touch(0o666)
    os.chown(file, 12345, 12345)
    mode = file.stat().st_mode & 0o777
    with pytest.raises(ValueError, match="another user's"):
        Collector(file)
    assert file.stat().st_mode & 0o777 == mode


def test_it_is_off_said_aloud_and_refused_in_a_sentence(pair, tmp_path, capsys):
    assert open_collector(parse()) is None
    with serving(pair, tmp_path / "x.jsonl") as asked:
        announce(asked.server, asked.generator)
    note = f"Note: chats and their answers are kept in {tmp_path / 'x.jsonl'} (--collect)."
    assert note in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"--collect \S+ cannot be written \(Not a directory"):
        open_collector(parse("--collect", str(tmp_path / "x.jsonl" / "y" / "z.jsonl")))
