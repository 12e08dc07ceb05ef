"""Loggers that the script turns on by arguments; stand-ins tell what they got."""

import os
import sys
from pathlib import Path

PACKAGES = {
    "wandb": "def init(project=None, mode=None):\n    return mode\n",
    "mlflow/__init__": "from mlflow.tracking._tracking_service.utils import set_tracking_uri\n",
    "mlflow/tracking/__init__": "",
    "mlflow/tracking/_tracking_service/__init__": "",
    "mlflow/tracking/_tracking_service/utils": "def set_tracking_uri(uri):\n    return uri\n"
    "def _resolve_tracking_uri(tracking_uri=None):\n    return tracking_uri\n",
    "tensorboard/__init__": "",
    "tensorboard/compat/__init__": "try:\n    from tensorboard.compat import notf\n    has_tensorflow = False\n"
    "except ImportError:\n    has_tensorflow = True\n",
    "comet_ml": "class Experiment:\n    def __init__(self, key=None, disabled=False):\n        self.off = disabled\n",
    "neptune": "class Run:\n    def __init__(self, name='', mode='async'):\n        self.mode = mode\ninit_run = Run\n",
    "h5py": "import io\nclass File:\n  def __init__(self, name, mode='r'):\n    self.raw = io.FileIO(name, mode)\n",
    "lmdb": "def open(path, **named):\n    return path, named\n",
    "pyarrow": "import io\ndef memory_map(path, mode='r'):\n    return io.FileIO(path, mode)\nOSFile = memory_map\n",
}
for name, text in PACKAGES.items():
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(f"{name}.py").write_text(text)


class Old:
    """A finder of an older kind, without find_spec."""

    def find_module(self, name, path=None):
        return None


sys.meta_path.insert(1, Old())
import comet_ml  # noqa: E402
import h5py  # noqa: E402
import lmdb  # noqa: E402
import mlflow  # noqa: E402
import neptune  # noqa: E402
import pyarrow  # noqa: E402
import tensorboard.compat  # noqa: E402
import wandb  # noqa: E402

assert wandb.init("project", "online") == wandb.init(mode="offline") == wandb.init() == "disabled"
assert mlflow.set_tracking_uri("http://192.0.2.1").startswith("file:")
resolve = mlflow.tracking._tracking_service.utils._resolve_tracking_uri
assert resolve("http://192.0.2.1").startswith("file:") and resolve().startswith("file:")
assert not tensorboard.compat.has_tensorflow
assert lmdb.open("old", readonly=True) == ("old", {"readonly": True, "lock": False})
assert lmdb.open("old", map_size=1) != ("old", {"map_size": 1}) and os.path.isdir(lmdb.open("old")[0])
assert comet_ml.Experiment("key").off and comet_ml.Experiment(disabled=False).off
assert neptune.init_run(mode="async").mode == neptune.Run("project", "sync").mode == "debug"
Path("table.arrow").write_text("table")
assert pyarrow.memory_map("table.arrow").read() == b"table" and pyarrow.OSFile("base.txt", "r").read() == b"base"
pyarrow.OSFile("base.txt", "w").write(b"new")
assert Path("base.txt").read_text() == "new"

h5py.File("shared.txt", mode="w").raw.write(b"new")
assert h5py.File(name="shared.txt").raw.read() == b"new"

assert "TOKENIZERS_PARALLELISM" not in os.environ
