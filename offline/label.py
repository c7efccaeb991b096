"""What a model is trained to tell."""

from dataclasses import dataclass

from schemas.view import FeatureView


@dataclass(frozen=True, kw_only=True)
class Label:
    """What comes true later: a value in a row of another view, told by an as-of row.

    Attributes:
        view: View whose as-of rows tell it.
        entity: Column of those rows that names what was scored.
        value: Their column that is compared.
        above: The label is true where the value is greater.
    """

    view: FeatureView
    entity: str
    value: str
    above: float

    def __str__(self) -> str:
        return f"{self.view.name}.{self.value} > {self.above:g}"
