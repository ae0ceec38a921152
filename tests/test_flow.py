"""The schedule, the objective and the solvers of flow.py, against tables and trajectories of the official code."""

import math

import pytest
import torch

from flow import (
    DPMSolver,
    Euler,
    UniPC,
    add_noise,
    bell_weight,
    flow_loss,
    shift_sigmas,
    training_sigmas,
    velocity_target,
)

SOLVERS = {"unipc": UniPC, "dpmpp": DPMSolver, "euler": Euler}
EXPERTS = [(12.0, 0.875), (5.0, 0.9)]  # shift and boundary of Wan 2.2's text-to-video and image-to-video experts
F64 = torch.float64


def stratified(n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    return (torch.arange(n, dtype=F64) + torch.rand(n, dtype=F64, generator=generator)) / n


def field(case: dict, dtype: torch.dtype):
    a, b = case["in.a"].to(dtype), case["in.b"].to(dtype)
    return lambda x, t: a * x * math.cos(3 * t / 1000) + b * torch.sin(2 * x + t / 250)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("shift", [1, 3, 5, 8, 12])
@pytest.mark.parametrize("steps", [4, 20, 50])
@pytest.mark.parametrize("name", SOLVERS)
def test_solver_follows_the_official_trajectory(golden, name, steps, shift, dtype):
    """Without it a solver's table, truncated timesteps, orders or coefficients could leave the released pipelines'."""
    case = golden(f"sched_{name}")
    lin = "_lin" if name == "euler" else ""
    key = f"{lin}.n{steps}.shift{shift}"
    solver = SOLVERS[name](steps, shift)
    assert solver.sigmas.dtype == F64 and solver.sigmas.shape == (steps + 1,)
    torch.testing.assert_close(solver.sigmas, case["out.sigmas" + key].to(F64), rtol=1e-6, atol=1e-7)
    if name == "euler":
        torch.testing.assert_close(solver.timesteps, case["out.timesteps" + key].to(F64), rtol=1e-6, atol=1e-4)
    else:
        assert torch.equal(solver.timesteps, case["out.timesteps" + key])
    v, x = field(case, dtype), case["in.x"].to(dtype)
    trajectory = [x[0]]
    for i, t in enumerate(solver.timesteps.tolist()):
        x = solver.step(v(x, t), x, i)
        trajectory.append(x[0])
    assert x.dtype == dtype
    official = case["out.traj" + key].to(F64)
    # In float32, as the official run was, within golden's tolerance; float64 shows that run's own rounding, to 1.2e-5.
    error = (torch.stack(trajectory).to(F64) - official).abs().flatten(1).amax(1) / official.square().mean().sqrt()
    assert error[:4].max() < 2e-6 and error.max() < (1e-5 if dtype == torch.float32 else 2e-5), (
        f"{name} {key}: {error} of rms"
    )


@pytest.mark.parametrize("name,tolerance", [("unipc", 1e-13), ("dpmpp", 5e-6)])
def test_solver_equals_diffusers_with_the_same_table(name, tolerance):
    """The golden trajectories know the coefficients to float32 only, and may be absent; diffusers' solvers, given this
    table, know them to float64 (its DPM++ converts the latents to float32)."""
    diffusers = pytest.importorskip("diffusers")
    if name == "unipc":
        make = diffusers.UniPCMultistepScheduler
    else:
        make = diffusers.DPMSolverMultistepScheduler
    for steps, shift in [(1, 5.0), (2, 1.0), (4, 5.0), (20, 12.0), (40, 5.0)]:
        ours = SOLVERS[name](steps, shift)
        theirs = make(prediction_type="flow_prediction", use_flow_sigmas=True, final_sigmas_type="zero", solver_order=2)
        theirs.set_timesteps(steps)
        theirs.sigmas, theirs.timesteps = ours.sigmas.clone(), ours.timesteps.clone()
        x = y = torch.linspace(-2, 2, 10, dtype=F64).view(2, 5)
        for i, t in enumerate(ours.timesteps.tolist()):
            v_x, v_y = (0.7 * z * math.cos(3 * t / 1000) + torch.sin(2 * z + t / 250) for z in (x, y))
            x, y = ours.step(v_x, x, i), theirs.step(v_y, t, y).prev_sample
            torch.testing.assert_close(x, y.to(F64), rtol=0, atol=tolerance)


@pytest.mark.parametrize("solver_class", SOLVERS.values())
def test_straight_trajectories_are_exact(solver_class):
    """Where the velocity is constant, every solver must land on noise - velocity * sigma to float64's rounding, for one
    step as for many; an infinite lambda at either end must not show as NaN, nor a coefficient in float32 as 1e-8."""
    latents, noise = torch.randn(2, 3, 4, dtype=F64, generator=torch.Generator().manual_seed(0)).unbind()
    for steps, shift in [(1, 1.0), (2, 5.0), (3, 12.0), (50, 5.0)]:
        solver = solver_class(steps, shift)
        v = velocity_target(latents, noise)
        x = add_noise(latents, noise, solver.sigmas[0].item())
        for i in range(steps):
            x = solver.step(v, x, i)
            torch.testing.assert_close(x, add_noise(latents, noise, solver.sigmas[i + 1].item()), rtol=0, atol=2e-14)


def error_at_quarter(solver_class, steps: int) -> float:
    """|x - exact| after three quarters of the steps, on a curved field; exact by Runge-Kutta from the same start."""
    solver = solver_class(steps, 1.0)

    def v(x, sigma):
        return 0.7 * x * math.cos(3 * sigma) + torch.sin(2 * x + 4 * sigma)

    x = start = torch.tensor([0.3, -1.2, 0.9], dtype=F64)
    done = steps * 3 // 4
    for i in range(done):
        x = solver.step(v(x, solver.sigmas[i].item()), x, i)
    exact, n, sigma = start, 2000, solver.sigmas[0].item()
    h = (solver.sigmas[done].item() - sigma) / n
    for k in range(n):
        s = sigma + k * h
        k1 = v(exact, s)
        k2 = v(exact + h / 2 * k1, s + h / 2)
        k3 = v(exact + h / 2 * k2, s + h / 2)
        k4 = v(exact + h * k3, s + h)
        exact = exact + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return (x - exact).abs().max().item()


@pytest.mark.parametrize("name,order", [("euler", 1), ("dpmpp", 2), ("unipc", 3)])
def test_convergence_order(name, order):
    """A wrong history or weight leaves a solver consistent (it still converges) but of a lower order; no other test
    without golden data would tell. UniPC's predictor has order 2, its corrector raises that to 3; DPM++ comes near 2
    only slowly, since lambda is minus infinity where it starts."""
    coarse, fine = (error_at_quarter(SOLVERS[name], steps) for steps in (80, 160))
    measured = math.log2(coarse / fine)
    assert abs(measured - order) < 0.5, f"{name}: order {measured:.2f}"


@pytest.mark.parametrize("solver_class", SOLVERS.values())
def test_steps_must_come_in_order(solver_class):
    """A skipped, repeated or surplus step, or a solver used for a second video, would silently mix histories."""
    x = torch.zeros(2)
    solver = solver_class(2, 1.0)
    with pytest.raises(ValueError, match="step 1 .* step 0 is due"):
        solver.step(x, x, 1)
    solver.step(x, x, 0)
    with pytest.raises(ValueError, match="step 0 .* step 1 is due"):
        solver.step(x, x, 0)
    solver.step(x, x, 1)
    for i in (0, 2):
        with pytest.raises(ValueError, match="all of them are done"):
            solver.step(x, x, i)
    with pytest.raises(ValueError, match="differ in shape"):
        solver_class(1, 1.0).step(x, torch.zeros(3), 0)
    with pytest.raises(ValueError, match="got 0"):
        solver_class(0, 1.0)
    with pytest.raises(ValueError, match="got -1"):
        solver_class(4, -1)


def test_bf16_latents_keep_their_dtype_but_not_its_arithmetic():
    """Coefficients near 1 (ratio of two sigmas) vanish in bf16: only the result may be rounded, once per step."""
    x = torch.linspace(-1, 1, 64, dtype=torch.bfloat16)
    v = torch.linspace(1, -2, 64, dtype=torch.bfloat16)
    for solver_class in SOLVERS.values():
        low, high = solver_class(50, 5.0), solver_class(50, 5.0)
        a = low.step(v, x, 0)
        assert a.dtype == torch.bfloat16
        assert torch.equal(a, high.step(v.to(F64), x.to(F64), 0).to(torch.bfloat16))


def test_experts_take_the_official_number_of_steps():
    """The high-noise expert runs where the truncated timestep >= 1000 * boundary: for 26 and 15 of 40
    steps in the official pipelines. One step more or less would go to an expert that never saw that noise."""
    assert [int((UniPC(40, shift).timesteps >= 1000 * b).sum()) for shift, b in EXPERTS] == [26, 15]


# --- training sigmas -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["uniform", "logit-normal"])
@pytest.mark.parametrize("shift,boundary", EXPERTS)
def test_experts_share_the_range_at_the_boundary(sampling, shift, boundary):
    """Each expert must train on exactly the sigmas it samples: bounds applied before the shift, or to another variable,
    would leave a gap or an overlap that shows only as poor videos."""
    u = torch.tensor([0.0, 1e-12, 0.5, 1 - 2**-53], dtype=F64)
    high = training_sigmas(u, shift, sampling, low=boundary)
    low = training_sigmas(u, shift, sampling, high=boundary)
    assert high[0].item() == pytest.approx(boundary, abs=1e-14) and high[0] >= boundary
    assert low[-1].item() == pytest.approx(boundary, abs=1e-14) and low[-1] < boundary
    assert 0 < low[0] < 1e-3 and 1 - 1e-3 < high[-1] < 1
    for sigmas in (low, high):
        assert sigmas.dtype == F64 and (sigmas.diff() > 0).all()


@pytest.mark.parametrize("sampling", ["uniform", "logit-normal"])
def test_restriction_keeps_the_form_of_the_distribution(sampling):
    """Restricted draws must be the unrestricted ones that fall inside: rescaling sigma itself would keep the bounds
    right and the density wrong."""
    shift, low, high = 5.0, 0.6, 0.9
    everything = training_sigmas(stratified(200_000), shift, sampling, mean=0.3, std=0.8)
    inside = everything[(everything >= low) & (everything < high)]
    restricted = training_sigmas(stratified(len(inside)), shift, sampling, low, high, mean=0.3, std=0.8)
    torch.testing.assert_close(restricted, inside, rtol=0, atol=1e-4)


def test_distributions_match_their_definition():
    """Pins the direction (u = 0 is clean), the shift after the sigmoid, and the logit-normal's mean and std."""
    u = stratified(100_000)
    assert torch.equal(training_sigmas(u), u)
    torch.testing.assert_close(training_sigmas(u, 5.0), shift_sigmas(u, 5.0), rtol=0, atol=1e-15)
    logits = torch.logit(shift_sigmas(training_sigmas(u, 5.0, "logit-normal", mean=0.5, std=0.8), 1 / 5.0))
    assert logits.mean().item() == pytest.approx(0.5, abs=1e-3)
    assert logits.std().item() == pytest.approx(0.8, abs=1e-3)
    assert abs(((logits - 0.5) / 0.8).pow(4).mean().item() - 3) < 0.05


def test_one_sigma_per_stratum():
    """Stratified uniforms must stay stratified: the k-th smallest sigma lies in the k-th equal share of probability."""
    for sampling in ("uniform", "logit-normal"):
        for low, high in [(0.0, 1.0), (0.875, 1.0)]:
            edges = training_sigmas(torch.arange(16, dtype=F64) / 16, 12.0, sampling, low, high)
            sigmas = training_sigmas(stratified(16), 12.0, sampling, low, high)
            assert (sigmas >= edges).all() and (sigmas[:-1] < edges[1:]).all()


def test_training_sigmas_stay_inside_the_open_interval():
    """sigma 0 makes the target unknowable and a weight of 1 / sigma infinite; no draw may reach it, nor 1."""
    u = torch.tensor([0.0, 2**-53, 1 - 2**-53], dtype=F64)
    for sampling in ("uniform", "logit-normal"):
        for shift in (0.2, 1.0, 12.0, 1000.0):
            sigmas = training_sigmas(u, shift, sampling)
            assert ((sigmas > 0) & (sigmas < 1)).all(), (sampling, shift, sigmas)


def test_training_sigmas_refuses_nonsense():
    """A swapped range or a uniform of exactly 1 is a caller's bug; both numbers must be in the message."""
    u = torch.tensor([0.5], dtype=F64)
    with pytest.raises(ValueError, match="low 0.9 and high 0.875"):
        training_sigmas(u, low=0.9, high=0.875)
    with pytest.raises(ValueError, match="low 0.9 and high 0.9"):
        training_sigmas(u, low=0.9, high=0.9)
    with pytest.raises(ValueError, match="1.5"):
        training_sigmas(u, high=1.5)
    with pytest.raises(ValueError, match="1.0"):
        training_sigmas(torch.tensor([0.0, 1.0]))
    with pytest.raises(ValueError, match="nan"):
        training_sigmas(torch.tensor([float("nan")]))
    with pytest.raises(ValueError, match="'normal'"):
        training_sigmas(u, sampling="normal")
    with pytest.raises(ValueError, match="got 0"):
        training_sigmas(u, shift=0)
    with pytest.raises(ValueError, match="std"):
        training_sigmas(u, sampling="logit-normal", std=0)
    with pytest.raises(ValueError, match="no mass"):
        training_sigmas(u, sampling="logit-normal", mean=-30, std=0.1, low=0.9)


def test_reference_grids_are_our_shift_of_an_even_grid(golden):
    """Ties the docstring's statement on the public trainers, and shift_sigmas, to their tables."""
    for name in ("train_diffsynth", "train_videoxfun"):
        tables = {k: v for k, v in golden(name).items() if k.startswith("shift") and k != "shifts_in_yaml"}
        assert len(tables) == 5
        for key, table in tables.items():
            rows = torch.arange(1000, 0, -1, dtype=F64)[:: table["index_step"]] / 1000
            expected = torch.tensor(table["sigmas"], dtype=F64)
            torch.testing.assert_close(shift_sigmas(rows, float(key[5:])), expected, rtol=0, atol=2e-7)


# --- the objective ---------------------------------------------------------------------------------------------------


def test_bell_weight_equals_the_reference_table(golden):
    """The option reproduces DiffSynth-Studio's loss only if weight and normalisation follow its table at all shifts."""
    for key, table in golden("train_diffsynth").items():
        if key.startswith("shift"):
            weights = bell_weight(torch.tensor(table["sigmas"], dtype=F64), float(key[5:]))
            assert weights.dtype == F64 and weights[0] == 0
            torch.testing.assert_close(weights, torch.tensor(table["weights"], dtype=F64), rtol=0, atol=3e-6)
    assert (bell_weight(stratified(1000), 5.0) > 0).all()


def test_losses_of_the_reference_trainer(golden):
    """add_noise, the target's sign, the weight and the loss's scale together give the reference trainer's numbers."""
    tensors = golden("train_loss")
    examples = next(v for k, v in golden("train_diffsynth").items() if k.startswith("sft_loss_examples"))
    for example in examples:
        case, half = example["case"], example["dtype"] == "torch.bfloat16"
        noise = tensors[f"out.noise.{case}"]
        latents = tensors["in.latents"].to(noise.dtype)  # (1, C, F, H, W)
        noisy = add_noise(latents, noise, example["sigma_used"])
        assert noisy.dtype == noise.dtype
        reference = tensors[f"out.noisy.{case}"]
        kept = slice(1, None) if example["first_frame"] else slice(None)
        close = dict(rtol=2e-2, atol=2e-2) if half else dict(rtol=0, atol=1e-6)
        torch.testing.assert_close(noisy[:, :, kept], reference[:, :, kept], **close)
        # One token per latent element of a frame: the sum over tokens needs the mean's 1 / number of elements.
        prediction = (0.5 * reference)[:, :, kept].flatten(2).transpose(1, 2)[0]  # (l, P)
        target = velocity_target(latents, noise)[:, :, kept].flatten(2).transpose(1, 2)[0]
        weight = bell_weight(torch.tensor(example["sigma_used"], dtype=F64), 5.0)
        loss = flow_loss(prediction, target, weight.expand(len(target)) / target.numel())
        assert loss.item() == pytest.approx(example["loss"], rel=1e-2 if half else 1e-5)


def test_velocity_is_the_derivative_in_sigma():
    """The three definitions (noising, target, Euler's sign) must agree: x(sigma) moves by d sigma * target."""
    latents, noise = torch.randn(2, 5, dtype=F64, generator=torch.Generator().manual_seed(1)).unbind()
    moved = add_noise(latents, noise, 0.75) - add_noise(latents, noise, 0.25)
    torch.testing.assert_close(moved, 0.5 * velocity_target(latents, noise))
    assert torch.equal(add_noise(latents, noise, 0.0), latents) and torch.equal(add_noise(latents, noise, 1.0), noise)


def test_add_noise_takes_a_sigma_per_frame():
    """TI2V and diffusion forcing noise each frame by its own sigma; a float64 sigma must not widen the latents."""
    latents, noise = torch.randn(2, 4, 3, 2, 2).unbind()  # (C, F, H, W)
    sigma = torch.tensor([0.0, 0.5, 1.0], dtype=F64)
    noisy = add_noise(latents, noise, sigma[:, None, None])
    assert noisy.dtype == torch.float32
    for f in range(3):
        torch.testing.assert_close(noisy[:, f], add_noise(latents[:, f], noise[:, f], sigma[f].item()))
    assert add_noise(latents.to("meta"), noise.to("meta"), sigma[:, None, None]).device.type == "meta"


def test_flow_loss_is_a_weighted_sum_in_at_least_float32():
    """That a run does not depend on its layout rests on the loss being a plain sum: shares of tokens add up, an empty
    share is 0 with a gradient, and bf16 inputs are not summed in bf16."""
    generator = torch.Generator().manual_seed(2)
    p, t = torch.randn(2, 7, 5, dtype=F64, generator=generator).unbind()
    p.requires_grad_()
    w = torch.rand(7, dtype=F64, generator=generator)
    loss = flow_loss(p, t, w)
    by_hand = sum(w[k] * ((p[k] - t[k]) ** 2).sum() for k in range(7))
    torch.testing.assert_close(loss, by_hand, rtol=1e-14, atol=0)
    parts = [flow_loss(p[a:b], t[a:b], w[a:b]) for a, b in [(0, 3), (3, 3), (3, 7)]]
    torch.testing.assert_close(sum(parts), loss, rtol=1e-14, atol=0)
    (gradient,) = torch.autograd.grad(loss, p)
    torch.testing.assert_close(gradient, 2 * w[:, None] * (p - t).detach())
    empty = flow_loss(p[:0], t[:0], w[:0])
    assert empty.item() == 0 and torch.autograd.grad(empty, p)[0].abs().sum() == 0

    half = flow_loss(p.detach().to(torch.bfloat16), t.to(torch.bfloat16), w)
    wide = flow_loss(p.detach().to(torch.bfloat16).to(F64), t.to(torch.bfloat16).to(F64), w)
    assert half.dtype == torch.float32 and half.item() == pytest.approx(wide.item(), rel=1e-6)
    with pytest.raises(ValueError, match=r"\(7, 5\), \(7, 5\) and \(5,\)"):
        flow_loss(p, t, torch.ones(5))


def test_nothing_above_the_usual_is_masked(golden):
    """VideoX-Fun drops errors above 50 from its loss without a word; here such an error counts, and that trainer's
    number follows only when those errors are removed by hand."""
    tensors = golden("train_loss")
    names = golden("train_videoxfun")
    expected = next(v for k, v in names.items() if k.startswith("custom_mse_loss"))["unweighted"]
    p, t = (tensors[f"in.vx_{k}"].to(F64).flatten(0, 1).flatten(1) for k in ("pred", "target"))
    w = torch.ones(len(p), dtype=F64) / p.numel()
    masked = torch.where((p - t).abs() > 50, t, p)
    assert (masked != p).any()
    assert flow_loss(masked, t, w).item() == pytest.approx(expected, rel=1e-5)
    assert flow_loss(p, t, w) > 10 * flow_loss(masked, t, w)
