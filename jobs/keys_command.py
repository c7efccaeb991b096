"""``headrace keys``: who may send events over HTTP, to which sources, and how many."""

import asyncio
import json
import os
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console

from jobs.application import load_application
from jobs.reach import reach_redis
from jobs.settings import Settings
from schemas.errors import ConfigError
from schemas.time import format_rfc3339
from schemas.topology import connect
from streams.serving.producer_key import ALL_SOURCES, KeyRing, ProducerKey, Rate, digest_of, make_secret
from streams.serving.producer_store import ProducerStore

app = typer.Typer(help="Keys of those who send events over HTTP.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON in place of text.")]
Name = Annotated[str, typer.Argument(help="Who has the key.", show_default=False)]
_TIMEOUT_S = 5.0


@app.command()
def create(
    name: Name,
    *,
    source: Annotated[
        list[str] | None,
        typer.Option(help="Topic of an event source that it is good for; `*`: all. May be repeated.", show_default="*"),
    ] = None,
    rate: Annotated[int, typer.Option(help="Events a second in the long run.")] = 1_000,
    burst: Annotated[
        int | None,
        typer.Option(help="Events at once after a pause.", show_default="the rate, or 10000 where it is less"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key, and print it: this once, for its hash alone is kept."""
    settings = Settings.from_environment(os.environ)
    known = connect(list(load_application(settings.application).views.values())).sources
    sources = tuple(dict.fromkeys(source or [ALL_SOURCES]))
    for each in sources:
        if each != ALL_SOURCES and each not in known:
            msg = f"there is no source {each!r}, expected one of {sorted(known)} or `*`"
            raise ConfigError(msg)
    secret = make_secret()
    key = ProducerKey(
        name=name,
        digest=digest_of(secret),
        sources=sources,
        rate=Rate(rate, max(rate, 10_000) if burst is None else burst),
        created_at=_now(),
    )
    _change(settings, lambda ring: ring.with_key(key))
    if as_json:
        typer.echo(json.dumps({**_document(key), "key": secret}, indent=2))
        return
    typer.echo(secret)
    typer.echo(
        f"The key of {name}; it is not kept and cannot be shown again. Send it as `Authorization: Bearer KEY`.",
        err=True,
    )


@app.command("list")
def list_(*, as_json: AsJson = False) -> None:
    """List the keys, the oldest first: what they are good for, and never the keys themselves."""
    keys = _read(Settings.from_environment(os.environ)).keys
    if as_json:
        typer.echo(json.dumps([_document(key) for key in keys], indent=2))
        return
    if not keys:
        typer.echo("There are no keys; `headrace keys create NAME` makes one.")
        return
    console = Console(highlight=False)
    for key in keys:
        revoked = f"  [yellow]revoked {key.revoked_at}[/]" if key.revoked_at else ""
        console.print(
            f"[bold]{key.name}[/]  {' '.join(key.sources)}  {key.rate.per_s}/s, {key.rate.burst} at once  "
            f"since {key.created_at}{revoked}",
            soft_wrap=True,
        )


@app.command()
def revoke(name: Name, *, as_json: AsJson = False) -> None:
    """Take a key back: its next request is refused."""
    now = _now()
    ring = _change(Settings.from_environment(os.environ), lambda ring: ring.with_revoked(name, at=now))
    revoked = next(key for key in reversed(ring.keys) if key.name == name)
    typer.echo(json.dumps(_document(revoked), indent=2) if as_json else f"{name} may send nothing any more")


def _read(settings: Settings) -> KeyRing:
    return asyncio.run(_with_store(settings, lambda store: store.read_ring()))


def _change(settings: Settings, make: Callable[[KeyRing], KeyRing]) -> KeyRing:
    return asyncio.run(_with_store(settings, lambda store: store.change_ring(make)))


async def _with_store(settings: Settings, work: Callable[[ProducerStore], Any]) -> KeyRing:
    url = settings.address("redis")
    reach_redis(url)
    async with ProducerStore(url, timeout_s=_TIMEOUT_S) as store:
        ring: KeyRing = await work(store)
        return ring


def _document(key: ProducerKey) -> dict[str, Any]:
    return {
        "name": key.name,
        "sources": list(key.sources),
        "rate": key.rate.per_s,
        "burst": key.rate.burst,
        "created_at": key.created_at,
        "revoked_at": key.revoked_at,
        "sha256": key.digest,
    }


def _now() -> str:
    return format_rfc3339(time.time_ns() // 1_000)
