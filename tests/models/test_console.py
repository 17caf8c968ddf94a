"""`run_generate`, as `jtile generate` calls it: text, JSON, errors in one sentence, and Ctrl-C."""

import json
import os
import signal
import subprocess
import sys

import forked
import numpy as np
import pytest

from jtile.models import run_generate

PROGRAM = "import sys, json; from jtile.models import run_generate; sys.exit(run_generate(**json.loads(sys.argv[1])))"


@pytest.fixture
def prompt_ids(golden):
    return ",".join(str(i) for i in golden["input_ids"][0])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A folder that the processes of this file share: one of them compiles the model's programs."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def options(tiny_folder, golden, cache):
    """What all processes are asked for, so that they have the same programs."""
    ids = ",".join(str(i) for i in golden["input_ids"][0])
    return dict(
        model=str(tiny_folder), prompt_ids=ids, max_new_tokens=200, ignore_eos=True, cache_dir=str(cache)
    )  # fmt: skip


@pytest.fixture(scope="module")
def environment(cache):
    hidden = {k: v for k, v in os.environ.items() if not k.startswith("JTILE_")}
    return hidden | {"JAX_PLATFORMS": "cpu", "JTILE_CACHE_DIR": str(cache), "JTILE_OPTIMIZE": "0"}


@pytest.fixture
def start(environment):
    def run(**options):
        command = [sys.executable, "-c", PROGRAM, json.dumps(options)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, bufsize=0)

    return run


@pytest.fixture(scope="module")
def ended(environment, options):
    """What a process tells that is not disturbed."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(options | {"json": True})]
    return lambda: json.loads(forked.run(command, env=environment).stdout)


@pytest.fixture(scope="module")
def first(ended):
    """The record of the first process."""
    return ended()


def test_json(tiny_folder, golden, prompt_ids, capsys):
    assert run_generate(model=str(tiny_folder), prompt_ids=prompt_ids, json=True, max_new_tokens=16) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["ids"] == golden["greedy"][0].tolist()
    assert record["finish"] == "length"
    assert record["prompt_tokens"] == 24
    assert record["new_tokens"] == 16
    assert record["tokens_per_second"] > 0
    assert record["prefill_tokens_per_second"] > 0


def test_stats_go_to_standard_error(tiny_folder, golden, prompt_ids, capsys):
    ids = golden["input_ids"][0]
    assert run_generate(model=str(tiny_folder), prompt_ids=ids, stats=True, max_new_tokens=4) == 0
    out = capsys.readouterr()
    assert out.out.split() == [str(i) for i in golden["greedy"][0][:4]]  # a model without a tokenizer
    assert out.err.startswith("prefill 24 tokens, ")
    assert "decode 4 tokens, " in out.err


def test_text_from_a_gguf(write_gguf, tmp_path, capsys):
    path = str(write_gguf(tmp_path / "tiny.gguf", tokenizer__chat_template="{{ messages[-1].content }}"))
    assert run_generate("ab", model=path, json=True, max_new_tokens=4) == 0
    with_template = json.loads(capsys.readouterr().out)
    assert run_generate("ab", model=path, json=True, max_new_tokens=4, chat=False) == 0
    assert json.loads(capsys.readouterr().out)["ids"] == with_template["ids"]
    assert run_generate("ab", model=path, max_new_tokens=4, ignore_eos=True) == 0
    assert capsys.readouterr().out.startswith(with_template["text"])
    assert run_generate("ab", model=path, system="be brief", chat=False) == 1
    assert "and no --raw" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give either a prompt or --prompt-ids"),
        ({"prompt_ids": "1,b"}, "--prompt-ids takes integers"),
        ({"prompt_ids": ""}, "the prompt is empty"),
        ({"prompt_ids": "999"}, "outside the vocabulary"),
        ({"prompt_ids": "1", "logit_bias": "3:2"}, "--logit-bias takes token ids with numbers"),
        ({"prompt_ids": "1", "min_p": 2.0}, "min_p must be in"),
        ({"prompt_ids": "1", "draft": "/nowhere"}, "there is no model at /nowhere"),
        ({"prompt": "hi"}, "has no tokenizer"),
        ({"prompt_ids": "1", "system": "be brief"}, "a system prompt is part of a chat"),
        ({"prompt_ids": "1", "model": "/nowhere"}, "there is no model at /nowhere"),
        ({"prompt_ids": "1", "dtype": "float31"}, "float31"),
        ({"prompt_ids": "1", "cache_dtype": "int3"}, "int3"),
    ],
)
def test_errors_are_one_sentence(tiny_folder, capsys, options, message):
    assert run_generate(**{"model": str(tiny_folder)} | options) == 1
    err = capsys.readouterr().err
    assert err.startswith("jtile: ")
    assert message in err
    assert err.count("\n") == 1


def test_ctrl_c_keeps_the_text_and_leaves_cleanly(start, first, options):
    whole = [str(i) for i in first["ids"]]
    assert len(whole) == 200
    process = start(**options)
    begin = process.stdout.read(1)  # generation has begun
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    part = (begin + out).decode().split()
    assert process.returncode in (130, 0)  # 0: it was faster than the signal
    assert part == whole[: len(part)]
    assert b"Traceback" not in err


def test_a_second_start_finds_the_compiled_programs(first, ended, cache):
    programs = lambda: {path.name for path in (cache / "xla").glob("*-cache")}
    compiled = programs()
    assert any(name.startswith("jit_decode") for name in compiled)
    assert ended()["ids"] == first["ids"]
    assert programs() == compiled


def test_ctrl_c_before_the_first_token(tiny_folder, prompt_ids, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("jtile.models.console.load_over", interrupted)
    assert run_generate(model=str(tiny_folder), prompt_ids=prompt_ids) == 130
    assert capsys.readouterr().out == ""


def test_a_closed_pipe_is_no_error_message(start, options):
    process = start(**options)
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=600) in (0, 1)


def test_smollm2_answers(smollm2, smollm2_path, smollm2_cases, monkeypatch, capsys):
    """By the model that other tests have loaded, with its programs."""
    monkeypatch.setattr("jtile.models.console.load_over", lambda devices, model, **_: {smollm2_path: smollm2}[model])
    assert smollm2_path.endswith(".gguf")
    question = smollm2_cases[0]["messages"][0]["content"]
    assert run_generate(question, model=smollm2_path, max_new_tokens=48) == 0
    assert capsys.readouterr().out == "The capital of France is Paris.\n"
    assert np.size(smollm2_cases[0]["greedy_ids"]) == 48
