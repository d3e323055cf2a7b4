"""The zoo: small models that the course did not write, in one table.

Models of the library transformers are made from configurations, without a
download; PyTorch's own layers and losses come beside them.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.nn.functional as F
from torch import nn

TOKENS, VOCABULARY = 12, 96


@dataclass
class Case:
    """A model and how its step is called.

    Attributes:
        model: in training.
        loss: called as ``loss(model, *batch)``.
        batch: from a number of samples to the batch.
        autocast: the forward pass runs under bf16 autocast.
    """

    model: nn.Module
    loss: Callable[..., torch.Tensor]
    batch: Callable[[int], tuple[torch.Tensor, ...]]
    autocast: bool = False

    def region(self):
        if self.autocast:
            return torch.autocast("cpu", torch.bfloat16)
        return contextlib.nullcontext()

    def value(self, model, *batch):
        with self.region():
            return self.loss(model, *batch)

    def in_bf16(self):
        make = self.batch

        def batch(samples):
            return tuple(
                t.bfloat16() if t.is_floating_point() else t
                for t in make(samples)
            )

        return dataclasses.replace(
            self, model=self.model.bfloat16(), batch=batch
        )


# Models of the library transformers ----------------------------------------

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}


# The builders import what only they need; it takes seconds.


def config_of(name, **options):
    import transformers

    return getattr(transformers, f"{name}Config")(**options)


def from_config(auto, config, **options):
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(0)
        kind = getattr(transformers, auto, None)
        make = getattr(kind, "from_config", kind)
        return make(config, **options).train()


def tokens(samples, padding=False):
    """Tokens, the attention mask and labels, as a data collator makes them."""
    x = torch.arange(samples * TOKENS).view(samples, TOKENS)
    x = x * 7 % (VOCABULARY - 3) + 3
    mask, labels = torch.ones_like(x), x.clone()
    if padding:
        mask[:, -4:] = 0
        labels[:, -4:] = -100
    return x, mask, labels


def labelled(model, x, mask, labels):
    return model(input_ids=x, attention_mask=mask, labels=labels).loss


def text(name, auto="AutoModelForCausalLM", padding=False, **options):
    config = config_of(name, **SMALL | options)
    model = from_config(auto, config)
    return Case(model, labelled, partial(tokens, padding=padding))


masked = partial(text, auto="AutoModelForMaskedLM")
both = partial(text, auto="AutoModelForSeq2SeqLM")


def lora(name, **options):
    import peft

    case = text(name, **options)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    return dataclasses.replace(
        case, model=peft.get_peft_model(case.model, config)
    )


def batch_of(*shapes):
    """Noise in shapes, then labels."""

    def batch(samples):
        noise = torch.Generator().manual_seed(0)
        xs = [torch.randn(samples, *s, generator=noise) for s in shapes]
        return *xs, torch.arange(samples) % 10

    return batch


def image(name, **options):
    config = config_of(name, image_size=32, num_labels=10, **options)
    model = from_config("AutoModelForImageClassification", config)

    def loss(model, x, y):
        return model(pixel_values=x, labels=y).loss

    return Case(model, loss, batch_of((3, 32, 32)))


def clip():
    tower = {
        k: SMALL[k]
        for k in SMALL
        if k not in ("vocab_size", "max_position_embeddings")
    }
    config = config_of(
        "CLIP",
        text_config=SMALL,
        vision_config=tower | {"image_size": 32, "patch_size": 8},
        projection_dim=16,
    )

    def batch(samples):
        x, mask, _ = tokens(samples)
        return x, mask, torch.ones(samples, 3, 32, 32)

    def loss(model, x, mask, pixels):
        return model(
            input_ids=x,
            attention_mask=mask,
            pixel_values=pixels,
            return_loss=True,
        ).loss

    return Case(from_config("CLIPModel", config), loss, batch)


def whisper():
    config = config_of(
        "Whisper",
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=24,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )

    def batch(samples):
        return torch.ones(samples, 8, 48), tokens(samples)[2]

    def loss(model, features, labels):
        return model(input_features=features, labels=labels).loss

    return Case(
        from_config("WhisperForConditionalGeneration", config), loss, batch
    )


def wav2vec2():
    config = config_of(
        "Wav2Vec2",
        **SMALL,
        conv_dim=(16, 16),
        conv_kernel=(10, 3),
        conv_stride=(5, 2),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        layerdrop=0.0,
        apply_spec_augment=False,
        classifier_proj_size=16,
        num_labels=10,
    )

    def loss(model, x, y):
        mask = torch.ones_like(x, dtype=torch.long)
        return model(input_values=x, attention_mask=mask, labels=y).loss

    return Case(
        from_config("Wav2Vec2ForSequenceClassification", config),
        loss,
        batch_of((400,)),
    )


# PyTorch's own -------------------------------------------------------------


class First(nn.Module):
    """A layer that returns a tuple, as one that returns its first part."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class Tied(nn.Module):
    """A head with the weights of the table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.body(self.table(x)).relu())


def torch_model(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def classify(model, x, y):
    return F.cross_entropy(model(x), y)


def recurrent(kind, **options):
    model = torch_model(
        lambda: nn.Sequential(
            First(kind(8, 16, batch_first=True, **options)),
            nn.Linear(16 * (1 + options.get("bidirectional", False)), 10),
            nn.Flatten(),
        )
    )
    return Case(model, classify, batch_of((TOKENS, 8)))


def convolutional(norm):
    model = torch_model(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            norm(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Sequential(norm(8), nn.ReLU(inplace=True)),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(8 * 8 * 8, 10),
        )
    )
    return Case(model, classify, batch_of((3, 16, 16)))


def attention():
    model = torch_model(
        lambda: nn.Sequential(
            *(
                nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
                for _ in range(2)
            ),
            nn.Flatten(),
            nn.Linear(16 * TOKENS, 10),
        )
    )
    return Case(model, classify, batch_of((TOKENS, 16)))


def tied():
    def loss(model, x, _, labels):
        return F.cross_entropy(model(x).flatten(0, 1), labels.flatten())

    return Case(torch_model(Tied), loss, tokens)


def perceptron():
    return torch_model(
        lambda: nn.Sequential(
            nn.Linear(8, 32),
            nn.GELU(),
            nn.Linear(32, 32),
            nn.Tanh(),
            nn.Linear(32, 10),
        )
    )


def compared(function):
    """A loss of the output and a target of its shape."""

    def loss(model, x, y):
        return function(model(x), y.sigmoid())

    def batch(samples):
        x, y, _ = batch_of((8,), (10,))(samples)
        return x, y

    return Case(perceptron(), loss, batch)


def classified(function):
    """A loss of the output and classes."""

    def loss(model, x, y):
        return function(model(x), y)

    return Case(perceptron(), loss, batch_of((8,)))


def weighted():
    weight = torch.linspace(1, 2, 10)
    case = classified(None)
    case.model.register_buffer("weight", weight)

    def loss(model, x, y):
        return F.cross_entropy(
            model(x),
            y,
            weight=model.weight,
            ignore_index=1,
            label_smoothing=0.1,
        )

    return dataclasses.replace(case, loss=loss)


def several(function, parts):
    """A loss of the outputs of several inputs."""

    def loss(model, *xs):
        *xs, y = xs
        return function(*map(model, xs), y)

    return Case(perceptron(), loss, batch_of(*[(8,)] * parts))


def ctc(lengths):
    def loss(model, x, y):
        log = model(x).log_softmax(-1).transpose(0, 1)
        inputs, targets = ([n] * len(x) for n in (x.shape[1], y.shape[1]))
        return F.ctc_loss(log, y, lengths(inputs), lengths(targets))

    def batch(samples):
        x, _ = batch_of((TOKENS, 8))(samples)
        y = torch.arange(4 * samples).view(samples, 4) % 9 + 1
        return x, y

    return Case(perceptron(), loss, batch)


def cosine(a, b, y):
    return F.cosine_embedding_loss(a, b, 2 * (y % 2) - 1)


def triplet(a, b, c, y):
    return F.triplet_margin_loss(a, b, c)


def bce(x, y):
    return F.binary_cross_entropy(x.sigmoid(), y)


def divergence(x, y):
    return F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean")


def nll(x, y):
    return F.nll_loss(x.log_softmax(-1), y)


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

TEXTS = {
    "BERT": partial(masked, "Bert"),
    "RoBERTa": partial(masked, "Roberta"),
    "DistilBERT": partial(masked, "DistilBert", hidden_dim=64),
    "DeBERTa": partial(masked, "Deberta"),
    "DeBERTa-v2": partial(
        masked,
        "DebertaV2",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
    ),
    "ModernBERT": partial(
        masked, "ModernBert", cls_token_id=1, sep_token_id=2
    ),
    "ELECTRA": partial(masked, "Electra", embedding_size=16),
    "ALBERT": partial(masked, "Albert", embedding_size=16),
    "GPT-2": partial(text, "GPT2"),
    "GPT-2, eager": partial(text, "GPT2", attn_implementation="eager"),
    "Llama": partial(text, "Llama", **GROUPED),
    "Qwen2": partial(text, "Qwen2", num_key_value_heads=2),
    "Qwen3": partial(text, "Qwen3", **GROUPED),
    "Gemma 2": partial(text, "Gemma2", **GROUPED),
    "Gemma 3": partial(text, "Gemma3Text", **GROUPED),
    "OPT": partial(text, "OPT", ffn_dim=64, word_embed_proj_dim=32),
    "Falcon": partial(text, "Falcon"),
    "Phi-3": partial(text, "Phi3", num_key_value_heads=2),
    "Mistral": partial(text, "Mistral", **GROUPED, sliding_window=8),
    "GPT-NeoX": partial(text, "GPTNeoX"),
    "BLOOM": partial(text, "Bloom"),
    "MPT": partial(text, "Mpt"),
    "OLMo 2": partial(text, "Olmo2"),
    "StableLM": partial(text, "StableLm", num_key_value_heads=4),
    "LFM2": partial(text, "Lfm2", num_key_value_heads=2),
    "Mixtral": partial(text, "Mixtral", **GROUPED, num_local_experts=4),
    "Qwen2-MoE": partial(
        text,
        "Qwen2Moe",
        num_key_value_heads=2,
        **MOE,
        shared_expert_intermediate_size=32,
    ),
    "Qwen3-MoE": partial(text, "Qwen3Moe", **GROUPED, **MOE),
    "GPT-OSS": partial(
        text,
        "GptOss",
        **GROUPED,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "T5": partial(both, "T5", d_kv=8, d_ff=64, decoder_start_token_id=0),
    "BART": partial(
        both,
        "Bart",
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
    ),
    "Mamba": partial(text, "Mamba", state_size=4),
    "Mamba-2": partial(
        text,
        "Mamba2",
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=4,
    ),
    "RWKV": partial(text, "Rwkv", attention_hidden_size=32),
    "LoRA on Llama": partial(lora, "Llama", **GROUPED),
    "Mixtral, batched": partial(
        text,
        "Mixtral",
        **GROUPED,
        num_local_experts=4,
        experts_implementation="batched_mm",
    ),
    "Mixtral, eager": partial(
        text,
        "Mixtral",
        **GROUPED,
        num_local_experts=4,
        experts_implementation="eager",
    ),
}

VIT = {k: SMALL[k] for k in list(SMALL)[1:5]}

OTHERS = {
    "ViT": partial(image, "ViT", patch_size=8, **VIT),
    "DINOv2": partial(image, "Dinov2", patch_size=8, **VIT),
    "Swin": partial(
        image,
        "Swin",
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    "ConvNeXt": partial(
        image,
        "ConvNext",
        num_stages=2,
        hidden_sizes=[8, 16],
        depths=[2, 2],
        patch_size=2,
    ),
    "ResNet": partial(
        image,
        "ResNet",
        embedding_size=8,
        hidden_sizes=[16, 32],
        depths=[2, 2],
    ),
    "CLIP": clip,
    "Whisper": whisper,
    "wav2vec 2.0": wav2vec2,
    "LSTM": partial(recurrent, nn.LSTM),
    "LSTM, both ways": partial(
        recurrent, nn.LSTM, bidirectional=True, num_layers=2
    ),
    "GRU": partial(recurrent, nn.GRU),
    "RNN": partial(recurrent, nn.RNN),
    "convolutions, batch norm": partial(convolutional, nn.BatchNorm2d),
    "convolutions, group norm": partial(
        convolutional, partial(nn.GroupNorm, 2)
    ),
    "convolutions, one group": partial(
        convolutional, partial(nn.GroupNorm, 1)
    ),
    "convolutions, instance norm": partial(
        convolutional, partial(nn.InstanceNorm2d, affine=True)
    ),
    "nn.TransformerEncoderLayer": attention,
    "tied weights": tied,
    "cross-entropy, weights": weighted,
    "mean square": partial(compared, F.mse_loss),
    "smooth L1": partial(compared, F.smooth_l1_loss),
    "Huber": partial(compared, F.huber_loss),
    "L1": partial(compared, F.l1_loss),
    "BCE": partial(compared, bce),
    "BCE with logits": partial(compared, F.binary_cross_entropy_with_logits),
    "KL": partial(compared, divergence),
    "NLL": partial(classified, nll),
    "multi margin": partial(classified, F.multi_margin_loss),
    "CTC": partial(ctc, tuple),
    "CTC, lengths in tensors": partial(ctc, torch.tensor),
    "cosine embedding": partial(several, cosine, 2),
    "triplet": partial(several, triplet, 3),
}


REFUSED = {
    "DeBERTa, autocast": "it fills fp16's smallest number into bf16 scores",
    "multi margin, bf16": "PyTorch has no such kernel",
    "CTC, bf16": "PyTorch has no such kernel",
    "CTC, lengths in tensors, bf16": "PyTorch has no such kernel",
}
"""What the libraries themselves cannot run on a CPU."""


def zoo():
    """Builders by the models' names; every text model with padding, too."""
    table = dict(TEXTS)
    for name, build in TEXTS.items():
        table[f"{name}, padding"] = partial(build, padding=True)
    table |= OTHERS
    for name, build in (TEXTS | OTHERS).items():
        table[f"{name}, autocast"] = partial(under_autocast, build)
        table[f"{name}, bf16"] = partial(in_bf16, build)
    return {n: build for n, build in table.items() if n not in REFUSED}


def under_autocast(build):
    return dataclasses.replace(build(), autocast=True)


def in_bf16(build):
    return build().in_bf16()
