"""What `account` says of runs that others measured on a GPU.

``ledger/published.json`` holds the settings of the runs, what was measured
and where it was published. This script adds what ``account`` says, with the
transformers and peft that were measured: ``make peers`` runs it in the
environment of the other calculators. The models are built on meta, the
operators are a CPU's. Bytes are the same on every machine.
"""

import importlib.metadata
import json
from pathlib import Path

RECORD = Path(__file__).parents[1] / "src/membudget/ledger/published.json"
PACKAGES = ("torch", "transformers", "peft")
LORA = ["q_proj", "k_proj", "v_proj", "o_proj"]


def model_of(record, run):
    """The library's model on meta, as the loop trains it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        **record["models"][run["model"]], attn_implementation=run["attention"]
    )
    autocast = run["recipe"] == "autocast"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32 if autocast else torch.bfloat16
        )
    if run["rank"]:
        lora = LoraConfig(r=run["rank"], target_modules=LORA)
        model = get_peft_model(model, lora)
    if run["checkpointed"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train(run["training"])


def account_of(record, run, keep=True):
    """The account of a run.

    Args:
        keep: whether `account` is told what their loop keeps: gradients, and
            the output. In inference there is nothing else to account for.
    """
    import torch

    from membudget.ledger import account

    model = model_of(record, run)
    x = torch.zeros(1, run["tokens"], dtype=torch.long, device="meta")
    if not run["training"]:

        def answer(model, x):
            return model(input_ids=x, use_cache=True)

        return account(model, answer, x, inference=True)

    def loss(model, x):
        with torch.autocast("cpu", torch.bfloat16, run["recipe"] != "bf16"):
            output = model(input_ids=x, labels=x, use_cache=False)
        return output if keep else output.loss

    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(trained, foreach=True)
    return account(model, loss, x, optimizer=adamw, keep_gradients=keep)


def predict(record, run):
    """Bytes of a run in tensors and in blocks; plain: in blocks, untold."""
    usage = account_of(record, run).usage
    plain = run["training"] and account_of(record, run, keep=False).usage
    return {
        "requested": usage.requested,
        "allocated": usage.allocated,
        "plain": plain.allocated if plain else None,
    }


def versions(packages=PACKAGES):
    """Of the packages that are here, without the kind of build (`+cpu`)."""
    found = {name: importlib.metadata.version(name) for name in packages}
    return {name: version.split("+")[0] for name, version in found.items()}


def write(path, record):
    """Write a record."""
    text = json.dumps(record, indent=1, ensure_ascii=False)
    Path(path).write_text(text + "\n", "utf-8")


def main():
    record = json.loads(RECORD.read_text("utf-8"))
    record["versions"] = versions()
    for name in PACKAGES[1:]:
        assert record["versions"][name] == record["measured_with"][name], name
    for run in record["runs"]:
        run["account"] = predict(record, run)
        off = 100 * (run["account"]["allocated"] / run["measured"] - 1)
        print(f"{run['name']:50} {off:+.2f} %", flush=True)
    write(RECORD, record)


if __name__ == "__main__":
    main()
