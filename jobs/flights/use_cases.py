"""What is asked about flights, and how the API answers it."""

from typing import Final

from jobs.flights.model import LATE_ARRIVAL
from jobs.flights.views import airport_departures, carrier_departures
from schemas.use_case import Lookup, UseCase

USE_CASES: Final = [
    UseCase(
        "/v1/flights/{flight_id}/late-arrival",
        model=LATE_ARRIVAL,
        description="Will this flight land late? Its score, once it has departed",
    ),
    UseCase(
        "/v1/airports/{origin}/carriers/{carrier}/departures",
        lookups=(
            Lookup(
                airport_departures, "origin", ("departures_1h", "mean_departure_delay_1h", "max_departure_delay_1h")
            ),
            Lookup(carrier_departures, "carrier"),
        ),
        description="How an airport and a carrier have been doing for the last hour",
    ),
]
