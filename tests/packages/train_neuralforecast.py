"""NeuralForecast's N-HiTS, on series that the package generates."""

from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS
from neuralforecast.utils import generate_series
from program import Losses, main


def train(strategy: str, seed: int, losses: Losses) -> None:
    series = generate_series(64, min_length=300, max_length=300, seed=0)
    model = NHITS(
        h=14, input_size=42, mlp_units=3 * [[256, 256]], scaler_type="standard", random_seed=seed, max_steps=200,
        val_check_steps=50, batch_size=16, windows_batch_size=64, accelerator="cpu", devices=2, strategy=strategy,
        callbacks=[losses], logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    NeuralForecast([model], freq="D").fit(series, val_size=28)


if __name__ == "__main__":
    main(train, "ptl/val_loss")
