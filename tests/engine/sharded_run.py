"""Under torchrun: train sharded, be stopped by a signal after update 3, go on from the checkpoint to the end."""

import json
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from vmamba_npu.engine import training
from vmamba_npu.engine.cli import register_resolvers
from vmamba_npu.engine.interrupts import Interrupted
from vmamba_npu.engine.loggers import CsvLogger
from vmamba_npu.engine.processes import processes

ROOT = Path(__file__).resolve().parents[2]


class StoppingLogger(CsvLogger):
    """Raises SIGTERM in the first process alone; the others learn of it from that process."""

    def update(self, row) -> None:
        super().update(row)
        if row["update"] == 3:
            signal.raise_signal(signal.SIGTERM)


def main(output: Path, overrides: list[str]) -> None:
    register_resolvers()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = OmegaConf.to_container(compose("train", overrides), resolve=True)
    with processes("cpu") as here:
        training.processes = lambda device: nullcontext(here)  # torchrun's store serves one group in a process
        for resume, logger in ((None, StoppingLogger), ("auto", CsvLogger)):
            config["trainer"]["resume"] = resume
            objects = {
                name: instantiate(config[name], _convert_="all") for name in ("model", "data", "optim", "trainer")
            }
            objects["logger"] = {"csv": logger}
            try:
                results = training.train("auto", **objects, seed=0, output=output, config=config)
            except Interrupted as ended:
                print(f"process {here.rank} ended with {ended.code}", flush=True)
        if here.first:
            print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
