"""What went wrong with a rendezvous, in words: who is missing, and what to do."""

from __future__ import annotations

from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

from nblaunch.engines.agent_news import NewsExchange, RankTakenError
from nblaunch.engines.agent_rendezvous import is_connection_error
from nblaunch.engines.elastic import Meeting


def story_of(error: Exception, meeting: Meeting, news: NewsExchange) -> str:
    """What went wrong with the rendezvous, who is missing, and what to do."""
    if isinstance(error, RankTakenError):
        return str(error)
    if isinstance(error, RendezvousTimeoutError):
        return _who_is_missing(str(error), meeting, news.who_is_here())
    if isinstance(error, RendezvousClosedError):
        return (
            f"the rendezvous {meeting.run_id!r} at {meeting.where} is closed: another node has given up or "
            "finished. Launch again on all nodes."
        )
    if not is_connection_error(error):
        return f"the rendezvous at {meeting.where} failed: {type(error).__name__}: {error}"
    if not news.has_begun:
        first = "node 0 is missing" if meeting.backend == "static" else "the node that hosts it is missing"
        return (
            f"node {meeting.node_rank} can't reach the rendezvous at {meeting.where} "
            f"({meeting.timeout_s:g} s): {first}. Is it launched, is that its address, and does no firewall close "
            f"the port? ({_first_line(error)})"
        )
    return f"the rendezvous at {meeting.where} is gone ({_first_line(error)})"


def _who_is_missing(missing: str, meeting: Meeting, here: list[str]) -> str:
    lack = f"{missing} did not come" if missing else f"{meeting.min_nodes - len(here)} more must come"
    return (
        f"the nodes did not find each other at {meeting.where} within {meeting.timeout_s:g} s: {lack}; here "
        f"{'is' if len(here) == 1 else 'are'} {', '.join(here)} of {meeting.min_nodes}. Launch it there with the "
        "same address, or allow more time with rdzv_timeout_s."
    )


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}".strip().splitlines()[0]
