"""Train from a config file; every option in it can also be given, or overridden, on the command line.

    python examples/cli.py fit --config examples/configs/by_name.yaml
    python examples/cli.py fit --config examples/configs/by_name.yaml --trainer.strategy ok_topk
    python examples/cli.py fit --config examples/configs/micro.yaml --trainer.strategy.compressor.density 0.1
    python examples/cli.py fit --config examples/configs/micro.yaml --print_config

Needs `pip install ".[cli,examples]"` in a checkout.
"""

from digits import Digits, DigitsClassifier
from lightning.pytorch.cli import LightningCLI

import lightning_sparse  # noqa: F401  makes the names of the strategies known, in every process


def main() -> LightningCLI:
    return LightningCLI(DigitsClassifier, Digits)


if __name__ == "__main__":
    main()
