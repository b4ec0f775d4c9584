"""What people see of a run, in a real browser (Debian's chromium).

make test-ui         # about two minutes
make screenshots     # the same, and writes docs/flow-run.png
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect_site import ROOT, Site
from tiny_run import EPOCHS, tiny_tree

pytestmark = [pytest.mark.ui, pytest.mark.timeout(900)]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    assert CHROMIUM, "chromium is needed: apt-get install chromium"
    directory = tmp_path_factory.mktemp("site")

    def changes(deployments: dict[str, Any]) -> None:
        deployments["demo"]["parameters"] = tiny_tree(directory) | {"name": "ui"}

    site = Site(directory, changes)
    try:
        site.start_server()
        site.deploy()
        site.start_worker()
        yield site
    finally:
        site.close()


@pytest.fixture(scope="module")
def flow_run(site: Site) -> str:
    run = site.run_deployment("full/demo")
    site.wait_for_state(run, "Completed", timeout_s=400)
    return run


def browse(site: Site, path: str, screenshot: Path | None = None) -> str:
    """The page's text once its scripts have run."""
    address = f"http://127.0.0.1:{site.port}{path}"
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--window-size=1500,1400",
        "--virtual-time-budget=20000",
        f"--user-data-dir={site.directory / 'chromium'}",
    ]
    if screenshot is not None:
        subprocess.run(
            [CHROMIUM, *options, f"--screenshot={screenshot}", address], check=True, capture_output=True, timeout=180
        )
    done = subprocess.run(
        [CHROMIUM, *options, "--dump-dom", address], check=True, capture_output=True, text=True, timeout=180
    )
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", done.stdout))


def test_page_of_the_run_says_what_it_is_and_what_came_of_it(site: Site, flow_run: str) -> None:
    text = browse(site, f"/runs/flow-run/{flow_run}")
    assert f"full ui {EPOCHS} epochs" in text
    assert "Completed" in text
    assert "train: " in text, "our log lines"


def test_artifacts_of_the_run_show_how_it_went(site: Site, flow_run: str) -> None:
    screenshot = site.directory / "flow-run.png"
    text = browse(site, f"/v2/runs/flow-run/{flow_run}?tab=Artifacts", screenshot)
    for what in ("ui-train-progress", "ui-pipeline", "ui-loss", "ui-tau", "ui-report", "token-cache", "sample-rows"):
        assert what in text, what
    assert screenshot.stat().st_size > 10_000
    if os.environ.get("DFLASH_SCREENSHOTS"):
        shutil.copy(screenshot, ROOT / "docs/flow-run.png")


def test_form_of_a_deployment_shows_typed_parameters_with_descriptions(site: Site) -> None:
    deployment = site.call("GET", "/deployments/name/train/train")
    text = browse(site, f"/deployments/deployment/{deployment['id']}/run")
    for what in ("rows", "target", "drafter", "training", "name of the run"):
        assert what in text, what
