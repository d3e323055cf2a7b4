"""The dry run on models that PyTorch's fake tensors do not know."""

import pytest
import torch
from torch import nn

from membudget.measuring import UNSURE, dry_run, trace_step, unsure


def sequence(model, x):
    return model(x)[0].square().mean()


def test_an_lstm_is_refused_or_an_estimate():
    model, x = nn.LSTM(8, 8, batch_first=True), torch.randn(2, 4, 8)
    with pytest.raises(ValueError, match=r"oneDNN .* with trace_step, or"):
        dry_run(model, sequence, x)
    run = dry_run(model, sequence, x, estimate=True)
    assert unsure(run).items() <= UNSURE.items()
    assert list(unsure(run)) == ["aten.mkldnn_rnn_layer"]
    assert run.peak < trace_step(model, sequence, x).peak


def test_other_recurrent_layers_are_exact():
    for kind in nn.GRU, nn.RNN:
        model, x = kind(8, 8, batch_first=True), torch.randn(2, 4, 8)
        peak = dry_run(model, sequence, x).peak
        assert peak == trace_step(model, sequence, x).peak
