import errno

import pytest
import torch

from autosplit.backends.probing import innermost, refused_ops


def test_all_ops_of_a_refused_kind_are_named_and_few_conversions_are_made(mlp, whole):
    sizes = []

    def convert(module, examples):
        targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
        sizes.append(len(targets))
        module(*examples)
        if torch.ops.aten.relu.default in targets:
            raise RuntimeError("") from ValueError("no relu here\nnor there")

    refused = refused_ops(whole(mlp), convert)
    assert set(refused) == {op.name for op in mlp.graph.ops if op.operator == "aten.relu.default"}
    assert set(refused.values()) == {"aten.relu.default: no relu here"}
    assert sizes == [2, 1, 1]


def test_nothing_is_refused_in_one_conversion(mlp, whole):
    calls = []
    assert refused_ops(whole(mlp), lambda *_: calls.append(1)) == {}
    assert len(calls) == 1


def test_an_error_without_words_is_its_class():
    assert innermost(KeyError()) == "KeyError"


def test_a_stage_that_views_a_strided_input_is_probed(after_attention):
    assert refused_ops(after_attention, lambda *_: None) == {}


def test_a_full_disk_is_no_refusal_of_an_op(mlp, whole):
    def convert(module, examples):
        raise RuntimeError("the file was not written") from OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left on device"):
        refused_ops(whole(mlp), convert)
