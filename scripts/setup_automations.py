"""Adds the automations of a server: silent runs are marked Crashed, crashed ones are started again.

    PREFECT_API_URL=http://127.0.0.1:4200/api python scripts/setup_automations.py

Run it once for a server, again after a change here. Both watch runs with our tag only.

Prefect sees by itself when a flow dies under a living worker. When both die, the run stays Running, and the slot of its
deployment stays taken, until the first automation has missed its heartbeats: one every 30 s, by prefect.toml and
prefect.yaml. Runs of other projects on the server may send theirs less often.

A crashed run is scheduled again as the same flow run, so it keeps its parameters, its night's window, and the count of
failures without progress that ends it (`flows/stage/attempts.py`).
"""

from datetime import timedelta

from prefect.automations import Automation
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import StateType

TAG = "dflash-train"  # of every deployment in prefect.yaml; a flow run has the tags of its deployment

# Five heartbeats. With 90 s, healthy runs were marked: heartbeats come late when the process is busy.
SILENT_AFTER_S = 150

# A cancelled run is Crashed, too, for its process has ended by a signal, until its worker says why some seconds later.
RESTARTED_AFTER_S = 20

_RUNS = ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]})
_OURS = ResourceSpecification({"prefect.resource.id": [f"prefect.tag.{TAG}"], "prefect.resource.role": ["tag"]})
_ENDS = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled")}


def automations() -> list[Automation]:
    return [silent_runs(), crashed_runs()]


def silent_runs() -> Automation:
    """For each flow run that has sent a heartbeat: no further one, and no end of its process, within the time."""
    return Automation(
        name="Mark silent runs of dflash-train Crashed",
        description=f"A run without a heartbeat for {SILENT_AFTER_S} s is marked Crashed, which frees its slot.",
        enabled=True,
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            # Suspended: its process ends, and another one goes on when it is resumed.
            expect=_ENDS | {f"prefect.flow-run.{what}" for what in ("heartbeat", "Crashed", "Suspended")},
            match=_RUNS,
            match_related=_OURS,
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=SILENT_AFTER_S),
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                message=f"No heartbeat for {SILENT_AFTER_S} s: flow and worker are gone. It goes on from the newest "
                "checkpoint.",
            )
        ],
    )


def crashed_runs() -> Automation:
    """For each flow run that has crashed: neither cancelled nor scheduled again by somebody else within the time."""
    return Automation(
        name="Start crashed runs of dflash-train again",
        description=f"A run that is still Crashed after {RESTARTED_AFTER_S} s is scheduled again, as the same one.",
        enabled=True,
        trigger=EventTrigger(
            after={"prefect.flow-run.Crashed"},
            expect=_ENDS
            | {f"prefect.flow-run.{what}" for what in ("Scheduled", "AwaitingRetry", "Pending", "Running")},
            match=_RUNS,
            match_related=_OURS,
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=RESTARTED_AFTER_S),
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.SCHEDULED,
                name="AwaitingRetry",
                message="It crashed; it is started again and goes on from the newest checkpoint.",
            )
        ],
    )


def main() -> None:
    for wanted in automations():
        try:
            existing = Automation.read(name=wanted.name)
        except (ValueError, PrefectHTTPStatusError):
            wanted.create()
            print(f"Added the automation {wanted.name!r}.")
        else:
            wanted.id = existing.id
            wanted.update()
            print(f"Updated the automation {wanted.name!r}.")


if __name__ == "__main__":
    main()
