"""The target's key-value cache while trees are verified: which rows stay, and for which of them trees work at all."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

_HOLES = 64  # columns that no row uses before a batch's cache is packed


def tree_limit(cache: Any) -> int:
    """How many columns the cache may have for a tree to be verified over it; 0 if none can be.

    Layers that keep every column, and sliding ones while nothing has slid out of their window, let accepted rows be
    moved and show all of them to every node; others (recurrent states, static and quantised ones) do not.
    """
    limit = 1 << 62
    for layer in cache.layers:
        if type(layer) is DynamicSlidingWindowLayer:
            limit = min(limit, int(layer.sliding_window) - 1)
        elif type(layer) is not DynamicLayer and type(layer).__name__ != "DummyLayer":  # one that shares another's
            return 0
    return limit if cache.layers else 0


def _held(cache: Any) -> list[Any]:
    """The layers that hold keys and values (those that share another layer's hold none)."""
    return [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]


def keep_path(cache: Any, start: int, size: int, path: list[int]) -> None:
    """Of a single sequence's last `size` columns, from `start` on, keep those of `path` (ascending), in order."""
    if path != list(range(len(path))):
        for layer in _held(cache):
            index = torch.tensor(path, device=layer.keys.device) + start
            for part in (layer.keys, layer.values):
                part[:, :, start : start + len(path)] = part[:, :, index]
    if size > len(path):
        cache.crop(len(path) - size)


def keep_paths(cache: Any, start: int, size: int, paths: list[list[int]]) -> Tensor:
    """As `keep_path` for every row of a batch; returns which of the kept columns each row uses, `[rows, longest]`."""
    longest = max(map(len, paths))
    index = torch.tensor([[*path, *[path[-1]] * (longest - len(path))] for path in paths])
    for layer in _held(cache):
        columns = (index + start).to(layer.keys.device)[:, None, :, None]
        for part in (layer.keys, layer.values):
            where = columns.expand(-1, part.shape[1], -1, part.shape[3])
            part[:, :, start : start + longest] = part.gather(2, where)
    if size > longest:
        cache.crop(longest - size)
    lengths = torch.tensor([len(path) for path in paths])
    return torch.arange(longest) < lengths[:, None]


def pack(cache: Any, used: Tensor, longest: int) -> Tensor:
    """Close gaps once they are many; `used [rows, columns]` (bool) before and after, of which rows use up to `longest`.

    A rejected row is not zeroed but dropped or masked: a key of zeros would still draw weight.
    """
    if used.shape[1] - longest < _HOLES:
        return used
    order = used.long().argsort(dim=1, descending=True, stable=True)[:, :longest]
    for layer in _held(cache):
        columns = order.to(layer.keys.device)[:, None, :, None]
        for part in (layer.keys, layer.values):
            where = columns.expand(-1, part.shape[1], -1, part.shape[3])
            part[:, :, :longest] = part.gather(2, where)
    cache.crop(longest - used.shape[1])
    return torch.arange(longest, device=used.device) < used.sum(dim=1)[:, None]


def keep_rows(cache: Any, rows: list[int]) -> None:
    """Drop all sequences of a batch but these."""
    cache.reorder_cache(torch.tensor(rows))
    for layer in _held(cache):
        if layer.keys.dim() == 4 and layer.keys.shape[0] != len(rows):  # static and still empty: not reordered
            layer.keys, layer.values = layer.keys[: len(rows)], layer.values[: len(rows)]
        if hasattr(layer, "batch_size"):
            layer.batch_size = len(rows)


def copied(cache: Any) -> Any:
    """A cache of its own with what `cache` holds, also where a pass has filled it that kept gradients."""
    held = [part for layer in cache.layers for part in vars(layer).values()]
    held += [part for each in held if isinstance(each, dict) for part in each.values()]
    return copy.deepcopy(cache, {id(part): part.detach().clone() for part in held if isinstance(part, Tensor)})


def join(cache: Any, used: Tensor, other: Any, other_used: Tensor) -> Tensor:
    """Add the sequences of `other` below those of `cache`; from their used `[rows, columns]`, those of both."""
    width = max(used.shape[1], other_used.shape[1])
    for layer, more in zip(_held(cache), _held(other), strict=True):
        layer.keys = torch.cat([_widened(layer.keys, width), _widened(more.keys, width)])
        layer.values = torch.cat([_widened(layer.values, width), _widened(more.values, width)])
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = width
    pad = torch.nn.functional.pad
    return torch.cat([pad(each, (0, width - each.shape[1])) for each in (used, other_used)])


def _widened(part: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(part, (0, 0, 0, width - part.shape[2]))
