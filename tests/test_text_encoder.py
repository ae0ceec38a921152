"""umT5 and its tokenizer, against the official code's data and transformers."""

import io
import json

import pytest
import sentencepiece
import torch

from text_encoder import (
    UMT5_CONFIGS,
    Tokenizer,
    UMT5Config,
    UMT5Encoder,
    clean_prompt,
    encode_prompts,
    relative_buckets,
)

SENTENCES = [
    "A cat walks on the grass.",
    "a red circle moves to the left over a blue ground",
    "two green squares drift slowly upwards, then stop",
    "the camera pans across a snowy mountain at dusk",
    "a small dog runs after a yellow ball in the park",
]
PROMPTS = ["a red circle", "", "  The cat &amp; the dog\n run  ", "a yellow ball " * 12]


@pytest.fixture(scope="module")
def spiece(tmp_path_factory):
    """A folder with a spiece.model of umT5's kind: pad 0, eos 1, unk 2, no bos."""
    path = tmp_path_factory.mktemp("tokenizer") / "spiece.model"
    path.write_bytes(train_model(pad_id=0, eos_id=1, unk_id=2, bos_id=-1, normalization_rule_name="identity"))
    return path


def train_model(**options) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=model, vocab_size=50, minloglevel=2, **options
    )
    return model.getvalue()


def official_encoder(golden) -> tuple[dict, UMT5Encoder]:
    case = golden("umt5")
    fields = {k: v for k, v in golden.config("umt5").items() if k in UMT5Config.__dataclass_fields__}
    encoder = UMT5Encoder(UMT5Config(**fields))
    encoder.load_state_dict({k[2:]: v for k, v in case.items() if k.startswith("w.")})
    return case, encoder


def demo_encoder(dtype=torch.float64) -> UMT5Encoder:
    torch.manual_seed(0)
    return UMT5Encoder(UMT5_CONFIGS["demo"]).to(dtype)


# --- the encoder -----------------------------------------------------------------------------------------------------


def test_parameters_are_the_released_checkpoint_s(golden):
    """A renamed or missing parameter of the xxl preset would only show when 11 GB fail to load."""
    with torch.device("meta"):
        encoder = UMT5Encoder(UMT5_CONFIGS["umt5-xxl"])
    assert {k: list(v.shape) for k, v in encoder.state_dict().items()} == golden.keys("umt5-xxl-enc")


def test_states_equal_the_official_encoder_s(golden):
    """Bias per layer, unscaled logits, masked keys, gated GELU: each of them, done otherwise, gives other states."""
    case, encoder = official_encoder(golden)
    real = case["in.mask"].bool()
    with torch.no_grad():
        states = encoder(case["in.ids"], case["in.mask"])
        torch.testing.assert_close(states[real], case["out.emb"][real], rtol=0, atol=2e-5)
        ids = case["in.ids_200"]
        torch.testing.assert_close(encoder(ids), case["out.emb_200"], rtol=0, atol=2e-5)
        torch.testing.assert_close(encoder(ids[:, :60]), case["out.emb_60_nomask"], rtol=0, atol=2e-5)


def test_buckets_and_bias_equal_the_official_table(golden):
    """A logarithm rounded the other way moves a bucket's edge: too rare in short prompts for the states to tell."""
    case, encoder = official_encoder(golden)
    table = relative_buckets(701, 32)  # offsets -700 ... 700 are the last row, then the first
    assert torch.equal(torch.cat([table[700], table[0, 1:]]), case["out.bucket_32_128"])
    assert torch.equal(table, case["out.bucket_32_128"][torch.arange(701)[None, :] - torch.arange(701)[:, None] + 700])
    bias = encoder.blocks[0].pos_embedding(relative_buckets(12, 32))
    torch.testing.assert_close(bias, case["out.pos_bias.block0"][0], rtol=0, atol=0)


def test_forward_and_gradient_equal_transformers(golden):
    """The golden case has no gradients; transformers, on the same weights, checks every parameter's. A parameter used
    twice or a detached branch keeps the forward and breaks the gradient of a fine-tuned text encoder."""
    transformers = pytest.importorskip("transformers")
    case, encoder = official_encoder(golden)
    c = encoder.config
    sizes = {"vocab_size": c.vocab, "d_model": c.dim, "d_kv": c.dim_attn // c.num_heads, "d_ff": c.dim_ffn}
    depth = {"num_layers": c.num_layers, "num_heads": c.num_heads, "relative_attention_num_buckets": c.num_buckets}
    config = transformers.UMT5Config(**sizes, **depth, feed_forward_proj="gated-gelu", dropout_rate=0.0)
    theirs = transformers.UMT5EncoderModel(config)
    names = parameter_map(golden, c.num_layers)
    weights = {names[k]: v for k, v in encoder.state_dict().items()}
    theirs.load_state_dict(weights | {"encoder.embed_tokens.weight": weights["shared.weight"]})

    ids, mask = case["in.ids"], case["in.mask"]
    ours, reference = encoder(ids, mask), theirs(input_ids=ids, attention_mask=mask).last_hidden_state
    real = mask.bool()
    torch.testing.assert_close(ours[real], reference[real], rtol=0, atol=2e-5)
    probe = torch.randn(ours[real].shape, generator=torch.Generator().manual_seed(0))
    (ours[real] * probe).sum().backward()
    (reference[real] * probe).sum().backward()
    gradients = {k: p.grad for k, p in theirs.named_parameters()}
    for name, p in encoder.named_parameters():
        expected = gradients[names[name]]
        assert (p.grad - expected).abs().max() < 5e-5 * expected.abs().max(), name


def parameter_map(golden, num_layers: int) -> dict[str, str]:
    """Official parameter name -> transformers' name."""
    record = json.loads((golden.folder / "keys" / "map.umt5-xxl-enc.official-to-transformers.json").read_text())
    names = dict(record["keys"])
    for repeat in record["repeat"]:
        for i in range(num_layers):
            for key, value in repeat["keys"].items():
                names[repeat["prefix"].replace("{i}", str(i)) + key] = value.replace("{i}", str(i))
    return names


def test_float64_stays_float64_inside():
    """Parity in float64 needs every norm and softmax in float64: a finite difference with a step of 1e-6 sees a float32
    rounding anywhere on the way as an error of several per cent."""
    encoder = demo_encoder()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 128, (2, 21), generator=generator)
    mask = torch.arange(21) < torch.tensor([[21], [13]])
    probe = torch.randn(2, 21, 64, dtype=torch.float64, generator=generator)

    def value() -> torch.Tensor:
        return (encoder(ids, mask) * probe * mask[:, :, None]).sum()

    value().backward()
    for p in encoder.parameters():
        direction = torch.randn(p.shape, dtype=p.dtype, generator=generator)
        with torch.no_grad():
            p += 1e-6 * direction
            above = value()
            p -= 2e-6 * direction
            below = value()
            p += 1e-6 * direction
        slope = (p.grad * direction).sum()
        assert abs((above - below) / 2e-6 - slope) < 1e-5 * (1 + abs(slope))


def test_bfloat16_runs_and_softmax_is_wider():
    """The released weights are bfloat16: the module must run in it, and stay within its rounding of float32."""
    ids = torch.randint(0, 128, (1, 30), generator=torch.Generator().manual_seed(2))
    encoder = demo_encoder(torch.bfloat16)
    states = encoder(ids)
    wide = encoder.to(torch.float64)(ids)
    assert states.dtype == torch.bfloat16
    assert (states - wide).square().mean().sqrt() < 0.03 * wide.square().mean().sqrt()


def test_padding_changes_nothing():
    """A prompt's states must not depend on how far it is padded or on what the padding ids are; and a row that is all
    padding must not turn the batch into NaN."""
    encoder = demo_encoder()
    ids = torch.randint(3, 128, (3, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    mask[2] = 0
    states = encoder(ids, mask)
    assert states.isfinite().all()
    torch.testing.assert_close(states[:1, :5], encoder(ids[:1, :5]), rtol=0, atol=1e-12)
    torch.testing.assert_close(states[1:2], encoder(ids[1:2]), rtol=0, atol=1e-12)
    ids[0, 5:] = 7
    assert torch.equal(states[0, :5], encoder(ids, mask)[0, :5])


def test_bias_is_not_expanded_over_prompts():
    """One (H, L, L) bias per layer and forward: expanded over prompts it would be 4 GB a layer at 64 heads, 512 tokens
    and 64 prompts."""
    encoder = demo_encoder()
    shapes = []
    for block in encoder.blocks:
        block.pos_embedding.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    encoder(torch.zeros(5, 11, dtype=torch.long))
    assert shapes == [(4, 11, 11)] * 2


def test_ids_outside_the_vocabulary_are_refused():
    """Mixing a tokenizer and an encoder otherwise ends in an index error, on a GPU in a nameless device assertion."""
    encoder = demo_encoder()
    with pytest.raises(ValueError, match="token id 128 .* vocabulary of 128"):
        encoder(torch.tensor([[1, 128]]))
    with pytest.raises(ValueError, match="token id -1 .* vocabulary of 128"):
        encoder(torch.tensor([[1, -1]]))
    with pytest.raises(ValueError, match="dim_attn 64 .* 3 heads"):
        UMT5Config(dim_attn=64, num_heads=3)


def test_initialisation_is_usable():
    """The demo's encoder is made from this initialisation: attention logits and states of unit size, and
    states that tell prompts apart."""
    encoder = demo_encoder()
    x = torch.randn(500, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    for block in encoder.blocks:
        q, k = (linear(x).unflatten(-1, (4, 16)).transpose(0, 1) for linear in (block.attn.q, block.attn.k))
        assert 0.7 < (q @ k.transpose(-1, -2)).std() < 1.4
    states = encoder(torch.tensor([[5, 6, 1], [6, 5, 1]]))
    assert 0.5 < states.std() < 2
    assert (states[0] - states[1])[2].abs().max() > 0.01  # the shared last token sees the order of the others


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_cleaning_equals_the_official_pipeline_s(golden):
    """Other cleaning gives other tokens, so a trained caption would not be the prompt that is sampled."""
    rows = golden("text_cleaning")["rows"]
    assert len(rows) == 25
    for row in rows:
        assert clean_prompt(row["text"]) == row["whitespace"]


def test_cleaning_without_golden_data():
    """The same where the reference data is absent; and ftfy leaves entities alone beside a "<", so it takes both
    rounds of unescaping."""
    assert clean_prompt("  A cat\n\twalks\u3000on ＡＢＣ ") == "A cat walks on ABC"
    assert clean_prompt("1 < 2 &amp;amp; cafÃ©") == "1 < 2 & café"
    assert clean_prompt(" \n ") == ""


def test_tokenizer_ends_cuts_and_pads(spiece):
    """The end-of-sentence token must survive truncation, padding must be id 0 with mask 0, and cleaning must happen."""
    tokenizer = Tokenizer(spiece, text_len=16)
    assert tokenizer.vocab_size == 50
    ids, mask = tokenizer(PROMPTS)
    assert ids.shape == mask.shape == (4, 16) and ids.dtype == mask.dtype == torch.long
    lengths = mask.sum(1).tolist()
    assert lengths[1] == 1 and lengths[3] == 16 and 1 < lengths[0] < 16
    for row, n in zip(ids, lengths, strict=True):
        assert row[n - 1] == 1 and (row[: n - 1] > 1).all() and (row[n:] == 0).all()
    assert torch.equal(mask, (torch.arange(16) < torch.tensor(lengths)[:, None]).long())
    assert torch.equal(tokenizer(["The cat & the dog run"])[0][0], ids[2])
    whole = Tokenizer(spiece, text_len=500)(PROMPTS[3:])[0][0]
    assert torch.equal(whole[:15], ids[3, :15])
    assert torch.equal(Tokenizer(spiece.parent, text_len=16)(PROMPTS)[0], ids)  # the folder will do
    assert tokenizer([])[0].shape == (0, 16)


def test_tokenizer_equals_transformers(spiece):
    """The official pipeline calls transformers' T5 tokenizer, which segments with code of its own; on the same pieces
    and scores both must agree, on padding and truncation too.

    In transformers 5 that class takes pieces and scores; for a spiece.model it would want protobuf to read them.
    """
    transformers = pytest.importorskip("transformers")
    model = sentencepiece.SentencePieceProcessor(model_file=str(spiece))
    vocab = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.vocab_size())]
    theirs = transformers.T5Tokenizer(vocab=vocab, extra_ids=0)
    prompts = PROMPTS + SENTENCES + ["Zebra 42 ünïcode 一只猫", "x"]
    encoded = theirs(
        [clean_prompt(p) for p in prompts], padding="max_length", truncation=True, max_length=24, return_tensors="pt"
    )
    ids, mask = Tokenizer(spiece, text_len=24)(prompts)
    assert torch.equal(mask, encoded.attention_mask) and torch.equal(ids, encoded.input_ids)


def test_tokenizer_refuses_what_it_cannot_use(spiece, tmp_path):
    """A wrong path, another model's tokenizer or a bare string (whose letters would be taken for prompts) must be named
    at once, not show up as nonsense conditioning."""
    with pytest.raises(FileNotFoundError, match="no tokenizer at .*nowhere.model; --tokenizer"):
        Tokenizer(tmp_path / "nowhere.model")
    with pytest.raises(FileNotFoundError, match="spiece.model; --tokenizer"):
        Tokenizer(tmp_path)
    with pytest.raises(ValueError, match="text_len 0"):
        Tokenizer(spiece, text_len=0)
    with pytest.raises(TypeError, match="list of prompts"):
        Tokenizer(spiece)("a cat")
    other = tmp_path / "other.model"
    other.write_bytes(train_model())  # SentencePiece's own defaults: no pad, eos 2
    with pytest.raises(ValueError, match=r"\(-1, 2\), umT5 has \(0, 1\)"):
        Tokenizer(other)


def test_encode_prompts_returns_real_tokens_only(spiece):
    """The DiT attends to all text it is given: a state of padding would condition it. A prompt's states must equal
    the padded batch's, and be the same bits whatever else is encoded, since several processes fill one cache."""
    encoder, tokenizer = demo_encoder(), Tokenizer(spiece, text_len=32)
    states = encode_prompts(encoder, tokenizer, PROMPTS)
    ids, mask = tokenizer(PROMPTS)
    assert [len(s) for s in states] == mask.sum(1).tolist()
    padded = encoder(ids, mask)
    for row, s in enumerate(states):
        assert s.shape[1] == 64 and s.dtype == torch.float64 and not s.requires_grad
        torch.testing.assert_close(s, padded[row, : len(s)], rtol=0, atol=1e-12)
    assert states[1].shape == (1, 64)  # the empty prompt is its end of sentence
    assert torch.equal(encode_prompts(encoder, tokenizer, PROMPTS[3:])[0], states[3])
    assert encode_prompts(encoder, tokenizer, []) == []
