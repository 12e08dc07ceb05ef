"""The hooks: functions of torch and of what people log and save with, timed where they are called.

They are placed before the script runs, and for libraries that it imports later at the end of a step. No hook keeps a
tensor but the loader's, which keeps the last few batches so that a switch can give them again.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import inspect
import itertools
import logging
import os
import shutil
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, dataloader
from torch.utils.data._utils import fetch

from autoplan.planner.diagnose.clock import Clock, telling, users_line
from autoplan.planner.diagnose.libraries import Function, around
from autoplan.planner.diagnose.memory import graph_of
from autoplan.planner.diagnose.ranks import CollectiveHooks
from autoplan.planner.diagnose.sandbox import Sandbox

KEPT_BATCHES = 4
"""Batches that are kept: with one alone, caches of the processor would be warmer than they are."""

ANCHOR_LOST = 50
"""Steps of other optimizers after which the one that marks the steps is taken to be gone."""

BY_HAND = 3
"""Backwards after which a script that has made no optimizer of torch is taken to step by hand."""

LARGE_TABLE, LEAST_UNUSED = 1 << 18, 0.5
"""Elements of an embedding, and the share of its rows without a gradient, from which on it is one to look at."""

LEAST_SHARED, MOST_WALKS = 0.5, 20
"""The share of a graph's nodes that makes it the same as another, and how often a graph is gone over."""

OF_CHECKPOINT = frozenset({"use_reentrant", "context_fn", "determinism_check", "debug", "preserve_rng_state",
                           "early_stop"})  # fmt: skip
"""Keywords of torch.utils.checkpoint.checkpoint itself."""

_OF_FILES, _OF_COPIES = ("rename", "replace", "remove", "unlink"), ("copyfile", "copy", "copy2", "move")
"""Functions of `os` and of `shutil` that belong to saving where their file is a checkpoint."""

AUTOCAST = ("cpu", "cuda")
"""Devices whose autocast is asked for: where a training runs is known only after its first steps."""

OF_PROFILER = {"prepare_trace": "prepared", "start_trace": "recording", "stop_trace": "off"}
"""Methods of torch's profiler, and what it is after them."""

SELDOM = 0.5
"""Forwards without gradients in a smaller share of the steps are a part of their own (samples, previews, rollouts), or
an evaluation; in more of them (a teacher, a policy that acts) they are a part of the forward."""

SYNCS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")
"""Calls that read a tensor on the host."""

_SAVES = (
    ("safetensors.torch", "save_file", 1),
    ("safetensors.numpy", "save_file", 1),
    ("tokenizers", "Tokenizer.save", 1),
    ("transformers.modeling_utils", "PreTrainedModel.save_pretrained", None),
    ("transformers.trainer", "Trainer._save_checkpoint", None),
    ("accelerate", "Accelerator.save_state", None),
)
_PATHS = ("f", "filename", "path")
_LOGS = (
    *(
        ("torch.utils.tensorboard", f"SummaryWriter.{name}")
        for name in ("add_scalar", "add_scalars", "add_histogram", "add_image", "flush")
    ),
    ("wandb", "log"),
    ("mlflow", "log_metric"),
    ("mlflow", "log_metrics"),
    ("tqdm", "tqdm.update"),
    ("tqdm", "tqdm.set_postfix"),
)
"""(module, name) of what is timed as saving and as logging once the script has imported it; for a save also the place
of its path among the arguments, where a library of C writes there."""


class Hooks:
    """All hooks of a process, and what they saw.

    Args:
        clock: Gets the times.
        sandbox: Says where saves go.
        on_step: Is called at the end of each step.

    Attributes:
        kept: Names of the user's that keep graphs; `cut`: take them off after each step, since these lengths.
        profilers: Those of torch, and whether they are "prepared", "recording" or "off".
        profiled: Steps at whose end one recorded.
        recomputed: Calls of torch.utils.checkpoint; with `keeps_activations` they compute nothing again.
        left_out: Parameters that the optimizer passes over.
        collections: Of Python's garbage collector, since they were removed.
        compiled: Modules that were compiled, with what runs in place of their call.
        again_s: Seconds of backwards over a graph that a backward of the same step went over before; with
            `leaves_out_again` these do nothing.
    """

    def __init__(self, clock: Clock, sandbox: Sandbox, on_step: Callable[[], None]) -> None:
        self.clock, self.sandbox, self.on_step = clock, sandbox, on_step
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.anchor: torch.optim.Optimizer | None = None
        self.loaders = LoaderHooks(clock)
        self.collectives = CollectiveHooks(clock)
        self.modules = ModuleHooks(clock, self.is_trained, self.loaders)
        self.kept: tuple[str, ...] = ()
        self.cut: dict[str, int] | None = None
        self.recomputed, self.keeps_activations = 0, False
        self.profilers: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self.profiled = 0
        self.left_out: list[torch.nn.Parameter] = []
        self.collections = 0
        self.compiled: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()
        self.again_s, self.leaves_out_again = 0.0, False
        self._inside_backward, self._keeps_graph, self._walks = False, False, 0
        self._retained: set[Any] = set()  # nodes of a graph that the script keeps, until its next step
        self._shared: dict[str | None, float] = {}  # by the line of the later backward
        self._trained: set[int] | None = None  # parameters of all optimizers, from the first step on
        self._missed = 0
        self._backwards = 0
        self._depth = 0
        self._collecting = 0.0
        self._waiting = [*((*one, "saving") for one in _SAVES), *((*one, None, "logging") for one in _LOGS)]

    def install(self) -> None:
        """Places them, for the rest of the process."""
        clock = self.clock
        register_optimizer_step_pre_hook(self._before_optimizer)
        register_optimizer_step_post_hook(self._after_optimizer)
        torch.optim.Optimizer.add_param_group = around(torch.optim.Optimizer.add_param_group, self._added)  # type: ignore[method-assign]
        torch.optim.Optimizer.profile_hook_step = staticmethod(self._stepped(torch.optim.Optimizer.profile_hook_step))  # type: ignore[method-assign]
        torch.optim.Optimizer.zero_grad = clock.region(self._zeroed(torch.optim.Optimizer.zero_grad), "optimizer")  # type: ignore[method-assign]
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            setattr(torch.nn.utils, name, clock.region(getattr(torch.nn.utils, name), "optimizer", skip=False))
        torch.autograd.backward = self._backward(torch.autograd.backward)
        checkpointing.checkpoint = self._checkpointed(checkpointing.checkpoint)
        torch.save = self._saves(torch.save, 1)
        for module, names in ((os, _OF_FILES), (shutil, _OF_COPIES)):
            for name in names:
                setattr(module, name, self._of_saves(getattr(module, name)))
        builtins.print = clock.region(builtins.print, "logging")
        logging.Logger._log = clock.region(logging.Logger._log, "logging")  # type: ignore[method-assign]
        for name in SYNCS:
            setattr(torch.Tensor, name, self._read(getattr(torch.Tensor, name)))
        if torch.cuda.is_available():
            torch.cuda.synchronize = self._read(torch.cuda.synchronize)
            for name in ("to", "cuda"):
                setattr(torch.Tensor, name, around(getattr(torch.Tensor, name), self._copied))
        for name, state in OF_PROFILER.items():
            setattr(torch.profiler.profile, name, self._profiles(getattr(torch.profiler.profile, name), state))
        gc.callbacks.append(self._on_gc)
        self.loaders.install()
        self.modules.install()
        with contextlib.suppress(ImportError):
            import safetensors.torch  # noqa: F401  (others import its function by name)
        self.look_again()

    def look_again(self) -> None:
        """Places the hooks of libraries that the script has imported since."""
        for one in list(self._waiting):
            module, name, path, part = one
            found: Any = sys.modules.get(module)
            *outer, last = name.split(".")
            for step in outer:
                found = getattr(found, step, None)
            if getattr(found, last, None) is None:
                continue
            self._waiting.remove(one)
            function = getattr(found, last)
            region = self.clock.region(function, part) if path is None else self._saves(function, path)
            setattr(found, last, region)

    # The optimizer.

    def is_trained(self, module: torch.nn.Module) -> bool | None:
        """Whether an optimizer has parameters of the module; None before the first step."""
        if self._trained is None:
            return None
        known = self.modules.known
        if module not in known:
            known[module] = any(id(parameter) in self._trained for parameter in module.parameters())
        return known[module]

    def _added(self, function: Function, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """An optimizer is known from its first group on, also while it makes no step."""
        found = function(optimizer, *args, **kwargs)
        self.optimizers.add(optimizer)
        self._look_at_optimizers()
        return found

    def _look_at_optimizers(self) -> None:
        if self._trained is not None:
            groups = itertools.chain.from_iterable(one.param_groups for one in self.optimizers)
            self._trained = {id(parameter) for group in groups for parameter in group["params"]}
            self.modules.known.clear()  # of two optimizers, the second trains what the first does not

    def _stepped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What torch makes of an optimizer's step; one that fails ends too, though torch calls no hook after it."""

        def profile_hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
            hooked = function(step)

            @functools.wraps(step)
            def run(*args: Any, **kwargs: Any) -> Any:
                if torch.compiler.is_compiling() or not self.clock.here:
                    return hooked(*args, **kwargs)
                depth, regions = self._depth, self.clock.depth
                try:
                    return hooked(*args, **kwargs)
                except BaseException:
                    self._depth = depth
                    self.clock.leave_all(regions)
                    raise

            return run

        return profile_hook_step

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth += 1
        self._forget_graph()
        for parameter in self.left_out:
            parameter.grad = None
        if self.clock.here:
            self.clock.enter("optimizer")

    def _forget_graph(self) -> None:
        self._keeps_graph, self._retained = False, set()

    def _zeroed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """After it gradients are taken by themselves: what was before is no backward of the same sum."""
        return telling(function, lambda *args, **kwargs: self._forget_graph())

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if not self.clock.here:
            return
        self.clock.leave()
        if self._depth:
            return  # of an optimizer inside another one
        if self._trained is None or optimizer not in self.optimizers:
            self.optimizers.add(optimizer)
            self._trained = set()
            self._look_at_optimizers()
        self._missed += 1
        if self.anchor is None or self._missed > ANCHOR_LOST:
            self.anchor = optimizer
        if optimizer is self.anchor:
            self._missed = 0
            self.profiled += torch._C._autograd._profiler_enabled()
            self.modules.end_step()
            self.on_step()

    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters of the optimizer that marks the steps; of a script that steps by hand those of its modules."""
        if self.anchor is not None:
            return [one for group in self.anchor.param_groups for one in group["params"]]
        return [one for module in list(self.modules.called) for one in module.parameters()]

    def needless(self) -> dict[str, list[torch.nn.Parameter]]:
        """Modules whose parameters got gradients, and no optimizer has any of them: `Classifier.backbone`."""
        found: dict[str, list[torch.nn.Parameter]] = {}
        if self._trained is None:
            return found
        trained = self._trained

        def look(module: torch.nn.Module, name: str) -> None:
            own = [one for one in module.parameters() if one.requires_grad]
            if own and not any(id(one) in trained for one in own):
                if any(one.grad is not None for one in own):
                    found[name] = own
                return
            for part, child in module.named_children():
                look(child, f"{name}.{part}")

        for module in list(self.modules.called):
            look(module, type(module).__name__)
        return found

    def unused_rows(self) -> dict[str, tuple[torch.nn.Parameter, float]]:
        """Large tables of embeddings, and the share of their rows whose gradient was nothing but zeros."""
        found: dict[str, tuple[torch.nn.Parameter, float]] = {}
        for outer in list(self.modules.called):
            for name, module in outer.named_modules():
                gradient = module.weight.grad if isinstance(module, torch.nn.Embedding) else None
                whole = type(gradient) is torch.Tensor and gradient.dim() == 2 and not gradient.is_sparse
                if gradient is not None and whole and gradient.numel() >= LARGE_TABLE:
                    share = 1 - float(gradient.any(dim=1).float().mean())
                    if share >= LEAST_UNUSED:
                        found[f"{type(outer).__name__}.{name}".rstrip(".")] = module.weight, share
        return found

    # Functions.

    def _checkpointed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def checkpoint(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(run, *args, **kwargs)
            self.recomputed += self.clock.here
            if self.keeps_activations:
                self.clock.acted += 1
                return run(*args, **{name: one for name, one in kwargs.items() if name not in OF_CHECKPOINT})
            return function(run, *args, **kwargs)

        return checkpoint

    def _backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def counted(*args: Any, **kwargs: Any) -> Any:
            """The backward; one inside of another (of reentrant checkpointing) is a part of that."""
            if self._inside_backward or not self.clock.here:
                return function(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            if self._is_again(given):
                return None
            self._inside_backward = True
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside_backward = False
                with contextlib.suppress(Exception):  # no error of ours in the user's backward
                    self._note_retained(time.perf_counter() - began, given)

        timed = self.clock.region(counted, "backward", skip=False)

        def backward(*args: Any, **kwargs: Any) -> Any:
            try:
                return timed(*args, **kwargs)
            finally:
                if self.clock.here:
                    self.clock.background = "loop"
                    self._after_backward()

        return backward

    def _after_backward(self) -> None:
        """Ends a step where the script steps by hand: it has no optimizer of torch."""
        if self.optimizers or self._inside_backward or self._depth:
            return
        self._backwards += 1
        if self._backwards > BY_HAND:
            self.profiled += torch._C._autograd._profiler_enabled()
            self.modules.end_step()
            self.on_step()

    def _is_again(self, given: Mapping[str, Any]) -> bool:
        """Whether a backward is left out: one over a graph that was gone over before."""
        shared = self._shared.get(users_line(sys._getframe()), 0.0)
        if not (self.leaves_out_again and self._keeps_graph and shared >= LEAST_SHARED):
            return False
        self.clock.acted += 1
        self._keeps_graph = bool(given.get("retain_graph"))
        return True

    def _note_retained(self, seconds: float, given: Mapping[str, Any]) -> None:
        """Whether a backward went over nodes of one before it, whose graph was kept: both could be one.

        Graphs are gone over for the first few pairs alone; later ones share what those of their line did.
        """
        line = users_line(sys._getframe())
        if self._keeps_graph:
            if line not in self._shared:
                own = graph_of(given["tensors"])
                self._shared[line] = len(own & self._retained) / max(1, len(own))
            if self._shared[line] >= LEAST_SHARED:
                self.again_s += self._shared[line] * seconds
                self.clock.note_line("backward_again", seconds)
        whole = not given.get("create_graph") and given.get("inputs") is None
        kept, self._keeps_graph = self._keeps_graph, bool(given.get("retain_graph")) and whole
        if self._keeps_graph and not kept:
            self._retained = graph_of(given["tensors"]) if self._walks < MOST_WALKS else set()
            self._walks += 1

    @contextlib.contextmanager
    def lines_of_softmax(self) -> Iterator[None]:
        """Notes the line and the shape of each softmax over several matrices, as in an attention, for a few steps."""
        owners: list[Any] = [torch, torch.Tensor]  # that of torch.nn.functional calls the tensor's

        def note(*args: Any, **kwargs: Any) -> None:
            of = kwargs.get("input", args[0] if args else None)
            if self.clock.here and type(of) is torch.Tensor and of.dim() > 2:
                self.clock.note_line(f"softmax {tuple(of.shape)}", 1.0)

        with contextlib.ExitStack() as put_back:
            for owner in owners:
                put_back.callback(setattr, owner, "softmax", owner.softmax)
                owner.softmax = telling(owner.softmax, note)
            yield

    def _saves(self, function: Callable[..., Any], place: int) -> Callable[..., Any]:
        """A function that saves to a path; without saving something stands in for what it writes."""

        def path_of(args: Any, kwargs: Any) -> Any:
            return args[place] if len(args) > place else next((kwargs[one] for one in _PATHS if one in kwargs), None)

        save = telling(function, lambda *args, **kwargs: self.sandbox.note_save(path_of(args, kwargs)))
        return self.clock.region(
            save, "saving", instead=lambda *args, **kwargs: self.sandbox.stand_in(path_of(args, kwargs))
        )

    def _of_saves(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that renames, copies or removes files: of a checkpoint it is a part of saving it."""
        timed = self.clock.region(function, "saving", skip=False)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            path = next(iter((*args, *kwargs.values())), None)
            return (timed if self.sandbox.is_saved(path) else function)(*args, **kwargs)

        return run

    def _read(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A call that reads a tensor on the host: its line is noted, and its part stays what it is.

        Where there is a GPU, a tensor that is on the host already counts for nothing: nobody waits for it.
        """
        clock, has_gpu = self.clock, torch.cuda.is_available()

        def read(*args: Any, **kwargs: Any) -> Any:
            if has_gpu and args and isinstance(args[0], torch.Tensor) and args[0].device.type == "cpu":
                return function(*args, **kwargs)
            began = time.perf_counter()
            found = function(*args, **kwargs)
            if clock.here and clock.current != "data":
                clock.note_line("sync", time.perf_counter() - began)
            return found

        return read

    def _profiles(self, function: Callable[..., Any], state: str) -> Callable[..., Any]:
        return telling(function, lambda profiler, *args, **kwargs: self.profilers.update({profiler: state}))

    def _copied(self, function: Function, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.clock.here or not _goes_elsewhere(function.__name__, tensor, args, kwargs):
            return function(tensor, *args, **kwargs)
        self.clock.enter("copy")
        try:
            return function(tensor, *args, **kwargs)
        finally:
            self.clock.leave()

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        if self.clock.here:
            if phase == "start":
                self.collections += 1
                self._collecting = time.perf_counter()
                self.clock.enter("gc")
            else:
                self.clock.note_line("gc", time.perf_counter() - self._collecting)
                self.clock.leave()


class _Epoch(Iterator[Any]):
    """An epoch that begins while its batches come from elsewhere: its own workers start once they are asked.

    A script may ask its length, and go on after an exception, as with the iterator in whose place it stands.

    Args:
        hooks: They know where a batch comes from now.
        loader: The script's.
    """

    def __init__(self, hooks: LoaderHooks, loader: Any) -> None:
        self._hooks, self._loader = hooks, loader
        self._own: Any = None
        self._left = len(loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self._left <= 0:
            raise StopIteration
        self._left -= 1
        if self._own is None:
            if self._hooks.gives_instead:
                return self._hooks.instead(self._loader)
            self._own = iter(self._loader)
        return next(self._own)


class LoaderHooks:
    """The DataLoaders: what a step waits for, and batches in their place.

    Attributes:
        replay: Give the kept batches again, and ask the loader for none.
        workers: The number of workers of the loader that takes the script's place; 0: the script's own.
        crop: Leave columns out that are padding in all samples of a batch.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.replay, self.crop, self.workers = False, False, 0
        self.batches: deque[Any] = deque(maxlen=KEPT_BATCHES)
        self.loader: DataLoader[Any] | None = None
        self.starts, self.start_s, self.got, self.remade = 0, 0.0, 0, False
        self.make_s, self.collate_s = 0.0, 0.0
        self.padding: list[float] = []
        self._evaluated: dict[int, Any] = {}  # datasets of evaluations, by their id
        self._owner: weakref.WeakKeyDictionary[Any, DataLoader[Any]] = weakref.WeakKeyDictionary()
        self._fresh: weakref.WeakSet[Any] = weakref.WeakSet()
        self._given_instead: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._other: Any = None
        self._other_iterator: Any = None
        self._last: Any = None
        self._next = 0

    def install(self) -> None:
        """Places the hooks."""
        base = dataloader._BaseDataLoaderIter
        for kind in (base, dataloader._SingleProcessDataLoaderIter, dataloader._MultiProcessingDataLoaderIter):
            if "__next__" in vars(kind):
                kind.__next__ = around(kind.__next__, self._given)  # type: ignore[method-assign]
        DataLoader.__iter__ = around(DataLoader.__iter__, self._started)  # type: ignore[method-assign]
        fetcher = fetch._MapDatasetFetcher
        fetcher.fetch = around(fetcher.fetch, self._fetched)  # type: ignore[method-assign]

    def restart(self) -> None:
        """Begins to count anew."""
        self.starts, self.start_s, self.got, self.make_s, self.collate_s = 0, 0.0, 0, 0.0, 0.0
        self.padding.clear()

    def stop_workers(self) -> None:
        """Ends the workers of the loader that took the script's place."""
        shutdown = getattr(self._other_iterator, "_shutdown_workers", None)
        self.workers, self._other, self._other_iterator = 0, None, None
        if shutdown is not None:
            shutdown()

    def _started(self, function: Function, loader: Any) -> Any:
        if not self.clock.here or loader is self._other:
            return function(loader)
        if self.is_main(loader) and self.gives_instead and length_of(loader) is not None:
            return _Epoch(self, loader)
        self.clock.enter("data")
        began = time.perf_counter()
        try:
            iterator = function(loader)
        finally:
            self.clock.leave()
        self._owner[iterator] = loader
        self._fresh.add(iterator)
        self._given_instead.pop(iterator, None)  # workers that stay have one iterator for all epochs
        if self.is_main(loader):
            self.starts += 1
            self.start_s += time.perf_counter() - began
        return iterator

    def is_main(self, loader: Any) -> bool:
        """Whether this is the loader of the training: the one that gave a batch before a forward with gradients.

        One that the script makes for each epoch has followers that are like it.
        """
        return loader is self.loader or (self.remade and self._is_like(loader))

    def _is_like(self, loader: Any) -> bool:
        own = self.loader
        same = own is not None and loader.dataset is own.dataset
        return own is not None and same and (loader.batch_size, loader.num_workers) == (own.batch_size, own.num_workers)

    def note_training(self) -> None:
        """Notes a forward with gradients."""
        last, self._last = self._last, None
        if last is None or last is self.loader:
            return
        self.remade = self._is_like(last)
        self.loader = last
        if not self.remade:
            self.starts = 0
            self.batches.clear()

    def note_evaluation(self) -> bool:
        """Notes a forward that may be an evaluation; returns whether its batch is from a loader for that."""
        last, self._last = self._last, None
        if last is None or self.is_main(last):
            return False
        self._evaluated[id(last.dataset)] = last.dataset
        return True

    @property
    def gives_instead(self) -> bool:
        """Whether the batches of the training come from elsewhere now."""
        return bool(self.workers or (self.replay and self.batches))

    def instead(self, loader: Any) -> Any:
        """A batch that does not come from the script's loader."""
        self.clock.acted += 1
        self.clock.enter("data")
        try:
            if self.workers:
                return self._from_workers(loader)
            self._next += 1
            batch = self.batches[self._next % len(self.batches)]
            return self._cropped(batch) if self.crop else shallow(batch)
        finally:
            self.clock.leave()

    def _given(self, function: Function, iterator: Any) -> Any:
        clock = self.clock
        loader = self._owner.get(iterator)
        if not clock.here or loader is None:
            return function(iterator)
        main = self.is_main(loader)
        if "evaluation" in clock.skipped and not main and id(loader.dataset) in self._evaluated:
            return self._once(iterator, function)
        given = self._given_instead.get(iterator, 0)
        if main and (given or self.gives_instead) and iterator._num_yielded + given == length_of(loader):
            raise StopIteration  # as the script's own epoch ends; one that is past its length has no end
        if main and self.gives_instead:
            self._given_instead[iterator] = given + 1
            return self.instead(loader)
        clock.enter("data")
        began = time.perf_counter()
        try:
            batch = function(iterator)
            return self._seen(iterator, loader, batch, time.perf_counter() - began)
        finally:
            if main:
                clock.note_line("data", time.perf_counter() - began)
            clock.leave()

    def _seen(self, iterator: Any, loader: Any, batch: Any, seconds: float) -> Any:
        self._last = loader
        first = iterator in self._fresh
        self._fresh.discard(iterator)
        if not self.is_main(loader):
            return batch
        self.start_s += seconds if first else 0.0
        self.got += 1
        self.batches.append(shallow(batch))
        if len(self.padding) < 20:
            self.padding.append(padding_share(batch))
        return self._cropped(batch) if self.crop else batch

    def _cropped(self, batch: Any) -> Any:
        self.clock.acted += padding_share(batch) > 0
        return cropped(batch)

    def _once(self, iterator: Any, function: Callable[..., Any]) -> Any:
        """One batch of an evaluation that is left out."""
        self.clock.acted += 1
        if iterator not in self._fresh:
            raise StopIteration
        self._fresh.discard(iterator)
        self._last = self._owner.get(iterator)
        return function(iterator)

    def _from_workers(self, loader: Any) -> Any:
        """A batch of the same dataset from a loader with workers."""
        if self._other is None:
            self._other = with_workers(loader, self.workers)
        for _ in range(2):
            if self._other_iterator is None:
                self._other_iterator = iter(self._other)
            batch = next(self._other_iterator, None)
            if batch is not None:
                return batch
            self._other_iterator = None
        raise RuntimeError("the dataset gives no batch when it is gone over again")

    def _fetched(self, function: Function, fetcher: Any, index: Any) -> Any:
        if not self.clock.here or self.loader is None or fetcher.dataset is not self.loader.dataset:
            return function(fetcher, index)
        collate = fetcher.collate_fn
        began = made = time.perf_counter()

        def collated(samples: Any) -> Any:
            nonlocal made
            made = time.perf_counter()
            return collate(samples)

        fetcher.collate_fn = collated
        try:
            return function(fetcher, index)
        finally:
            fetcher.collate_fn = collate
            self.make_s += made - began
            self.collate_s += time.perf_counter() - made


def length_of(loader: Any) -> int | None:
    """The batches of an epoch; None where the loader does not know, or one iterator of it serves all epochs."""
    try:
        return len(loader if isinstance(loader.dataset, torch.utils.data.IterableDataset) else loader._index_sampler)
    except (TypeError, NotImplementedError):
        return None


def with_workers(loader: Any, workers: int) -> DataLoader[Any]:
    """A loader of the same batches with so many workers, which stay between epochs."""
    names = ["collate_fn", "pin_memory", "worker_init_fn", "multiprocessing_context", "generator"]
    is_iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    if loader.batch_sampler is not None and not is_iterable:
        names += ["batch_sampler"]
    else:
        names += ["batch_size", "drop_last", *(() if is_iterable else ("sampler",))]
    given = {name: getattr(loader, name) for name in names}
    return DataLoader(loader.dataset, num_workers=workers, persistent_workers=True, **given)


def shallow(batch: Any) -> Any:
    """The same tensors in containers of their own: a loop may take things out of a batch."""
    if isinstance(batch, list):
        return list(batch)
    if isinstance(batch, dict) or hasattr(batch, "data") and hasattr(batch, "keys"):
        try:
            return batch.copy()
        except Exception:
            return batch
    return batch


def _tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]  # it has a method `values` of its own
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else []
    return [value for value in values if isinstance(value, torch.Tensor)]


def _used_columns(batch: Any) -> tuple[int, int] | None:
    """(columns in use, columns) of a batch of token ids; None where it has none.

    A column is padding if it is the same number in all samples, and so are all columns after it.
    """
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    ids = mask if isinstance(mask, torch.Tensor) else next(
        (one for one in _tensors(batch) if one.dim() == 2 and not one.is_floating_point() and one.dtype != torch.bool),
        None,
    )  # fmt: skip
    if ids is None or ids.dim() != 2 or ids.shape[0] < 2 or ids.shape[1] < 8 or ids.device.type != "cpu":
        return None
    used = (ids != (0 if ids is mask else ids[0, -1])).any(dim=0).nonzero()
    return (int(used[-1, 0]) + 1 if len(used) else 1), ids.shape[1]


def padding_share(batch: Any) -> float:
    """Share of the columns of a batch that are padding for all its samples."""
    columns = _used_columns(batch)
    return 0.0 if columns is None else 1 - columns[0] / columns[1]


def cropped(batch: Any) -> Any:
    """A batch without the columns that are padding for all its samples."""
    columns = _used_columns(batch)
    if columns is None or columns[0] == columns[1]:
        return shallow(batch)

    def crop(value: Any) -> Any:
        fits = isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[1] == columns[1]
        return value[:, : columns[0]].contiguous() if fits else value

    if isinstance(batch, Mapping):
        found = shallow(batch)
        for name, value in batch.items():
            found[name] = crop(value)
        return found
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(crop, batch)) if type(batch) in (list, tuple) else batch
    return crop(batch)


class ModuleHooks:
    """The calls of modules: the outermost one is the forward, or an evaluation.

    Attributes:
        autocast: Run the forward in bf16 autocast.
        single: Give the forward fp32 in place of fp64, and take its outputs as fp64.
        anomaly: Whether the anomaly detection of autograd was on in a forward.
        called: The outermost modules.
        known: Whether a module is trained.
        outputs: Of evaluations, while these are left out.
    """

    def __init__(
        self, clock: Clock, is_trained: Callable[[torch.nn.Module], bool | None], loaders: LoaderHooks
    ) -> None:
        self.clock, self.is_trained, self.loaders = clock, is_trained, loaders
        self.autocast, self.anomaly, self.single = False, False, False
        self.device = "cpu"
        self.called: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.low_precision = False
        self._inside = False
        self._without_gradients, self._evaluations = Seldom(), Seldom()
        self.known: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()
        self.outputs: dict[tuple[int, Any], Any] = {}

    def install(self) -> None:
        """Places the hooks."""
        torch.nn.Module.__call__ = self._called(torch.nn.Module.__call__)  # type: ignore[method-assign]
        torch.nn.Module.train = around(torch.nn.Module.train, self._mode)  # type: ignore[method-assign]

    def end_step(self) -> None:
        """Counts a step."""
        self._without_gradients.end_step()
        self._evaluations.end_step()

    def _called(self, function: Callable[..., Any]) -> Callable[..., Any]:
        hooks = self

        def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:  # torch.profiler reads `self` with_stack
            if hooks._inside or torch.compiler.is_compiling() or not hooks.clock.here:
                return function(self, *args, **kwargs)
            hooks._inside = True
            try:
                return hooks._outermost(function, self, args, kwargs)
            finally:
                hooks._inside = False

        return call

    def _outermost(self, function: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if self.single:
            function = in_single(function)
        trained = self.is_trained(module)
        if trained and not torch.is_grad_enabled() and not module.training:
            self._evaluations.note()
            if self.loaders.note_evaluation() or self._evaluations.is_seldom:
                return self._evaluate(function, module, args, kwargs)
        clock, with_gradients = self.clock, torch.is_grad_enabled()
        if trained is not False and with_gradients:
            self.loaders.note_training()
            clock.inputs += sum(one.numel() for given in (*args, *kwargs.values()) for one in _tensors(given))
        if not with_gradients:
            self._without_gradients.note()
        seldom = not with_gradients and self._without_gradients.is_seldom
        clock.enter("no_grad" if seldom else "forward")
        began = time.perf_counter()
        self.called.add(module)
        self.anomaly = self.anomaly or torch.is_anomaly_enabled()
        self.low_precision = self.low_precision or any(map(torch.is_autocast_enabled, AUTOCAST))
        try:
            if self.autocast:
                clock.acted += 1
                with torch.autocast(self.device, torch.bfloat16):
                    return function(module, *args, **kwargs)
            return function(module, *args, **kwargs)
        finally:
            if seldom:
                clock.note_line("no_grad", time.perf_counter() - began)
            clock.leave()
            clock.background = "no_grad" if seldom else "loss"

    def _evaluate(self, function: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        clock = self.clock
        clock.evaluation_mark()
        clock.enter("evaluation")
        began = time.perf_counter()
        try:
            key = id(module), _shapes((args, kwargs))
            if "evaluation" in clock.skipped and key in self.outputs:
                clock.acted += 1
                return self.outputs[key]
            output = function(module, *args, **kwargs)
            if "evaluation" in clock.skipped:
                self.outputs[key] = output
            return output
        finally:
            clock.note_line("evaluation", time.perf_counter() - began)
            clock.leave()
            clock.evaluation_mark()

    def _mode(self, function: Function, module: torch.nn.Module, mode: bool = True) -> Any:
        if not self._inside and self.clock.here and module.training != mode and self.known.get(module):
            self._evaluations.note()
            if self._evaluations.is_seldom:
                self.clock.evaluation_mark()
        return function(module, mode)


class Seldom:
    """Whether something comes in less than SELDOM of the steps."""

    def __init__(self) -> None:
        self._steps, self._with, self._now = 0, 0, False

    def note(self) -> None:
        """It is there."""
        self._now = True

    def end_step(self) -> None:
        """Counts a step."""
        self._steps, self._with, self._now = self._steps + 1, self._with + self._now, False

    @property
    def is_seldom(self) -> bool:
        """Of the steps so far."""
        return self._with < SELDOM * self._steps


def _goes_elsewhere(name: str, tensor: Any, args: Any, kwargs: Any) -> bool:
    """Whether `tensor.to(...)` or `tensor.cuda(...)` copies from one kind of device to another; a cast does not."""
    given = [
        *args[:1],
        *(kwargs[key] for key in ("device", "other") if key in kwargs),
        "cuda" if name == "cuda" else None,
    ]
    target = given[0]
    if isinstance(target, torch.Tensor):
        target = target.device
    if target is None or isinstance(target, (torch.dtype, torch.memory_format, bool)):
        return False
    kind = "cuda" if isinstance(target, int) else torch.device(target).type
    return bool(kind != tensor.device.type)


def in_single(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, given fp32 in place of fp64; its outputs are fp64 as before."""

    def cast(value: Any, dtype: torch.dtype) -> Any:
        floats = (torch.float32, torch.float64)
        return tree_map(lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in floats else x, value)

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast((args, kwargs), torch.float32)
        return cast(function(*args, **kwargs), torch.float64)

    return run


def _shapes(value: Any) -> Any:
    """Shapes of all tensors of the arguments: the output of an evaluation is given again for the same."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return tuple((name, _shapes(one)) for name, one in sorted(value.items()))
    return tuple(map(_shapes, value)) if isinstance(value, (list, tuple)) else repr(type(value))
