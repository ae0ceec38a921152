"""Where the weights of frozen modules wait while nobody computes with them: the memory modes of sampling.

    whole    on the device, from start to end
    idle     in host memory, and on the device only while they are used: one of text encoder, VAE, CLIP and the DiT's
             experts at a time
    blocks   as idle; and of a module kept with its blocks at most two are on the device, the one that computes and the
             next, whose weights are copied meanwhile. The 14B DiT then has 1.7 of its 27 GiB on the device

    memory = Memory("idle", device)
    memory.keep(vae)                # once, after loading
    with memory.using(vae):         # each time
        vae.decode(latents)

Weights are frozen: what waits in host memory is made once, copied to the device as often as needed and never back.
Every process keeps its own. Several GPUs of one machine that cannot hold a model each can also share it:
parallel.shard_frozen.
"""

from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

MODES = ("whole", "idle", "blocks")
PIECE = 2**30  # bytes
ALIGNMENT = 512  # bytes; where a tensor may start in a piece


class Memory:
    """Keeps modules as `mode` says; `device` is where they compute. See the top of the file."""

    def __init__(self, mode: str = "whole", device: torch.device | str = "cpu"):
        if mode not in MODES:
            raise ValueError(f"--memory {mode} is none of {', '.join(MODES)}")
        self.mode, self.device = mode, torch.device(device)
        self.kept = WeakKeyDictionary()  # {module: (Weights, BlockStream)}, gone when nobody else holds the module
        self.used: set[nn.Module] = set()

    def keep(self, module: nn.Module, blocks: nn.ModuleList | tuple = ()) -> nn.Module:
        """Take over a module that is loaded, has its final dtype and is frozen; `blocks`, parts of it that compute one
        after the other, are what mode "blocks" streams. A module sharded over the ranks stays as it is. Returns the
        module."""
        name, sharded = type(module).__name__, any(isinstance(p, DTensor) for p in module.parameters())
        if sharded and self.mode == "blocks":
            raise ValueError(
                f"{name} is sharded over the ranks; --memory blocks streams whole blocks: use --memory idle"
            )
        if sharded or self.mode == "whole":
            return module.to(self.device)
        if any(p.requires_grad for p in module.parameters()):
            raise ValueError(f"{name} is being trained; --memory {self.mode} never copies weights back: freeze it")
        blocks = list(blocks) if self.mode == "blocks" else []
        move_to_host(tensors_of(module), self.device)
        streamed = {id(x) for block in blocks for x in tensors_of(block)}
        rest = Weights([x for x in tensors_of(module) if id(x) not in streamed], self.device)
        self.kept[module] = rest, BlockStream(blocks, self.device)
        return module

    @contextmanager
    def using(self, *modules: nn.Module):
        """Within, the modules can compute. Within another `using` of the same module this does nothing."""
        modules = [module for module in modules if module in self.kept and module not in self.used]
        try:
            for module in modules:
                rest, stream = self.kept[module]
                self.used.add(module)
                rest.attach(rest.fetch())
                stream.start()
            yield
        finally:
            for module in modules:
                rest, stream = self.kept[module]
                stream.stop()
                rest.detach()
                self.used.discard(module)


WHOLE = Memory()  # where nothing moves


class Weights:
    """Tensors of a module whose data live in host memory and are lent to the device."""

    def __init__(self, tensors: list[Tensor], device: torch.device):
        self.tensors, self.device = tensors, device
        self.home = [x.data for x in tensors]

    def fetch(self, stream=None) -> list[Tensor]:
        """Copies on the device. Their memory is the current CUDA stream's, the copying is done on `stream`."""
        copies = [torch.empty_like(x, device=self.device) for x in self.home]
        if stream is not None:
            # What was computed in this memory before, on the current stream, must be over before it is written.
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):  # None: stay on the current one
            for copy, x in zip(copies, self.home, strict=True):
                copy.copy_(x, non_blocking=True)
        return copies

    def attach(self, copies: list[Tensor]):
        for x, copy in zip(self.tensors, copies, strict=True):
            x.data = copy

    def detach(self):
        self.attach(self.home)


class BlockStream:
    """Blocks that compute one after the other, each with its weights on the device for its own forward only.

    Hooks around each block's call, so that a compiled body neither sees nor traces them. Before block i: start copying
    block i + 1 on the side stream, wait for block i's copy, lend it; after: give it up. The device's memory for the
    copies belongs to the computing stream, and the side stream waits for what that has been told so far: so the copy
    of i + 1 may take the memory that block i - 1 gave up a moment ago, though the device may not have reached block
    i - 1 yet, and there are never more than two however far the host runs ahead.
    """

    def __init__(self, blocks: list[nn.Module], device: torch.device):
        self.blocks, self.device = blocks, device
        self.weights = [Weights(tensors_of(block), device) for block in blocks]
        self.side = torch.cuda.Stream(device) if blocks and device.type == "cuda" else None
        self.coming: dict[int, tuple[list[Tensor], object]] = {}  # number: copies, and the event that they are whole
        self.hooks = []

    def start(self):
        for i, block in enumerate(self.blocks):
            self.hooks.append(block.register_forward_pre_hook(lambda *_, i=i: self.before(i)))
            # always_call: a block that fails, out of memory for example, gives its weights up too
            self.hooks.append(block.register_forward_hook(lambda *_, i=i: self.weights[i].detach(), always_call=True))

    def stop(self):
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        if self.coming and self.side is not None:  # a forward that broke off: its last copy may still be under way
            torch.cuda.current_stream(self.device).wait_stream(self.side)
        self.coming.clear()

    def before(self, i: int):
        if torch.is_grad_enabled():
            raise RuntimeError("blocks whose weights leave after the forward have no backward; use torch.no_grad()")
        for n in range(i, min(i + 2, len(self.blocks))):
            if n not in self.coming:
                copies = self.weights[n].fetch(self.side)
                self.coming[n] = copies, self.side and self.side.record_event()
        copies, whole = self.coming.pop(i)
        if whole is not None:
            torch.cuda.current_stream(self.device).wait_event(whole)
        self.weights[i].attach(copies)


def tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def move_to_host(tensors: list[Tensor], device: torch.device):
    """Moves the tensors' data into host memory, pinned if `device` is a GPU: only from there can it copy by itself.

    They lie in pieces of about 1 GiB. PyTorch rounds each pinned allocation up to a power of two: of a 14B model's
    tensors, pinned one by one, 27 GiB would become 41.
    """
    sizes = [-(-x.nbytes // ALIGNMENT) * ALIGNMENT for x in tensors]
    piece = torch.empty(0, dtype=torch.uint8)
    for i, (x, size) in enumerate(zip(tensors, sizes, strict=True)):
        if size > len(piece):
            room = max(size, min(PIECE, sum(sizes[i:])))
            piece = torch.empty(room, dtype=torch.uint8, pin_memory=device.type == "cuda")
        home = piece[: x.nbytes].view(x.dtype).view(x.shape)
        home.copy_(x.data)
        x.data, piece = home, piece[size:]
