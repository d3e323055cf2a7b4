"""A part of a transformer on paper: what one rank of many writes down.

Of a pipeline it has some of the blocks; of tensor parallelism a share of
each block's heads and of its MLP's width, and the collectives between.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from membudget.ledger import operators as op
from membudget.ledger.networks import Transformer, Written
from membudget.ledger.paper import Paper, PaperTensor
from membudget.ledger.walk import PaperMoment, _Walk

ROWS = ("out", "down")
"""Linear layers whose inputs are cut; of the others it is the outputs."""


@dataclass
class Part(Written):
    """Some blocks, and a share of each."""

    blocks: range = range(0)
    ranks: int = 1  # of tensor parallelism
    sequence: bool = False  # whether they share the tokens between
    ring: bool = False  # whether other ranks have further tokens

    @property
    def copied(self) -> bool:
        """Whether parts of a sequence do not lie one after the other."""
        return self.batch > 1

    def write(self, checkpointed: set[int], chunks: int | None = None) -> None:
        shape, paper = self.shape, self.paper
        gpt = shape.family == "gpt"
        x = self.first(gpt)
        for index in self.blocks:
            start = len(paper.rows)
            with paper.inside(f"blocks.{index}"):
                x = self.gpt_block(x) if gpt else self.llama_block(x)
                if index in checkpointed:
                    paper.checkpoint(start)
        if self.blocks.stop == shape.depth:
            self.last(x)

    def first(self, gpt: bool) -> PaperTensor:
        """What the first of the blocks is given."""
        shape, paper = self.shape, self.paper
        if not gpt:
            size = self.tokens * (shape.width // shape.heads // 2)
            self.turns = op.constant(paper, size, 8)
        size = self.batch * self.tokens
        if self.blocks.start:  # it was received
            size *= shape.width // (self.ranks if self.sequence else 1)
            return PaperTensor(size, self.itemsize, True, "input")
        ids = paper.input(size, 8)
        table = self.weight(shape.vocabulary * shape.width, "token.weight")
        if gpt and not self.sequence:
            return self.gpt_start(table, ids)
        with paper.inside("token"):
            x = op.embedding(paper, table, ids, shape.width)
        if not self.sequence:
            return x
        x = op.taken(paper, x, self.ranks, self.copied)
        return self.placed(x) if gpt else x

    def placed(self, x: PaperTensor) -> PaperTensor:
        """With this rank's part of the learned positions."""
        paper, shape = self.paper, self.shape
        places = op.constant(paper, self.tokens, 8)
        table = self.weight(shape.context * shape.width, "position.weight")
        with paper.inside("position"):
            y = op.embedding(paper, table, places, shape.width)
        y = op.taken(paper, y, self.ranks, copied=False)
        return op.add(paper, x, y, broadcast=True)

    def last(self, x: PaperTensor) -> None:
        """The norm, the head and the loss."""
        shape, paper = self.shape, self.paper
        targets = paper.input(self.batch * self.tokens, 8)
        x = self.norm(x, "norm")
        head = self.weight(shape.vocabulary * shape.width, "head.weight")
        with paper.inside("head"):
            logits = op.linear(paper, x, head, shape.vocabulary, folds=True)
        op.cross_entropy(paper, logits, targets)

    def attend(
        self, q: PaperTensor, k: PaperTensor, v: PaperTensor
    ) -> PaperTensor:
        """What a ring adds is at most this.

        A block of a neighbour's keys and values is here while the next
        arrives, and what a tile gives is added to what the tiles before it
        gave, in fp32. In the backward pass gradients go round, too, and are
        rounded at home.
        """
        if not self.ring:
            return super().attend(q, k, v)
        pairs, both = 2 * k.elements, q.elements + 2 * k.elements
        wide = 4 - q.itemsize  # more, of a number in fp32
        most = 2 * pairs * q.itemsize + q.bytes + 2 * wide * q.bytes
        here = self.paper.write("ring", (), (PaperTensor(most, 1, False),))
        y = super().attend(q, k, v)
        row = self.paper.last
        row.watches += here.makes
        most = (pairs + both) * q.itemsize
        most += max(4 * pairs + wide * both, 4 * both * (wide > 0))
        row.steps += (("ring", most), ("ring", 0))
        return y

    def norm(
        self, x: PaperTensor, name: str, *watches: PaperTensor
    ) -> PaperTensor:
        y = super().norm(x, name, *watches)
        if self.sequence:
            how = {"copied": self.copied, "summed": name != "norm"}
            return op.all_gather(self.paper, y, self.ranks, **how)
        if self.ranks > 1 and name != "norm":
            y = op.entered(self.paper, y)
        return y

    def linear(
        self, x: PaperTensor, name: str, inputs: int, outputs: int
    ) -> PaperTensor:
        if self.ranks == 1:
            return super().linear(x, name, inputs, outputs)
        if name in ROWS:
            return self.by_rows(x, name, inputs // self.ranks, outputs)
        return super().linear(x, name, inputs, outputs // self.ranks)

    def by_rows(
        self, x: PaperTensor, name: str, inputs: int, outputs: int
    ) -> PaperTensor:
        """A layer whose results are summed over the ranks."""
        paper = self.paper
        with paper.inside(name):
            weight = self.weight(inputs * outputs, "weight")
            bias, share = None, list[PaperTensor]()
            if self.biased(name):  # each rank adds its share
                bias = self.weight(outputs, "bias")
                share = [op.constant(paper, outputs, bias.itemsize)]
            y = op.linear(paper, x, weight, outputs, bias, folds=True)
            paper.last.watches += tuple(share)
            if self.sequence:
                return op.reduce_scatter(paper, y, self.ranks, self.copied)
            return op.all_reduce(paper, y)


class Passes(NamedTuple):
    """What a micro-batch needs on a rank, beside what is there before it.

    Attributes:
        body: the most bytes in its forward pass before there are logits.
        forward: the most bytes in all of it.
        held: bytes that stay when that is over.
        first: the most bytes in its backward pass, ``held`` included, where
            that makes the gradients.
        later: where it adds to them, the gradients themselves aside.
        logits: bytes of these; 0 where there are none.
        loss: bytes of the loss, likewise.
        sizes: numbers of the parameters.
    """

    body: int
    forward: int
    held: int
    first: int
    later: int
    logits: int
    loss: int
    sizes: tuple[int, ...]


MANY = 6
"""Blocks from which on a part's bytes are on the line through two shorter
ones: at each moment they are affine in the blocks, and the worst is at an
end."""


def written(
    network: Transformer,
    batch: int,
    tokens: int,
    *,
    blocks: range,
    ranks: int = 1,
    sequence: bool = False,
    ring: bool = False,
    itemsize: int = 4,
    checkpointed: bool = False,
    device: str = "cpu",
) -> Paper:
    """A part of a network on paper.

    Args:
        network: the whole; its attention is fused.
        batch, tokens: of a micro-batch.
        blocks: their numbers; with the first block stands the embedding,
            with the last one the norm, the head and the loss.
        ranks: of tensor parallelism, which divide heads and widths.
        sequence: whether they share the tokens of what lies between.
        ring: whether these tokens are some of a sequence's, and others are
            on other ranks.
        itemsize: bytes of a parameter.
        checkpointed: whether each block is.
        device: whose kernels run.
    """
    paper = Paper(None, device, device)
    part = Part(
        network,
        paper,
        batch,
        tokens,
        itemsize,
        False,
        ("*",),
        None,
        blocks=blocks,
        ranks=ranks,
        sequence=sequence,
        ring=ring,
    )
    part.write(set(blocks) if checkpointed else set())
    return paper


def passes(network: Transformer, *sizes: int, blocks: range, **how) -> Passes:
    """What a micro-batch needs on the rank that has these blocks.

    The arguments are those of :func:`written`.
    """
    count = len(blocks)
    ends = int(blocks.start > 0), int(blocks.stop < network.depth)

    def walked(count: int) -> tuple[list[int], Paper]:
        first = ends[0]
        small = replace(network, depth=count + sum(ends))
        few = range(first, first + count)
        paper = written(small, *sizes, blocks=few, **how)
        return _numbers(paper, few), paper

    few = min(count, MANY)
    found, paper = walked(few)
    weights = [p.elements for p in paper.parameters]
    if count > few:
        more, longer = walked(few + 1)
        further = count - few
        found = [
            a + further * (b - a) for a, b in zip(found, more, strict=True)
        ]
        each = [p.elements for p in longer.parameters]
        middle = len(each) - len(weights)
        start = len(weights) // 2
        weights += weights[start : start + middle] * further
    body, after, held, one, two, three, four = found
    logits = loss = 0
    last = paper.last.makes[0] if not ends[1] else None
    if last is not None:
        loss, logits = last.bytes, paper.last.watches[0].bytes
    return Passes(
        body,
        max(body, after),
        held,
        max(one, two),
        max(three, four),
        logits,
        loss,
        tuple(weights),
    )


def _numbers(paper: Paper, blocks: range) -> list[int]:
    """The most bytes of the forward pass before and after the logits, those
    that stay, and of each way back the most at its first and last blocks."""
    found: list[int] = []
    for gradients in (False, True):
        machine = _Walk()
        if gradients:
            machine.begun = set(range(len(paper.parameters)))
        output = machine.forward(paper)
        forward = machine.moments
        if not gradients:
            loss = output.elements == 1
            many = len(forward) - 2 * loss
            found.append(max(m.live for m in forward[:many]))
            found.append(max((m.live for m in forward[many:]), default=0))
            found.append(machine.total)
        machine.moments = []
        if output.elements == 1:
            machine.make(output.bytes, "activations")
        machine.backward(paper, output)
        found += _ends(machine.moments, blocks)
    return found


def _ends(moments: list[PaperMoment], blocks: range) -> list[int]:
    """The most bytes from the end to the middle, and from there on."""
    middle = f"blocks.{blocks[len(blocks) // 2]}."
    names = [m.row for m in moments]
    cut = next(i for i, name in enumerate(names) if name.startswith(middle))
    return [
        max((m.live for m in part), default=0)
        for part in (moments[:cut], moments[cut:])
    ]
