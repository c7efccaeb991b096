"""How much may be sent: the generic cell rate algorithm, as a script of the store and by itself. Pure.

The algorithm is that of ITU-T Recommendation I.371, Annex A, in its form of virtual scheduling: a limit keeps one
number, the time at which all that was taken would be through at the steady rate (the theoretical arrival time). A
request may go if that time, moved on by what it takes, lies no further ahead than a full burst. It does what a token
bucket does, with no clock that fills it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from streams.serving.producer_key import Rate

TAKE: Final = """
-- KEYS: one per limit, then the keys of producers.
-- ARGV: events to take; then one value per key: microseconds an event, a space, microseconds of a full burst; '' last.
-- The reply: '1' where the events were taken from all limits, else '0', nothing being taken; for each limit, how far
-- ahead its time lies now, in microseconds; the version of the keys. Numbers are text: a reply would cut them.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local events = tonumber(ARGV[1])
local limits = #KEYS - 1
local ahead, after = {}, {}
local is_taken = true
for i = 1, limits do
  local interval, burst = string.match(ARGV[i + 1], '^(%S+) (%S+)$')
  ahead[i] = math.max(0, tonumber(redis.call('GET', KEYS[i]) or '0') - now)
  after[i] = ahead[i] + events * tonumber(interval)
  -- A microsecond is what a double of this size is sure of.
  is_taken = is_taken and after[i] <= tonumber(burst) + 1
end
local reply = {is_taken and '1' or '0'}
for i = 1, limits do
  if is_taken then
    ahead[i] = after[i]
    redis.call('SET', KEYS[i], string.format('%.17g', now + after[i]), 'PX', math.ceil(after[i] / 1000) + 1)
  end
  reply[i + 1] = string.format('%.17g', ahead[i])
end
reply[limits + 2] = redis.call('GETRANGE', KEYS[#KEYS], 0, 19)
return reply
"""


def limit_argument(rate: Rate) -> bytes:
    """Write a limit as the script reads it."""
    return f"{interval_us(rate)!r} {interval_us(rate) * rate.burst!r}".encode()


def interval_us(rate: Rate) -> float:
    """Microseconds that an event takes at the steady rate."""
    return 1e6 / rate.per_s


@dataclass(frozen=True)
class Limit:
    """A limit after a request.

    Attributes:
        name: ``client`` or ``global``.
        rate: What it allows.
        ahead_us: How far ahead its time lies, microseconds.
    """

    name: str
    rate: Rate
    ahead_us: float

    @property
    def remaining(self) -> int:
        """Events that may be sent at once now."""
        return max(0, int(self.rate.burst - self.ahead_us / interval_us(self.rate) + 1e-6))

    @property
    def full_in_s(self) -> int:
        """Whole seconds until a full burst may be sent again."""
        return -int(-self.ahead_us // 1e6)

    def wait_us(self, events: int) -> float:
        """Microseconds until so many events may be sent; 0 or less: now."""
        return self.ahead_us - interval_us(self.rate) * (self.rate.burst - events)


class LocalLimits:
    """Limits of this process alone, for when the store is away; the script's steps, one by one."""

    def __init__(self) -> None:
        self._times_us: dict[str, float] = {}

    def take(self, limits: Sequence[tuple[str, Rate]], *, events: int, now_us: int) -> tuple[bool, list[float]]:
        """Take events from all limits, or from none.

        Args:
            limits: Key and rate of each.
            events: How many.
            now_us: The time, microseconds of any clock that does not go back.

        Returns:
            Whether they were taken, and for each limit how far ahead its time lies now.
        """
        self._times_us = {key: time_us for key, time_us in self._times_us.items() if time_us > now_us}
        ahead = [max(0.0, self._times_us.get(key, 0.0) - now_us) for key, _ in limits]
        after = [before + events * interval_us(rate) for before, (_, rate) in zip(ahead, limits, strict=True)]
        if any(us > interval_us(rate) * rate.burst + 1 for us, (_, rate) in zip(after, limits, strict=True)):
            return False, ahead
        for (key, _), us in zip(limits, after, strict=True):
            self._times_us[key] = now_us + us
        return True, after
