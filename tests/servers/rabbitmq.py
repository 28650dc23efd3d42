"""A private RabbitMQ node with a port mapper (epmd) of its own."""

from pathlib import Path

import amqp

from tests.processes.waiting import port_is_free, wait_for
from tests.servers.programs import find_programs_folder
from tests.servers.server import Server


class RabbitMQServer(Server):
    """RabbitMQ as user guest; slow to start (several seconds), so use it in few tests."""

    name = "rabbitmq"
    program = "rabbitmq-server"
    start_timeout = 180

    def __init__(self) -> None:
        # Its script finds Erlang on the PATH.
        self.erlang = find_programs_folder("epmd", "erl")
        super().__init__()
        self.epmd_port = self._reserve_port()
        self.node_port = self._reserve_port()

    @property
    def url(self) -> str:
        """The default virtual host."""
        return f"amqp://guest:guest@{self.host}:{self.port}//"

    def prepare(self) -> None:
        """
        Write the node's own configuration, so that the system's is not read, and start the mapper.

        The node would start a port mapper that outlives it.
        """
        (self.folder / "rabbitmq.conf").write_text(
            "vm_memory_high_watermark.absolute = 512MB\ndisk_free_limit.absolute = 50MB\n"
        )
        (self.folder / "enabled_plugins").write_text("[].\n")
        epmd = self.keep([self.erlang / "epmd", "-port", str(self.epmd_port)])
        epmd.log_path = self.folder / "epmd.log"
        self._owned.enter_context(epmd)
        wait_for(lambda: not port_is_free(self.epmd_port), message="epmd does not listen")

    def environment(self) -> dict[str, str]:
        """Every folder, port and name that the system's node also has."""
        folder = str(self.folder)
        return {
            **super().environment(),
            "ERL_CRASH_DUMP": f"{folder}/erl_crash.dump",
            "ERL_EPMD_ADDRESS": self.host,
            "ERL_EPMD_PORT": str(self.epmd_port),
            "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq.conf",
            "RABBITMQ_CONF_ENV_FILE": f"{folder}/no-such-file",
            "RABBITMQ_DIST_PORT": str(self.node_port),
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/enabled_plugins",
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_LOG_BASE": folder,
            "RABBITMQ_MNESIA_BASE": f"{folder}/mnesia",
            "RABBITMQ_NODENAME": f"safe-{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": self.host,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_PID_FILE": f"{folder}/pid",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none",
        }

    def command(self) -> list[str | Path]:
        """In the foreground, which is the script's way."""
        return [self.programs / self.program]

    def is_ready(self) -> bool:
        """Whether a client can log in."""
        with amqp.Connection(f"{self.host}:{self.port}", connect_timeout=2):
            return True
