"""Notices of AWS, GCP and Azure from their metadata servers; and detection of the cloud that this machine is in.

These pages define the requests, by title: "Use the Instance Metadata Service to access instance metadata" (Amazon EC2
User Guide), "View and query VM metadata" (Compute Engine), "Azure Instance Metadata Service". notice.py names the pages
that define the answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from elastic_train.notices.metadata import ANSWER_SECONDS, LINK_LOCAL, Answer, ask
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
"""The time limit for the detection of the cloud."""
GPU_MAINTENANCE_SECONDS = 3600.0
"""GCP's time from the announcement to the end of a machine with a GPU."""
TOKEN_SECONDS = 21600
"""The requested lifetime of a token of IMDSv2: the maximum."""
GOOGLE = {"Metadata-Flavor": "Google"}
AZURE = {"Metadata": "true"}
EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
MACHINE_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"


class TokenSilent(NoticeUnreadable):
    """A request for a token got no answer."""


class AwsSource:
    """IMDSv2, which needs a token. Each of the two documents is a 404 as long as there is no notice of its kind."""

    name = "aws"
    poll_seconds = 2.0
    """AWS recommends 5 s at most. Nodes that are taken together should notice within the 3 s before they leave."""

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
        if answer.status == 401:  # the token has expired
            self._token = None
            answer = self._ask(path)
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise answer.refused()
        return answer.text

    def _ask(self, path: str) -> Answer:
        if self._token is None:
            self._token = aws_token(self._address, ANSWER_SECONDS)
        return ask(self._address, path, {"X-aws-ec2-metadata-token": self._token})


def aws_token(address: tuple[str, int], seconds: float) -> str:
    """Request a token of IMDSv2. The answer travels only as many hops as the instance's hop limit. With a limit of 1 no
    answer reaches a container with its own network.

    Raises: TokenSilent; NoticeUnreadable: the request is refused, or the answer is no token.
    """
    path = "/latest/api/token"
    headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
    try:
        answer = ask(address, path, headers, method="PUT", seconds=seconds)
    except NoticeUnreadable as error:
        raise TokenSilent(f"{error} (in a container the hop limit of IMDSv2 must be 2)") from error
    token = answer.text.strip()
    if answer.status != 200 or not token.isascii() or not token.isprintable() or not token:
        raise answer.refused()
    return token


class GcpSource:
    """Two values under /computeMetadata/v1/instance. Request and answer carry the header Metadata-Flavor."""

    name = "gcp"
    poll_seconds = 2.0
    """A small part of the 30 s between notice and end."""

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
        """Whether the last look found no maintenance announced."""
        self._announced: float | None = None
        """The time of the announcement in Unix seconds, if it came during this process."""

    def look(self) -> PreemptionNotice | None:
        preempted = from_preempted(self._value("preempted"))
        if preempted is not None:  # no other answer could add to this, so a failure must not hide it
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
        """Add the deadline of a machine with a GPU, an hour after the announcement. Other machines end after 60 s."""
        if not self._has_gpu:
            return ending
        if self._announced is None:  # announced before this start: a certain notice would end every restart
            return replace(ending, is_certain=False)
        return replace(ending, deadline=self._announced + GPU_MAINTENANCE_SECONDS)

    def _value(self, name: str) -> str:
        return required(self._address, f"/computeMetadata/v1/instance/{name}", GOOGLE)


class AzureSource:
    """Scheduled Events for this VM, by its name. Nothing is acknowledged, because that would start events earlier.

    The first request enables the service; its answer may take two minutes.
    """

    name = "azure"
    poll_seconds = 1.0
    """A small part of the 30 s between notice and end of a Spot VM."""

    def __init__(self, address: tuple[str, int] = LINK_LOCAL) -> None:
        self._address = address
        self._machine: str | None = None

    def look(self) -> PreemptionNotice | None:
        if self._machine is None:
            self._machine = required(self._address, MACHINE_PATH, AZURE).strip()
        return from_scheduled_events(required(self._address, EVENTS_PATH, AZURE), self._machine)


def is_google(answer: Answer) -> bool:
    """Whether Google's server has answered: a proxy or another server at that address does not send this header."""
    return answer.headers.get("metadata-flavor") == "Google"


def required(address: tuple[str, int], path: str, headers: Mapping[str, str]) -> str:
    """Raises: NoticeUnreadable."""
    answer = ask(address, path, headers)
    if answer.status != 200 or (headers is GOOGLE and not is_google(answer)):
        raise answer.refused()
    return answer.text


def find_cloud(address: tuple[str, int] = LINK_LOCAL, seconds: float = PROBE_SECONDS) -> NoticeSource | None:
    """The source of the cloud that this machine is in, or None. Sends each cloud's own request in turn, to this address
    only, until an answer is as documented. Blocks at most `seconds` for all requests."""
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
    except TokenSilent:  # AWS beyond its hop limit (polling it logs that), or a server that is slow with everything
        return AwsSource(address) if for_token > seconds / 2 else None
    except NoticeUnreadable:  # no server, or an unknown one
        return None
    return AwsSource(address)
