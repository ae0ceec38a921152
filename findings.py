"""What is wrong with a traced step and needs no other run to be seen: ranks that disagree where they must not, noise or
samples that are used twice, parameters without a gradient, a learning rate off its schedule."""

import torch
from torch import Tensor


def finding(phase: str, name: str, kind: str, text: str, ranks=()) -> dict:
    return {"phase": phase, "name": name, "kind": kind, "ranks": sorted(ranks), "text": text}


def check_ranks(trace, entries: list[dict], ranks: Tensor) -> list[dict]:
    """What must be alike on several ranks and is not. ranks (E, world, 2)."""
    odd_ones = {}  # entry: the ranks that differ from the first of their group, that one, and the group's size
    for agree, width in {"world": trace.world, "sp": trace.sp}.items():
        mine = [i for i, entry in enumerate(entries) if entry["agree"] == agree]
        groups = ranks[mine].unflatten(1, (-1, width))  # (entries, groups, width, 2)
        size = groups[..., 1:].nan_to_num(0.0).amax(2, keepdim=True).sqrt()
        apart = (groups - groups[:, :, :1]).abs() > 1e-10 * torch.cat((size, size * size), -1)
        apart |= groups.isnan() != groups[:, :, :1].isnan()
        for i, group, rank in apart.any(-1).nonzero().tolist():
            odd_ones.setdefault(mine[i], (set(), group * width, width))[0].add(group * width + rank)
    found = {}
    for i, (odd, first, width) in sorted(odd_ones.items()):
        item = found.setdefault(entries[i]["phase"], ([], set(), first, width))
        item[0].append(entries[i]["name"])
        item[1].update(odd)
    return [
        finding(
            phase,
            names[0],
            "ranks disagree",
            f"{describe(phase, names)} on ranks {listed(odd)} is not that of rank "
            f"{first}, where {'all ranks' if width == trace.world else 'a sequence-parallel group'} must agree",
            odd,
        )
        for phase, (names, odd, first, width) in found.items()
    ]


def check_gradients(trace, entries: list[dict], numbers: Tensor) -> list[dict]:
    """Parameters whose gradient is missing, zero everywhere (from the second traced step on: a model may well start so,
    behind a layer of zeros) or not finite; and other tensors that are not finite."""
    found, missing, zero = [], set(trace.parameters), []
    for entry, (count, _, zeros, nans, infinities, _) in zip(entries, numbers.tolist(), strict=True):
        phase, name = entry["phase"], entry["name"]
        if phase == "gradient":
            missing.discard(name)
            if zeros == count and trace.updates > 0:
                zero.append(name)
        if (nans or infinities) and not found:
            found.append(
                finding(
                    phase,
                    name,
                    "not finite",
                    f"{describe(phase, [name])} has {nans:.0f} NaN and "
                    f"{infinities:.0f} infinite values, the first such tensor of the step",
                )
            )
    if any(entry["phase"] == "gradient" for entry in entries):
        for kind, names in (("no gradient", sorted(missing)), ("zero gradient", zero)):
            if names:
                what = "no gradient" if kind == "no gradient" else "a gradient of zeros"
                text = f"{len(names)} of {len(trace.parameters)} parameters get {what}: {listed(names)}"
                found.append(finding("gradient", names[0], kind, text))
    return found


def check_facts(trace, facts: list[dict]) -> list[dict]:
    """facts: of each rank, as the caller left them in `trace.facts`, all optional: samples [(position, sample, noise
    digest)], batch (first position, number of positions, samples of an epoch), trains (those of its positions that this
    model trains on; default: all), tokens [(here, in the pack)], lr (used, scheduled)."""
    found, owner = [], {}
    for rank, fact in enumerate(facts):
        first = rank // trace.sp * trace.sp
        own, group = ([s[0] for s in f.get("samples", [])] for f in (fact, facts[first]))
        if own != group:
            found.append(
                finding(
                    "input",
                    "positions",
                    "ranks disagree",
                    f"rank {rank} has positions {listed(own)}, rank "
                    f"{first} of its sequence-parallel group {listed(group)}",
                    [rank],
                )
            )
        for here, whole in fact.get("tokens", []):
            if here != -(-whole // trace.sp):
                found.append(
                    finding(
                        "forward",
                        "tokens",
                        "local length",
                        f"rank {rank} has {here} of {whole} tokens, not 1/{trace.sp} of them",
                        [rank],
                    )
                )
        if "lr" in fact and abs(fact["lr"][0] - fact["lr"][1]) > 1e-12 * abs(fact["lr"][1]):
            found.append(
                finding(
                    "rate",
                    "lr",
                    "schedule",
                    f"rank {rank} steps with learning rate {fact['lr'][0]:.6g}, its schedule says {fact['lr'][1]:.6g}",
                    [rank],
                )
            )
        if rank == first:
            for position, sample, digest in fact.get("samples", []):
                owner.setdefault(("position", position), []).append((rank, position))
                owner.setdefault(("noise", digest), []).append((rank, position))
                trace.history.setdefault(position, sample)
    for (what, _), users in owner.items():
        if len(users) > 1:
            ranks, positions = ({u[i] for u in users} for i in (0, 1))
            text = (
                f"positions {listed(positions)} have the same noise"
                if what == "noise"
                else f"position {users[0][1]} is computed {len(users)} times, on ranks {listed(ranks)}"
            )
            found.append(finding("input", "noise" if what == "noise" else "positions", "duplicate", text, ranks))
    return found + check_stream(trace, facts, {p for what, p in owner if what == "position"})


def check_stream(trace, facts: list[dict], seen: set[int]) -> list[dict]:
    """The step must take its positions, all of them, and an epoch every sample once, in an order of its own."""
    found = []
    if "batch" in facts[0]:
        start, count, samples = facts[0]["batch"]
        wrong = seen.symmetric_difference(facts[0].get("trains", range(start, start + count)))
        if wrong:
            found.append(
                finding(
                    "input",
                    "positions",
                    "stream",
                    f"step {trace.number} takes positions {start} to "
                    f"{start + count - 1}; missing or out of place: {listed(wrong)}",
                )
            )
        epochs = {p // samples for p in seen} if samples else set()
        for epoch in sorted(epochs):
            now, before = ([trace.history.get(e * samples + i) for i in range(samples)] for e in (epoch, epoch - 1))
            known = [s for s in now if s is not None]
            if len(set(known)) < len(known):
                found.append(finding("input", "samples", "repeat", f"epoch {epoch} takes a sample twice"))
            if now == before and None not in now and samples > 3:
                found.append(
                    finding("input", "samples", "same order", f"epoch {epoch} has the order of epoch {epoch - 1}")
                )
    return found


def listed(things, most: int = 6) -> str:
    things = sorted(things) if isinstance(things, set) else list(things)
    return ", ".join(map(str, things[:most])) + (f", ... ({len(things)})" if len(things) > most else "")


NOUNS = {
    "start": "the weight",
    "input": "the input",
    "forward": "the activation",
    "loss": "the",
    "norm": "the",
    "rate": "the",
}
NOUNS |= {
    "backward": "the gradient of activation",
    "partial": "the unreduced gradient of",
    "gradient": "the gradient of",
}
NOUNS |= {"parameter": "the updated weight", "moment": "the optimizer's state"}


def describe(phase: str, names: list[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{NOUNS[phase]} {names[0]}{more}"
