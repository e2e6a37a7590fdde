import pytest
import torch
from torch import nn

from autosplit.examples.batch_norm import calibrate_batch_norm
from autosplit.examples.branches import branches
from autosplit.examples.mlp import mlp, mlp_512
from autosplit.examples.spectral import spectral
from autosplit.examples.tied import tied
from autosplit.examples.unet import unet

EXAMPLES = {
    "mlp": lambda batch: mlp(batch, width=16, depth=24),
    "unet": lambda batch: unet(batch, size=32, channels=4),
    "branches": lambda batch: branches(batch, size=16, channels=4),
    "spectral": lambda batch: spectral(batch, size=16, channels=4, depth=1),
    "tied": lambda batch: tied(batch, seq_len=4, vocabulary=50, width=8),
}


def leaves(value):
    return list(value.values()) if isinstance(value, dict) else [value]


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_in_eval_mode_and_takes_its_batch_and_its_outputs_differ_between_items(name):
    for batch in (1, 3):
        module, inputs = EXAMPLES[name](batch)
        assert not any(child.training for child in module.modules())
        with torch.inference_mode():
            outputs = leaves(module(*inputs))
        assert all(tensor.shape[0] == batch for tensor in [*inputs, *outputs])
        assert all(output.std() > 0.05 for output in outputs)
    assert not any(torch.allclose(output[0], output[1], atol=1e-3) for output in outputs)


@pytest.mark.parametrize("name", EXAMPLES)
def test_weights_and_inputs_are_seeded_and_leave_the_generator_alone(name):
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first, inputs = EXAMPLES[name](1)
    assert torch.equal(torch.rand(1), expected)
    second, again = EXAMPLES[name](1)
    assert all(torch.equal(a, b) for a, b in zip(inputs, again, strict=True))
    assert all(torch.equal(tensor, second.state_dict()[key]) for key, tensor in first.state_dict().items())


def test_default_sizes():
    assert sum(p.nbytes for p in mlp()[0].parameters()) == 24 * (1024 * 1024 + 1024) * 4
    assert sum(p.nbytes for p in mlp_512()[0].parameters()) == 24 * (512 * 512 + 512) * 4


def test_tied_net_has_one_weight_at_both_ends():
    module, _ = EXAMPLES["tied"](1)
    assert module.head.weight is module.embedding.weight


def test_calibration_restores_momentum_and_eval_mode():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, momentum=0.3), nn.Dropout())
    calibrate_batch_norm(net, (5 + torch.randn(4, 3, 8, 8),))
    assert net[1].momentum == 0.3
    assert not any(child.training for child in net.modules())
    assert net[1].running_mean.abs().max() > 0.1


def test_calibration_leaves_eval_mode_when_the_model_fails():
    net = nn.Sequential(nn.BatchNorm2d(4), nn.Linear(3, 3))
    with pytest.raises(ValueError):
        calibrate_batch_norm(net, (torch.randn(4, 4),))
    assert not net[0].training
    assert net[0].momentum == 0.1
