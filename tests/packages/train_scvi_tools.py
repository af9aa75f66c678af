"""scvi-tools' variational autoencoder of gene expression, on counts drawn from a few kinds of cells."""

import anndata
import numpy as np
import scvi
from program import Losses, main


def train(strategy: str, seed: int, losses: Losses) -> None:
    random = np.random.default_rng(0)
    kinds, weights = random.gamma(0.5, 2.0, (8, 1000)), random.dirichlet(np.ones(8) / 2, 2560)
    cells = anndata.AnnData(random.poisson(weights @ kinds).astype(np.float32))
    scvi.model.SCVI.setup_anndata(cells)
    scvi.settings.seed = seed
    model = scvi.model.SCVI(cells, n_hidden=128)
    model.train(
        accelerator="cpu", devices=2, strategy=strategy, callbacks=[losses], max_epochs=24, batch_size=128,
        check_val_every_n_epoch=6, num_sanity_val_steps=2, enable_progress_bar=False, plan_kwargs={"lr": 2e-3},
    )  # fmt: skip


if __name__ == "__main__":
    main(train, "validation_loss", unused=True)
