"""The CLIP vision tower against the official code's numbers and against transformers' model."""

import pytest
import torch
import torch.nn.functional as F

from image_encoder import CLIP_CONFIGS, CLIPConfig, CLIPVision

TINY = CLIPConfig(image_size=28, patch_size=7, dim=32, out_dim=24, num_heads=4, num_layers=4)  # as the golden case


def make_vision(dtype: torch.dtype = torch.float64) -> CLIPVision:
    """A tiny tower; norms and biases are random as well, since initial ones and zeros would hide a missing one."""
    torch.manual_seed(0)
    vision = CLIPVision(TINY).to(dtype)
    with torch.no_grad():
        for parameter in vision.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return vision


def picture(height: int, width: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(3, 1, height, width, generator=generator, dtype=torch.float64) * 2 - 1


def assert_near(result: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Root mean square of the difference against that of what is expected."""
    assert result.shape == expected.shape
    error = (result - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert error <= tolerance, f"relative error {error:.2e} > {tolerance:.0e}"


# The official code


@pytest.fixture
def official(golden):
    """(the tower with the golden case's weights, the case's tensors)."""
    tensors = golden("clip_visual")
    vision = CLIPVision(TINY)
    vision.load_official({name[2:]: tensor for name, tensor in tensors.items() if name.startswith("w.")})
    return vision, tensors


@torch.no_grad()
def test_official_features(official):
    """Without it the image tokens that I2V attends to may not be those it was trained with."""
    vision, tensors = official
    features = vision(tensors["in.pixels"])
    assert_near(features, tensors["out.use_31_block"], 2e-6)
    # The block that is left out has its weights nevertheless.
    assert_near(vision.visual.transformer[-1](features), tensors["out.all_blocks"], 2e-6)


@torch.no_grad()
def test_official_preprocessing(official):
    """Without it a picture may be cropped, antialiased or normalised otherwise than in the official pipeline."""
    vision, tensors = official
    videos = [tensors["in.video.0"], tensors["in.video.1"]]
    assert_near(vision.preprocess(videos), tensors["out.preprocessed"], 1e-6)
    assert_near(vision.encode(videos), tensors["out.features"], 2e-6)


@torch.no_grad()
def test_official_positions_of_another_size(official):
    """Without it pictures of another size than the trained one may get positions that do not fit their patches."""
    vision, tensors = official
    bigger = F.interpolate(tensors["in.pixels"], (42, 42), mode="bicubic")
    states = vision.visual.transformer[-1](vision(bigger))  # this case was made with all blocks
    assert_near(states, tensors["out.interpolated_42"], 2e-6)


def test_official_names(golden):
    """Without it the released checkpoint may fail to load, or need a map of names."""
    with torch.device("meta"):
        vision = CLIPVision(CLIP_CONFIGS["vit-h-14"])
    keys = golden.keys("clip-xlm-roberta-vit-h-14")
    ours = {name: list(tensor.shape) for name, tensor in vision.state_dict().items()}
    assert ours == {name: shape for name, shape in keys.items() if name.startswith("visual.")}
    assert vision(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 257, 1280)
    # And from the whole checkpoint, text encoder included, they load.
    ignored = vision.load_official({name: torch.empty(shape, device="meta") for name, shape in keys.items()})
    assert len(ignored) == len(keys) - len(ours) and "log_scale" in ignored


def test_loading_is_strict():
    """Without it a checkpoint of another model may load in part, and features be noise without an error."""
    vision, state = make_vision(), make_vision().state_dict()
    assert vision.load_official(state | {"textual.norm.weight": torch.ones(2)}) == ["textual.norm.weight"]
    lacking = {name: tensor for name, tensor in state.items() if name != "visual.pre_norm.bias"}
    with pytest.raises(RuntimeError, match="Missing key.*visual.pre_norm.bias"):
        vision.load_official(lacking)
    with pytest.raises(RuntimeError, match="Unexpected key.*visual.extra"):
        vision.load_official(state | {"visual.extra": torch.ones(2)})


# transformers, same weights, float64


@pytest.fixture
def twins():
    """(ours, transformers' model), with the same weights."""
    clip = pytest.importorskip("transformers.models.clip", reason="transformers is missing")
    config = clip.CLIPVisionConfig(
        hidden_size=TINY.dim,
        intermediate_size=TINY.dim * TINY.mlp_ratio,
        num_hidden_layers=TINY.num_layers,
        num_attention_heads=TINY.num_heads,
        image_size=TINY.image_size,
        patch_size=TINY.patch_size,
        hidden_act="gelu",
        layer_norm_eps=TINY.norm_eps,
    )
    ours, theirs = make_vision(), clip.CLIPVisionModel(config).double().eval()
    theirs.load_state_dict(as_transformers(ours.state_dict()))
    return ours, theirs


def as_transformers(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Official weights, or their gradients, under transformers' names; the projection is not part of that class."""
    renamed = {}
    for name, tensor in state.items():
        for old, new in (
            ("visual.patch_", "embeddings.patch_"),
            ("visual.cls_embedding", "embeddings.class_embedding"),
            ("visual.pos_embedding", "embeddings.position_embedding.weight"),
            ("visual.pre_norm", "pre_layrnorm"),  # their spelling
            ("visual.post_norm", "post_layernorm"),
            ("visual.transformer", "encoder.layers"),
            (".norm", ".layer_norm"),
            (".attn.proj", ".self_attn.out_proj"),
            (".mlp.0", ".mlp.fc1"),
            (".mlp.2", ".mlp.fc2"),
        ):
            name = name.replace(old, new)
        if "class" in name or "position" in name:
            tensor = tensor.reshape(tensor.shape[-1] if "class" in name else tensor.shape[1:])
        if ".attn.to_qkv" in name:
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                renamed[name.replace(".attn.to_qkv", f".self_attn.{letter}_proj")] = part
        elif name != "visual.head":
            renamed[name] = tensor
    return renamed


@pytest.mark.parametrize("height, width", [(28, 28), (42, 21)])
def test_features_as_transformers(twins, height, width):
    """Without it an error in the features or their gradients passes where no golden data is at hand; and the positions
    of an oblong picture, which the official code cannot have, would have no witness."""
    ours, theirs = twins
    pixels = torch.cat([picture(height, width), picture(height, width, seed=2)], 1).transpose(0, 1)
    features = ours(pixels)
    out = theirs(pixels, interpolate_pos_encoding=True, output_hidden_states=True)
    assert_near(features, out.hidden_states[-2], 1e-12)
    for x in (features, out.hidden_states[-2]):
        x.sin().sum().backward()
    gradients = as_transformers({n: p.grad for n, p in ours.named_parameters() if p.grad is not None})
    for name, gradient in gradients.items():
        reference = theirs.get_parameter(name).grad
        # A bias of the keys shifts all logits of a query alike: its gradient is 0 but for rounding.
        assert (gradient - reference).abs().max() < 1e-11 * max(reference.abs().max(), 1)
    assert len(gradients) == 5 + 16 * (TINY.num_layers - 1)


# Use


@torch.no_grad()
def test_pictures_do_not_meet():
    """Without it FLF2V's first and last picture, of two sizes, could change each other's features or places."""
    vision = make_vision()
    first, last = picture(20, 36), picture(40, 30, seed=2)
    features = vision.encode([first, last])
    assert features.shape == (2, 17, TINY.dim)
    assert_near(features[:1], vision.encode([first]), 1e-13)
    assert_near(features[1:], vision.encode([last]), 1e-13)
    assert_near(vision.encode([torch.cat([last, last], 1)]), features[[1, 1]], 1e-13)  # each frame is a picture


@torch.no_grad()
def test_picture_of_the_right_size_is_only_normalised():
    """Without it the range may be wrong where no golden data is at hand: black is -1 before and (0 - mean) / std after,
    white 1 and (1 - mean) / std."""
    constants = pytest.importorskip("transformers.image_utils", reason="transformers is missing")
    vision = make_vision()
    mean, std = torch.tensor([constants.OPENAI_CLIP_MEAN, constants.OPENAI_CLIP_STD])[:, :, None, None]
    for value, level in ((-1.0, 0.0), (1.0, 1.0)):
        pixels = vision.preprocess([torch.full((3, 1, 28, 28), value)])
        assert_near(pixels, ((level - mean) / std).expand(1, 3, 28, 28), 1e-6)


def test_wrong_sizes_are_refused():
    """Without it the right and lower edge of a picture are cut in silence."""
    with pytest.raises(ValueError, match="28 x 30 pixels does not split into patches of 7 x 7"):
        make_vision()(torch.zeros(1, 3, 28, 30))
    with pytest.raises(ValueError, match="dim 30 does not split into 4 heads"):
        CLIPConfig(dim=30, num_heads=4)
    with pytest.raises(ValueError, match="image_size 30 is not a multiple of patch_size 7"):
        CLIPConfig(image_size=30, patch_size=7)


@torch.no_grad()
def test_precision():
    """Without it float64 may be rounded on the way, and layouts no longer be compared to 1e-12; or weights in bfloat16
    may refuse float32 pictures."""
    vision, image = make_vision(), picture(20, 36)
    features = vision.encode([image])
    assert features.dtype == torch.float64
    # A step too small for float32 moves the result by its own size.
    assert 1e-12 < (vision.encode([image + 1e-11]) - features).abs().max() < 1e-9
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        coarse = vision.to(dtype).encode([image.float()])
        assert coarse.dtype == torch.float32
        assert_near(coarse.double(), features, tolerance)
