"""One thread beside the training that does what would hold it up."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Worker:
    """Does jobs one after the other, in the order in which they came.

    The thread lives as long as there is something to do, and does not keep the
    process alive: who needs a job done waits for it.
    """

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._running = False

    @property
    def busy(self) -> bool:
        """Whether something is still being done."""
        with self._changed:
            return self._running

    def submit(self, job: Callable[[], None]) -> None:
        """Do something soon.

        Args:
            job: Reports its problems itself: nobody sees what it raises.
        """
        with self._changed:
            self._jobs.append(job)
            if self._running:
                return
            self._running = True
        threading.Thread(target=self._work, name="spec-export", daemon=True).start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until nothing is left to do; a signal's exception ends it too.

        Returns:
            Whether that was so within the time.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, seconds)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._running = False
                    self._changed.notify_all()
                    return
                job = self._jobs.popleft()
            try:
                job()
            except BaseException:
                with self._changed:  # whoever waits must not wait for ever
                    self._jobs.clear()
                    self._running = False
                    self._changed.notify_all()
                raise
