"""Having an XLA device represent wider numbers as bfloat16 by itself, which takes the place of autocast."""

from __future__ import annotations

from nblaunch import env

_THIRD = 1 / 3
_THIRD_IN_BF16 = 0.333984375  # 8 bits of significand


class Representation:
    """Which types are bfloat16 on the device of this process.

    Attributes:
        has_fp32_doubles: ``float`` alone is bfloat16, and ``double`` is float32.
    """

    def __init__(self) -> None:
        self.has_fp32_doubles = False

    @property
    def variable(self) -> str:
        """What the runtime reads."""
        return "XLA_DOWNCAST_BF16" if self.has_fp32_doubles else "XLA_USE_BF16"

    def __str__(self) -> str:
        return (
            "float is bfloat16, double is float32"
            if self.has_fp32_doubles
            else "float and double are bfloat16"
        )

    def switch_on(self) -> bool:
        """Ask the runtime for it; whether it took effect. Makes the first tensor of the process on the device."""
        other = "XLA_USE_BF16" if self.has_fp32_doubles else "XLA_DOWNCAST_BF16"
        # Read once by the runtime, at the first tensor of the process. Deprecated since torch_xla 2.6, and without a
        # successor of the same meaning; the test below tells when they are gone.
        env.apply({self.variable: "1", other: None})
        single, double = _round_trip()
        is_active = single == _THIRD_IN_BF16 and (double != _THIRD_IN_BF16) == self.has_fp32_doubles
        if not is_active:
            env.apply({self.variable: None})
        return is_active


def _round_trip() -> tuple[float, float]:
    """1/3 as float and as double, to the device and back."""
    import torch

    single, double = (
        torch.tensor([_THIRD], dtype=dtype).to("xla").cpu().item() for dtype in (torch.float32, torch.float64)
    )
    return single, double
