"""The server for launchers of an elastic job, in the launcher on the coordinator's host."""

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

from tfdist.coordination import Server
from tfdist.coordination.calls import Handler, Message, Service
from tfdist.coordination.group import NO_GOODBYE, silence_reason
from tfdist.coordination.job_token import join_address, listen, split_address
from tfdist.coordination.messages import WrongSealError, derive_token, nonce
from tfdist.launcher import orders
from tfdist.launcher.job_controller import JobController

LOST_AFTER_SECONDS = 10.0  # without a call; no engine blocks a launcher's threads


class RendezvousServer(Service):
    """Connects other launchers, which poll for orders, to a `JobController`; a context manager."""

    def __init__(self, listener: socket.socket, host: str, token: str, controller: JobController):
        self._host, self._controller = host, controller
        self._changed = threading.Condition()  # guards the attributes below
        self._clients, self._has_ended = 0, False
        self._numbers = itertools.count(1)
        self._group: Server | None = None
        controller.open_group, controller.close_group = self.open_group, self.close_group
        super().__init__({}, token, listener, LOST_AFTER_SECONDS)

    def open_group(self, names: Sequence[str]) -> tuple[str, str]:
        """Serves a group of launchers, which replaces the last group; returns its address and the purpose of its token."""
        self.close_group()
        purpose = nonce()
        listener = listen(join_address(self._host, 0), "Choose another --coordinator, the same on every host.")
        self._group = Server(listener, size=len(names), token=derive_token(self._token, purpose), noun="node")
        return join_address(self._host, split_address(self._group.address)[1]), purpose

    def close_group(self) -> None:
        """Closes the last group, whose launchers then stop waiting; does not affect running processes."""
        if self._group:
            self._group.close("the attempt is over")

    def __enter__(self) -> "RendezvousServer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Closes the server when the launchers have received the outcome of the job."""
        with self._changed:
            self._has_ended = True
            self._changed.wait_for(lambda: not self._clients, LOST_AFTER_SECONDS)
        self.close()
        self.close_group()

    @contextlib.contextmanager
    def client(self, address: str) -> Iterator[Mapping[str, Handler]]:
        """See base class. A launcher joins by its first call; if its connection ends before it has left, it is lost."""
        controller, name = self._controller, f"launcher {next(self._numbers)} ({address})"

        def join(message: Message) -> Message:
            controller.add_launcher(name, [*message.values["places"], address])
            return Message({})

        def order(message: Message) -> Message:
            current_order = controller.order(name)
            if current_order.kind == orders.OrderKind.OVER:
                controller.remove_launcher(name)
            elif self._has_ended:
                raise ConnectionError("the launcher has ended")
            return Message(orders.encode_order(current_order))

        def report(message: Message) -> Message:
            controller.record_report(name, orders.decode_report(message.values))
            return Message({})

        def leave(message: Message) -> Message:
            controller.remove_launcher(name, "has left the job")
            return Message({})

        self._count_clients(1)
        try:
            yield {handler.__name__: handler for handler in (join, order, report, leave)}
        except (OSError, WrongSealError) as error:
            reason = silence_reason(LOST_AFTER_SECONDS) if isinstance(error, TimeoutError) else NO_GOODBYE
            controller.lose_launcher(name, f"is lost: {reason}")
        finally:
            controller.remove_launcher(name)
            self._count_clients(-1)

    def _count_clients(self, change: int) -> None:
        with self._changed:
            self._clients += change
            self._changed.notify_all()
