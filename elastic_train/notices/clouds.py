"""Notices of AWS, GCP and Azure, each from the metadata server of its machines; and which of them this machine has.

The pages that say how to ask, by their titles: "Use the Instance Metadata Service to access instance metadata" (Amazon
EC2 User Guide), "View and query VM metadata" (Compute Engine), "Azure Instance Metadata Service". notice.py names those
that say what is answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from elastic_train.notices.metadata import ANSWER_SECONDS, LINK_LOCAL, Answer, ask, refuse
from elastic_train.notices.notice import (
    NoticeSource,
    NoticeUnreadable,
    from_instance_action,
    from_maintenance_event,
    from_preempted,
    from_rebalance,
    from_scheduled_events,
)
from elastic_train.preemption import PreemptionNotice

PROBE_SECONDS = 0.3
"""for finding out which cloud this is"""
GPU_MAINTENANCE_SECONDS = 3600.0
"""GCP's, between the announcement and the end"""
TOKEN_SECONDS = 21600
"""that a token of IMDSv2 is asked for: the longest that there is"""
GOOGLE = {"Metadata-Flavor": "Google"}
AZURE = {"Metadata": "true"}
EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
MACHINE_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"


class TokenSilent(NoticeUnreadable):
    """No answer to a question for a token."""


class AwsSource:
    """IMDSv2: a token first. Each of the two documents is a 404 as long as there is no notice of its kind."""

    name = "aws"
    poll_seconds = 2.0
    """AWS recommends 5 s at most; nodes that are taken together should hear of it within the 3 s before they leave"""

    def __init__(self, address: tuple[str, int] = LINK_LOCAL) -> None:
        self._address = address
        self._token: str | None = None

    def look(self) -> PreemptionNotice | None:
        action = self._document("/latest/meta-data/spot/instance-action")
        if action is not None:
            return from_instance_action(action)
        rebalance = self._document("/latest/meta-data/events/recommendations/rebalance")
        return None if rebalance is None else from_rebalance(rebalance)

    def _document(self, path: str) -> str | None:
        answer = self._ask(path)
        if answer.status == 401:  # the token has run out
            self._token = None
            answer = self._ask(path)
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise refuse(answer, self._address, path)
        return answer.text

    def _ask(self, path: str) -> Answer:
        if self._token is None:
            self._token = aws_token(self._address, ANSWER_SECONDS)
        return ask(self._address, path, {"X-aws-ec2-metadata-token": self._token})


def aws_token(address: tuple[str, int], seconds: float) -> str:
    """A token of IMDSv2. The answer to this PUT is not forwarded further than the instance's hop limit says, so that in
    a container of a network of its own there is none where it is 1.

    Raises: TokenSilent; NoticeUnreadable: it is refused, or none.
    """
    path = "/latest/api/token"
    headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
    try:
        answer = ask(address, path, headers, method="PUT", seconds=seconds)
    except NoticeUnreadable as error:
        raise TokenSilent(f"{error} (in a container the hop limit of IMDSv2 must be 2)") from error
    token = answer.text.strip()
    if answer.status != 200 or not token.isascii() or not token.isprintable() or not token:
        raise refuse(answer, address, path)
    return token


class GcpSource:
    """Two values under /computeMetadata/v1/instance; asked for with a header, and answered with one."""

    name = "gcp"
    poll_seconds = 2.0
    """of the 30 s that there are"""

    def __init__(
        self,
        address: tuple[str, int] = LINK_LOCAL,
        *,
        has_gpu: bool | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._address, self._now = address, now
        self._has_gpu = any(Path("/dev").glob("nvidia[0-9]*")) if has_gpu is None else has_gpu
        self._has_none = False
        """no maintenance has been announced, at the last look"""
        self._announced: float | None = None
        """Unix seconds: when one was, where that was seen"""

    def look(self) -> PreemptionNotice | None:
        preempted = from_preempted(self._value("preempted"))
        if preempted is not None:  # no other answer, nor a failure, could say more
            return preempted
        event = from_maintenance_event(self._value("maintenance-event"))
        has_ending = event is not None and event.is_certain
        if has_ending and self._has_none:
            self._announced = self._now()
        elif not has_ending:
            self._announced = None
        self._has_none = not has_ending
        return self._with_deadline(event) if event is not None and has_ending else event

    def _with_deadline(self, ending: PreemptionNotice) -> PreemptionNotice:
        """A machine with a GPU is ended an hour after its announcement, any other one 60 s after it."""
        if not self._has_gpu:
            return ending
        if self._announced is None:  # announced before this start: to leave would be to leave again at each start
            return replace(ending, is_certain=False)
        return replace(ending, deadline=self._announced + GPU_MAINTENANCE_SECONDS)

    def _value(self, name: str) -> str:
        return required(self._address, f"/computeMetadata/v1/instance/{name}", GOOGLE)


class AzureSource:
    """Scheduled Events of this VM, which it knows by its name. Nothing is acknowledged: that would bring them nearer.

    The first question turns the service on; it may take two minutes to answer.
    """

    name = "azure"
    poll_seconds = 1.0
    """as long as it may take of the 30 s before a Spot VM is taken"""

    def __init__(self, address: tuple[str, int] = LINK_LOCAL) -> None:
        self._address = address
        self._machine: str | None = None

    def look(self) -> PreemptionNotice | None:
        if self._machine is None:
            self._machine = required(self._address, MACHINE_PATH, AZURE).strip()
        return from_scheduled_events(required(self._address, EVENTS_PATH, AZURE), self._machine)


def is_google(answer: Answer) -> bool:
    """Whether Google's server has answered: a proxy, or some other server at that address, does not say so."""
    return answer.headers.get("metadata-flavor") == "Google"


def required(address: tuple[str, int], path: str, headers: Mapping[str, str]) -> str:
    """Raises: NoticeUnreadable."""
    answer = ask(address, path, headers)
    if answer.status != 200 or (headers is GOOGLE and not is_google(answer)):
        raise refuse(answer, address, path)
    return answer.text


def find_cloud(address: tuple[str, int] = LINK_LOCAL, seconds: float = PROBE_SECONDS) -> NoticeSource | None:
    """The cloud that this machine is in, or None. Asks that one address alone, each cloud's own question in turn, until
    one answers as its documentation says. Blocks at most `seconds` for all of them."""
    deadline = time.monotonic() + seconds

    def left() -> float:
        return max(deadline - time.monotonic(), 0.001)

    try:
        google = ask(address, "/computeMetadata/v1/instance/", GOOGLE, seconds=left())
        if is_google(google):
            return GcpSource(address)
        if google.status != 200 and ask(address, MACHINE_PATH, AZURE, seconds=left()).status == 200:
            return AzureSource(address)
        for_token = left()
        aws_token(address, for_token)
    except TokenSilent:  # AWS's, and too many hops: it is asked on, and tells why; or one that is slow with everything
        return AwsSource(address) if for_token > seconds / 2 else None
    except NoticeUnreadable:  # nobody is there, or nobody that we know
        return None
    return AwsSource(address)
