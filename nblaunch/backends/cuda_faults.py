"""What errors of CUDA and NCCL mean, and what to try: their own texts say neither.

Memory that runs out is explained in ``cuda_memory.py``. Errors that only say that another rank is gone are not here:
they are explained by what became of that rank.
"""

from __future__ import annotations

import re
import sys
from typing import Any, NamedTuple

_LATER = (
    "GPUs report errors later than they happen, so the line above may not be the cause: "
    "os.environ['CUDA_LAUNCH_BLOCKING'] = '1' in a cell before the launch makes them wait for each operation"
)


class Fault(NamedTuple):
    """A kind of error: by which words it is known (a regular expression), what it means, and what to try."""

    words: str
    meaning: str
    advice: str


FAULTS = (
    Fault(
        r"device-side assert triggered",
        "An operation on the GPU was given a number out of range: most often a class that is not below the number of "
        "the model's outputs, or a token that its embedding has no row for. Which check it was is in this rank's "
        "log, as `Assertion ... failed`.",
        f"the same function on the CPU, notebook_launcher(..., backend='cpu'), which raises at the very line. {_LATER}",
    ),
    Fault(
        r"illegal memory access|misaligned address|unspecified launch failure|illegal instruction was encountered",
        "An operation on the GPU reached outside of its memory, which is a mistake of that operation: of a compiled or "
        "hand-written one, most often.",
        "without torch.compile, and without libraries that bring operations of their own, as for attention or "
        f"quantisation. {_LATER}",
    ),
    Fault(
        r"no kernel image is available",
        "The installed torch has no code for this GPU: it is older, or newer, than those it was built for{built}.",
        "another build of torch: https://pytorch.org/get-started lists them by CUDA version, and the oldest GPUs need "
        "an older torch",
    ),
    Fault(
        r"Cannot re-initialize CUDA in forked subprocess|CUDA error: initialization error",
        "CUDA was in use in the process that this one was forked from, and can't be used in a fork of it. nblaunch "
        "forks no workers then; data loaders and multiprocessing do so inside the function.",
        "datasets and collate functions that stay on the CPU (prepared loaders bring batches to the GPU), or "
        "DataLoader(..., multiprocessing_context='forkserver'); for the workers, start_method='forkserver'",
    ),
    Fault(
        r"driver on your system is too old|driver version is insufficient",
        "The NVIDIA driver is older than this torch{cuda} needs.",
        "a newer driver, or a build of torch for an older CUDA: https://pytorch.org/get-started",
    ),
    Fault(
        r"uncorrectable (NVLink|ECC) error|hardware stack error|GPU is lost|fallen off the bus|Xid",
        "The GPU itself, or its link to others, reports a defect: the function is not to blame.",
        "`nvidia-smi -q -d ECC` and the system's log (Xid) say more; leave the GPU out by CUDA_VISIBLE_DEVICES until "
        "the machine was started anew",
    ),
    Fault(
        r"device\(s\) is/are busy or unavailable",
        "Another process has the GPU to itself, as its compute mode allows one only.",
        "end the processes that nvidia-smi lists; `nvidia-smi -c DEFAULT`, as root, allows several",
    ),
    Fault(
        r"system not yet initialized|Error 802",
        "The GPUs of this machine are linked by NVSwitch, and the service that sets up their links does not run.",
        "`systemctl start nvidia-fabricmanager`, in the very version of the driver",
    ),
    Fault(
        r"forward compatibility was attempted",
        "The container brings a CUDA library for another driver than the host has.",
        "an image for the CUDA version that nvidia-smi shows, or one without the package cuda-compat",
    ),
    Fault(
        r"No CUDA GPUs are available|CUDA unknown error",
        "CUDA shows this process no GPU, though the driver reported some to the launcher.",
        "CUDA_VISIBLE_DEVICES as it was when the kernel started; nvidia-smi, to see whether the driver still answers",
    ),
    Fault(
        r"CUBLAS_STATUS_NOT_INITIALIZED|CUDNN_STATUS_NOT_INITIALIZED",
        "A library of CUDA could not be started: most often the GPU's memory is full, or a number out of range stopped "
        "the GPU just before.",
        f"a smaller batch; the same function with backend='cpu'. {_LATER}",
    ),
    Fault(
        r"Duplicate GPU detected",
        "Two ranks compute on the same GPU, which NCCL refuses.",
        "accelerator.device, or torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before CUDA is used, instead of "
        "'cuda' or 'cuda:0'; as many ranks as GPUs at most, or init_process_group('gloo')",
    ),
    Fault(
        r"shared memory segment|/dev/shm/nccl",
        "NCCL found no room in /dev/shm, through which GPUs without direct links talk; containers have 64 MB there.",
        "a container with --shm-size=8g, or --ipc=host; slower: os.environ['NCCL_SHM_DISABLE'] = '1' before the launch",
    ),
    Fault(
        r"peer access is not supported|peer mapping resources exhausted",
        "GPUs can't reach each other's memory, though NCCL took them for able to.",
        "os.environ['NCCL_P2P_DISABLE'] = '1' in a cell before the launch",
    ),
)  # fmt: skip


def explain(error: BaseException) -> tuple[str, ...]:
    """What an error of CUDA or NCCL means and what to try, a line each; nothing of any other error.

    Asks CUDA nothing: after most of these errors it answers with the same one.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        for fault in FAULTS:
            if _is_of_a_device(current) and re.search(fault.words, str(current)):
                facts = _build()
                return fault.meaning.format(**facts), f"Try: {fault.advice}."
        current = current.__cause__ or current.__context__
    return ()


def _is_of_a_device(error: BaseException) -> bool:
    """torch's errors of devices and of groups are RuntimeErrors; the last is what it makes of them at the start."""
    return isinstance(error, RuntimeError) or type(error).__name__ == "DeferredCudaCallError"


def _build() -> dict[str, str]:
    """For which CUDA, and for which GPUs, torch was built."""
    torch: Any = sys.modules.get("torch")
    cuda = torch.version.cuda if torch is not None else None
    kinds = torch.cuda.get_arch_list() if torch is not None else []
    return {
        "cuda": f" (built for CUDA {cuda})" if cuda else "",
        "built": f" ({', '.join(kinds)})" if kinds else "",
    }
