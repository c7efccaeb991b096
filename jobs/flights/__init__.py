"""The application that ships with Headrace: the flights of New York City's airports in 2013."""

from jobs.flights.model import LATE_ARRIVAL
from jobs.flights.use_cases import USE_CASES
from jobs.flights.views import VIEWS

MODELS = [LATE_ARRIVAL]

__all__ = ["MODELS", "USE_CASES", "VIEWS"]
