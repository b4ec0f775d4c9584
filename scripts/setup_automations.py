"""Adds the automation that marks silent runs Crashed; run it once for a server, again after a change here.

    PREFECT_API_URL=http://127.0.0.1:4200/api python scripts/setup_automations.py

Prefect sees by itself when a flow dies under a living worker. When both die, the run stays Running, and the slot of its
deployment stays taken, until this automation has missed its heartbeats: one every 30 s, by prefect.toml and
prefect.yaml. Runs of other projects on the server may send theirs less often, so only runs with our tag are watched.
"""

from datetime import timedelta

from prefect.automations import Automation
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import StateType

NAME = "Mark silent runs of dflash-train Crashed"
TAG = "dflash-train"  # of every deployment in prefect.yaml; a flow run has the tags of its deployment

# Five heartbeats. With 90 s, healthy runs were marked: heartbeats come late when the process is busy.
SILENT_AFTER_S = 150


def automation() -> Automation:
    """For each flow run that has sent a heartbeat: no further one, and no end of its process, within the time."""
    return Automation(
        name=NAME,
        description=f"A run without a heartbeat for {SILENT_AFTER_S} s is marked Crashed, which frees its slot.",
        enabled=True,
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={
                "prefect.flow-run.heartbeat",
                "prefect.flow-run.Completed",
                "prefect.flow-run.Failed",
                "prefect.flow-run.Cancelled",
                "prefect.flow-run.Crashed",
                "prefect.flow-run.Suspended",  # its process ends, and another one goes on when it is resumed
            },
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            match_related=ResourceSpecification(
                {"prefect.resource.id": [f"prefect.tag.{TAG}"], "prefect.resource.role": ["tag"]}
            ),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=SILENT_AFTER_S),
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                message=f"No heartbeat for {SILENT_AFTER_S} s: flow and worker are gone. The next run goes on from the "
                "newest checkpoint.",
            )
        ],
    )


def main() -> None:
    wanted = automation()
    try:
        existing = Automation.read(name=NAME)
    except (ValueError, PrefectHTTPStatusError):
        wanted.create()
        print(f"Added the automation {NAME!r} (after {SILENT_AFTER_S} s).")
        return
    wanted.id = existing.id
    wanted.update()
    print(f"Updated the automation {NAME!r} (after {SILENT_AFTER_S} s).")


if __name__ == "__main__":
    main()
