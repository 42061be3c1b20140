"""Fixtures: jobs that are closed when their test ends, and that must leave nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.store.cuda.jobs import Job, two_gpus
from tricomm.store.arenas.cuda_arena import CudaArena


@pytest.fixture
def verified() -> Iterator[Callable[[Job], Job]]:
    jobs: list[Job] = []

    def verify_later(job: Job) -> Job:
        jobs.append(job)
        return job

    yield verify_later
    for job in jobs:
        job.end()


@pytest.fixture
def job(verified: Callable[[Job], Job]) -> Job:
    return verified(two_gpus())


@pytest.fixture
def arenas(job: Job) -> list[CudaArena]:
    return job.open_all()
