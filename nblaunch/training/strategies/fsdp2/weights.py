"""The source of a sharded model's weights: each rank's own copy, rank 0, or none yet (the meta device).

    before    every rank has the full model: the kernel's memory pages after a fork, a copy, or only shapes
    shapes    the parameters are on the meta device, where applying ``fully_shard`` costs no memory
    after     every rank has filled its shards from the full model, copying only the shards' bytes

Ranks never send weights that all of them hold. This module does not depend on units.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn

from nblaunch import formatting
from nblaunch.host import memory
from nblaunch.training.collectives import dtensor, operations
from nblaunch.training.joining import waiting
from nblaunch.training.strategies.replicated import checksum
from nblaunch.weights import extent, is_quantised_weight, is_sharded

_META = "meta"
_UNKNOWN = "unknown"


class FullWeights:
    """Keeps a model's full weights during sharding, and fills the shards from them without another full copy.

    All ranks must use this class together: they compare where each tensor is, and rank 0 sends the tensors that only it
    has.

    Args:
        model: the model as the user built it.
        ignored: parameters that are not sharded; if one of them is replaced, it is also replaced in this set.
        device: this rank's device, for unsharded tensors and for communication; :meth:`fill_shards` takes the shards'
            device.
        may_be_sent: whether rank 0 may send other ranks the weights that only rank 0 has.
        trained_dtype: the dtype for shards of trained weights; None: as in the model.
    """

    def __init__(
        self,
        model: nn.Module,
        ignored: set[nn.Parameter],
        device: torch.device,
        may_be_sent: bool,
        trained_dtype: torch.dtype | None,
    ) -> None:
        self._model = model
        self._device = device
        self._ignored = ignored
        self._trained_dtype = trained_dtype
        # Take the names before fully_shard changes the classes.
        self._class_names = {name: type(module).__name__ for name, module in model.named_modules()}
        named = model.named_parameters(remove_duplicate=False)
        self._parameters = {name: parameter for name, parameter in named if parameter not in ignored}
        self._others: dict[str, torch.Tensor] = dict(model.named_buffers())
        self._others |= {name: p for name, p in model.named_parameters() if p in ignored}
        self._origins = _origins(self._class_names[""], {**self._parameters, **self._others}, may_be_sent)

    @property
    def num_bytes(self) -> int:
        """Size of all ranks' shards in bytes, counting tied parameters once."""
        unique = {id(parameter): parameter for parameter in self._parameters.values()}
        return sum(parameter.numel() * self._shard_dtype(parameter).itemsize for parameter in unique.values())

    def _shard_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        is_trained = parameter.requires_grad and parameter.is_floating_point()
        return self._trained_dtype if is_trained and self._trained_dtype is not None else parameter.dtype

    def move_to_meta(self) -> None:
        """Replace the parameters to be sharded with meta tensors tied in the same way; move the rest to the device.

        The rest are buffers and ignored parameters, which every rank holds in full.
        """
        empty: dict[int, nn.Parameter] = {}
        for name, old in self._parameters.items():
            if id(old) not in empty:
                data = torch.empty_like(
                    old, device="meta", dtype=self._shard_dtype(old), memory_format=torch.contiguous_format
                )
                empty[id(old)] = nn.Parameter(data, requires_grad=old.requires_grad)
            _owner(self._model, name)[_own_name(name)] = empty[id(old)]
        for name, tensor in self._others.items():
            if self._origins[name] != "nowhere":
                self._place_full(name, tensor)

    def _place_full(self, name: str, tensor: torch.Tensor) -> None:
        """Move a tensor that every rank holds in full to the device, and make it equal to rank 0's."""
        if isinstance(tensor, nn.Parameter) and is_quantised_weight(tensor):
            if tensor.device != self._device:  # the tensor's own to() also moves the data stored with it
                self._replace(tensor, tensor.to(self._device))  # type: ignore[arg-type]
            return
        # If only rank 0 has the tensor, other ranks allocate memory to receive it.
        if tensor.is_meta:
            moved = torch.empty_like(tensor, device=self._device, requires_grad=False)
        else:
            moved = tensor.detach().to(self._device)
        if self._origins[name] == "rank 0":
            moved = operations.broadcast(moved.clone())
        if isinstance(tensor, nn.Parameter) and not tensor.is_meta:
            tensor.data = moved
        elif isinstance(tensor, nn.Parameter):  # a meta parameter can't be given memory, so replace it
            self._replace(tensor, nn.Parameter(moved, requires_grad=tensor.requires_grad))
        else:
            self._put(tensor, moved)

    def _replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Replace an ignored parameter with ``new``."""
        self._put(old, new)
        self._ignored.remove(old)
        self._ignored.add(new)

    def _put(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Replace ``old`` with ``new`` throughout the model, under each of its names."""
        for module in self._model.modules():
            for held in (module._parameters, module._buffers):
                for name in [name for name, tensor in held.items() if tensor is old]:
                    held[name] = new  # type: ignore[assignment]

    def fill_shards(self, device: torch.device, initialise: Callable[[nn.Module], Any] | None) -> None:
        """Replace the model's meta shards with shards on ``device``, and fill them.

        ``initialise`` initialises a module's weights if no rank has them yet; None: the module initialises itself.
        """
        made: dict[int, nn.Parameter] = {}
        for name, source in self._parameters.items():
            parameters, own_name = _owner(self._model, name), _own_name(name)
            meta_shard: Any = parameters[own_name]
            if id(meta_shard) not in made:
                held = self._shard_of(name, source, meta_shard, device)
                made[id(meta_shard)] = nn.Parameter(
                    dtensor.with_local(meta_shard, held), requires_grad=meta_shard.requires_grad
                )
            parameters[own_name] = made[id(meta_shard)]
        if "nowhere" in self._origins.values():
            self._initialise(initialise)

    def _shard_of(
        self, name: str, source: torch.Tensor, meta_shard: Any, device: torch.device
    ) -> torch.Tensor:
        """Return a shard of a weight, filled if any rank has the weight.

        On the CPU, memory that this process shares with the kernel is not copied: the shard is a view of the kernel's
        pages. The system copies a page when training first writes to it, and never copies pages of frozen weights.
        """
        is_own = self._origins[name] == "own" and source.is_contiguous() and source.dtype == meta_shard.dtype
        # Writes to memory from share_memory() are visible in all processes, so such memory must be copied.
        if device.type == "cpu" and is_own and not source.is_shared():
            held = dtensor.slice_for(meta_shard, source.detach())
            if held.is_contiguous() and memory.is_shared(held.data_ptr(), held.numel() * held.element_size()):
                return held
        held = torch.empty(extent(meta_shard)[1], dtype=meta_shard.dtype, device=device)
        if self._origins[name] != "nowhere":
            held.copy_(dtensor.slice_for(meta_shard, self._full(name, source)))
        return held

    def _full(self, name: str, source: torch.Tensor) -> torch.Tensor:
        """Return the full tensor, from this rank or from rank 0."""
        if self._origins[name] == "own":
            return source.detach()
        is_sender = dist.get_rank() == 0
        full = (
            source.detach().to(self._device) if is_sender else torch.empty_like(source, device=self._device)
        )
        with waiting():
            dist.broadcast(full, src=0)
        return full

    def _initialise(self, initialise: Callable[[nn.Module], Any] | None) -> None:
        """Give all ranks the same initial weights, so that each rank holds only one full module at a time."""
        nowhere = {name for name, origin in self._origins.items() if origin == "nowhere"}
        make = initialise or constructor(self._model)
        made: set[int] = set()
        unmade: dict[str, int] = {}
        with _random_state_of_main(), StandIns(self._model) as stand_ins:
            for module_name, module in self._model.named_modules():
                prefix = f"{module_name}." if module_name else ""
                tensors = {name: tensor for name, tensor in stand_ins.of(module) if prefix + name in nowhere}
                missing = {name for name, tensor in tensors.items() if id(tensor) not in made}
                left = self._initialise_one(module, missing, make, stand_ins) if missing else set()
                made |= {id(tensors[name]) for name in missing - left}
                unmade |= {prefix + name: id(tensors[name]) for name in tensors if name in left}
        # Any module that shares a tied parameter may initialise it.
        names = [name for name, tensor in unmade.items() if tensor not in made]
        if names:
            raise ValueError(self._describe_unmade(names, initialise is not None))

    def _initialise_one(
        self, module: nn.Module, names: set[str], make: Callable[[nn.Module], Any], stand_ins: StandIns
    ) -> set[str]:
        """Use ``make`` to write the full tensors ``names`` of a module; return the names that remain unwritten.

        The module's other tensors already have values. ``make`` gets copies of these, or blank tensors in place of
        shards, and its writes to them are dropped.
        """
        tensors = dict(stand_ins.of(module))
        for name, tensor in tensors.items():
            is_blank = name in names or tensor.is_meta or is_sharded(tensor)
            stand_ins.show(tensor, unwritten(tensor) if is_blank else tensor.detach().to("cpu", copy=True))
        blank = {name: getattr(module, name).data_ptr() for name in names}
        make(module)
        made: dict[str, Any] = {name: getattr(module, name) for name in names}
        stand_ins.hide_again(module)
        left = set()
        for name, value in made.items():
            # A tensor that replaced the blank one, as in ``to_empty``, may hold any values.
            if value.data_ptr() == blank[name] and is_unwritten(value.detach()):
                left.add(name)
            elif is_sharded(tensors[name]):
                with torch.no_grad():
                    dtensor.local(tensors[name]).copy_(dtensor.slice_for(tensors[name], value.detach()))
            else:  # every rank holds ignored parameters and buffers in full
                value.data = value.data.to(self._device)
                stand_ins.replace(tensors[name], value)
        return left

    def _describe_unmade(self, unmade: Sequence[str], is_given: bool) -> str:
        """Return the error message for tensors that initialisation left without values.

        ``is_given``: whether the user passed param_init_fn.
        """
        owners = {name: self._class_names[name.rpartition(".")[0]] for name in unmade}
        listed = formatting.first([f"{name} ({owner})" for name, owner in owners.items()], 8)
        model = f"the {self._class_names['']} is on the meta device"
        if is_given:
            return (
                f"{model}, and param_init_fn did not initialise all of these weights and buffers: {listed}. "
                "Initialise them there, or build the model on the CPU"
            )
        return (
            f"{model}, and neither the modules' reset_parameters() nor the model's _init_weights() initialises "
            f"all of these weights and buffers: {listed}. Initialise them there, pass "
            "FullyShardedDataParallelPlugin(param_init_fn=...), or build the model on the CPU"
        )


def _origins(model_name: str, tensors: dict[str, torch.Tensor], may_be_sent: bool) -> dict[str, str]:
    """Return the source of each tensor: "own", "rank 0" or "nowhere". All ranks compare tensors in one collective."""
    mine = [(name, tuple(tensor.shape), _fingerprint(tensor)) for name, tensor in tensors.items()]
    everyones = operations.gather_object([mine])
    shapes = [[(name, shape) for name, shape, _ in model_print] for model_print in everyones]
    for rank, model_print in enumerate(shapes):
        if model_print != shapes[0]:
            differing = next(
                (f"{a} and {b}" for a, b in zip(shapes[0], model_print, strict=False) if a != b), ""
            )
            raise ValueError(
                f"the {model_name} differs between rank {rank} and rank 0: {len(model_print)} tensors and "
                f"{len(shapes[0])}{', ' + differing if differing else ''}"
            )
    origins = {}
    for position, name in enumerate(tensors):
        prints = [model_print[position][2] for model_print in everyones]
        if set(prints) == {_META}:
            origins[name] = "nowhere"
        elif len(set(prints)) == 1 and prints[0] != _UNKNOWN:
            origins[name] = "own"
        elif prints[0] == _META:
            raise ValueError(
                f"{name} of the {model_name} is on the meta device on rank 0, but not on other ranks"
            )
        elif _META in prints and not may_be_sent:
            raise ValueError(
                f"{name} of the {model_name} is on the meta device on rank {prints.index(_META)}, but with "
                "cpu_ram_efficient_loading=False every rank needs its weights"
            )
        else:
            origins[name] = "rank 0"
    return origins


def _fingerprint(tensor: torch.Tensor) -> Any:
    if tensor.is_meta:
        return _META
    return checksum(tensor.detach()) if tensor.device.type == "cpu" else _UNKNOWN


@contextmanager
def _random_state_of_main() -> Iterator[None]:
    """Give every rank the state of rank 0's CPU generator in the block, and restore its own state afterwards."""
    state = operations.broadcast_object_list([torch.get_rng_state()])[0]
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        yield


def _owner(model: nn.Module, name: str) -> dict[str, nn.Parameter | None]:
    return model.get_submodule(name.rpartition(".")[0])._parameters


def _own_name(name: str) -> str:
    return name.rpartition(".")[2]


# --- initialising a model on the meta device, one module after the other, so that no rank ever holds all of it --------

#     StandIns        the model's tensors during initialisation: only shapes, except in the current module
#     unwritten       creates tensors that show which elements were not written
#     constructor     writes the tensors as if the model were built on the CPU


class StandIns:
    """Replaces all of a model's tensors with meta tensors tied in the same way, in a ``with`` block.

    The code that initialises one module may also write to others: for example, ``_init_weights`` for transformers'
    attention layers writes to their projections. Such writes to meta tensors do nothing and cost nothing. Quantised
    weights that have values are kept.
    """

    def __init__(self, model: nn.Module) -> None:
        self._own: dict[nn.Module, list[tuple[str, torch.Tensor]]] = {}
        self._places: dict[int, list[tuple[Any, str]]] = {}
        self._final: dict[int, torch.Tensor] = {}
        for module in model.modules():
            self._own[module] = []
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None and (tensor.is_meta or not is_quantised_weight(tensor)):
                        self._own[module].append((name, tensor))
                        self._places.setdefault(id(tensor), []).append((held, name))
                        self._final[id(tensor)] = tensor

    def of(self, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """Return ``module``'s own tensors, as they were before the block, with their names."""
        return self._own[module]

    def show(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        """Put ``other`` in place of a tensor, as a parameter if the tensor is one."""
        if isinstance(tensor, nn.Parameter):
            other = nn.Parameter(other, requires_grad=tensor.requires_grad)
        self._put(id(tensor), other)

    def hide_again(self, module: nn.Module) -> None:
        """Put meta tensors back into ``module`` and its submodules, where initialisation replaced them."""
        for part in module.modules():
            for name, tensor in self._own.get(part, ()):
                current = getattr(part, name, None)
                if current is None or not current.is_meta:
                    self._hide(tensor)

    def _hide(self, tensor: torch.Tensor) -> None:
        self.show(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device=_META))

    def replace(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        """Put ``other`` in place of a tensor when the block ends."""
        self._final[id(tensor)] = other

    def _put(self, key: int, tensor: torch.Tensor) -> None:
        for held, name in self._places[key]:
            held[name] = tensor

    def __enter__(self) -> StandIns:
        for tensor in list(self._final.values()):
            self._hide(tensor)
        return self

    def __exit__(self, *exception: object) -> None:
        for key, tensor in self._final.items():
            self._put(key, tensor)


# The byte that fills unwritten integers and booleans; written booleans are 0 or 1.
_UNWRITTEN_BYTE = 0xAA


def unwritten(like: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor with the shape and dtype of ``like``, filled with a marker for unwritten elements."""
    if like.is_floating_point() or like.is_complex():
        return torch.full(like.shape, torch.nan, dtype=like.dtype)
    tensor = torch.empty(like.shape, dtype=like.dtype)
    tensor.reshape(-1).view(torch.uint8).fill_(_UNWRITTEN_BYTE)
    return tensor


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Return whether any element holds :func:`unwritten`'s marker; for one-byte integers, whether all elements do."""
    if not tensor.numel():
        return False
    num_bytes = tensor.element_size()
    if tensor.is_floating_point() or tensor.is_complex():
        comparable = tensor.float() if num_bytes == 1 else tensor  # torch can't compare float8
        return bool(comparable.isnan().any())
    is_blank = tensor.contiguous().reshape(-1).view(torch.uint8) == _UNWRITTEN_BYTE
    if num_bytes == 1 and tensor.dtype != torch.bool:  # a written integer may equal the marker
        return bool(is_blank.all())
    return bool(is_blank.view(-1, num_bytes).all(dim=1).any())


def constructor(model: nn.Module) -> Callable[[nn.Module], None]:
    """Return a function that initialises one module, if possible as it would be when the model is built on the CPU.

    The module's constructor calls ``reset_parameters``. transformers models then apply their ``_init_weights`` to each
    of their modules outside nested models, inner modules first. This includes containers, since ``_init_weights`` may
    write to their contents. For other models, the function calls only the outermost model's ``_init_weights``, with the
    module.
    """
    around: dict[str, list[nn.Module]] = {}  # name -> the module and its parents, innermost first
    for name, module in model.named_modules():
        around[name] = [module, *(around[name.rpartition(".")[0]] if name else ())]
    containers = {modules[0]: modules for modules in around.values()}
    of_model = None if _is_of_transformers(model) else getattr(model, "_init_weights", None)

    def construct(module: nn.Module) -> None:
        reset = getattr(module, "reset_parameters", None)
        if _takes(reset):
            with suppress(NotImplementedError):
                reset()
        first = 0
        for position, owner in enumerate(containers[module]):
            if _is_of_transformers(owner):
                for part in containers[module][first : position + 1]:
                    owner._init_weights(part)  # type: ignore[operator]
                first = position + 1
        if _takes(of_model, module):
            of_model(module)

    return construct


def _takes(method: Any, *args: Any) -> TypeGuard[Callable[..., Any]]:
    """Return whether a method accepts these arguments; a method with the same name may serve another purpose."""
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*args)
    except (TypeError, ValueError):
        return False
    return True


def _is_of_transformers(module: nn.Module) -> bool:
    return any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)
