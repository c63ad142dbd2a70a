"""What an Accelerator has for saving and loading: the state, and who saves and who loads it."""

from __future__ import annotations

from nblaunch.training.checkpoints.restoring import Restorer
from nblaunch.training.checkpoints.saving import Saver
from nblaunch.training.checkpoints.training_state import TrainingState
from nblaunch.training.options import ProjectConfiguration
from nblaunch.training.prepare import Preparer
from nblaunch.training.session import Session


class Checkpointer:
    """Saves and loads the state of one process's share of a job.

    Args:
        session: its session.
        preparer: has the prepared objects.
        project: says where and how many.
    """

    def __init__(self, session: Session, preparer: Preparer, project: ProjectConfiguration) -> None:
        self.state = TrainingState(session, preparer, project)
        self.saver = Saver(self.state)
        self.restorer = Restorer(self.state, self.saver.wait)
