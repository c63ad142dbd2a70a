"""Settings from cells apply in workers under every start method."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contracts.inheritance.contract import contract
from tests.kernels import Kernel

CELL = """
import decimal, gc, logging, sys, warnings
import numpy, torch
from nblaunch import notebook_launcher

def launch(function, start_method):
    values = notebook_launcher(
        function, num_processes=2, start_method=start_method, dashboard="none", return_all=True, backend="cpu"
    )
    assert values[0] == values[1], values
    own = function()
    assert values[0] == own, {name: (own[name], value) for name, value in values[0].items() if own[name] != value}
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Kernel]:
    with Kernel.start() as kernel:
        kernel.run(CELL)
        yield kernel


TORCH = """
torch.set_default_dtype(torch.float64)
torch.set_float32_matmul_precision("high")
torch.use_deterministic_algorithms(True, warn_only=True)
torch.backends.cudnn.benchmark = True
torch.backends.cudnn.allow_tf32 = False
torch.backends.mkldnn.deterministic = True
torch.backends.cuda.enable_flash_sdp(False)
torch.autograd.set_detect_anomaly(True)
torch.set_grad_enabled(False)
torch.set_printoptions(precision=7, sci_mode=False)
torch.set_default_device("meta")

def torch_settings():
    return {
        "dtype": str(torch.ones(1).dtype),
        "device": str(torch.ones(1).device),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32),
        "mkldnn": torch.backends.mkldnn.deterministic,
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "grad": torch.is_grad_enabled(),
        "print": str(torch.tensor([1e-7 / 3], device="cpu")),
    }
"""

RESET_TORCH = """
torch.set_default_device(None)
torch.set_grad_enabled(True)
torch.set_default_dtype(torch.float32)
torch.autograd.set_detect_anomaly(False)
"""


@contract("numeric settings of torch")
def test_settings_of_torch(shared: Kernel, start_method: str) -> None:
    shared.run(TORCH)
    try:
        shared.run(f"launch(torch_settings, {start_method!r})")
    finally:
        shared.run(RESET_TORCH)


HOOKS = """
from torch.optim.optimizer import register_optimizer_step_post_hook
steps = []
hooks = [torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output + 1),
         register_optimizer_step_post_hook(lambda optimizer, args, kwargs: steps.append(1))]
torch.distributions.Distribution.set_default_validate_args(False)
torch.sparse.check_sparse_tensor_invariants.enable()
torch.backends.opt_einsum.strategy = "greedy"

def of_hooks():
    steps.clear()
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight]).step()
    return {
        "forward": torch.nn.Identity()(torch.zeros(1)).item(),
        "steps": len(steps),
        "checked": torch.sparse.check_sparse_tensor_invariants.is_enabled(),
        "einsum": torch.backends.opt_einsum.strategy,
        "scale": torch.distributions.Normal(0.0, -1.0).scale.item(),
    }
"""


@contract("numeric settings of torch", is_slow=True)
def test_hooks_of_all_modules_and_optimizers(shared: Kernel, start_method: str) -> None:
    shared.run(HOOKS)
    try:
        shared.run(f"launch(of_hooks, {start_method!r})")
    finally:
        shared.run(
            "for hook in hooks: hook.remove()\n"
            "torch.distributions.Distribution.set_default_validate_args(True)\n"
            "torch.sparse.check_sparse_tensor_invariants.disable()\n"
            "torch.backends.opt_einsum.strategy = 'auto'"
        )


NUMPY = """
numpy.seterr(divide="raise", under="warn")
numpy.set_printoptions(precision=3, formatter={"bool": lambda value: "yes" if value else "no"})
decimal.getcontext().prec = 5
sys.setrecursionlimit(4321)
gc.set_threshold(500, 5, 5)
import threading
from PIL import Image
threading.stack_size(1 << 24)
Image.register_extension("PNG", ".pix")

def other_settings():
    import decimal, threading
    from PIL import Image

    threading.stack_size(size := threading.stack_size())
    return {
        "errors": numpy.geterr(),
        "print": str(numpy.array([1 / 3])) + str(numpy.array([True])),
        "decimal": str(decimal.Decimal(1) / 3),
        "recursion": sys.getrecursionlimit(),
        "gc": gc.get_threshold(),
        "stack": size,
        "extension": Image.EXTENSION.get(".pix"),
    }
"""


@contract("settings of Python, NumPy and other libraries")
def test_settings_of_numpy_and_python(shared: Kernel, start_method: str) -> None:
    shared.run(NUMPY)
    shared.run(f"launch(other_settings, {start_method!r})")


WARNINGS = """
class OwnWarning(UserWarning): ...

warnings.simplefilter("ignore", numpy.exceptions.RankWarning)
warnings.filterwarnings("error", message="old", category=DeprecationWarning)
warnings.filterwarnings("error", category=OwnWarning)

def outcomes():
    outcomes = {}
    for category in (OwnWarning, DeprecationWarning, numpy.exceptions.RankWarning):
        try:
            warnings.warn("old way", category)
        except Warning:
            outcomes[category.__name__] = "raised"
        else:
            outcomes[category.__name__] = "passed"
    return outcomes
"""


@contract("warning filters")
def test_filters_of_warnings(shared: Kernel, start_method: str) -> None:
    shared.run(WARNINGS)
    shared.run(f"launch(outcomes, {start_method!r})")


LOGGING = """
import io
logging.basicConfig(format="%(levelname)s of %(name)s: %(message)s", level=logging.INFO, force=True)
logging.getLogger("mine").setLevel(logging.DEBUG)
logging.getLogger("quiet").disabled = True
elsewhere = logging.StreamHandler(io.StringIO())

def log():
    logging.getLogger("mine").debug("written")
    logging.getLogger("others").info("written")
    logging.getLogger("others").debug("missed")
    logging.getLogger("quiet").error("missed")

def launch_logging(start_method):
    notebook_launcher(log, num_processes=2, start_method=start_method, dashboard="text", backend="cpu")
"""


@contract("loggers")
def test_levels_and_handlers_of_loggers(shared: Kernel, start_method: str) -> None:
    shared.run(LOGGING)
    cell = shared.run(f"launch_logging({start_method!r})")
    text = cell.stdout + cell.stderr
    assert "DEBUG of mine: written" in text
    assert "INFO of others: written" in text
    assert "missed" not in text
    assert "can't be sent" not in text


def test_a_handler_that_cannot_be_sent_is_named(shared: Kernel) -> None:
    shared.run(LOGGING + "logging.root.addHandler(elsewhere)")
    try:
        cell = shared.run("launch_logging('forkserver')")
    finally:
        shared.run("logging.root.removeHandler(elsewhere)")
    assert cell.shown.count("can't be sent") == 2  # at once, and in the final table
    assert "handler <StreamHandler (NOTSET)> of the root logger" in cell.shown


def test_a_library_that_the_function_does_not_use_is_not_imported(shared: Kernel) -> None:
    used = "lambda: [name for name in ('pandas', 'matplotlib', 'torch', 'numpy') if name in sys.modules]"
    shared.run("import pandas, matplotlib\npandas.set_option('display.max_rows', 7)")
    launch = (
        f"notebook_launcher({used}, num_processes=1, start_method='spawn', dashboard='none', backend='cpu')"
    )
    assert shared.run(launch).value == []
    rows = "lambda: __import__('pandas').get_option('display.max_rows')"
    launch = (
        f"notebook_launcher({rows}, num_processes=1, start_method='spawn', dashboard='none', backend='cpu')"
    )
    assert shared.run(launch).value == 7


def test_a_restart_has_the_settings_of_the_launch(shared: Kernel) -> None:
    shared.run(
        "import os, threading\n"
        "def train():\n"
        "    if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise ValueError('once')\n"
        "    return str(torch.ones(1).dtype)\n"
        "torch.set_default_dtype(torch.float64)\n"
        "job = notebook_launcher(train, num_processes=1, max_restarts=1, background=True, dashboard='none')\n"
        "torch.set_default_dtype(torch.float32)"
    )
    assert shared.run("job.result()").value == "torch.float64"


@contract("numeric settings of torch", is_slow=True)
def test_torch_modes_around_a_launch_apply_in_it(shared: Kernel, start_method: str) -> None:
    shared.run(
        "def modes():\n"
        "    product = torch.ones(2, 2, device='cpu') @ torch.ones(2, 2, device='cpu')\n"
        "    return {'dtype': str(product.dtype), 'inference': product.is_inference()}\n"
        "with torch.autocast('cpu', dtype=torch.float16), torch.inference_mode():\n"
        f"    launch(modes, {start_method!r})\n"
        "    within = modes()\n"
        f"launch(modes, {start_method!r})\n"
        "assert within == {'dtype': 'torch.float16', 'inference': True} != modes()"
    )


OWN_MODES = """
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

class Doubles(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        value = function(*args, **(kwargs or {}))
        return 2 * value if function is torch.add else value

class Negates(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        value = function(*args, **(kwargs or {}))
        return -value if function is torch.ops.aten.sub.Tensor else value

def of_modes():
    one = torch.ones((), device="cpu")
    return {"add": torch.add(one, one).item(), "sub": torch.sub(3 * one, one).item(),
            "device": str(torch.empty(1).device)}
"""


@contract("numeric settings of torch", is_slow=True)
def test_function_and_dispatch_modes_around_a_launch_apply_in_it(shared: Kernel, start_method: str) -> None:
    shared.run(OWN_MODES)
    shared.run(
        "with torch.device('meta'), Doubles(), Negates():\n"
        "    within = of_modes()\n"
        f"    launch(of_modes, {start_method!r})\n"
        "assert within == {'add': 4.0, 'sub': -2.0, 'device': 'meta'} != of_modes(), within"
    )


SAVED_TENSORS = """
import torch.utils.checkpoint
from contextlib import ExitStack
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.attention import SDPBackend, sdpa_kernel

def around():
    stack = ExitStack()
    stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda tensor: 2 * tensor, lambda tensor: tensor))
    stack.enter_context(torch.autograd.set_multithreading_enabled(False))
    stack.enter_context(torch.autograd._force_original_view_tracking(True))
    stack.enter_context(torch.utils.checkpoint.set_checkpoint_early_stop(False))
    stack.enter_context(sdpa_kernel([SDPBackend.MATH], set_priority=True))
    hook = register_module_parameter_registration_hook(lambda module, name, weight: torch.nn.Parameter(weight + 5))
    stack.callback(hook.remove)
    return stack

def of_autograd():
    import torch.utils.checkpoint
    weight = torch.tensor(3.0, requires_grad=True, device="cpu")
    (weight * weight).backward()
    module = torch.nn.Module()
    module.register_parameter("weight", torch.nn.Parameter(torch.zeros(())))
    return {
        "grad": weight.grad.item(),
        "threads": torch._C._is_multithreading_enabled(),
        "views": torch._C._is_view_replay_enabled(),
        "early stop": torch.utils.checkpoint._enable_checkpoint_early_stop,
        "attention": torch._C._get_sdp_priority_order(),
        "weight": module.weight.item(),
    }
"""


@contract("numeric settings of torch", is_slow=True)
def test_contexts_of_autograd_around_a_launch_apply_in_it(shared: Kernel, start_method: str) -> None:
    shared.run(SAVED_TENSORS)
    shared.run(f"with around():\n    launch(of_autograd, {start_method!r})\n    within = of_autograd()")
    assert shared.run("[within['grad'], of_autograd()['grad'], within['weight']]").value == [12.0, 6.0, 5.0]
