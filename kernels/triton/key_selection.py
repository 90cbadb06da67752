"""Selection of keys by an index on a GPU: the torch calls of a CPU, over slots that are read from
the device's page table. Nothing here waits for the device, but the calls are many a row and layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention_rows import AttentionRows
from ..cpu.key_selection import CpuSelectionPlan, RowKeys
from ..ops import DeviceArrays, DevicePlan


def plan_selection(rows: AttentionRows, num_selected: int) -> DevicePlan:
    starts, page_size = rows.query_start.tolist(), rows.page_size

    def bind(lists: DeviceArrays, page_table: Tensor) -> CpuSelectionPlan:
        offsets = torch.arange(page_size, dtype=torch.int32, device=page_table.device)
        planned = []
        for row, (table_row, length) in enumerate(zip(rows.table_rows, rows.seq_lens, strict=True)):
            pages = page_table[int(table_row), : -(-int(length) // page_size)]
            slots = (pages[:, None] * page_size + offsets).flatten()[: int(length)]
            planned.append(RowKeys(slice(starts[row], starts[row + 1]), slots))
        return CpuSelectionPlan(tuple(planned), num_selected)

    return DevicePlan({}, bind, is_replayable=False)
