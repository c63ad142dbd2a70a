"""Names that an installed Hugging Face Accelerate serves: device maps, offloading and their hooks, small helpers.

nblaunch trains models; it does not cut one into pieces for inference, nor has it every helper and constant that
Accelerate exports beside. Programs that do both import these names beside those of training, and libraries import them
without any use of them. So each of them is Accelerate's own object, imported at its first use. Without Accelerate the
names can be imported all the same, and raise where they are used.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any

_log = logging.getLogger(__name__)

_NAMES: Mapping[str, str] = {
    "big_modeling": (
        "attach_layerwise_casting_hooks cpu_offload cpu_offload_with_hook disk_offload dispatch_model"
    ),
    "hooks": (
        "AlignDevicesHook CpuOffload LayerwiseCastingHook ModelHook SequentialHook UserCpuOffloadHook "
        "add_hook_to_module attach_align_device_hook attach_align_device_hook_on_blocks "
        "attach_execution_device_hook remove_hook_from_module remove_hook_from_submodules"
    ),
    "inference": "prepare_pippy",
    "test_utils": "torch_device",  # examples ask for it
    "test_utils.training": "mocked_dataloaders mocked_dataloaders_for_autoregressive_models",
    "utils": (
        "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION PrepareForLaunch TORCH_DISTRIBUTED_OPERATION_TYPES "
        "TORCH_LAUNCH_PARAMS XPU_PROFILING_AVAILABLE_PYTORCH_VERSION are_libraries_initialized "
        "check_cuda_fp8_capability check_cuda_p2p_ib_support compile_regions compile_regions_deepspeed "
        "convert_dict_to_env_variables copy_tensor_to_devices deepspeed_required "
        "disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading ensure_weights_retied "
        "get_cpu_distributed_information get_current_device_type get_gpu_info get_grad_scaler get_model_tp_size "
        "has_4bit_bnb_layers has_compiled_regions ignorant_find_batch_size install_xla "
        "is_bitsandbytes_multi_backend_available is_habana_gaudi1 prepare_deepspeed_cmd_env prepare_multi_gpu_env "
        "prepare_sagemager_args_inputs prepare_simple_launcher_cmd_env prepare_tpu set_numa_affinity torchao_required"
    ),
    "utils.ao": "convert_model_to_fp8_ao filter_first_and_last_linear_layers has_ao_layers",
    "utils.bnb": "load_and_quantize_model",
    "utils.dataclasses": (
        "BnbQuantizationConfig ComputeEnvironment CustomDtype DeepSpeedSequenceParallelConfig SageMakerDistributedType"
    ),
    "utils.deepspeed": "map_pytorch_optim_to_deepspeed",
    "utils.modeling": (
        "align_module_device calculate_maximum_sizes check_device_map check_tied_parameters_in_config "
        "check_tied_parameters_on_same_device clean_device_map get_balanced_memory get_max_layer_size "
        "get_max_memory get_state_dict_from_offload get_state_dict_offloaded_model has_offloaded_params "
        "infer_auto_device_map load_offloaded_weights named_module_tensors retie_parameters "
        "set_module_tensor_to_device"
    ),
    "utils.offload": (
        "OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict load_offloaded_weight "
        "offload_state_dict offload_weight save_offload_index"
    ),
}
"""Module of Accelerate -> the names that it defines."""

HOMES: Mapping[str, str] = {
    name: f"accelerate.{module}" for module, names in _NAMES.items() for name in names.split()
}
"""Name -> the module of Accelerate that defines it."""

DISPATCHING = "load_checkpoint_and_dispatch"
LOADING = "load_checkpoint_in_model"
"""nblaunch's functions of these names pass on the calls that cut a model into pieces."""

MODULES = (
    "hooks",
    "inference",
    "test_utils",
    "test_utils.training",
    "utils.ao",
    "utils.bnb",
    "utils.offload",
)
"""Modules that have no other names."""

_INSTALL = (
    "is Hugging Face Accelerate's own, which nblaunch passes on. Accelerate is not installed here; install it: "
    "pip install accelerate. To train a model that does not fit on one device, nblaunch has Accelerator(fsdp_plugin="
    "FullyShardedDataParallelPlugin()) and Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))"
)


class _Announcer:
    """Says once per process that Accelerate serves these names."""

    is_done = False

    def announce(self, name: str) -> None:
        if not self.is_done:
            from importlib import metadata  # imports much, and most programs need none of these names

            self.is_done = True
            _log.warning(
                "nblaunch: %s comes from the installed Accelerate %s, as all names that nblaunch does not have itself",
                name,
                metadata.version("accelerate"),
            )


_announcer = _Announcer()


def find(name: str) -> Any:
    """Return Accelerate's object of a ``name``; without Accelerate, what raises where it is used.

    Args:
        name: one of :data:`HOMES`, :data:`DISPATCHING` or :data:`LOADING`.
    """
    try:
        value = getattr(importlib.import_module(HOMES.get(name, "accelerate.big_modeling")), name)
    except (ImportError, AttributeError, RecursionError) as error:
        return _stand_in(name, error)
    if not str(getattr(value, "__module__", "accelerate.")).startswith("accelerate."):  # constants have none
        # Another package is imported under the name of Accelerate: nblaunch itself, maybe.
        return _stand_in(name, None)
    _announcer.announce(name)
    return value


def _stand_in(name: str, cause: Exception | None) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ImportError(f"{name} {_INSTALL}", name="accelerate") from cause

    refuse.__name__ = refuse.__qualname__ = name
    # Libraries ask whether something is of such a class, and derive from it.
    return type(name, (), {"__init__": refuse, "__doc__": refuse.__doc__}) if name[0].isupper() else refuse
