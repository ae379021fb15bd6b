"""Counting what idles when the scores of an attention's last head no longer matter: its queries, its keys, its biases.

Libraries agree on few names, so this one table holds them all; tests compare it with what has no gradient.
"""

import re

from torch import Tensor, nn

# The weights that make the scores of an attention, by name: joint projections, those of queries or keys alone, ...
_LAYER = r"(\.(ln\.|proj\.)?(linear|conv|bn|proj))?(\.(weight|bias))?"
JOINT = re.compile(rf"((?P<keys_and_values>(to_)?kv)|(to_)?qkv|in_proj_(weight|bias)|query_key_value){_LAYER}")
QUERIES = re.compile(rf"((to_|w)?q|q_proj|q_bias|query){_LAYER}")
KEYS = re.compile(rf"((to_|w)?k|k_proj|k_bias|key){_LAYER}")
BOTH = re.compile(rf"qk{_LAYER}")
# ... what mixes the scores of all heads, of which then only the last head's own row idles, ...
TALKING_HEADS = ("proj_l", "talking_head1")
# ... tables of one entry or more for each head, and networks of which each head has a row of the last layer.
TABLES = re.compile(r"relative_position_bias_table|attention_biases|logit_scale|tau|gating_param")
NETWORKS = re.compile(r"cpb_mlp|meta_mlp|rel_pos|pos_proj")


def last_head_weights(attention: nn.Module, heads: int) -> int:
    """How many of an attention's weights make the scores of its last head, and nothing else."""
    for mixing in (getattr(attention, name, None) for name in TALKING_HEADS):
        if isinstance(mixing, nn.Linear | nn.Conv2d):
            return sum(weight.numel() // heads for weight in mixing.parameters())
    return sum(_idle_in(name, weight, attention, heads) for name, weight in attention.named_parameters())


def _idle_in(name: str, weight: Tensor, attention: nn.Module, heads: int) -> int:
    """How much of one weight is the last head's queries or keys alone."""
    if weight.ndim == 0:
        return 0
    parts = name.split(".")
    network = any(map(NETWORKS.fullmatch, parts)) and weight.shape[0] == heads
    if network or any(map(TABLES.fullmatch, parts)):
        return weight.numel() // heads
    rows, row = weight.shape[0] // heads, weight.numel() // weight.shape[0]
    # Keys may be narrower than values, as LeViT's are; one head of keys may serve several of queries; and MViT adds its
    # queries to its output, so they act whatever the scores are.
    key_dim = getattr(attention, "key_dim", None)
    if joint := JOINT.fullmatch(name):
        queries = joint["keys_and_values"] is None
        head_dim = getattr(attention, "head_dim", None) or rows // (3 if queries else 2)
        idle = rows - head_dim if key_dim is None else key_dim * (2 if queries else 1)
        return row * (idle - head_dim if getattr(attention, "residual_pooling", False) else idle)
    if KEYS.fullmatch(name):
        widths = {other.shape[0] for name, other in attention.named_parameters() if QUERIES.fullmatch(name)}
        return row * rows if weight.shape[0] in widths else 0
    return row * rows if QUERIES.fullmatch(name) or BOTH.fullmatch(name) else 0
