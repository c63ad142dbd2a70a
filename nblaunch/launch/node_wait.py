"""The wait until all nodes of a job have met: before its first start, and before each that follows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from nblaunch.errors import JobCancelled, LaunchError
from nblaunch.launch.agent_line import AgentLine
from nblaunch.launch.requests import StopRequests
from nblaunch.nodes import messages
from nblaunch.nodes.messages import AgentEnded, WorldFormed
from nblaunch.spec import LaunchSpec
from nblaunch.wire.polling import wait_until_readable

_TICK_S = 0.1
_FIRST_WORD_S = 3.0
"""How long nodes may look for each other before somebody is told about it."""

_LAST_WORD_S = 2.0
_AGENT_SLACK_S = 15.0
"""For an agent's own start, and for torch to notice that its time is over."""


class NodeWait:
    """Waits, as often as a job starts its workers.

    Args:
        spec: what is launched.
        line: to this node's agent.
        requests: what people ask of the job meanwhile.
        note: takes a text for people, and its kind.
    """

    def __init__(
        self, spec: LaunchSpec, line: AgentLine, requests: StopRequests, note: Callable[[str, str], None]
    ) -> None:
        self._spec = spec
        self._line = line
        self._requests = requests
        self._note = note
        self._restarts_left = spec.max_restarts
        self._first_beats: dict[str, int] = {}
        self._has_met = False
        self._is_finished = False

    def until_met(self, look: Callable[[], bool], is_finished: bool) -> WorldFormed | None:
        """Wait until all nodes have met; None when the agent says that there is nothing more to do.

        Args:
            look: hears and shows what is new, and tells whether any other node may still have to start anew.
            is_finished: this node's own workers have done their work.

        Raises:
            KeyboardInterrupt: a person did not want to wait.
            JobCancelled: likewise.
            LaunchError: the nodes did not find each other, and never had before.
        """
        self._is_finished = is_finished
        began_s = time.monotonic()
        patience_s = self._patience_for_agent()
        said = ""
        while True:
            wait_until_readable([self._line.fileno(), self._requests.fileno()], _TICK_S)
            is_anybody_expected = look()
            formed = self._line.take_formed()
            if formed is not None:
                self._has_met = True
                return formed
            if self._line.over is None and self._is_agent_cut_off():
                where = self._line.rendezvous.endpoint
                self._line.end(f"the rendezvous at {where} does not answer any more", can_retry=True)
            over = self._line.over
            if over is not None and not self._try_again(over):
                self._tell_end(over)
                return None
            self._check_terms()
            self._heed_requests()
            if is_finished and not is_anybody_expected:
                self._line.leave(messages.FINISHED)
                return None
            if time.monotonic() - began_s > patience_s:
                self._give_up()
                return None
            if not is_finished and time.monotonic() - began_s > _FIRST_WORD_S:
                said = self._say_who_is_here(said)

    def _patience_for_agent(self) -> float:
        """Seconds in which the agent must have come to something. One that is cut off from the store may never do."""
        if self._is_finished:
            return math.inf  # others may train on for as long as they are heard of
        if self._has_met and not self._spec.max_restarts:
            return _LAST_WORD_S
        return self._spec.rendezvous_timeout_s + _AGENT_SLACK_S

    def _give_up(self) -> None:
        self._line.leave("gave up")
        if not self._has_met or self._spec.max_restarts:
            timeout_s = self._spec.rendezvous_timeout_s
            where = self._line.rendezvous.endpoint
            self._tell_end(self._line.end(f"the nodes did not meet at {where} within {timeout_s:g} s"))

    def _tell_end(self, over: AgentEnded) -> None:
        if not self._has_met:
            raise LaunchError(over.error or "the rendezvous was ended before all nodes had met")
        if over.error and not self._is_finished:
            self._note(over.error, "warning")

    def _try_again(self, over: AgentEnded) -> bool:
        """The node that hosts the store is lost. If that comes back, and restarts are left, so does the job."""
        if not (over.can_retry and self._has_met and self._restarts_left > 0) or self._is_finished:
            return False
        self._note(f"{over.error}; waiting for it to come back", "warning")
        self._restarts_left -= 1
        self._line.restart(self._restarts_left)
        return True

    def _is_agent_cut_off(self) -> bool:
        return self._has_met and not self._is_finished and self._line.is_cut_off()

    def _heed_requests(self) -> None:
        self._requests.acknowledge()
        if self._requests.is_cancelled:
            self._line.leave("was cancelled")
            raise JobCancelled(f"{self._spec.function_name} was cancelled while it waited for other nodes")
        if (self._requests.interrupts or self._requests.terminations) and not self._is_finished:
            self._line.leave("was interrupted")
            raise KeyboardInterrupt

    def _check_terms(self) -> None:
        """Nodes that were launched for different rendezvous would wait for each other until the time is up."""
        if self._has_met:
            return
        for page in self._line.news:
            # The page of a node that has gone, and was launched anew with other settings, does not change any more.
            is_alive = page.count > self._first_beats.setdefault(page.id, page.count)
            if is_alive and page.settings != self._line.rendezvous.shared_settings:
                self._line.leave("was launched with other settings")
                raise LaunchError(
                    f"{page} was launched with {page.settings}, but this one (node "
                    f"{self._spec.node_rank}) with {self._line.rendezvous.shared_settings}: launch all nodes with "
                    "the same"
                )

    def _say_who_is_here(self, said: str) -> str:
        here = [str(news) for news in self._line.news if news.state == messages.JOINING]
        spec = self._spec
        if len(here) + 1 >= spec.max_nodes:
            return said  # torch's rendezvous takes a second or two to see that all are here
        everybody = ", ".join(sorted([f"node {spec.node_rank} (this one)", *here]))
        text = f"waiting at {self._line.rendezvous.endpoint} for {spec.num_nodes} nodes; here: {everybody}"
        if text != said:
            self._note(text, "note")
        return text
