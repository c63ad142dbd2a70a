"""The ``kwargs_handlers`` that an Accelerator was given, one attribute for each kind, as scripts look at them."""

from __future__ import annotations

from typing import TypeVar

from nblaunch.training.options import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)

Handler = TypeVar("Handler", bound=KwargsHandler)


class GivenHandlers:
    """Each is None where the Accelerator was given none of its kind. The final class keeps them."""

    _handlers: dict[type[KwargsHandler], KwargsHandler]

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """How forward passes compute in half precision."""
        return self._given(AutocastKwargs)

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """How models are spread over ranks."""
        return self._given(DistributedDataParallelKwargs)

    @property
    def init_handler(self) -> InitProcessGroupKwargs | None:
        """How the process group was joined."""
        return self._given(InitProcessGroupKwargs)

    @property
    def profile_handler(self) -> ProfileKwargs | None:
        """What ``profile`` records."""
        return self._given(ProfileKwargs)

    @property
    def scaler_handler(self) -> GradScalerKwargs | None:
        """How fp16 scales gradients."""
        return self._given(GradScalerKwargs)

    def _given(self, kind: type[Handler]) -> Handler | None:
        handler = self._handlers.get(kind)
        return handler if isinstance(handler, kind) else None
