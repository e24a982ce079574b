"""FlashInfer: attention within buckets as block-sparse attention whose blocks are runs of equal buckets.

Its plan copies the pattern to the host and waits for the device at every call, and keys and values are copied into the
order of their buckets. It has no bias per key. Source of the interface: flashinfer.VariableBlockSparseAttentionWrapper.
Letters: B batch, L queries, N keys, H heads, D head dim, P pages, K buckets, E edges.
"""

import logging
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .bucket_attention import attend_flex, num_buckets_of
from .groups import KeyGroups, group_codes, in_page_order, with_lonely

log = logging.getLogger(__name__)

HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 128 * 2**20  # what FlashInfer recommends


def attend_flashinfer(
    q_BLHD: Tensor,
    q_codes_ABLH: Tensor,
    k_BNHD: Tensor,
    v_BNHD: Tensor,
    groups: Sequence[KeyGroups],
    bias_BHN: Tensor | None = None,
) -> Tensor:
    """Return what ``attend_torch`` does. Calls with a bias go to FlexAttention, after a warning."""
    batch, queries, heads, dim = q_BLHD.shape
    if dim not in HEAD_DIMS:
        raise ValueError(
            f"sparse_attention='flashinfer' takes heads of {', '.join(map(str, HEAD_DIMS))}, not of {dim}; use 'auto'"
        )
    if bias_BHN is not None:
        _warn_of_bias()
        return attend_flex(q_BLHD, q_codes_ABLH, k_BNHD, v_BNHD, groups, bias_BHN)
    mask, rows, columns, q_order = pattern(q_codes_ABLH, groups)
    k_order = in_page_order(groups)[0]
    q, k, v = (_sorted(x, order) for x, order in ((q_BLHD, q_order), (k_BNHD, k_order), (v_BNHD, k_order)))
    wrapper = _wrapper(q.device, threading.get_ident())
    wrapper.plan(
        mask,
        rows,
        columns,
        num_qo_heads=batch * heads,
        num_kv_heads=batch * heads,
        head_dim=dim,
        q_data_type=q.dtype,
    )
    found = wrapper.run(q, k, v).view(batch, heads, queries, dim)
    out = torch.empty_like(found).scatter_(2, q_order.unsqueeze(-1).expand_as(found), found)
    return out.transpose(1, 2)


def pattern(q_codes_ABLH: Tensor, groups: Sequence[KeyGroups]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return which blocks meet, bool [B·H, K+1, P·(K+1)], how long their rows and columns are, and the queries' order.

    The last row has the queries whose bucket is empty, which see all keys; a page's last column its hidden keys.
    """
    num_buckets = num_buckets_of(groups)
    starts = torch.stack([page.starts_BHE for page in groups])
    codes_BHL = with_lonely(q_codes_ABLH[0], starts)
    queries = group_codes(codes_BHL.transpose(1, 2).unsqueeze(0), num_buckets=num_buckets)
    rows = queries.starts_BHE.diff(dim=-1).flatten(0, 1)
    columns = starts.diff(dim=-1).permute(1, 2, 0, 3).flatten(0, 1).flatten(1)
    row = torch.arange(num_buckets + 1, device=rows.device).unsqueeze(1)
    column = torch.arange(num_buckets + 1, device=rows.device).repeat(len(groups)).unsqueeze(0)
    meets = (column < num_buckets) & ((row == column) | (row == num_buckets))
    mask = meets.expand(rows.shape[0], -1, -1).contiguous()
    return mask, rows.contiguous(), columns.contiguous(), queries.order_BHN.to(torch.int64)


def _sorted(x_BNHD: Tensor, order_BHN: Tensor) -> Tensor:
    """Return tokens head by head in an order, [B·H, N, D]."""
    x_BHND = x_BNHD.transpose(1, 2)
    return x_BHND.gather(2, order_BHN.unsqueeze(-1).expand_as(x_BHND)).flatten(0, 1)


@cache
def _wrapper(device: torch.device, thread: int) -> Any:
    """Return one lane's wrapper, which owns the workspace of the calls that are under way."""
    from flashinfer import VariableBlockSparseAttentionWrapper

    return VariableBlockSparseAttentionWrapper(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device))


@cache
def _warn_of_bias() -> None:
    """Warn once per process."""
    log.warning("sparse_attention='flashinfer' has no bias per key; tokens that stand for several go to FlexAttention")
