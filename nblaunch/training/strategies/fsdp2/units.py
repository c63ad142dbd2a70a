"""The units of a sharded model. A unit's weights are gathered together before its forward pass and freed afterwards.

model (the rest)         one unit for the rest of the model: embedding, norm, head
  layers.0 ... layers.N  one unit each: memory holds the full weights of only one at a time

A unit never returns views; it returns separate tensors that use the same memory. torch gathers a unit's
weights for backward in a hook on the tensors that the unit returned. For batches of sequences, a linear layer returns a
view, and the user's next ``x += y`` would remove the hook from it. torch (2.12 and later) also warns about each such
unit.

A unit can recompute its activations in backward instead of keeping them.

Only this module uses private attributes of ``fully_shard``.
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
"""Default minimum number of parameters in a unit, as in torch's size-based policy."""

# Containers, and the layer whose weights nn.MultiheadAttention uses without calling the layer.
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.modules.linear.NonDynamicallyQuantizableLinear)


Policy = Callable[..., Any] | str | None


def choose(
    model: nn.Module,
    policy: Policy = None,
    class_names: Sequence[str] | None = None,
    min_num_params: int | None = None,
) -> list[tuple[str, nn.Module]]:
    """Return the units inside ``model``, innermost first, with their names. ``model`` itself is not in the list.

    Args:
        model: the model as the user built it.
        policy: the plugin's ``auto_wrap_policy``.
        class_names: the plugin's ``transformer_cls_names_to_wrap``.
        min_num_params: the plugin's ``min_num_params``.
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
    """Divide ``units`` until the trained weights in each share one dtype. Return all units, innermost first.

    A unit has the dtype of its direct weights or, if it has none, the most common dtype of the weights inside
    it. Inner modules become units if their direct weights have another dtype. :func:`odd_weights` returns the
    weights that can't be divided this way.
    """
    chosen = list(units)
    while True:
        others: set[nn.Module] = set()
        for unit, inside in _modules_of(model, chosen):
            dtypes = {module: _trained_dtypes(module) for module in inside}
            most = Counter(dtypes[unit] or itertools.chain(*dtypes.values())).most_common(1)
            alike = {dtype for dtype, _ in most}
            others.update(
                module for module, kinds in dtypes.items() if {*kinds} - alike and module is not unit
            )
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
    """Return the parameters that ``fully_shard`` rejects in a unit with other parameters.

    These are scalars, which can't be sharded. With ``is_one_dtype``, trained weights are included if their dtype
    differs from the dtype of most elements in their unit.

    Args:
        model: the model as the user built it.
        units: the units, innermost first.
        ignored: parameters that are not sharded.
        is_one_dtype: whether trained weights keep their dtypes.
    """
    odd = {weight for weight in model.parameters() if weight.ndim == 0 and weight not in ignored}
    named = [("", unit) for unit in units if unit is not model]
    for _, inside in _modules_of(model, named) if is_one_dtype else ():
        of_dtype: dict[torch.dtype, set[nn.Parameter]] = defaultdict(set)
        for parameter in itertools.chain(*(module.parameters(recurse=False) for module in inside)):
            if parameter.requires_grad and parameter not in ignored and parameter not in odd:
                of_dtype[parameter.dtype].add(parameter)
        by_size = sorted(of_dtype.values(), key=lambda alike: sum(weight.numel() for weight in alike))
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
    return [
        parameter.dtype
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad and parameter.ndim
    ]


def ignored_parameters(model: nn.Module, ignored: Iterable[nn.Module] | str | None) -> set[nn.Parameter]:
    """Return the parameters of the modules that must not be sharded."""
    if ignored is None:
        return set()
    if isinstance(ignored, str):
        modules = [module for name, module in model.named_modules() if re.fullmatch(ignored, name)]
        if not modules:
            names = ", ".join(name for name, _ in list(model.named_modules())[1:9])
            raise ValueError(f"ignored_modules={ignored!r} matches no module name; the names are {names} ...")
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
    """List the classes of the model's modules that have parameters, the most frequent first."""
    counts = Counter(
        type(module).__name__
        for module in list(model.modules())[1:]
        if not isinstance(module, _NEVER_CALLED) and any(True for _ in module.parameters())
    )
    listed = sorted(counts, key=lambda name: (-counts[name], name))
    return "Its classes: " + (", ".join(f"{name} ({counts[name]})" for name in listed) or "none")


def _predicate(policy: Callable[..., Any]) -> Callable[[nn.Module], bool]:
    """Return a user's policy as a function of the module alone. torch.distributed.fsdp.wrap passes more arguments."""
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
    """Return the ids of modules with at least ``min_num_params`` elements outside smaller units."""
    large: set[int] = set()

    def left_over(module: nn.Module) -> int:
        count_here = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        count = count_here + sum(left_over(child) for child in module.children())
        if count < min_num_params or isinstance(module, _NEVER_CALLED):
            return count
        large.add(id(module))
        return 0

    left_over(model)
    return large


def _without_split_ties(model: nn.Module, units: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Leave out units that hold only one of two tied weights. An enclosing unit holds both."""
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


# --- outputs of units -------------------------------------------------------------------------------------------------


def return_no_views(module: nn.Module) -> None:
    """Make ``module`` return no views. Call this before ``fully_shard``, whose hooks must run after this hook."""
    module.register_forward_hook(_without_views_uncompiled(), with_kwargs=True)


@functools.cache
def _without_views_uncompiled() -> Any:
    """Return a hook that is never compiled. torch's own hooks, which get its result, are not compiled either."""
    return torch.compiler.disable(_without_views)  # imports the compiler


def _without_views(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
) -> Any | None:
    # Rebuilding containers of other types could change them.
    is_known = isinstance(output, (torch.Tensor, list, tuple, dict))
    if not is_known or not torch.is_grad_enabled():
        return None
    returned = {id(leaf): leaf for leaf in nested.leaves(output) if isinstance(leaf, torch.Tensor)}
    views = [tensor for tensor in returned.values() if tensor.requires_grad and tensor._base is not None]
    if not views:
        return None
    # Leave tensors that share memory unchanged: autograd tracks how a write to one changes the other.
    others = [leaf for leaf in nested.leaves([args, kwargs]) if isinstance(leaf, torch.Tensor)]
    shown = [_memory(tensor) for tensor in (*returned.values(), *others)]
    copies: dict[int, torch.Tensor] = {
        id(view): _AsOwnTensor.apply(view)
        for view in views
        if sum(memory is view._base for memory in shown) == 1
    }
    # One remaining hook is enough to gather a unit's weights.
    num_left = len(views) - len(copies)
    if 0 < num_left < sum(tensor.requires_grad for tensor in returned.values()):
        _ignore_warning(type(module).__name__)
    return nested.map_tensors(lambda tensor: copies.get(id(tensor), tensor), output) if copies else None


@functools.cache
def _ignore_warning(unit: str) -> None:
    """Silence torch's warning about views that a unit passes on, such as biases and masks."""
    warnings.filterwarnings("ignore", rf"FSDP2-wrapped module \({unit}\) returned a view", UserWarning)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


class _AsOwnTensor(torch.autograd.Function):
    """Returns a separate tensor that shares a view's memory. Autograd notices writes to it if the view was saved."""

    @staticmethod
    def forward(ctx: Any, view: torch.Tensor) -> torch.Tensor:
        return view.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


# --- recomputed activations -------------------------------------------------------------------------------------------

# transformers' names for the arguments that hold caches of generated tokens.
_CACHES = ("past_key_value", "past_key_values", "layer_past")


def checkpoint_activations(module: nn.Module, is_offloaded: bool) -> None:
    """Make ``module`` recompute its activations in backward, instead of keeping them.

    This wraps the module's ``forward`` inside the hooks that gather and free weights, so that the second forward pass
    uses the weights gathered for backward. Empty caches, which models for text generation receive, are left out,
    because the first forward pass would fill them.
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
        return kwargs  # the user continues from these tokens; torch raises an error if the caches can't be reused
    return {**kwargs, **dict.fromkeys(caches), **({"use_cache": False} if "use_cache" in kwargs else {})}


def _is_filled(cache: Any) -> bool:
    """Return whether a cache, from transformers or the user, has tokens."""
    length = getattr(cache, "get_seq_length", None)
    return bool(length()) if callable(length) else bool(cache)


# --- inside fully_shard -----------------------------------------------------------------------------------------------


def _groups(module: nn.Module) -> list[Any]:
    """Return the parameter groups of one sharded unit."""
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    if hasattr(state, "_fsdp_param_groups"):  # torch >= 2.12 allows several
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def register_new_parameters(module: nn.Module) -> None:
    """Make torch use the parameters that have replaced the ones created by ``fully_shard``."""
    for group in _groups(module):
        for parameter in group.fsdp_params:
            parameter.reset_sharded_param()  # for example after ``load_state_dict(assign=True)``
            parameter._setattr_on_modules(parameter.sharded_param)


def average_gradients(parameters: Sequence[nn.Parameter], mesh: Any, units: Sequence[nn.Module]) -> None:
    """Average the gradients of unsharded parameters whenever ``backward`` reduces the gradients of ``units``.

    This includes gradients accumulated earlier. If these were averaged before, they are the same on all ranks, and
    averaging again does not change them.
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


def reject_copies(module: nn.Module) -> None:
    """Make copying a sharded module raise an error that, unlike torch's own, says what to do."""
    type(module).__deepcopy__ = _reject_copy  # type: ignore[attr-defined]


def _reject_copy(module: nn.Module, memo: Any) -> Any:
    name = type(module).__name__.removeprefix("FSDP")
    raise RuntimeError(
        f"a {name} whose weights are sharded over ranks can't be copied by copy.deepcopy, which AveragedModel "
        "uses. Copy the model or create the AveragedModel before prepare, and pass it to prepare as well; or keep "
        "an average of the shards: [p.detach().clone() for p in model.parameters()]"
    )


def is_reducing(module: nn.Module) -> bool:
    """Return whether ``backward`` reduces gradients of a unit and all units inside it: see ``no_sync``."""
    return all(
        group.reduce_grads
        for unit in module.modules()
        if hasattr(unit, "_get_fsdp_state")
        for group in _groups(unit)
    )


def gather_for_training(module: nn.Module) -> None:
    """Make a unit gather its weights outside ``torch.inference_mode``, whose tensors can't be used in training."""
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
