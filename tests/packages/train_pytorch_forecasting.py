"""PyTorch Forecasting's temporal fusion transformer, on the series that the package generates."""

import lightning as L
from program import Losses, main
from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data.examples import generate_ar_data


def train(strategy: str, seed: int, losses: Losses) -> None:
    data = generate_ar_data(seasonality=10.0, timesteps=120, n_series=100, seed=0)
    data["series"] = data.series.astype(str)
    training = TimeSeriesDataSet(
        data[data.time_idx < 108],
        time_idx="time_idx",
        target="value",
        group_ids=["series"],
        max_encoder_length=24,
        max_prediction_length=6,
        static_categoricals=["series"],
        time_varying_known_reals=["time_idx"],
        time_varying_unknown_reals=["value"],
    )
    held_out = TimeSeriesDataSet.from_dataset(training, data, min_prediction_idx=108)
    model = TemporalFusionTransformer.from_dataset(
        training, learning_rate=3e-3, hidden_size=72, attention_head_size=4, loss=QuantileLoss()
    )
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, callbacks=[losses], max_steps=240, val_check_interval=60,
        check_val_every_n_epoch=None, enable_checkpointing=False, enable_progress_bar=False, logger=False,
        gradient_clip_val=0.1,
    )  # fmt: skip
    trainer.fit(model, training.to_dataloader(batch_size=16), held_out.to_dataloader(train=False, batch_size=128))


if __name__ == "__main__":
    main(train, "val_loss")
