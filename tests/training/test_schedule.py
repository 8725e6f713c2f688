from dataclasses import replace

import pytest
import torch
from lilicorr.training.anchors import sample_blocks
from lilicorr.training.data import collate, load_examples
from lilicorr.training.schedule import Schedule, fingerprint
from transformers import AutoTokenizer


@pytest.fixture
def examples(answers, target_folder):
    return load_examples([answers], AutoTokenizer.from_pretrained(target_folder), 64)


def drawn(examples, step, micro_batch_size, processes):
    """Every sequence's blocks in `step`, by its place in the batch, as all processes together draw them."""
    found = {}
    for rank in range(processes):
        schedule = Schedule(examples, 8, micro_batch_size, 3, processes, rank)
        for share in schedule.shares(step):
            batch = collate([examples[i] for i in share.indices])
            generators = schedule.generators(step, share)
            blocks = sample_blocks(batch.input_ids, batch.loss_mask, 4, 6, generators)
            for row, (index, place) in enumerate(zip(share.indices, share.places, strict=True)):
                kept = blocks.keep[row]
                found[place] = (index, blocks.anchors[row, kept].tolist(), blocks.draws[row, kept].tolist())
    return found


@pytest.mark.parametrize("layout", [(8, 1), (4, 1), (1, 1), (4, 2), (2, 2), (1, 8)])
def test_batch_anchors_and_draws_do_not_depend_on_processes_or_micro_batches(examples, layout):
    micro, processes = layout
    for step in (0, 1, 5):
        assert drawn(examples, step, micro, processes) == drawn(examples, step, 0, 1)


def test_each_epoch_has_its_own_order_and_all_examples(examples):
    schedule = Schedule(examples, 4, 0, 1)
    epochs = [[i for step in range(4) for i in schedule.batch(4 * epoch + step)] for epoch in range(2)]
    assert all(sorted(order) == list(range(len(examples))) for order in epochs) and epochs[0] != epochs[1]


def test_looking_back_gives_the_same_batch(examples):
    schedule = Schedule(examples, 4, 0, 1)
    first = schedule.batch(2)
    schedule.batch(9)
    assert schedule.batch(2) == first


def test_one_generator_for_all_sequences_still_draws_anew_for_each(examples):
    batch = collate(examples[:4])
    blocks = sample_blocks(batch.input_ids, batch.loss_mask, 4, 3, torch.Generator().manual_seed(0))
    assert len({tuple(row) for row in blocks.draws.tolist()}) == 4


def test_the_fingerprint_tells_data_apart(examples):
    assert fingerprint(examples) == fingerprint(list(examples))
    assert fingerprint(examples) != fingerprint(examples[1:]) != fingerprint(examples[1:][::-1])
    one, *rest = examples
    for other in (replace(one, input_ids=[*one.input_ids[:-1], 4]), replace(one, loss_mask=one.loss_mask[::-1])):
        assert fingerprint([other, *rest]) != fingerprint(examples)
