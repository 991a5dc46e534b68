"""PyTorch as sbtrain.torch needs it, which is found in the checkout; ends the test with 77 where it is missing or older."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python/sbtrain-kernels"))
sys.dont_write_bytecode = True
try:
    import torch
except ImportError as error:
    print(f"skipped: {error} (install torch)")
    sys.exit(77)
if not hasattr(torch.library, "custom_op"):
    print(f"skipped: PyTorch {torch.__version__} (install 2.4 or later)")
    sys.exit(77)
