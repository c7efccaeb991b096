"""The application of ``headrace bench offline``: the view of the job, every event with its row."""

from typing import Final

from jobs.bench.job import make_view

NAME: Final = "bench"
VIEWS: Final = [make_view("every_event")]
