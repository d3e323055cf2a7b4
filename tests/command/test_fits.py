"""The commands fits and plan: their answers, by the ledger."""

import json
import logging
import sys
import warnings

import pytest

from membudget.cards import CARDS, GIB
from membudget.command import Code, asked, main
from membudget.ledger import Adapter, from_config, predict, rules

pytest.importorskip("transformers")

CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 5000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
BATCH, TOKENS = 4, 128
SIZES = ["--batch", str(BATCH), "--sequence", str(TOKENS)]


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return str(file)


def predicted(train, micro_batch, checkpointed):
    """Bytes of a step, by the ledger alone."""
    shape = from_config(CONFIG)
    adapter = None
    if train != "full":
        packed = train == "qlora"
        adapter = Adapter(list(shape.linears), 16, four_bits=packed)
    how = rules(shape, "cuda") | {"foreach": False, "fused": True}
    return predict(
        shape,
        BATCH,
        TOKENS,
        recipe="bf16" if adapter else "autocast",
        micro_batch=micro_batch,
        checkpointed=checkpointed,
        adapter=adapter,
        **how,
    )


@pytest.mark.parametrize("train", ["full", "lora", "qlora"])
def test_bytes_are_the_ledger_s(train, config, capsys):
    given = [config, "--card", "rtx 3060", "--train", train, *SIZES, "--json"]
    assert main(["fits", *given]) == Code.OK
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == from_config(CONFIG).parameters
    assert found["budget"] == CARDS["RTX 3060"].usable
    expected = predicted(train, BATCH, False)
    whole = found["all_at_once"]
    assert whole["peak"] == expected.peak
    assert whole["split"] == expected.at_peak.split
    assert found["fits"] and found["plans"]
    for plan in [*found["plans"], found["smallest"]]:
        how = plan["micro_batch"], plan["checkpointed"]
        assert plan["peak"] == predicted(train, *how).peak, plan
        assert plan["checkpointed"] in (0, 7)


@pytest.mark.parametrize("share", [0.999, 1])
def test_the_exit_code_is_the_answer(share, config, capsys):
    """With the least that fits, and with less."""
    asked = ["fits", config, "--train", "lora", *SIZES, "--json", "--memory"]
    main([*asked, "64GiB"])
    least = json.loads(capsys.readouterr().out)["smallest"]["peak"]
    code = main([*asked, f"{int(least * share)}B"])
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] == bool(found["plans"]) == (share == 1)
    assert code == (Code.OK if share == 1 else Code.NO)


def test_what_would_fit_does(config, capsys):
    """The shorter sequences that it names fit, and a step more does not."""
    memory = f"{predicted('lora', 1, True).peak - 10**6}B"
    asked = ["fits", config, "--train", "lora", "--memory", memory]
    assert main([*asked, *SIZES]) == Code.NO
    told = capsys.readouterr().out
    assert "It does not fit." in told
    assert "  --sequence 64 fits" in told
    assert "  --train qlora " in told
    assert main([*asked, "--batch", str(BATCH), "--sequence", "64"]) == 0
    assert "It fits so:" in capsys.readouterr().out


def test_the_program_alone_is_printed(config, capsys):
    asked = [config, "--memory", "1GiB", *SIZES, "--train", "lora"]
    for form, name in (("torch", "torch.optim"), ("trainer", "Trainer(")):
        assert main(["plan", *asked, "--as", form]) == Code.OK
        program = capsys.readouterr().out
        compile(program, form, "exec")
        assert name in program
    assert main(["fits", *asked, "--as", "torch"]) == Code.OK
    assert "from_pretrained" in capsys.readouterr().out
    small = [config, "--memory", "1MiB", *SIZES]
    assert main(["plan", *small]) == Code.NO
    out, error = capsys.readouterr()
    assert not out and "no plan fits, the least is" in error


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (["--card", "RTX 9999"], "there is no card 'RTX 9999': use one of"),
        (["--memory", "12 GB"], "'12 GB' is no size in bytes"),
        (["--memory", "9GiB", "--batch", "0"], "batch is 0"),
        (["--memory", "9GiB", "--sequence", "many"], "invalid int value"),
        (["--memory", "9GiB", "--train", "bits"], "invalid choice: 'bits'"),
        (["--memory", "9GiB", "--train", "lora", "--rank", "999"], "rank"),
        (["--memory", "9GiB", "--card", "T4"], "not allowed with"),
        ([], "one of the arguments --card --memory is required"),
        (
            ["--card", "T4", "--train", "qlora", "--precision", "autocast"],
            "bitsandbytes computes in one dtype",
        ),
    ],
    ids=" ".join,
)
def test_wrong_use_is_one_sentence(wrong, why, config, capsys):
    assert main(["fits", config, *wrong]) == Code.WRONG
    out, error = capsys.readouterr()
    assert not out and why in error
    assert error.startswith("membudget: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("weights", "config.json is no JSON"),
        ('{"model_type": "vit"}', "no rule for the model_type 'vit'"),
        ('{"model_type": "qwen2"}', "lacks vocab_size"),
        (None, "there is no file"),
    ],
)
def test_a_config_that_is_none(text, why, tmp_path, capsys):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert main(["fits", str(tmp_path), "--card", "T4"]) == Code.WRONG
    assert why in capsys.readouterr().err


def test_a_model_of_the_hub_s_cache(config, monkeypatch, capsys):
    """Downloaded before, it goes by its name."""
    hub = pytest.importorskip("huggingface_hub")
    known = {("Qwen/Qwen2", "config.json"): config}
    monkeypatch.setattr(
        hub, "try_to_load_from_cache", lambda *name: known.get(name)
    )
    asked = ["--memory", "9GiB", *SIZES]
    assert main(["fits", "Qwen/Qwen2", *asked]) == Code.OK
    assert capsys.readouterr().out.startswith("Qwen/Qwen2: ")
    assert main(["fits", "Qwen/Qwen9", *asked]) == Code.WRONG
    assert "nothing is downloaded" in capsys.readouterr().err


def test_a_bf16_less_card_is_told(config, capsys):
    assert main(["fits", config, "--card", "T4", *SIZES]) == Code.OK
    assert "no bf16" in capsys.readouterr().out
    assert CARDS["T4"].usable < 16 * GIB


def test_a_lora_needs_peft(config, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "peft", None)
    given = [config, "--card", "T4", "--train", "lora"]
    assert main(["fits", *given]) == Code.WRONG
    out, error = capsys.readouterr()
    assert not out and "a LoRA needs peft: pip install" in error


def test_the_question_stands_before_the_search(config, monkeypatch, capsys):
    """Which takes seconds."""

    def answer(question):
        raise ValueError("it takes too long")

    monkeypatch.setattr(asked.Asked, "answer", answer)
    assert main(["fits", config, "--card", "T4"]) == Code.WRONG
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 5 and told[-1].startswith("T4: ")


def test_libraries_are_not_heard(caplog, recwarn):
    with asked.quiet():
        logging.getLogger("bitsandbytes.backends").warning("no kernels")
        warnings.warn("deprecated", FutureWarning, stacklevel=1)
    assert not caplog.records and not recwarn
    logging.getLogger("bitsandbytes.backends").warning("no kernels")
    assert caplog.records
