import numpy as np
import pytest

from offline.calibration import by_column, fit_calibration
from schemas.errors import ConfigError
from schemas.output import ModelOutput, read_calibrations
from tests.support.scoring import make_spec


def overconfident(n_rows: int = 20_000) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities whose log-odds are twice what they should be, and what came true."""
    random = np.random.default_rng(0)
    odds = random.normal(0, 1.5, n_rows)
    is_true = random.random(n_rows) < 1 / (1 + np.exp(-odds))
    return (1 / (1 + np.exp(-2 * odds))).astype(np.float32), is_true


def test_probabilities_that_say_too_much_are_put_right():
    table = fit_calibration(*overconfident())

    expected = 1 / (1 + np.exp(-np.array([-2.0, 0.0, 2.0])))
    answered = 1 / (1 + np.exp(-np.array([-4.0, 0.0, 4.0])))
    np.testing.assert_allclose(table.apply(answered), expected, atol=0.02)
    assert (np.diff(table.calibrated) > 0).all(), "no two rows change places"
    assert (table.answered[0], table.answered[-1]) == (0.0, 1.0)


def test_the_points_are_such_as_a_card_may_have_for_yes_and_for_no():
    outputs = tuple(
        ModelOutput(column=column, tensor="probabilities", width=2, index=index, minimum=0, maximum=1)
        for index, column in enumerate(("no", "yes"))
    )
    points = by_column(fit_calibration(*overconfident()), make_spec(outputs=outputs))
    tables = read_calibrations(points, outputs, where="model delay")

    values = np.linspace(0, 1, 11)
    np.testing.assert_allclose(tables["no"].apply(1 - values), 1 - tables["yes"].apply(values), atol=1e-9)


def test_probabilities_that_say_the_opposite_are_refused():
    probabilities, is_true = overconfident()
    with pytest.raises(ConfigError, match=r"calibration on 20000 rows has slope -.*, expected more than 0"):
        fit_calibration(1 - probabilities, is_true)
