import threading

import pytest
import torch
from lilicorr.kernels.few_rows import MOST_ROWS, FewRows, few_rows_linear
from torch import nn


@pytest.fixture(autouse=True)
def where_it_gains(monkeypatch):
    """No gradients, and MKL whether it is there or not."""
    monkeypatch.setattr("lilicorr.kernels.few_rows.multiplies_few_rows", lambda: True)
    with torch.no_grad():
        yield


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (2,), (5,), (1, 8), (2, 3), (2, 2, 4), (MOST_ROWS,), (MOST_ROWS + 1,), (0,)])
def test_products_equal_the_layers_own(shape, bias):
    torch.manual_seed(0)
    layer = nn.Linear(12, 7, bias=bias)
    x = torch.randn(*shape, 12)
    made = few_rows_linear(layer, x)
    assert made.shape == (*shape, 7) and made.is_contiguous()
    torch.testing.assert_close(made, layer(x))


def test_inputs_that_are_not_contiguous_are_taken_as_they_are():
    torch.manual_seed(0)
    layer, x = nn.Linear(12, 7), torch.randn(12, 6, 2)[..., 0].t()
    torch.testing.assert_close(few_rows_linear(layer, x), layer(x))


def test_layers_compute_the_other_way_round_only_within(monkeypatch):
    model, called = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), []
    monkeypatch.setattr("lilicorr.kernels.few_rows.few_rows_linear", lambda layer, x: called.append(layer) or x)
    few_rows = FewRows(model)
    model(torch.randn(3, 4))
    assert not called
    with few_rows.multiplied():
        model(torch.randn(3, 4))
    assert called == [model[0], model[2]]
    model(torch.randn(3, 4))
    assert len(called) == 2 and all("forward" not in vars(layer) for layer in model)


def test_layers_are_as_before_after_an_error():
    layer = nn.Linear(4, 4)
    with pytest.raises(KeyError), FewRows(layer).multiplied():
        raise KeyError
    assert "forward" not in vars(layer)


def test_replaced_forwards_other_classes_and_other_dtypes_are_left_alone():
    class Own(nn.Linear):
        pass

    replaced, own, half = nn.Linear(4, 4), Own(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16)
    replaced.forward = mine = lambda x: x
    with FewRows(replaced, own, half).multiplied():
        assert replaced.forward is mine
        assert "forward" not in vars(own) and "forward" not in vars(half)
    assert replaced.forward is mine


def test_gradients_flow_as_without():
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    with torch.enable_grad(), FewRows(layer).multiplied():
        layer(x).sum().backward()
    assert layer.weight.grad is not None


def test_a_second_thread_finds_the_layers_while_a_first_is_within():
    layer, found = nn.Linear(4, 4), []
    with FewRows(layer).multiplied():
        thread = threading.Thread(target=lambda: found.extend(FewRows(layer)._layers))
        thread.start()
        thread.join()
    assert found == [layer]


def test_compiled_models_are_left_alone():
    by_method, by_forward = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    by_method.compile()
    by_forward.forward = torch.compile(by_forward.forward)
    assert FewRows(by_method, by_forward)._layers == []


def test_without_mkl_no_layer_is_touched(monkeypatch):
    monkeypatch.setattr("lilicorr.kernels.few_rows.multiplies_few_rows", lambda: False)
    assert FewRows(nn.Linear(4, 4))._layers == []
