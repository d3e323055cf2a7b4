"""The adapters widget: what a switch makes autograd keep of one block."""

from typing import Any

import traitlets

from membudget.widgets.adapters_rows import TRAINED, Switches, known
from membudget.widgets.base import Widget, format_bytes


class Adapters(Widget):
    """The tensors that a block of a small Llama keeps for its backward pass.

    Beside it stands the peak of a training step with 16-bit weights and Adam
    as :func:`membudget.ledger.predict` gives it: of the small Llama by a
    CPU's rules, and of Llama 3 8B by a GPU's. Adapters have rank 8.

    Args:
        train: one of :data:`membudget.widgets.adapters_rows.TRAINED`.
        bf16: whether adapters are in bf16, and not in fp32.
        checkpointed: whether each block is.
        dropout: whether adapters drop some of their input.
        four_bits: whether the frozen linear layers lie in 4 bits.

    Without an adapter the last two and ``bf16`` change nothing.

    Attributes:
        account: what the widget shows, for every state of the switches.

    Example:
        >>> Adapters("LoRA, all layers", bf16=True).switches.adapted
        True
    """

    name = "adapters"
    positional = ("train",)
    named = ("bf16", "checkpointed", "dropout", "four_bits")

    train = traitlets.Enum(list(TRAINED), "all weights").tag(sync=True)
    bf16 = traitlets.Bool(False).tag(sync=True)
    checkpointed = traitlets.Bool(False).tag(sync=True)
    dropout = traitlets.Bool(False).tag(sync=True)
    four_bits = traitlets.Bool(False).tag(sync=True)
    account = traitlets.Dict(read_only=True).tag(sync=True)

    def __init__(self, train: str = "all weights", **traits: Any) -> None:
        self.set_trait("account", known())
        super().__init__(train=train, **traits)

    @property
    def switches(self) -> Switches:
        """The state of the switches."""
        plain = Switches(self.train, checkpointed=self.checkpointed)
        if not plain.adapted:
            return plain
        own = self.bf16, self.dropout, self.four_bits
        return Switches(self.train, *own, self.checkpointed)

    @property
    def step(self) -> dict[str, Any]:
        """What the step needs, as the account has it."""
        wanted = vars(self.switches).items()
        return next(s for s in self.account["steps"] if wanted <= s.items())

    @property
    def block(self) -> int:
        """Bytes that one block keeps."""
        tiles = self.account["tiles"][self.step["tiles"]]
        return self.account["tokens"] * sum(n * b for _, _, n, b, _ in tiles)

    def sentence(self) -> str:
        """What a block keeps, what the step, and the peak."""
        step = self.step
        peak = format_bytes(sum(step["peak"]))
        return (
            f"A small Llama with 16-bit weights, trained: {self.train}. One "
            f"block keeps {format_bytes(self.block)} for its backward pass, "
            f"the whole step {format_bytes(step['saved'])}, and its peak is "
            f"{peak}."
        )
