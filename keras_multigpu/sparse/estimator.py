"""What scikit-learn asks of an estimator, for one that does not need scikit-learn."""

from __future__ import annotations

import abc
from typing import Any

from keras_multigpu.sparse import settings


class Estimator(abc.ABC):
    """Settings that can be read, changed and cloned, and what pipelines ask for; abstract."""

    @property
    @abc.abstractmethod
    def is_ready(self) -> bool:
        """Whether everything is known that `transform` needs."""

    @abc.abstractmethod
    def _prepare(self) -> None:
        """Checks the settings, and forgets what was fitted."""

    @abc.abstractmethod
    def fit(self, table: Any, y: Any = None) -> Any:
        """Estimates what was not given."""

    @abc.abstractmethod
    def transform(self, table: Any) -> Any:
        """The rows of a table in another form."""

    def fit_transform(self, table: Any, y: Any = None) -> Any:
        """`fit`, then `transform`."""
        return self.fit(table).transform(table)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The settings, by name."""
        return {name: getattr(self, name) for name in settings.NAMES}

    def set_params(self, **changes: Any) -> Any:
        """Changes settings; estimated cardinalities are forgotten.

        Raises:
            ValueError: if a setting is unknown, or its value is not of its kind.
        """
        for name, value in changes.items():
            if name not in settings.NAMES:
                raise ValueError(
                    f"An encoder has the settings {', '.join(settings.NAMES)}. "
                    f"Received: {name}={value!r}."
                )
            setattr(self, name, value)
        self._prepare()
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return self.is_ready

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import InputTags, Tags, TargetTags, TransformerTags

        return Tags(
            estimator_type=None,
            target_tags=TargetTags(required=False),
            transformer_tags=TransformerTags(),
            input_tags=InputTags(string=True, categorical=True, allow_nan=True),
            requires_fit=False,
        )

    def __repr__(self) -> str:
        given = (f"{name}={value!r}" for name, value in self.get_params().items())
        return f"{type(self).__name__}({', '.join(given)})"
