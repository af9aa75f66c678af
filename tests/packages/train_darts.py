"""Darts' N-BEATS, on series that the package generates."""

import numpy as np
from darts.models import NBEATSModel
from darts.utils.timeseries_generation import gaussian_timeseries, sine_timeseries
from program import Losses, main


def train(strategy: str, seed: int, losses: Losses) -> None:
    np.random.seed(0)
    series = [
        (sine_timeseries(length=400, value_frequency=1 / (10 + each)) + gaussian_timeseries(length=400, std=0.2))
        .astype(np.float32)
        for each in range(8)
    ]  # fmt: skip
    options = {"accelerator": "cpu", "devices": 2, "strategy": strategy, "callbacks": [losses],
               "enable_progress_bar": False}  # fmt: skip
    model = NBEATSModel(
        36, 12, generic_architecture=True, num_stacks=4, layer_widths=160, batch_size=32, n_epochs=6,
        random_state=seed, pl_trainer_kwargs=options,
    )  # fmt: skip
    model.fit([each[:340] for each in series], val_series=[each[304:] for each in series])


if __name__ == "__main__":
    main(train, "val_loss")
