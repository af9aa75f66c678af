"""Chemprop's message passing over molecules, to learn a property that RDKit computes of the molecules it ships."""

from pathlib import Path

import lightning as L
import numpy as np
from chemprop import data, models, nn
from program import Losses, main
from rdkit import Chem, RDConfig, RDLogger
from rdkit.Chem.Crippen import MolLogP


def train(strategy: str, seed: int, losses: Losses) -> None:
    RDLogger.DisableLog("rdApp.*")
    lines = Path(RDConfig.RDDataDir, "NCI", "first_5K.smi").read_text().splitlines()[:1200]
    molecules = [m for m in map(Chem.MolFromSmiles, (line.split()[0] for line in lines)) if m and m.GetNumBonds()]
    points = [data.MoleculeDatapoint(m, np.array([MolLogP(m)])) for m in molecules]
    training, held_out = (data.MoleculeDataset(each) for each in (points[:1024], points[1024:]))
    training.cache = held_out.cache = True
    scaler = training.normalize_targets()
    held_out.normalize_targets(scaler)
    model = models.MPNN(nn.BondMessagePassing(), nn.MeanAggregation(), nn.RegressionFFN(), batch_norm=True)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, callbacks=[losses], max_epochs=8, check_val_every_n_epoch=2,
        enable_checkpointing=False, enable_progress_bar=False, logger=False,
    )  # fmt: skip
    trainer.fit(
        model,
        data.build_dataloader(training, batch_size=16, seed=seed),
        data.build_dataloader(held_out, batch_size=64, shuffle=False),
    )


if __name__ == "__main__":
    main(train, "val_loss")
