"""What the kernels of one call of refined attention share: tensors, sizes, constants and tiles."""

from torch import Tensor

from vitrefine.ops.kernels.precision import product_precision
from vitrefine.ops.kernels.refined_attention_mask import Mask
from vitrefine.ops.kernels.refined_attention_plan import Buffer, Chunk, buffer, chunks, span, tiles_for
from vitrefine.ops.kernels.shapes import padded, rows_contiguous


class Call:
    """One call, forward or backward.

    Args:
        q: (B, H, Nq, d).
        k: (B, H, Nk, d).
        v: (B, G, Nk, d).
        mix: (G, H, k, k), k odd.
        mask: Of the scores, (B or 1, H or 1, Nq or 1, Nk or 1), boolean or additive.
        out_mask: Of the refined maps; likewise, with G for H.
        seed: Of dropout, one number.
        dropout_p: Of the refined maps.
        scale: Factor of the scores.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mix: Tensor,
        mask: Tensor | None,
        out_mask: Tensor | None,
        seed: Tensor | None,
        dropout_p: float,
        scale: float,
    ) -> None:
        q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
        self.q, self.k, self.v, self.mix = q, k, v, mix
        self.inputs = (q, k, v, mix, mask, out_mask)
        self.batch, self.heads, self.n_queries, self.dim = q.shape
        self.n_keys, self.n_mixed, self.size = k.shape[2], mix.shape[0], mix.shape[-1]
        self.padded_heads, self.padded_dim = padded(max(self.heads, self.n_mixed)), padded(self.dim)
        self.tiles = tiles_for(self.padded_heads, self.padded_dim, q.element_size(), masked=mask is not None)
        self.mask, self.out_mask = Mask.of(mask, q), Mask.of(out_mask, q)
        self.seed = q if seed is None else seed
        self.dropout_p, self.scale = dropout_p, scale
        self.precision = product_precision(q.dtype)
        self.pad = self.size // 2
        self.products = {"HEADS": self.padded_heads, "PRECISION": self.precision}
        self.window = {"SIZE": self.size, "SPAN": span(self.size, self.padded_heads)}
        self.dropping = {"OUT_MASK": self.out_mask.kind, "DROPOUT": dropout_p > 0}

    def cut(self, buffers: int, slowest: str, share: float) -> tuple[list[Chunk], Buffer]:
        """Chunks of work, and what a buffer of maps for any of them takes.

        Args:
            buffers: That are needed at once.
            slowest: The kernel that takes the longest.
            share: Scratch memory that may be taken at any rate, in sizes of the queries.
        """
        n_queries, n_keys, item = self.n_queries, self.n_keys, self.q.element_size()
        least, tile = share * self.q.nbytes, self.tiles[slowest]
        work = chunks(self.batch, n_queries, n_keys, self.size, self.padded_heads, item, buffers, tile, least)
        return work, buffer(work[0].images, work[0].last_out, n_keys, self.size, self.padded_heads)
