import pytest
import torch
from lilicorr.training.anchors import block_mask, sample_blocks

INPUT_IDS = torch.arange(100, 124).view(2, 12)
LOSS_MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1]]).bool()


def draw(num_anchors=8, seed=0, block_size=4):
    return sample_blocks(INPUT_IDS, LOSS_MASK, block_size, num_anchors, torch.Generator().manual_seed(seed))


def test_anchors_are_distinct_ascending_and_supervised_with_their_successor():
    blocks = draw()
    valid = [{2, 3, 4, 7, 8}, {9, 10}]
    for row in range(2):
        kept = blocks.anchors[row][blocks.keep[row]].tolist()
        assert kept == sorted(set(kept)) and set(kept) == valid[row]


def test_fewer_anchors_are_drawn_uniformly():
    counts = torch.zeros(12)
    for seed in range(600):
        counts[draw(num_anchors=2, seed=seed).anchors[0]] += 1
    assert counts.nonzero().flatten().tolist() == [2, 3, 4, 7, 8]
    assert (counts[counts > 0] - 240).abs().max() < 60


def test_labels_and_supervision_follow_the_same_position_convention():
    blocks = draw()
    for row in range(2):
        for n in range(blocks.anchors.shape[1]):
            for s in range(1, 4):
                place = int(blocks.anchors[row, n]) + s
                expected = bool(blocks.keep[row, n]) and place < 12 and bool(LOSS_MASK[row, min(place, 11)])
                assert bool(blocks.supervised[row, n, s - 1]) == expected
                if expected:
                    assert blocks.labels[row, n, s - 1] == INPUT_IDS[row, place]


def test_a_batch_without_anchors_is_refused():
    with pytest.raises(ValueError, match="two supervised tokens in a row"):
        sample_blocks(INPUT_IDS, torch.zeros_like(LOSS_MASK), 4, 8, torch.Generator())


def test_block_sees_rows_before_its_anchor_and_all_of_itself():
    anchors = torch.tensor([[1, 4], [0, 11]])
    mask = block_mask(anchors, context_length=12, block_size=4)
    assert mask.shape == (2, 1, 8, 20)
    for group, pair in enumerate(anchors.tolist()):
        for row in range(8):
            block = row // 4
            own = [key // 4 == block for key in range(8)]
            assert mask[group, 0, row].tolist() == [past < pair[block] for past in range(12)] + own
