"""The plain numbers of a call."""

from lilicorr.candidate_generator.figures import GenerationFigures


def test_figures_by_hand():
    figures = GenerationFigures(plain_steps=1)
    for drafted, committed in ((4, 3), (4, 1), (4, 4), (2, 3)):
        figures.add_block(drafted, committed)
    assert (figures.blocks, figures.drafted, figures.accepted, figures.committed) == (4, 14, 7, 12)
    assert figures.accepted_per_slot == [3, 3, 1, 0]
    assert figures.acceptance_length == 11 / 4
    assert str(figures) == "12 tokens, 4 blocks, 7 of 14 drafted tokens accepted, acceptance length 2.75"


def test_nothing_drafted():
    figures = GenerationFigures(plain_steps=1)
    assert (figures.blocks, figures.drafted, figures.accepted, figures.committed) == (0, 0, 0, 1)
    assert figures.accepted_per_slot == []
    assert figures.acceptance_length == 0.0


def test_empty_drafts_count_as_blocks():
    figures = GenerationFigures()
    figures.add_block(0, 1)
    assert (figures.blocks, figures.accepted, figures.accepted_per_slot) == (1, 0, [])
    assert figures.acceptance_length == 1.0


def test_figures_of_a_call_agree_with_its_output(llama, llama_drafter, teach, prompt):
    ids = prompt(6)
    plain = llama.generate(ids, max_new_tokens=33, do_sample=False)
    teach(llama_drafter, plain[0], wrong_slots=(2,))
    out = llama.generate(ids, max_new_tokens=33, do_sample=False, assistant_model=llama_drafter)
    figures = llama_drafter.last_generation
    assert figures.committed == out.shape[1] - 6
    assert figures.plain_steps == 1
    assert figures.accepted_per_slot[2:] == [0, 0, 0, 0, 0]
    assert figures.accepted == sum(figures.accepted_per_slot)
    assert all(isinstance(value, int) for value in figures.drafted_per_block + figures.committed_per_block)
