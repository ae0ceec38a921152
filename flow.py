"""Flow matching: the noise schedule, the training objective, and the solvers that run it backwards.

    noisy latents  x(sigma) = (1 - sigma) * latents + sigma * noise        sigma in [0, 1], 1 = pure noise
    velocity       v = dx/dsigma = noise - latents                         what the model predicts
    timestep       1000 * sigma                                            what the model is told

So latents = x - sigma * v: each solver turns the velocity into that estimate of the clean latents, or steps along v.

What the public trainers do differently: DiffSynth-Studio and VideoX-Fun draw a row of a table of 1000 sigmas
(1, 0.999, ..., 0.001, then shifted), so their sigma takes 1000 values, with 1 among them, and an expert's range is a
range of rows that misses its boundary by up to a row. Here sigma is continuous and the boundary is exact.
VideoX-Fun also zeroes each error above 50 in its loss; here nothing is masked.

Letters: l tokens on this rank, P numbers per token's patch, B samples of the global batch.
"""

import math

import torch

TIMESTEPS = 1000  # timestep = TIMESTEPS * sigma
# Training never sees sigma = 0: there the input is clean, and the noise to predict is unknowable.
SMALLEST_SIGMA = 2.0**-53
# The largest sigma of the official UniPC table before the shift: 1 - 1/1000, which that table keeps in float32. The
# rounding matters where 1000 * sigma would fall on an integer and is then truncated.
UNIPC_FIRST_SIGMA = 0.9990000128746033


def widen(x: torch.Tensor) -> torch.Tensor:
    """x in at least float32; float64 stays float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# --- the schedule ---------------------------------------------------------------------------------------------------


def shift_sigmas(sigmas: torch.Tensor | float, shift: float) -> torch.Tensor | float:
    """Moves sigmas towards noise: shift * s / (1 + (shift - 1) * s); 0 and 1 stay where they are.

    Long or large videos need it, since noise of a given sigma hides less of them (Stable Diffusion 3 paper, eq. 23).
    Shift 1 changes nothing; the inverse is the same function with 1 / shift.
    """
    if not (shift > 0 and math.isfinite(shift)):
        raise ValueError(f"shift must be a positive number, got {shift}")
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def training_sigmas(
    uniforms: torch.Tensor,
    shift: float = 1.0,
    sampling: str = "uniform",
    low: float = 0.0,
    high: float = 1.0,
    mean: float = 0.0,
    std: float = 1.0,
) -> torch.Tensor:
    """Turns uniforms in [0, 1) into training sigmas, float64, of the same shape.

    The map is the inverse of the sigmas' distribution function, hence increasing: stratified uniforms give stratified
    sigmas. Before the shift sigma is uniform in (0, 1), or sigmoid(mean + std * z) with z normal ("logit-normal").
    low and high bound sigma after the shift, as the boundary between Wan 2.2's experts does (0.875 for text to video,
    0.9 for image to video); they restrict the uniforms, so the distribution inside [low, high) keeps its form. The
    high-noise expert takes low = boundary and may see the boundary itself, the low-noise one takes high = boundary and
    never does.
    The result lies strictly between 0 and 1.
    """
    if not 0 <= low < high <= 1:
        raise ValueError(f"the noise range needs 0 <= low < high <= 1, got low {low} and high {high}")
    if sampling not in ("uniform", "logit-normal"):
        raise ValueError(f"timestep sampling must be uniform or logit-normal, got {sampling!r}")
    if not std > 0:
        raise ValueError(f"the logit-normal's std must be positive, got {std}")
    u = uniforms.to(torch.float64)
    if u.numel() and not (u.min() >= 0 and u.max() < 1):
        raise ValueError(f"uniforms must lie in [0, 1), got {u.min().item()} to {u.max().item()}")

    if not (shift > 0 and math.isfinite(shift)):
        raise ValueError(f"shift must be a positive number, got {shift}")
    # The bounds before the shift, as logits: the shift adds log(shift) to logit(sigma). Then their place in [0, 1].
    logits = torch.logit(torch.tensor([low, high], dtype=torch.float64, device=u.device)) - math.log(shift)
    first, last = (
        torch.sigmoid(logits) if sampling == "uniform" else torch.special.ndtr((logits - mean) / std)
    ).tolist()
    if not first < last:
        raise ValueError(f"{sampling} sampling (mean {mean}, std {std}) has no mass between sigma {low} and {high}")
    u = first + (last - first) * u
    if sampling == "logit-normal":
        u = torch.sigmoid(mean + std * torch.special.ndtri(u))
    # The clamp is for rounding, and for a uniform of 0 where low is 0.
    return shift_sigmas(u, shift).clamp(max(low, SMALLEST_SIGMA), math.nextafter(high, 0.0))


def bell_weight(sigmas: torch.Tensor, shift: float) -> torch.Tensor:
    """DiffSynth-Studio's loss weight, as a function of sigma instead of a table's row; same shape as sigmas.

    exp(-2 (sigma - 1/2)^2), lowered to be 0 at sigma = 1, scaled to have mean 1 over the 1000 sigmas of that trainer's
    shifted table (FlowMatchScheduler.set_timesteps, training=True). The mean is 1 for uniform sampling with the same
    shift over the whole range; a restricted range or logit-normal sampling has another mean, there as here.
    """

    def bell(s: torch.Tensor) -> torch.Tensor:
        return torch.exp(-2 * (s - 0.5) ** 2) - math.exp(-0.5)

    table = shift_sigmas(torch.arange(1, TIMESTEPS + 1, dtype=torch.float64) / TIMESTEPS, shift)
    return bell(widen(sigmas)) / bell(table).mean().item()


# --- the objective --------------------------------------------------------------------------------------------------


def add_noise(latents: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor | float) -> torch.Tensor:
    """(1 - sigma) * latents + sigma * noise, in the latents' dtype.

    sigma is a number or a tensor that broadcasts over the latents, such as (F, 1, 1) for a sigma per latent frame.
    """
    x, e = widen(latents), widen(noise)
    if isinstance(sigma, torch.Tensor):
        sigma = sigma.to(x)
    return ((1 - sigma) * x + sigma * e).to(latents.dtype)


def velocity_target(latents: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The velocity that the model learns to predict: noise - latents, whatever sigma is."""
    return noise - latents


def flow_loss(prediction: torch.Tensor, target: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum over tokens of weight * squared error; prediction and target (l, P), weights (l,) -> scalar in >= float32.

    A sum, not a mean: the caller puts the sample's weight / (B * its number of target elements) into each token's
    weight and 0 into padding, so that the sum over all tokens of all ranks is the loss of the global batch. No tokens
    give 0, with a gradient.
    """
    if prediction.shape != target.shape or weights.shape != prediction.shape[:1]:
        shapes = f"{tuple(prediction.shape)}, {tuple(target.shape)} and {tuple(weights.shape)}"
        raise ValueError(f"flow_loss wants prediction (l, P), target (l, P) and weights (l,), got {shapes}")
    error = (widen(prediction) - widen(target)).square().sum(-1)  # (l,)
    return (weights.to(error.dtype) * error).sum()


def sample_losses(
    prediction: torch.Tensor, target: torch.Tensor, weights: torch.Tensor, owner: torch.Tensor, samples: int
) -> torch.Tensor:
    """`flow_loss` by sample: owner (l,) says whose each token is -> (samples,) in at least float32, for the record."""
    error = (widen(prediction) - widen(target)).square().sum(-1)  # (l,)
    return error.new_zeros(samples).index_add_(0, owner, weights.to(error.dtype) * error)


# --- the solvers ----------------------------------------------------------------------------------------------------


class Solver:
    """From noise to latents in `steps` model calls; one object per trajectory.

    sigmas (steps + 1,) float64, falling to 0; timesteps (steps,): what to tell the model in each step.
    `step(velocity, latents, i)` takes the model's velocity at `latents` and timesteps[i], returns the latents at
    sigmas[i + 1]. Steps are numbered 0 ... steps - 1 and must come in order, since the multistep solvers use the steps
    before. The latents may be edited between steps (Wan 2.2's TI2V puts the image back into frame 0). Arithmetic is in
    at least float32, the coefficients are Python floats, and the latents' dtype is returned.
    """

    first_sigma = 1.0
    whole_timesteps = True  # the official UniPC and DPM++ tell the model 1000 * sigma with its fraction cut off

    def __init__(self, steps: int, shift: float = 1.0):
        if steps < 1:
            raise ValueError(f"a solver needs at least 1 step, got {steps}")
        # start + i * step rather than torch.linspace: its other rounding would tip a truncated timestep by one.
        line = self.first_sigma + torch.arange(steps, dtype=torch.float64) * (-self.first_sigma / steps)
        sigmas = shift_sigmas(line, shift)
        timesteps = sigmas * TIMESTEPS
        if self.whole_timesteps:  # the official tables keep sigma in float32, which near 1 moves 1 - sigma by 1e-3
            sigmas = sigmas.to(torch.float32).to(torch.float64)
        self.steps = steps
        self.sigmas = torch.cat([sigmas, sigmas.new_zeros(1)])
        self.timesteps = timesteps.to(torch.int64) if self.whole_timesteps else timesteps
        self.next_step = 0

    def step(self, velocity: torch.Tensor, latents: torch.Tensor, i: int) -> torch.Tensor:
        if i != self.next_step or i >= self.steps:
            due = f"step {self.next_step} is due" if self.next_step < self.steps else "all of them are done"
            raise ValueError(f"step {i} of a solver with {self.steps} steps, where {due}; a new run needs a new solver")
        if velocity.shape != latents.shape:
            raise ValueError(f"velocity {tuple(velocity.shape)} and latents {tuple(latents.shape)} differ in shape")
        self.next_step += 1
        return self.advance(widen(velocity), widen(latents), i).to(latents.dtype)

    def advance(self, v: torch.Tensor, x: torch.Tensor, i: int) -> torch.Tensor:
        raise NotImplementedError

    def between(self, i: int) -> tuple[float, float]:
        """(sigma[i], sigma[i + 1])."""
        return self.sigmas[i].item(), self.sigmas[i + 1].item()

    def log_snr(self, i: int) -> float:
        """lambda = log((1 - sigma) / sigma) at sigma[i]: the time in which both multistep solvers are polynomial.

        Minus infinity at sigma = 1, infinity at 0."""
        sigma = self.sigmas[i].item()
        if sigma in (0.0, 1.0):
            return math.inf if sigma == 0.0 else -math.inf
        return math.log1p(-sigma) - math.log(sigma)


class Euler(Solver):
    """x += (sigma' - sigma) * v: first order, exact where the trajectory is straight; timesteps keep their fraction."""

    whole_timesteps = False

    def advance(self, v: torch.Tensor, x: torch.Tensor, i: int) -> torch.Tensor:
        sigma, following = self.between(i)
        return x + (following - sigma) * v


class DPMSolver(Solver):
    """DPM-Solver++(2M) in the midpoint form (Lu et al. 2022, algorithm 2); official: FlowDPMSolverMultistepScheduler.

    Extrapolates the clean latents d linearly in lambda from the last two steps. The paper's -alpha' (exp(-h) - 1) is
    1 - sigma' / sigma for alpha = 1 - sigma, and finite at both ends. The table starts at sigma = 1, where lambda is
    minus infinity: step 0 has nothing to extrapolate from, step 1 extrapolates over an infinite distance, so both are
    of first order, and so is the last, which ends at lambda = infinity.
    """

    def __init__(self, steps: int, shift: float = 1.0):
        super().__init__(steps, shift)
        self.previous = None  # d of the step before

    def advance(self, v: torch.Tensor, x: torch.Tensor, i: int) -> torch.Tensor:
        sigma, following = self.between(i)
        clean = x - sigma * v
        d = clean
        if 2 <= i < self.steps - 1:
            here = self.log_snr(i)
            r = (here - self.log_snr(i - 1)) / (self.log_snr(i + 1) - here)
            d = clean + (clean - self.previous) / (2 * r)
        self.previous = clean
        ratio = following / sigma
        return ratio * x + (1 - ratio) * d


class UniPC(Solver):
    """UniPC of order 2, form bh2, in the clean latents (Zhao et al. 2023); official: FlowUniPCMultistepScheduler.

    Each step first corrects the latents it was given: now that the model has been called there, the step before is
    repeated with one more point. Then it predicts. Both are written as an update from x at sigma to
    (sigma' / sigma) * x + (1 - sigma' / sigma) * (d + weighted differences of d), as in DPMSolver. The first step has
    order 1 for want of history, the last because it ends at lambda = infinity.
    """

    first_sigma = UNIPC_FIRST_SIGMA

    def __init__(self, steps: int, shift: float = 1.0):
        super().__init__(steps, shift)
        self.clean = []  # d of the last two steps, newest last
        self.start = None  # the (corrected) latents that the last step started from

    def advance(self, v: torch.Tensor, x: torch.Tensor, i: int) -> torch.Tensor:
        sigma, following = self.between(i)
        clean = x - sigma * v
        if i > 0:
            x = self.correct(clean, i)
        self.start, self.clean = x, (self.clean + [clean])[-2:]
        d = clean
        if 1 <= i < self.steps - 1:
            here = self.log_snr(i)
            r = (self.log_snr(i - 1) - here) / (self.log_snr(i + 1) - here)  # < 0
            d = clean + 0.5 * (self.clean[0] - clean) / r
        ratio = following / sigma
        return ratio * x + (1 - ratio) * d

    def correct(self, clean: torch.Tensor, i: int) -> torch.Tensor:
        """The latents at sigma[i] again, from sigma[i - 1], with the d just found there among the points."""
        start, end = self.between(i - 1)
        before = self.log_snr(i - 1)
        h = self.log_snr(i) - before
        newest = self.clean[-1]
        if i == 1:
            d = newest + 0.5 * (clean - newest)
        else:
            # Solve  w + w_new = b1,  r w + w_new = b2: the update is then exact for d quadratic in lambda.
            r = (self.log_snr(i - 2) - before) / h
            grow = math.expm1(-h)
            phi2 = -grow / h - 1
            phi3 = -phi2 / h - 0.5
            b1, b2 = phi2 / grow, 2 * phi3 / grow
            w = (b1 - b2) / (1 - r)
            d = newest + w * (self.clean[0] - newest) / r + (b1 - w) * (clean - newest)
        ratio = end / start
        return ratio * self.start + (1 - ratio) * d
