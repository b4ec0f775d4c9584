"""A real S3 server on this machine, and the credentials for it where the libraries look for them."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def s3(s3_address: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    import fsspec

    for name, value in {
        "AWS_ENDPOINT_URL": s3_address,
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    system = fsspec.filesystem("s3", use_listings_cache=False)
    if not system.exists("bucket"):
        system.mkdir("bucket")
    for path in system.find("bucket"):
        system.rm(path)
    yield system
    fsspec.get_filesystem_class("s3").clear_instance_cache()
