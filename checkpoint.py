"""The formats in which Wan's weights live, by their names."""

# Official names, left, that diffusers' WanTransformer3DModel spells differently; tensors are the same.
DIFFUSERS_NAMES = {
    "text_embedding.0.": "condition_embedder.text_embedder.linear_1.",
    "text_embedding.2.": "condition_embedder.text_embedder.linear_2.",
    "time_embedding.0.": "condition_embedder.time_embedder.linear_1.",
    "time_embedding.2.": "condition_embedder.time_embedder.linear_2.",
    "time_projection.1.": "condition_embedder.time_proj.",
    "img_emb.proj.0.": "condition_embedder.image_embedder.norm1.",
    "img_emb.proj.1.": "condition_embedder.image_embedder.ff.net.0.proj.",
    "img_emb.proj.3.": "condition_embedder.image_embedder.ff.net.2.",
    "img_emb.proj.4.": "condition_embedder.image_embedder.norm2.",
    "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
    "head.head.": "proj_out.",
    "head.modulation": "scale_shift_table",
    ".modulation": ".scale_shift_table",
    ".norm3.": ".norm2.",
    ".ffn.0.": ".ffn.net.0.proj.",
    ".ffn.2.": ".ffn.net.2.",
    ".self_attn.": ".attn1.",
    ".cross_attn.": ".attn2.",
    ".q.": ".to_q.",
    ".k.": ".to_k.",
    ".v.": ".to_v.",
    ".o.": ".to_out.0.",
    ".k_img.": ".add_k_proj.",
    ".v_img.": ".add_v_proj.",
    ".norm_k_img.": ".norm_added_k.",
}


def diffusers_name(name: str) -> str:
    """The name that diffusers gives to the official parameter `name`."""
    for official, theirs in DIFFUSERS_NAMES.items():
        name = name.replace(official, theirs)
    return name
