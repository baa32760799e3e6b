"""The threads of an engine's products: none while it is built, the configured number where it runs."""

import threading
from collections.abc import Callable

import torch

from outrider.engine.forward_threads import ForwardThreads, compute_alone


def in_a_thread(*work: Callable[[], None]) -> int:
    """Threads that torch uses in a new thread, after `work` has been done there."""
    found: list[int] = []

    def run() -> None:
        for one in work:
            one()
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_the_thread_that_runs_an_engine_gets_its_threads_whoever_built_it() -> None:
    before = torch.get_num_threads()
    try:
        compute_alone()
        assert torch.get_num_threads() == 1
        threads = ForwardThreads(3)
        assert in_a_thread(threads.claim) == 3
        assert torch.get_num_threads() == 1  # the builder stays alone
        # Another thread that takes the engine over gets them as well, and so does one that had fewer.
        assert in_a_thread(compute_alone, threads.claim, threads.claim) == 3
        threads.claim()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
