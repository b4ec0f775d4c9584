"""What people see in the UI, sent by one thread beside the watching task.

A call to the server takes 20 to 40 ms and may block for half a minute while the server restarts, so nothing here is
ever waited for while a stage runs; an error is logged and the run goes on.
"""

import base64
import contextvars
import json
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.context import FlowRunContext, TaskRunContext
from prefect.utilities.context import get_task_and_flow_run_ids

from flows.show.progress import StageProgress

logger = logging.getLogger("flows.show.artifacts")

UPDATE_EVERY_S = 10.0
LAST_WORDS_S = 10.0  # how long the end of a stage waits for a slow server


class Reporter:
    """Takes what there is to show without waiting, and sends it from its own thread."""

    def __init__(self, run_name: str, stage: str) -> None:
        self._run_name = run_name
        self._stage = stage
        self._changed = threading.Condition()
        self._latest: StageProgress | None = None
        self._pending: deque[Callable[[], object]] = deque()
        self._closing = self._closed = False
        self._next_update = 0.0
        self._sent: dict[str, UUID] = {}
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        # The thread sends in the name of the task that started it: Prefect knows that by context variables.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._send_all,), name="reporter", daemon=True)
        self._thread.start()

    def show(self, progress: StageProgress) -> None:
        """Only the newest is sent."""
        with self._changed:
            self._latest = progress
            self._changed.notify()

    # What is shown is made in the reporter's thread, too: a mistake in a table must not end a run.

    def markdown(self, what: str, make: Callable[[], str], description: str) -> None:
        self._post(what, "markdown", lambda: (make(), description))

    def table(self, what: str, make: Callable[[], list[dict[str, object]]], description: str) -> None:
        self._post(what, "table", lambda: (json.dumps(make()), description))

    def image(self, what: str, make: Callable[[], str], description: str) -> None:
        """An SVG image. It travels in its own address: there is no other place that a browser could load it from."""

        def address() -> str:
            return "data:image/svg+xml;base64," + base64.b64encode(make().encode()).decode()

        self._post(what, "image", lambda: (address(), description))

    def close(self) -> None:
        """Sends what is left; gives up on a server that does not answer."""
        if self._thread is None:
            return
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(LAST_WORDS_S)
        if self._thread.is_alive():
            logger.warning(
                "The Prefect server is slow to answer; the last artifacts of %s may be missing.", self._stage
            )

    def _post(self, what: str, kind: str, make: Callable[[], tuple[object, str]]) -> None:
        key = re.sub(r"[^a-z0-9]+", "-", f"{self._run_name}-{what}".lower()).strip("-")
        with self._changed:
            self._pending.append(lambda: self._send(key, kind, *make()))
            self._changed.notify()

    def _send(self, key: str, kind: str, data: object, description: str) -> None:
        """What is sent again takes the place of what was there."""
        if key not in self._sent:
            self._sent[key] = send_new(key, kind, data, description)
        else:
            send_again(self._sent[key], data, description)

    def _send_all(self) -> None:
        while not self._closed:
            with self._changed:
                self._changed.wait_for(self._has_work, timeout=UPDATE_EVERY_S)
                actions = [*self._pending]
                self._pending.clear()
                if self._is_due() or self._closing:
                    latest, self._latest = self._latest, None
                else:
                    latest = None
                self._closed = self._closing
            if latest is not None:
                self._next_update = time.monotonic() + UPDATE_EVERY_S
                self._post_progress(latest)
                with self._changed:
                    actions += self._pending
                    self._pending.clear()
            for action in actions:
                self._try(action)

    def _has_work(self) -> bool:
        return bool(self._pending) or self._closing or self._is_due()

    def _is_due(self) -> bool:
        return self._latest is not None and time.monotonic() >= self._next_update

    def _post_progress(self, progress: StageProgress) -> None:
        percent = 100 * (progress.share or 0.0)
        text = f"{progress.counts}  {progress.message}".strip()
        self._post(f"{self._stage}-progress", "progress", lambda: (percent, text))

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            logger.warning("An artifact of %s could not be sent: %s: %s", self._stage, type(error).__name__, error)


def send_new(key: str, kind: str, data: object, description: str) -> UUID:
    task_run, flow_run = get_task_and_flow_run_ids()
    artifact = ArtifactCreate(
        type=kind, key=key, description=description, data=data, task_run_id=task_run, flow_run_id=flow_run
    )
    with get_client(sync_client=True) as client:
        return client.create_artifact(artifact).id


def send_again(artifact: UUID, data: object, description: str) -> None:
    with get_client(sync_client=True) as client:
        client.update_artifact(artifact, ArtifactUpdate(data=data, description=description))


@contextmanager
def reporting(run_name: str, stage: str) -> Iterator[Reporter]:
    """The reporter of one stage; after the stage it has sent what it could."""
    reporter = Reporter(run_name, stage)
    if FlowRunContext.get() is not None or TaskRunContext.get() is not None:
        reporter.start()  # else there is nobody to tell: a dry run, a plain call
    try:
        yield reporter
    finally:
        reporter.close()
