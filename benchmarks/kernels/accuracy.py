"""Error of an attention kernel against float64, beside that of torch's own attention in the kernel's dtype on the same data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

MAX_LOGITS = 2**25  # float64 logits held at once: 256 MB
# All but cuDNN, which builds a plan for every length.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def visible_keys(
    length: int, q_len: int, words: torch.Tensor | None, device: torch.device, window_left: int = -1
) -> torch.Tensor:
    """`[q_len, length]` bool: causal, aligned to the end, or by the tree's words `[q_len]` over the last `q_len` keys.

    With a window, only keys at most `window_left` positions before the query; a draft's position follows its depth.
    """
    draft = torch.arange(length, device=device) - (length - q_len)  # draft position of each key; negative in the prefix
    depth = torch.arange(q_len, device=device)
    if words is None:
        seen = draft <= depth[:, None]
    else:
        in_tree = (words[:, None] >> torch.arange(q_len, device=device)) & 1
        seen = (draft < 0) | (in_tree[:, draft.clamp(min=0)] == 1)
        depth = in_tree.sum(1) - 1
    if window_left < 0:
        return seen
    position = torch.where(draft < 0, draft, depth[draft.clamp(min=0)])
    return seen & (position >= depth[:, None] - window_left)


def exact_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float) -> torch.Tensor:
    """float64 attention of one request.

    Args:
        q: `[q_len, heads, dim]`. k: `[length, kv_heads, dim]`. v: `[length, kv_heads, v_dim]`. visible: `[q_len, length]`.

    Returns:
        `[q_len, heads, v_dim]` float64.
    """
    q_len, heads, _ = q.shape
    group = heads // k.shape[1]
    out = q.new_empty(q_len, heads, v.shape[-1], dtype=torch.float64)
    for kv_head in range(k.shape[1]):
        keys, values = k[:, kv_head].double(), v[:, kv_head].double()
        step = max(1, MAX_LOGITS // (group * k.shape[0]))
        for first in range(0, q_len, step):
            rows, mine = slice(first, first + step), slice(kv_head * group, (kv_head + 1) * group)
            logits = torch.einsum("qhd,kd->qhk", q[rows, mine].double(), keys).mul_(scale)
            logits.masked_fill_(~visible[rows, None], float("-inf"))
            out[rows, mine] = logits.softmax(-1) @ values
    return out


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float) -> torch.Tensor:
    """The same by `scaled_dot_product_attention` in the dtype of `q`: arguments as `exact_attention`, KV heads as its batch."""
    q_len, heads, dim = q.shape
    kv_heads = k.shape[1]
    queries = q.reshape(q_len, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)  # [kv_heads, group, q_len, dim]
    keys, values = (x.transpose(0, 1)[:, None].expand(-1, heads // kv_heads, -1, -1) for x in (k, v))
    with sdpa_kernel(KERNELS):
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(q_len, heads, v.shape[-1])


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """`|out - exact| / |exact|` in the Euclidean norm over all elements; NaN stays NaN."""
    return float((out.double() - exact).norm() / exact.norm())
