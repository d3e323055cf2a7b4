"""Run other memory calculators on the same steps: writes ledger/peers.json.

They run in a virtual environment of their own, which is deleted afterwards
(--env FOLDER keeps it and takes it again). The file says nothing of the
machine: bytes are the same everywhere. Then ``published.py`` runs there, too.
"""

import argparse
import dataclasses
import functools
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

from published import versions, write

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "src/membudget/ledger/peers.json"
VERSIONS = {
    "torch": "2.13.0",
    "transformers": "4.57.6",
    "peft": "0.21.2",
    "accelerate": "1.15.0",
    "vramcalc": "0.1.2",
    "llm-analysis": "0.2.2",
    "bitsandbytes": "0.50.2",
}
# What llm-analysis and the course's package import. llm-analysis itself asks
# for an old huggingface-hub that it uses for downloads only.
BESIDES = ["fire==0.5.0", "numpy==2.4.6", "psutil==7.2.2"]

SMALL = {
    "vocabulary": 8192,
    "width": 384,
    "depth": 6,
    "heads": 6,
    "context": 256,
    "tied": True,
}
ROWS = [  # a preset or SMALL, batch, tokens, recipe, checkpointed
    ("small GPT", 8, 256, "fp32", False),
    ("GPT-2 124M", 8, 1024, "fp32", False),
    ("GPT-2 124M", 8, 1024, "autocast", False),
    ("Llama 3.2 1B", 1, 2048, "bf16", False),
    ("Llama 3.2 1B", 1, 2048, "autocast", False),
    ("Llama 3.2 1B", 1, 2048, "autocast", True),
    ("Llama 3 8B", 1, 2048, "bf16", False),
    ("Llama 3 8B", 1, 2048, "autocast", False),
]
RUN = "small GPT"  # really run; the others in a dry run

PEERS = {
    "membudget": {
        "what": "membudget.ledger.predict(…, foreach=True).peak",
        "leaves_out": "What an operator allocates and frees within itself.",
    },
    "accelerate": {
        "what": "calculate_maximum_sizes and estimate_training_usage, the "
        "two functions behind accelerate estimate-memory, on the model on "
        "meta. The total is the largest of their four numbers, as the "
        "command prints it.",
        "leaves_out": "Activations, logits and temporaries: neither batch "
        "nor sequence is asked for. In mixed precision its largest number "
        "is the two Adam states alone, 8 bytes per parameter, because it "
        "takes the maximum of model, gradients and states and not their "
        "sum. The command itself builds AutoModel, which has no head.",
    },
    "vramcalc": {
        "what": "vramcalc.estimate(config, mode='train').total, which is "
        "what PyTorch allocates; its overhead outside PyTorch is not in it.",
        "leaves_out": "GPT-2 (no rule for its family), the attention mask, "
        "the statistics of attention and norms, rotary tables and inputs. "
        "Two tensors of each layer are a correction from measurements. It "
        "always adds gradients to the activations, as its benchmark keeps "
        "them.",
    },
    "eleutherai": {
        "what": "calc/calc_transformer_mem.py of EleutherAI/cookbook "
        "(commit c2af7db), 'Transformer Math 101', one GPU: its formula in "
        "tools/peers.py.",
        "leaves_out": "Logits and loss, fused attention (it always counts "
        "the scores), tied heads, a gated MLP's activations, an optimizer "
        "other than 12 bytes per parameter; checkpointing takes away the "
        "scores only. Its option for the MLP's width takes whole multiples "
        "of the model's; the formula is used with Llama 3 8B's 3.5.",
    },
    "llm_analysis": {
        "what": "LLMAnalysis(…).training(flash_attn=True), the sum of its "
        "weights, gradients, optimizer states and activations.",
        "leaves_out": "The loss: of the logits it has one copy in 16 bits, "
        "which it adds twice at a batch of 1, no log-probabilities and no "
        "gradients. Embedding and head always share a weight; positions, "
        "biases and the third matrix of a gated MLP have none (the MLP is "
        "given 1.5 times as wide, which makes its parameters right); and of "
        "a checkpointed model the layer that is being recomputed. Mixed "
        "precision is 2 + 4 + 12 bytes per parameter, which it is asked for "
        "under autocast.",
    },
}
TRUTHS = {
    "course": "membudget.models, the loss is F.cross_entropy",
    "transformers": "LlamaForCausalLM or GPT2LMHeadModel, "
    "model(input_ids, labels).loss, sdpa, use_cache=False, no dropout",
    "transformers_mask": "the same with attention_mask of ones: attention is "
    "then fused and causal, without a mask",
}
WHY = {
    "llama": {
        "logits and loss": "The loss casts the logits to fp32: "
        "log-probabilities and both gradients take 4 bytes a number, in a "
        "16-bit model too.",
        "norms": "LlamaRMSNorm casts the normalised input back to 16 bits "
        "before it multiplies by the weight, and saves that; PyTorch's "
        "RMSNorm saves it in fp32.",
        "attention": "Without an attention mask the library cannot rule out "
        "packed sequences. It makes a mask of tokens × tokens, which every "
        "layer casts and saves, and repeats keys and values for every head.",
        "positions": "Tables of cosine and sine that hold every number "
        "twice, where the course has one complex number for each pair.",
        "parameters": "The rotary frequencies, a buffer.",
    },
    "gpt": {
        "attention": "Without an attention mask the library cannot rule out "
        "packed sequences. It makes a mask of tokens × tokens for each "
        "sequence, which every layer casts and saves.",
        "MLP": "GPT-2's GELU is the tanh formula, operator by operator: it "
        "saves several tensors of the MLP's width where F.gelu saves one.",
        "parameters": "A causal mask in every layer, a buffer that fused "
        "attention does not use.",
    },
}


# In the environment of the peers


def course_loss(model, x, y):
    import torch.nn.functional as F

    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def library_loss(model, x, y, mask=None):
    """The loss of the library's model; its output is let go."""
    return model(
        input_ids=x, labels=y, attention_mask=mask, use_cache=False
    ).loss


def in_recipe(loss, recipe):
    """The loss as the recipe computes it."""
    import torch

    @functools.wraps(loss)
    def under_autocast(model, *batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, *batch)

    return under_autocast if recipe == "autocast" else loss


@contextmanager
def mask_of_ones():
    """Let the library know what a dry run cannot ask: the mask is all ones."""
    from transformers import masking_utils

    ask = masking_utils._ignore_causal_mask_sdpa
    masking_utils._ignore_causal_mask_sdpa = lambda mask, *rest, **named: ask(
        None, *rest, **named
    )
    try:
        yield
    finally:
        masking_utils._ignore_causal_mask_sdpa = ask


def library_config(shape, tokens):
    """The shape as the library's configuration."""
    from transformers import GPT2Config, LlamaConfig

    common = {
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    if shape.family == "gpt":
        return GPT2Config(
            n_embd=shape.width,
            n_layer=shape.depth,
            n_head=shape.heads,
            n_positions=shape.context,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            loss_type="ForCausalLMLoss",
            **common,
        )
    return LlamaConfig(
        hidden_size=shape.width,
        num_hidden_layers=shape.depth,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.hidden,
        max_position_embeddings=tokens,
        rope_theta=500000.0,
        loss_type="ForCausalLMLoss",
        **common,
    )


def library_model(shape, tokens, device="meta"):
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        return AutoModelForCausalLM.from_config(library_config(shape, tokens))


def course_model(shape, device, checkpointed):
    from torch.utils.checkpoint import checkpoint

    model = shape.build(device)
    for block in model.blocks if checkpointed else ():
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False
        )
    return model


def measure(truth, row, run=False):
    """The tracker of one step of one truth."""
    import torch

    from membudget.measuring import dry_run, trace_step

    shape, batch, tokens, recipe, checkpointed = row
    device = "cpu" if run else "meta"
    x = torch.zeros(batch, tokens, dtype=torch.long, device=device)
    inputs, loss = [x, x.clone()], library_loss
    if truth == "course":
        model = course_model(shape, device, checkpointed)
        loss = course_loss
    else:
        model = library_model(shape, tokens, device)
        if checkpointed:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
    if recipe == "bf16":
        model = model.to(torch.bfloat16)
    if truth == "transformers_mask":
        inputs.append(torch.ones_like(x))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    step = (model.train(), in_recipe(loss, recipe), *inputs)
    if run:
        return trace_step(*step, optimizer=optimizer)
    with mask_of_ones():
        return dry_run(*step, optimizer=optimizer, on="cpu")


def part_of(allocation):
    """The part of a model to which bytes belong."""
    if allocation.category in ("parameters", "gradients", "optimizer"):
        return allocation.category
    if allocation.category == "inputs":
        return "inputs"
    operator = allocation.operator
    module = operator.module
    name = operator.name.removeprefix("aten.")
    if re.search(r"norm|ln_", module):
        return "norms"
    if re.search(r"head|^$|LMHead|ForCausalLM", module):
        return "logits and loss"
    inside = re.search(r"(blocks|layers|h)\.\d+\.?(.*)", module)
    if not inside:
        return "positions"
    if re.match(r"mlp|gate|up|down", inside[2]):
        return "MLP"
    if re.match(r"self_attn|attn|q|k|v|out", inside[2]):
        return "attention"
    if re.match(r"gelu|silu|mul", name):
        return "MLP"
    return "residuals" if name.startswith("add") else "attention"


def parts(tracker):
    """Bytes at the peak by part of the model."""
    counted = Counter()
    for allocation in tracker.at_peak():
        counted[part_of(allocation)] += allocation.bytes
    assert counted.total() == tracker.peak
    return counted


def as_truth(tracker, how):
    operator = tracker.operators[tracker.peak_moment]
    return {
        "how": how,
        "peak": tracker.peak,
        "split": tracker.split(),
        "moment": [operator.name, operator.phase],
    }


def truths(row, run):
    """What a step needs, by each of the truths."""
    result, counted = {}, {}
    for truth in TRUTHS:
        tracker = measure(truth, row)
        result[truth] = as_truth(tracker, "dry run")
        if run:
            really = measure(truth, row, run=True)
            assert really.peak == tracker.peak, (truth, really.peak)
            assert really.split() == tracker.split()
            result[truth] = as_truth(really, "run")
        counted[truth] = parts(tracker)
    ours, theirs = counted["course"], counted["transformers"]
    result["transformers"]["beyond"] = {
        part: theirs[part] - ours[part]
        for part in sorted({*ours, *theirs})
        if theirs[part] != ours[part]
    }
    return result


def membudget(shape, batch, tokens, recipe, checkpointed):
    from membudget.ledger import predict

    settings = {
        "recipe": recipe,
        "optimizer": "adam",
        "checkpointed": checkpointed,
        "foreach": True,
    }
    found = predict(shape, batch, tokens, **settings)
    return {
        "settings": settings,
        "total": found.peak,
        "parts": found.at_peak.split,
        "moment": [found.at_peak.row, found.at_peak.phase],
    }


def accelerate(shape, batch, tokens, recipe, checkpointed):
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoModel

    if recipe == "bf16":
        return {
            "cannot": "its 16-bit rules keep the parameters in fp32, there "
            "is none for a model in bf16"
        }
    precision = {"fp32": "float32", "autocast": "bfloat16"}[recipe]

    def ask(model):
        size, _ = calculate_maximum_sizes(model)
        found = estimate_training_usage(size, precision)
        return {name: whole(number) for name, number in found.items()}

    with init_empty_weights():
        headless = AutoModel.from_config(library_config(shape, tokens))
    found = ask(library_model(shape, tokens))
    return {
        "settings": {"mixed_precision": precision},
        "total": max(found.values()),
        "parts": found,
        "command": max(ask(headless).values()),
    }


def vramcalc(shape, batch, tokens, recipe, checkpointed):
    from vramcalc import estimate

    config = library_config(shape, tokens)
    settings = {
        "mode": "train",
        "dtype": "fp32" if recipe == "fp32" else "bf16",
        "batch": batch,
        "seq_len": tokens,
        "grad_checkpoint": checkpointed,
        "optimizer": "adamw",
        "precision": "amp" if recipe == "autocast" else "pure",
        "attn_impl": "sdpa",
    }
    try:
        found = estimate(config.to_dict(), **settings)
    except ValueError as error:
        return {"cannot": str(error)}
    names = "weights gradients optimizer activations autocast_cache"
    return {
        "settings": settings,
        "total": found.total,
        "parts": {
            name: getattr(found, name)
            for name in [*names.split(), "step_workspace"]
        },
    }


def eleutherai(shape, batch, tokens, recipe, checkpointed):
    if recipe == "bf16":
        return {
            "cannot": "its optimizer takes 12 bytes per parameter, a master "
            "copy among them, and no option changes that"
        }
    settings = {
        "--kv-size-ratio": shape.kv_heads / shape.heads,
        "--ffn-expansion-factor": shape.hidden / shape.width,
        "--num-mlp-linears": 3 if shape.family == "llama" else 2,
        "--checkpoint-activations": checkpointed,
    }
    if recipe == "fp32":
        settings |= {
            "--disable-mixed-precision": True,
            "--low-prec-bytes-per-val": 4,
        }
    found = eleutherai_parts(shape, batch, tokens, recipe, checkpointed)
    return {"settings": settings, "total": sum(found.values()), "parts": found}


def eleutherai_parts(shape, batch, tokens, recipe, checkpointed):
    """EleutherAI's formula, in its own terms, in bytes.

    From ``calc/calc_transformer_mem.py`` of EleutherAI/cookbook (commit
    c2af7db; Anthony and Schoelkopf, "Transformer Math 101", 2023) for one
    GPU, without experts. It is written for mixed precision, 2 + 4 + 12 bytes
    per parameter; in ``"fp32"`` it is asked for 4 bytes of each parameter
    and activation, and its optimizer keeps 12. Checkpointing drops the scores
    and nothing else.
    """
    low = {"fp32": 4, "autocast": 2}[recipe]
    h, depth, s = shape.width, shape.depth, tokens
    linears = 3 if shape.family == "llama" else 2
    ratio = shape.kv_heads / shape.heads
    parameters = (
        2 * shape.vocabulary * h  # embedding and head
        + h * s  # positions
        + 8 * h * depth
        + 2 * h
        + int(2 * (1 + ratio) * depth * h * h)
        + int(linears * depth * h * (shape.hidden / h) * h)
    )
    scores = 0 if checkpointed else (2 * low + 1) * shape.heads * s
    return {
        "model": parameters * low,
        "gradients": parameters * 4,
        "optimizer": parameters * 12,
        "activations": s * batch * depth * (h * (16 * low + 2) + scores),
    }


def llm_analysis(shape, batch, tokens, recipe, checkpointed):
    from llm_analysis.analysis import ActivationRecomputation, LLMAnalysis
    from llm_analysis.config import DtypeConfig, GPUConfig, ModelConfig

    if recipe == "fp32":
        return {"cannot": "weights and activations have 4, 8 or 16 bits"}
    wide = shape.hidden * (3 if shape.family == "llama" else 2) // 2
    settings = {
        "batch_size_per_gpu": batch,
        "seq_len": tokens,
        "layernorm_dtype_bytes": 4,
        "flash_attn": True,
        "mlp_gated_linear_units": shape.family == "llama",
    }
    if recipe == "bf16":  # gradients take the first, Adam the sum of both
        settings |= {"master_weights_dtype_bytes": 2, "other_op_bytes": 2}
    how = "FULL" if checkpointed else "NONE"
    analysis = LLMAnalysis(
        ModelConfig(
            name="model",
            num_layers=shape.depth,
            n_head=shape.heads,
            hidden_dim=shape.width,
            vocab_size=shape.vocabulary,
            max_seq_len=tokens,
            num_key_value_heads=shape.kv_heads,
            ffn_embed_dim=wide,
            expansion_ratio=wide / shape.width,
        ),
        # Only the limit matters: it refuses a batch that does not fit.
        GPUConfig("large", 10**6, 1, 1, 1, 1),
        DtypeConfig("w16a16e16"),
    )
    found = analysis.training(
        activation_recomputation=ActivationRecomputation[how], **settings
    )
    names = {
        "weights": "weight_memory_per_gpu",
        "gradients": "gradient_memory_per_gpu",
        "optimizer": "optimizer_state_memory_per_gpu",
        "activations": "activation_memory_per_gpu",
    }
    return {
        "settings": {
            "dtype_name": "w16a16e16",
            **settings,
            "ffn_embed_dim": wide,
            "activation_recomputation": how,
        },
        "total": whole(found["(weight+op_state+grad+act)_memory_per_gpu"]),
        "parts": {name: whole(found[key]) for name, key in names.items()},
    }


def whole(number):
    assert number == int(number), number
    return int(number)


CALCULATORS = (membudget, accelerate, vramcalc, eleutherai, llm_analysis)


def adam_8bit():
    """Bytes of the states of bitsandbytes' AdamW8bit, and ours."""
    import torch
    from bitsandbytes.optim import AdamW8bit

    from membudget.ledger import PRESETS, optimizer_bytes

    with torch.device("meta"):
        block = PRESETS["GPT-2 124M"].build("meta").blocks[0]
    lists = [
        [[768]],
        [[4095]],
        [[4096]],
        [[4097]],
        [[63, 65]],
        [[768, 3072]],
        [[8192, 384]],
        [list(p.shape) for p in block.parameters()],
    ]
    result = []
    for shapes in lists:
        weights = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = AdamW8bit(weights)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
            for state in optimizer.state.values()
            for tensor in state.values()
            if torch.is_tensor(tensor)
        }
        theirs = sum(storage.nbytes() for storage in storages.values())
        sizes = [weight.numel() for weight in weights]
        ours = optimizer_bytes(sizes, "fp32", "adam-8bit")
        result.append({"shapes": shapes, "theirs": theirs, "ours": ours})
    return result


def write_record(path):
    """Run everything, here."""
    import logging

    logging.getLogger("llm-analysis").setLevel(logging.ERROR)
    from llm_analysis.logger import logger

    logger.setLevel(logging.ERROR)
    from membudget.ledger import PRESETS, Transformer

    assert versions(VERSIONS) == VERSIONS
    rows = []
    for preset, *step in ROWS:
        shape = PRESETS[preset] if preset in PRESETS else Transformer(**SMALL)
        batch, tokens, recipe, checkpointed = step
        name = f"{preset}, {batch} × {tokens}, {recipe}"
        row = {
            "name": name + ", checkpointed" * checkpointed,
            "shape": dataclasses.asdict(shape),
            "batch": batch,
            "tokens": tokens,
            "recipe": recipe,
            "checkpointed": checkpointed,
            "truths": truths((shape, *step), preset == RUN),
            "calculators": {
                ask.__name__: ask(shape, *step) for ask in CALCULATORS
            },
        }
        rows.append(row)
        print(row["name"], flush=True)
    record = {
        "versions": VERSIONS,
        "optimizer": "AdamW, foreach=True, as PyTorch does on a GPU",
        "truths": TRUTHS,
        "peers": PEERS,
        "why": WHY,
        "rows": rows,
        "adam_8bit": adam_8bit(),
    }
    write(path, record)


# Outside


def make(folder):
    """The environment of the peers; its Python."""
    python = Path(folder) / "bin/python"
    if not python.exists():
        pins = [f"{name}=={version}" for name, version in VERSIONS.items()]
        alone = [pin for pin in pins if pin.startswith("llm-analysis")]
        others = [pin for pin in pins if pin not in alone]
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        install = [*pip, "install", "--quiet"]
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([*install, *others, *BESIDES], check=True)
        subprocess.run([*install, "--no-deps", *alone], check=True)
    return python


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", help="folder of the environment; kept")
    parser.add_argument("--here", metavar="FILE", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        return write_record(given.here)
    with tempfile.TemporaryDirectory() as folder:
        python = make(given.env or folder)
        paths = {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
        published = Path(__file__).with_name("published.py")
        for script in ([__file__, "--here", RECORD], [published]):
            subprocess.run(
                [python, *script], env=os.environ | paths, check=True
            )


if __name__ == "__main__":
    main()
