import pytest
import torch

import kernels


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (8, 2), (20, 20), (128, 8)])
def test_follows_the_definition(implementation: object, num_experts: int, top_k: int, renormalize: bool) -> None:
    logits = torch.randn(37, num_experts) * 3
    chosen, weights = kernels.route(logits, top_k, renormalize=renormalize)
    assert (chosen.dtype, weights.dtype) == (torch.int32, torch.float32)
    wanted, experts = logits.double().softmax(1).topk(top_k)
    if renormalize:
        wanted = wanted / wanted.sum(1, keepdim=True)
    assert torch.equal(chosen.long(), experts)
    torch.testing.assert_close(weights.double(), wanted, rtol=2e-6, atol=1e-12)


def test_of_equal_experts_the_first_are_chosen(implementation: object) -> None:
    logits = torch.tensor([[0.0, 2.0, -0.0, 2.0, 2.0, 0.0], [1.0] * 6])
    chosen, weights = kernels.route(logits, 4, renormalize=True)
    assert chosen.tolist() == [[1, 3, 4, 0], [0, 1, 2, 3]]
    assert weights[0, 0] == weights[0, 2]
    assert weights[1].tolist() == [0.25] * 4


def test_what_is_not_finite_is_seen_and_harms_no_other_row(implementation: object) -> None:
    logits = torch.tensor(
        [
            [1.0, 3.0, 2.0, 0.0],
            [0.0, torch.nan, 1.0, torch.nan],
            [0.0, torch.inf, 1.0, 0.0],
            [-torch.inf, 0.0, -torch.inf, -torch.inf],
            [-torch.inf] * 4,
        ]
    )
    chosen, weights = kernels.route(logits, 3, renormalize=False)
    assert chosen.tolist() == [[1, 2, 0], [1, 3, 2], [1, 2, 0], [1, 0, 2], [0, 1, 2]]
    assert torch.equal(weights[:1], kernels.route(logits[:1], 3, renormalize=False)[1])
    assert weights[1].isnan().all()
    assert weights[2].isnan().any()
    assert weights[3].tolist() == [1, 0, 0]
    assert weights[4].isnan().all()


@pytest.mark.parametrize("renormalize", [False, True])
def test_a_row_has_the_same_bits_in_any_batch(implementation: object, renormalize: bool) -> None:
    logits = torch.randn(100, 60)
    whole = kernels.route(logits, 8, renormalize=renormalize)
    for threads in (1, 2):
        kernels.set_num_threads(threads)
        for rows in (1, 2, 7, 16, 33, 64, 100):
            found = kernels.route(logits[-rows:], 8, renormalize=renormalize)
            assert torch.equal(found[0], whole[0][-rows:])
            assert torch.equal(found[1], whole[1][-rows:]), (threads, rows)


def test_refuses_more_experts_than_there_are() -> None:
    for top_k in (0, 5):
        with pytest.raises(ValueError, match=rf"top_k must be in 1\.\.4 for 4 experts, got {top_k}"):
            kernels.route(torch.zeros(2, 4), top_k, renormalize=True)
