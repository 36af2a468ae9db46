"""The preallocated KV cache is transformers' DynamicCache, only faster: same numbers, rows repeated and retired."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from mmrl.rollout.cache import PreallocatedCache
from tests.kits.engine_kit import ARCHITECTURES, Album, picture, policy, sample_with


def test_updates_and_row_operations_equal_a_dynamic_cache() -> None:
    torch.manual_seed(0)
    ours, theirs = PreallocatedCache(12), DynamicCache()
    index = None
    for step, width in enumerate((5, 1, 1, 3, 1)):
        for layer in range(3):
            rows = 2 if index is None else len(index)
            key, value = torch.randn(rows, 4, width, 8), torch.randn(rows, 4, width, 6)
            got, expected = ours.update(key, value, layer), theirs.update(key, value, layer)
            assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
        assert ours.get_seq_length() == theirs.get_seq_length()
        if step == 0:
            counts = torch.tensor([3, 2])
            ours.repeat_rows(counts)
            index = torch.tensor([0, 0, 0, 1, 1])
        elif step == 2:
            index = torch.tensor([4, 1])
            ours.select_rows(index)
        else:
            continue
        for layer in theirs.layers:
            layer.keys, layer.values = layer.keys[index], layer.values[index]
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(mine.keys, other.keys) and torch.equal(mine.values, other.values)


def test_rows_do_not_share_memory_after_repeating() -> None:
    cache = PreallocatedCache(4)
    cache.update(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2), 0)
    cache.repeat_rows(torch.tensor([2]))
    cache.update(
        torch.tensor([1.0, 2.0]).view(2, 1, 1, 1).expand(2, 1, 1, 2), torch.zeros(2, 1, 1, 2), 0
    )
    assert cache.layers[0].keys[:, 0, 2, 0].tolist() == [1.0, 2.0]


def test_writing_past_the_end_is_caught() -> None:
    cache = PreallocatedCache(3)
    cache.update(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), 0)
    with pytest.raises(AssertionError, match="3 positions asked for 4"):
        cache.update(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2), 0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_model_answers_the_same(arch: str) -> None:
    p = policy(arch)
    prompt = p.encoder(sample_with([picture((112, 84))]), Album())
    outputs = []
    for cache in (
        PreallocatedCache(prompt.length + 3),
        DynamicCache(config=p.base.config.get_text_config()),
    ):
        with torch.no_grad():
            hidden = [
                p.base.model(
                    input_ids=prompt.ids_P[None],
                    position_ids=prompt.positions_3P[:, None],
                    mm_token_type_ids=prompt.kinds_P[None],
                    past_key_values=cache,
                    use_cache=True,
                    **p.media(prompt.visuals),
                ).last_hidden_state
            ]
            for step in range(3):
                hidden.append(
                    p.base.model(
                        input_ids=torch.tensor([[40 + step]]),
                        past_key_values=cache,
                        use_cache=True,
                        position_ids=torch.full((3, 1, 1), prompt.next_position + step),
                    ).last_hidden_state
                )
        outputs.append(torch.cat(hidden, 1))
    assert torch.equal(*outputs)
