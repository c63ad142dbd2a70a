"""The units of a sharded model: modules gathered together before their forward, and freed together after it.

model (what is left)     one unit for what belongs to no other: embedding, norm, head
  layers.0 ... layers.N  a unit each: memory holds one of them at a time as a whole

A unit returns no views, but tensors of their own that show the same memory. Torch gathers a unit's weights for
backward in a hook on the tensors that it returned. On a view, as a linear layer returns for batches of sequences, that
hook is lost when the user goes on with ``x += y``, and torch (from 2.12) warns of it at each such unit in any case.

Its activations can be computed anew in backward instead of being kept.

No other module looks inside ``fully_shard``, for what torch has no public way to ask.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from nblaunch.training.collectives import nested
from nblaunch.training.models import repeated_blocks

MIN_NUM_PARAMS = 100_000_000
"""What torch's own size-based policy takes for a unit of its own."""

# Containers that are never called, and a layer of nn.MultiheadAttention whose weights are used without calling it.
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.modules.linear.NonDynamicallyQuantizableLinear)


Policy = Callable[..., Any] | str | None


def choose(
    model: nn.Module,
    policy: Policy = None,
    class_names: Sequence[str] | None = None,
    min_num_params: int | None = None,
) -> list[tuple[str, nn.Module]]:
    """Return the units inside ``model``, innermost first, with their names; ``model`` itself is not among them.

    Args:
        model: as the user built it.
        policy: ``auto_wrap_policy`` of the plugin, whose fields the next two are as well.
        class_names: ``transformer_cls_names_to_wrap``.
        min_num_params: of a unit.
    """
    is_unit = _rule(model, policy, class_names, min_num_params)
    chosen = [
        (name, module)
        for name, module in model.named_modules()
        if module is not model and not isinstance(module, _NEVER_CALLED) and is_unit(module)
    ]
    return sorted(_without_split_ties(model, chosen), key=lambda unit: -unit[0].count("."))


def of_one_dtype_each(
    model: nn.Module, units: Sequence[tuple[str, nn.Module]]
) -> list[tuple[str, nn.Module]]:
    """Return ``units`` and more inside them, innermost first: trained weights of one unit must be alike in dtype.

    A unit has the dtype of the weights that belong to itself, else that of most weights inside. Modules in it whose own
    weights are of another dtype become units. :func:`odd_weights` returns what can't be divided so.
    """
    chosen = list(units)
    while True:
        others: set[nn.Module] = set()
        for unit, inside in _modules_of(model, chosen):
            dtypes = {module: _trained_dtypes(module) for module in inside}
            most = Counter(dtypes[unit] or itertools.chain(*dtypes.values())).most_common(1)
            alike = {dtype for dtype, _ in most}
            others.update(module for module, own in dtypes.items() if {*own} - alike and module is not unit)
        more = [
            (name, module)
            for name, module in model.named_modules()
            if module in others and not isinstance(module, _NEVER_CALLED)
        ]
        more = _without_split_ties(model, more)
        if not more:
            return chosen
        chosen = sorted([*chosen, *more], key=lambda unit: -unit[0].count("."))


def odd_weights(
    model: nn.Module, units: Sequence[nn.Module], ignored: set[nn.Parameter], is_one_dtype: bool
) -> set[nn.Parameter]:
    """Return the parameters that ``fully_shard`` refuses beside the others of their unit.

    Numbers without dimensions, which can't be sharded, and with ``is_one_dtype`` trained weights of another dtype than
    most elements of their unit.

    Args:
        model: as the user built it.
        units: innermost first.
        ignored: parameters that are not sharded.
        is_one_dtype: whether trained weights keep their dtypes.
    """
    odd = {one for one in model.parameters() if one.ndim == 0 and one not in ignored}
    named = [("", unit) for unit in units if unit is not model]
    for _, inside in _modules_of(model, named) if is_one_dtype else ():
        of_dtype: dict[torch.dtype, set[nn.Parameter]] = defaultdict(set)
        for parameter in itertools.chain(*(module.parameters(recurse=False) for module in inside)):
            if parameter.requires_grad and parameter not in ignored and parameter not in odd:
                of_dtype[parameter.dtype].add(parameter)
        by_size = sorted(of_dtype.values(), key=lambda alike: sum(one.numel() for one in alike))
        odd.update(*by_size[:-1])
    return odd


def _modules_of(
    model: nn.Module, units: Sequence[tuple[str, nn.Module]]
) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Yield each unit, innermost first and the model last, with the modules whose weights it gathers."""
    left = dict.fromkeys(model.modules())
    for _, unit in [*units, ("", model)]:
        inside = [module for module in unit.modules() if module in left]
        for module in inside:
            del left[module]
        yield unit, inside


def _trained_dtypes(module: nn.Module) -> list[torch.dtype]:
    return [one.dtype for one in module.parameters(recurse=False) if one.requires_grad and one.ndim]


def ignored_parameters(model: nn.Module, ignored: Iterable[nn.Module] | str | None) -> set[nn.Parameter]:
    """Return the parameters of the modules that are not to be sharded."""
    if ignored is None:
        return set()
    if isinstance(ignored, str):
        modules = [module for name, module in model.named_modules() if re.fullmatch(ignored, name)]
        if not modules:
            names = ", ".join(name for name, _ in list(model.named_modules())[1:9])
            raise ValueError(f"ignored_modules={ignored!r} fits the name of no module; there are {names} ...")
    else:
        modules = list(ignored)
    return {parameter for module in modules for parameter in module.parameters()}


def _rule(
    model: nn.Module, policy: Policy, class_names: Sequence[str] | None, min_num_params: int | None
) -> Callable[[nn.Module], bool]:
    if callable(policy):
        return _predicate(policy)
    if policy == "no_wrap":
        return lambda module: False
    if policy == "size_based_wrap" or (policy is None and class_names is None and min_num_params):
        large = _large_modules(model, min_num_params or MIN_NUM_PARAMS)
        return lambda module: id(module) in large
    names = class_names or getattr(model, "_no_split_modules", None)
    if names:
        return _of_classes(model, list(names), is_asked_for=class_names is not None)
    if policy == "transformer_based_wrap":
        raise ValueError(
            "auto_wrap_policy='transformer_based_wrap' needs transformer_cls_names_to_wrap, because "
            f"{type(model).__name__} does not name its layers itself (_no_split_modules). {_classes_in(model)}"
        )
    blocks = {id(block) for block in repeated_blocks(model)}
    return lambda module: id(module) in blocks


def _of_classes(model: nn.Module, names: list[str], is_asked_for: bool) -> Callable[[nn.Module], bool]:
    present = {type(module).__name__ for module in model.modules()}
    absent = [name for name in names if name not in present]
    if absent and is_asked_for:
        raise ValueError(
            f"transformer_cls_names_to_wrap has {', '.join(map(repr, absent))}, but the {type(model).__name__} has no "
            f"such modules. {_classes_in(model)}"
        )
    return lambda module: type(module).__name__ in names


def _classes_in(model: nn.Module) -> str:
    """List the classes of modules with submodules or parameters, those that occur several times first."""
    counts = Counter(
        type(module).__name__
        for module in list(model.modules())[1:]
        if not isinstance(module, _NEVER_CALLED) and any(True for _ in module.parameters())
    )
    listed = sorted(counts, key=lambda name: (-counts[name], name))
    return "Its classes are " + (", ".join(f"{name} ({counts[name]})" for name in listed) or "none")


def _predicate(policy: Callable[..., Any]) -> Callable[[nn.Module], bool]:
    """Return a user's policy as a function of the module alone; those of torch.distributed.fsdp.wrap take more."""
    try:
        takes = inspect.signature(policy).parameters
    except (TypeError, ValueError):
        takes = {}  # type: ignore[assignment]
    if "nonwrapped_numel" in takes or "recurse" in takes:
        return lambda module: bool(
            policy(module=module, recurse=False, nonwrapped_numel=sum(p.numel() for p in module.parameters()))
        )
    return lambda module: bool(policy(module))


def _large_modules(model: nn.Module, min_num_params: int) -> set[int]:
    """Return the ids of the modules with at least so many elements that lie in no smaller unit."""
    large: set[int] = set()

    def left_over(module: nn.Module) -> int:
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        count = own + sum(left_over(child) for child in module.children())
        if count < min_num_params or isinstance(module, _NEVER_CALLED):
            return count
        large.add(id(module))
        return 0

    left_over(model)
    return large


def _without_split_ties(model: nn.Module, units: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Leave out units that have one of two tied weights: both belong to a unit around them."""
    holders: dict[int, set[int]] = defaultdict(set)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)].add(id(module))
    tied = [modules for modules in holders.values() if len(modules) > 1]
    kept = []
    for name, unit in units:
        inside = {id(module) for module in unit.modules()}
        if all(modules <= inside or not modules & inside for modules in tied):
            kept.append((name, unit))
    return kept


# --- what they return -------------------------------------------------------------------------------------------------


def return_no_views(module: nn.Module) -> None:
    """Have ``module`` return no views. To be called before ``fully_shard``, whose hooks run after those there are."""
    module.register_forward_hook(_without_views, with_kwargs=True)


@torch.compiler.disable  # as torch's own hooks are, which see next what this returns
def _without_views(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
) -> Any | None:
    # Containers of other kinds may not be the same, once rebuilt.
    is_known = isinstance(output, (torch.Tensor, list, tuple, dict))
    if not is_known or not torch.is_grad_enabled():
        return None
    returned = {id(leaf): leaf for leaf in nested.leaves(output) if isinstance(leaf, torch.Tensor)}
    views = [tensor for tensor in returned.values() if tensor.requires_grad and tensor._base is not None]
    if not views:
        return None
    # Memory that goes by two names stays as it is: autograd knows what writing to one does to the other.
    others = [leaf for leaf in nested.leaves([args, kwargs]) if isinstance(leaf, torch.Tensor)]
    shown = [_memory(tensor) for tensor in (*returned.values(), *others)]
    own: dict[int, torch.Tensor] = {
        id(view): _AsOwnTensor.apply(view)
        for view in views
        if sum(memory is view._base for memory in shown) == 1
    }
    # One hook that stays is enough to gather a unit's weights.
    num_left = len(views) - len(own)
    if 0 < num_left < sum(tensor.requires_grad for tensor in returned.values()):
        _ignore_warning(type(module).__name__)
    return nested.map_tensors(lambda tensor: own.get(id(tensor), tensor), output) if own else None


@functools.cache
def _ignore_warning(unit: str) -> None:
    """Have torch not warn of the views of such units, as of biases and masks that they hand on."""
    warnings.filterwarnings("ignore", rf"FSDP2-wrapped module \({unit}\) returned a view", UserWarning)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


class _AsOwnTensor(torch.autograd.Function):
    """A view's memory as a tensor of its own. Writing to it counts for what autograd has saved of the view, too."""

    @staticmethod
    def forward(ctx: Any, view: torch.Tensor) -> torch.Tensor:
        return view.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


# --- activations computed anew ----------------------------------------------------------------------------------------

# What layers of generating models are given to keep tokens in, in the words of transformers.
_CACHES = ("past_key_value", "past_key_values", "layer_past")


def checkpoint_activations(module: nn.Module, is_offloaded: bool) -> None:
    """Have ``module`` compute its activations anew in backward, instead of keeping them.

    In its own ``forward``, which the hooks that gather and free weights are around: the second time runs while they
    are gathered for backward. Empty caches of a generating model are left out: the second time would find them filled.
    """
    forward = module.forward

    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        kwargs = _without_empty_caches(kwargs)
        saving = torch.autograd.graph.save_on_cpu(pin_memory=True) if is_offloaded else nullcontext()
        with saving:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    module.forward = checkpointed


def _without_empty_caches(kwargs: dict[str, Any]) -> dict[str, Any]:
    caches = [name for name in _CACHES if kwargs.get(name) is not None]
    if not caches or any(_is_filled(kwargs[name]) for name in caches):
        return kwargs  # with tokens that a user computes on: torch says where that can't be done twice
    return {**kwargs, **dict.fromkeys(caches), **({"use_cache": False} if "use_cache" in kwargs else {})}


def _is_filled(cache: Any) -> bool:
    """Return whether a cache of transformers, or of a user's own, has tokens."""
    length = getattr(cache, "get_seq_length", None)
    return bool(length()) if callable(length) else bool(cache)


# --- inside fully_shard -----------------------------------------------------------------------------------------------


def _groups(module: nn.Module) -> list[Any]:
    """Return the groups of parameters of one sharded unit."""
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    if hasattr(state, "_fsdp_param_groups"):  # torch >= 2.12 allows several
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def register_new_parameters(module: nn.Module) -> None:
    """Register parameters that took the place of those that ``fully_shard`` made, so that torch goes on with them."""
    for group in _groups(module):
        for parameter in group.fsdp_params:
            parameter.reset_sharded_param()  # as after ``load_state_dict(assign=True)``
            parameter._setattr_on_modules(parameter.sharded_param)


def average_gradients(parameters: Sequence[nn.Parameter], mesh: Any, units: Sequence[nn.Module]) -> None:
    """Average the gradients of parameters that every rank has whole, wherever ``backward`` reduces those of ``units``.

    What was accumulated before is averaged as well; where that was an average, it is the same on all ranks, and stays.
    """
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]

    def average(parameter: torch.Tensor) -> None:
        if parameter.grad is None or not all(group.reduce_grads for unit in units for group in _groups(unit)):
            return
        for group in groups:
            dist.all_reduce(parameter.grad, group=group)
        parameter.grad.div_(mesh.size())

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(average)


def refuse_copies(module: nn.Module) -> None:
    """Have a copy of a sharded module raise an error that says what to do; torch's own does not."""
    type(module).__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]


def _refuse_copy(module: nn.Module, memo: Any) -> Any:
    name = type(module).__name__.removeprefix("FSDP")
    raise RuntimeError(
        f"a {name} whose weights are sharded over ranks can't be copied by copy.deepcopy, as AveragedModel does. Copy "
        "the model, or make the AveragedModel of it, before prepare, and pass the copy to prepare as well; or keep an "
        "average of its shards: [p.detach().clone() for p in model.parameters()]"
    )


def is_reducing(module: nn.Module) -> bool:
    """Return whether ``backward`` through a unit, and those inside it, reduces gradients: see ``no_sync``."""
    return all(
        group.reduce_grads
        for unit in module.modules()
        if hasattr(unit, "_get_fsdp_state")
        for group in _groups(unit)
    )


def gather_for_training(module: nn.Module) -> None:
    """Have a unit gather its weights outside of ``torch.inference_mode``, whose tensors training can't use later."""
    for group in _groups(module):
        for name in ("unshard", "wait_for_unshard"):
            setattr(group, name, _outside_inference_mode(getattr(group, name)))


def _outside_inference_mode(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False):
            return method(*args, **kwargs)

    return call
