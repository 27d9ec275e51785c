# mypy: allow-untyped-defs, allow-untyped-calls
"""How attention over a ragged batch is cut into items. The plan depends on the batch alone, so all layers
share it.

An item is a set of query rows that meets one run of keys of a block table. Decoding rows meet the run that
their group shares, then their own tail, in parts of `KEYS_PER_PART`; a row with several parts gets their
results merged. A prefill chunk is cut into sets of rows that meet all keys they see. The cuts of a sequence
depend on itself and its group, not on its other neighbours.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.kernels.jit import device, inlined

KEYS_PER_PART = 256
# Rows x heads of an item: what is read and widened once serves them all, while their sums stay in the level-2
# cache.
MAX_ITEM_ROWS = 96

# Columns of AttentionPlan.items. SHARED: TABLE is a group's, not a sequence's. PART: among the parts of each
# of its rows.
ROW_BEGIN, ROW_END, SHARED, TABLE, KEY_BEGIN, KEY_END, PART = range(7)
_NUM_COLUMNS = 7


class AttentionPlan(NamedTuple):
    row_order: npt.NDArray[np.int32]  # [T]; an item's rows are row_order[ROW_BEGIN:ROW_END]
    num_visible: npt.NDArray[np.int32]  # [T] keys that a row sees, and
    ancestors: npt.NDArray[np.int64]  # [T] those behind them whose bit is set
    part_begin: npt.NDArray[
        np.int32
    ]  # [T + 1]; row t has parts part_begin[t]:part_begin[t + 1], none if one item does it all
    items: npt.NDArray[np.int32]  # [num_items, 7]


@inlined
def _is_chunk(num_rows, heads_per_group):
    """A prefill chunk fills items by itself; sharing reads with others would gain it nothing."""
    return num_rows * heads_per_group > MAX_ITEM_ROWS


@inlined
def _num_parts(num_keys):
    return -(-num_keys // KEYS_PER_PART)


@inlined
def _effective_groups(cu_query_lens, group_of, heads_per_group):
    """The group of each sequence, -1 for those that go alone."""
    num_sequences = cu_query_lens.shape[0] - 1
    groups = np.empty(num_sequences, np.int32)
    for s in range(num_sequences):
        alone = group_of.shape[0] == 0 or _is_chunk(cu_query_lens[s + 1] - cu_query_lens[s], heads_per_group)
        groups[s] = -1 if alone else group_of[s]
    return groups


@inlined
def _order_rows(cu_query_lens, groups, num_groups, row_order, group_begin):
    """Rows by group, then the others; group_begin [num_groups + 1] are the groups' places. Returns each
    sequence's place."""
    num_sequences = groups.shape[0]
    sequence_begin = np.empty(num_sequences, np.int32)
    place = 0
    for group in range(num_groups + 1):
        group_begin[group] = place
        wanted = group if group < num_groups else -1
        for s in range(num_sequences):
            if groups[s] == wanted:
                sequence_begin[s] = place
                for row in range(cu_query_lens[s], cu_query_lens[s + 1]):
                    row_order[place] = row
                    place += 1
    return sequence_begin


@inlined
def _add_items(
    items, count, row_begin, row_end, rows_per_item, shared, table, key_begin, key_end, first_part
):
    """Items for a run of keys in parts, each for all sets of rows. Returns the number of items."""
    for part in range(_num_parts(key_end - key_begin)):
        begin = key_begin + part * KEYS_PER_PART
        for row in range(row_begin, row_end, rows_per_item):
            items[count, ROW_BEGIN] = row
            items[count, ROW_END] = min(row_end, row + rows_per_item)
            items[count, SHARED] = shared
            items[count, TABLE] = table
            items[count, KEY_BEGIN] = begin
            items[count, KEY_END] = min(key_end, begin + KEYS_PER_PART)
            items[count, PART] = first_part + part
            count += 1
    return count


@inlined
def _add_chunk_items(items, count, row_begin, num_rows, rows_per_item, table, context_len):
    """Items for a prefill chunk, the longest first. Returns the number of items."""
    for begin in range((num_rows - 1) // rows_per_item * rows_per_item, -1, -rows_per_item):
        end = min(num_rows, begin + rows_per_item)
        items[count, ROW_BEGIN] = row_begin + begin
        items[count, ROW_END] = row_begin + end
        items[count, SHARED] = 0
        items[count, TABLE] = table
        items[count, KEY_BEGIN] = 0
        items[count, KEY_END] = context_len - num_rows + end
        items[count, PART] = 0
        count += 1
    return count


@device
def plan_attention(cu_query_lens, context_lens, group_of, group_lens, tree, heads_per_group):
    """The plan of a batch; group_of [S] and group_lens [G] may be empty. Arguments as for
    `paged_attention_shared`."""
    num_sequences, num_groups = context_lens.shape[0], group_lens.shape[0]
    num_rows = cu_query_lens[num_sequences]
    rows_per_item = MAX_ITEM_ROWS // heads_per_group
    groups = _effective_groups(cu_query_lens, group_of, heads_per_group)
    row_order = np.empty(num_rows, np.int32)
    group_begin = np.empty(num_groups + 1, np.int32)
    sequence_begin = _order_rows(cu_query_lens, groups, num_groups, row_order, group_begin)
    part_begin = np.empty(num_rows + 1, np.int32)
    items = np.empty((_max_items(context_lens, group_lens, num_rows, rows_per_item), _NUM_COLUMNS), np.int32)
    count = 0
    for group in range(num_groups):
        begin, end = group_begin[group], group_begin[group + 1]
        count = _add_items(items, count, begin, end, rows_per_item, 1, group, 0, group_lens[group], 0)
    parts = 0
    for s in range(num_sequences):
        begin, length = sequence_begin[s], context_lens[s]
        num_new = cu_query_lens[s + 1] - cu_query_lens[s]
        num_shared = 0 if groups[s] < 0 else group_lens[groups[s]]
        num_parts = 0
        if _is_chunk(num_new, heads_per_group):
            count = _add_chunk_items(items, count, begin, num_new, rows_per_item, s, length)
        else:
            first = _num_parts(num_shared)
            count = _add_items(
                items, count, begin, begin + num_new, rows_per_item, 0, s, num_shared, length, first
            )
            num_parts = first + _num_parts(length - num_shared)
        for row in range(cu_query_lens[s], cu_query_lens[s + 1]):
            part_begin[row] = parts
            parts += num_parts if num_parts > 1 else 0
    part_begin[num_rows] = parts
    return AttentionPlan(row_order, tree.visible, tree.ancestors, part_begin, items[:count])


@inlined
def _max_items(context_lens, group_lens, num_rows, rows_per_item):
    """No batch of these sizes needs more items."""
    row_sets = num_rows // rows_per_item + 1
    count = context_lens.shape[0] + row_sets
    for length in context_lens:
        count += _num_parts(length)
    for length in group_lens:
        count += _num_parts(length) * row_sets
    return count
