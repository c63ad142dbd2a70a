# Written by `make stubs` from nblaunch/compat.py.
from nblaunch.cli.config import (
    write_basic_config as write_basic_config,
)
from nblaunch.errors import (
    DistributedOperationException as DistributedOperationException,
)
from nblaunch.training.checkpoints.files import (
    MODEL_NAME as MODEL_NAME,
    OPTIMIZER_NAME as OPTIMIZER_NAME,
    PROFILE_PATTERN_NAME as PROFILE_PATTERN_NAME,
    RNG_STATE_NAME as RNG_STATE_NAME,
    SAFE_MODEL_NAME as SAFE_MODEL_NAME,
    SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME,
    SAMPLER_NAME as SAMPLER_NAME,
    SCALER_NAME as SCALER_NAME,
    SCHEDULER_NAME as SCHEDULER_NAME,
    WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME as WEIGHTS_NAME,
    WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME,
)
from nblaunch.training.checkpoints.fsdp_states import (
    FSDP_MODEL_NAME as FSDP_MODEL_NAME,
    load_fsdp_model as load_fsdp_model,
    load_fsdp_optimizer as load_fsdp_optimizer,
    merge_fsdp_weights as merge_fsdp_weights,
    save_fsdp_model as save_fsdp_model,
    save_fsdp_optimizer as save_fsdp_optimizer,
)
from nblaunch.training.checkpoints.load_weights import (
    load_checkpoint_in_model as load_checkpoint_in_model,
)
from nblaunch.training.checkpoints.model_files import (
    load as load,
    save as save,
)
from nblaunch.training.collectives.nested import (
    TensorInformation as TensorInformation,
    concatenate as concatenate,
    convert_to_fp32 as convert_to_fp32,
    find_batch_size as find_batch_size,
    find_device as find_device,
    get_data_structure as get_data_structure,
    honor_type as honor_type,
    initialize_tensors as initialize_tensors,
    is_namedtuple as is_namedtuple,
    is_tensor_information as is_tensor_information,
    is_torch_tensor as is_torch_tensor,
    listify as listify,
    pad_input_tensors as pad_input_tensors,
    recursively_apply as recursively_apply,
    send_to_device as send_to_device,
    slice_tensors as slice_tensors,
)
from nblaunch.training.collectives.operations import (
    CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
    broadcast as broadcast,
    broadcast_object_list as broadcast_object_list,
    gather as gather,
    gather_object as gather_object,
    pad_across_processes as pad_across_processes,
    reduce as reduce,
)
from nblaunch.training.collectives.rng import (
    set_seed as set_seed,
    synchronize_rng_state as synchronize_rng_state,
    synchronize_rng_states as synchronize_rng_states,
)
from nblaunch.training.models import (
    is_compiled_module as is_compiled_module,
)
from nblaunch.training.options import (
    AutocastKwargs as AutocastKwargs,
    DDPCommunicationHookType as DDPCommunicationHookType,
    DataLoaderConfiguration as DataLoaderConfiguration,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    DynamoBackend as DynamoBackend,
    GradScalerKwargs as GradScalerKwargs,
    GradientAccumulationPlugin as GradientAccumulationPlugin,
    InitProcessGroupKwargs as InitProcessGroupKwargs,
    KwargsHandler as KwargsHandler,
    PrecisionType as PrecisionType,
    ProfileKwargs as ProfileKwargs,
    ProjectConfiguration as ProjectConfiguration,
    RNGType as RNGType,
    TorchDynamoPlugin as TorchDynamoPlugin,
)
from nblaunch.training.parallelism import (
    ParallelismConfig as ParallelismConfig,
    TorchContextParallelConfig as TorchContextParallelConfig,
    TorchTensorParallelConfig as TorchTensorParallelConfig,
    TorchTensorParallelPlugin as TorchTensorParallelPlugin,
)
from nblaunch.training.precision import (
    AORecipeKwargs as AORecipeKwargs,
    convert_outputs_to_fp32 as convert_outputs_to_fp32,
)
from nblaunch.training.prepare import (
    extract_model_from_parallel as extract_model_from_parallel,
    is_peft_model as is_peft_model,
)
from nblaunch.training.state import (
    DistributedType as DistributedType,
    wait_for_everyone as wait_for_everyone,
)
from nblaunch.training.strategies.deepspeed.config import (
    DummyOptim as DummyOptim,
    DummyScheduler as DummyScheduler,
    HfDeepSpeedConfig as HfDeepSpeedConfig,
)
from nblaunch.training.strategies.deepspeed.settings import (
    get_active_deepspeed_plugin as get_active_deepspeed_plugin,
)
from nblaunch.training.strategies.deepspeed.strategy import (
    DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper,
    DeepSpeedPlugin as DeepSpeedPlugin,
    DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper,
)
from nblaunch.training.strategies.fsdp2.settings import (
    FSDP2_STATE_DICT_TYPE as FSDP2_STATE_DICT_TYPE,
    FSDP_AUTO_WRAP_POLICY as FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH as FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY as FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE as FSDP_STATE_DICT_TYPE,
)
from nblaunch.training.strategies.fsdp2.strategy import (
    FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
)
from nblaunch.training.tracking import (
    LoggerType as LoggerType,
)
from nblaunch.training.utilities.helpers import (
    BETA_CP_AVAILABLE_PYTORCH_VERSION as BETA_CP_AVAILABLE_PYTORCH_VERSION,
    BETA_SP_AVAILABLE_DEEPSPEED_VERSION as BETA_SP_AVAILABLE_DEEPSPEED_VERSION,
    BETA_TP_AVAILABLE_PYTORCH_VERSION as BETA_TP_AVAILABLE_PYTORCH_VERSION,
    BETA_TP_AVAILABLE_TRANSFORMERS_VERSION as BETA_TP_AVAILABLE_TRANSFORMERS_VERSION,
    DTENSOR_PYTORCH_VERSION as DTENSOR_PYTORCH_VERSION,
    FSDP2_PYTORCH_VERSION as FSDP2_PYTORCH_VERSION,
    FSDP_PYTORCH_VERSION as FSDP_PYTORCH_VERSION,
    MITA_PROFILING_AVAILABLE_PYTORCH_VERSION as MITA_PROFILING_AVAILABLE_PYTORCH_VERSION,
    TORCH_DYNAMO_MODES as TORCH_DYNAMO_MODES,
    XPU_PROFILING_AVAILABLE_PYTORCH_VERSION as XPU_PROFILING_AVAILABLE_PYTORCH_VERSION,
    are_libraries_initialized as are_libraries_initialized,
    check_cuda_fp8_capability as check_cuda_fp8_capability,
    check_os_kernel as check_os_kernel,
    clear_environment as clear_environment,
    compare_versions as compare_versions,
    compile_regions_fsdp2 as compile_regions_fsdp2,
    convert_bytes as convert_bytes,
    convert_dict_to_env_variables as convert_dict_to_env_variables,
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
    dtype_byte_size as dtype_byte_size,
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
    find_tied_parameters as find_tied_parameters,
    get_int_from_env as get_int_from_env,
    get_pretty_name as get_pretty_name,
    has_compiled_regions as has_compiled_regions,
    id_tensor_storage as id_tensor_storage,
    ignorant_find_batch_size as ignorant_find_batch_size,
    is_aim_available as is_aim_available,
    is_amdsmi_available as is_amdsmi_available,
    is_bf16_available as is_bf16_available,
    is_bnb_available as is_bnb_available,
    is_boto3_available as is_boto3_available,
    is_clearml_available as is_clearml_available,
    is_comet_ml_available as is_comet_ml_available,
    is_cuda_available as is_cuda_available,
    is_datasets_available as is_datasets_available,
    is_deepspeed_available as is_deepspeed_available,
    is_dvclive_available as is_dvclive_available,
    is_fp16_available as is_fp16_available,
    is_fp8_available as is_fp8_available,
    is_hpu_available as is_hpu_available,
    is_import_timer_available as is_import_timer_available,
    is_lomo_available as is_lomo_available,
    is_matplotlib_available as is_matplotlib_available,
    is_megatron_lm_available as is_megatron_lm_available,
    is_mlflow_available as is_mlflow_available,
    is_mlu_available as is_mlu_available,
    is_mps_available as is_mps_available,
    is_msamp_available as is_msamp_available,
    is_musa_available as is_musa_available,
    is_neuron_available as is_neuron_available,
    is_npu_available as is_npu_available,
    is_numpy_available as is_numpy_available,
    is_pandas_available as is_pandas_available,
    is_peft_available as is_peft_available,
    is_pippy_available as is_pippy_available,
    is_port_in_use as is_port_in_use,
    is_pynvml_available as is_pynvml_available,
    is_pytest_available as is_pytest_available,
    is_rich_available as is_rich_available,
    is_rocm_available as is_rocm_available,
    is_sagemaker_available as is_sagemaker_available,
    is_schedulefree_available as is_schedulefree_available,
    is_sdaa_available as is_sdaa_available,
    is_swanlab_available as is_swanlab_available,
    is_tensorboard_available as is_tensorboard_available,
    is_timm_available as is_timm_available,
    is_torch_distributed_available as is_torch_distributed_available,
    is_torch_version as is_torch_version,
    is_torch_xla_available as is_torch_xla_available,
    is_torchao_available as is_torchao_available,
    is_torchdata_available as is_torchdata_available,
    is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
    is_torchvision_available as is_torchvision_available,
    is_tqdm_available as is_tqdm_available,
    is_trackio_available as is_trackio_available,
    is_transformer_engine_available as is_transformer_engine_available,
    is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available,
    is_transformers_available as is_transformers_available,
    is_triton_available as is_triton_available,
    is_wandb_available as is_wandb_available,
    is_weights_only_available as is_weights_only_available,
    is_xccl_available as is_xccl_available,
    is_xpu_available as is_xpu_available,
    merge_dicts as merge_dicts,
    model_has_dtensor as model_has_dtensor,
    parse_choice_from_env as parse_choice_from_env,
    parse_flag_from_env as parse_flag_from_env,
    patch_environment as patch_environment,
    purge_accelerate_environment as purge_accelerate_environment,
    recursive_getattr as recursive_getattr,
    str_to_bool as str_to_bool,
)
from nblaunch.training.utilities.log import (
    tqdm as tqdm,
)
from nblaunch.training.utilities.memory import (
    clear_device_cache as clear_device_cache,
    find_executable_batch_size as find_executable_batch_size,
    release_memory as release_memory,
    should_reduce_batch_size as should_reduce_batch_size,
)
