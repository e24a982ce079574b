"""Which bucket each token is in, page by page: worked out once when a page is first attended to, and kept with it.

Random planes cut the space of a head into buckets; several sets of planes (tables) give a pair several chances to
meet. A page's keys are taken less *its own* mean, so that its buckets do not change with what else a forward reads.
What all of a page's keys share changes no query's preference among them, but would put them into one bucket.
Letters: B batch, L queries, N keys (of a page), H heads, D head dim, A tables, P pages, E edges (buckets + 2).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..kv_policy import SparseOptions
from .ann import buckets, centre


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyGroups:
    """The buckets of one page's keys. Keys themselves stay where they are: a kernel reads them through ``order``."""

    codes_ABNH: Tensor
    """Each key's bucket in every table, int32; ``2**planes``, where no query is, for keys that are hidden."""
    order_BHN: Tensor
    """The page's tokens in the order of their buckets of the first table, int32."""
    starts_BHE: Tensor
    """Where each of these buckets begins in ``order_BHN``, the hidden ones' last, and the end; int32."""

    @property
    def num_keys(self) -> int:
        return self.order_BHN.shape[-1]

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors."""
        return self.codes_ABNH.nbytes + self.order_BHN.nbytes + self.starts_BHE.nbytes


GroupPage = Callable[[Tensor], KeyGroups]
"""k_BNHD of one page -> its groups."""


class GroupedContext(Protocol):
    """A forward's view whose pages keep their groups."""

    def groups(self, block: int, k_BNHD: Tensor, group: GroupPage) -> Sequence[KeyGroups]:
        """Return the groups of all pages in ``k_BNHD``, which ``extend`` returned; ``group`` makes those not known."""
        ...


def bucket_tables(x_BLHD: Tensor, *, options: SparseOptions) -> Tensor:
    """Return each token's bucket in every table, int64 [A, B, L, H]."""
    seeds = range(options.seed, options.seed + options.tables)
    return torch.stack([buckets(x_BLHD, planes=options.planes, seed=seed) for seed in seeds])


def group_page(k_BNHD: Tensor, *, options: SparseOptions, alive_BNH: Tensor | None = None) -> KeyGroups:
    """Find the buckets of a page's keys. Keys that are not alive are hidden. Does not wait for the device."""
    codes_ABNH = bucket_tables(centre(k_BNHD, alive_BNH), options=options)
    if alive_BNH is not None:
        codes_ABNH = codes_ABNH.masked_fill(~alive_BNH, 2**options.planes)
    return group_codes(codes_ABNH, num_buckets=2**options.planes)


def group_codes(codes_ABNH: Tensor, *, num_buckets: int) -> KeyGroups:
    """Return groups from buckets that are known."""
    sorted_BHN, order_BHN = codes_ABNH[0].transpose(1, 2).to(torch.int32).sort(dim=-1, stable=True)
    edges = torch.arange(num_buckets + 2, device=codes_ABNH.device, dtype=torch.int32)
    starts = torch.searchsorted(sorted_BHN.contiguous(), edges.expand(*sorted_BHN.shape[:2], -1).contiguous())
    return KeyGroups(
        codes_ABNH=codes_ABNH.to(torch.int32), order_BHN=order_BHN.to(torch.int32), starts_BHE=starts.to(torch.int32)
    )


def all_codes(groups: Sequence[KeyGroups]) -> Tensor:
    """Return the buckets of all pages' keys, int64 [A, B, N, H]."""
    return torch.cat([page.codes_ABNH for page in groups], dim=2).to(torch.int64)


def in_page_order(groups: Sequence[KeyGroups]) -> tuple[Tensor, Tensor]:
    """Return keys' indices among all, page by page in the order of buckets, and their buckets; int64 [B, H, N]."""
    order, codes, start = [], [], 0
    for page in groups:
        index = page.order_BHN.to(torch.int64)
        order.append(index + start)
        codes.append(page.codes_ABNH[0].transpose(1, 2).gather(2, index).to(torch.int64))
        start += page.num_keys
    return torch.cat(order, dim=-1), torch.cat(codes, dim=-1)


def meets(x_ABLH: Tensor, others_ABNH: Tensor, *, num_buckets: int) -> Tensor:
    """Return whether each of ``x`` shares a bucket with at least one of the others, bool [B, L, H]."""
    tables, batch, _, heads = others_ABNH.shape
    used = torch.zeros(tables, batch, num_buckets + 1, heads, dtype=torch.bool, device=x_ABLH.device)
    used.scatter_(2, others_ABNH, torch.ones_like(others_ABNH, dtype=torch.bool))
    return used.gather(2, x_ABLH).any(dim=0)


def shared_mask(q_ABLH: Tensor, k_ABNH: Tensor) -> Tensor:
    """Return whether a query may see a key, bool [B, H, L, N]: they share a bucket, or the query shares none."""
    q, k = q_ABLH.permute(0, 1, 3, 2).unsqueeze(-1), k_ABNH.permute(0, 1, 3, 2).unsqueeze(-2)
    mask = (q == k).any(dim=0)
    return mask | ~mask.any(dim=-1, keepdim=True)


def with_lonely(codes_BLH: Tensor, starts_PBHE: Tensor) -> Tensor:
    """Return the queries' buckets, int32 [B, H, L]; the number of buckets for those whose bucket holds no key."""
    held_BHE = starts_PBHE.diff(dim=-1).sum(dim=0)
    codes_BHL = codes_BLH.transpose(1, 2)
    num_buckets = held_BHE.shape[-1] - 1
    return codes_BHL.masked_fill(held_BHE.gather(2, codes_BHL) == 0, num_buckets).to(torch.int32)
