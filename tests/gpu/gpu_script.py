"""What has to be seen on a GPU, in one run of at most eight minutes on one card: `make gpu`, or `make gpu PART="parity mfu"`.

    python tests/gpu/gpu_script.py [PART ...] [--tiny]

Each part prints a row for each thing that it has compared, as it goes, and writes PART.json into the folder that $HOLMES_GPU_OUT or $OUT
names (else runs/gpu). It needs torch with CUDA, lightning, transformers and pytest; wheels of what else is missing are installed from
the folder that $HOLMES_WHEELS names, into a folder of this run alone. --tiny: the same at small sizes on the CPU, in seconds.
"""

import argparse
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent


def main(arguments: list[str]) -> int:
    """Run the chosen parts; the exit code is 1 if something was not as promised."""
    parser = argparse.ArgumentParser(description="What has to be seen on a GPU.")
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU")
    given = parser.parse_args(arguments)
    out = Path(os.environ.get("HOLMES_GPU_OUT") or os.environ.get("OUT") or ROOT / "runs" / "gpu").resolve()
    out.mkdir(parents=True, exist_ok=True)
    prepare(out)

    import torch
    from gpu_parts import PARTS, Script

    unknown = set(given.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if not given.tiny and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --tiny runs the same on the CPU")
    script = Script(tiny=given.tiny, out=out)
    about = "the CPU, tiny" if given.tiny else torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {about}; results in {out}", flush=True)
    for name in given.parts or PARTS:
        function, seconds = PARTS[name]
        script.part, began = name, time.monotonic()
        script.deadline = began + seconds * script.patience
        try:
            function(script)
        except Exception:
            script.row("the part ended early", ok=False, error=traceback.format_exc()[-1500:])
        print(f"{name:10} took {time.monotonic() - began:.0f} s", flush=True)
    bad = [row for row in script.rows if row["ok"] is False]
    print(f"{len(script.rows)} rows, {len(bad)} not ok" + "".join(f"\n  {r['part']}: {r['what']}" for r in bad))
    return 1 if bad else 0


def prepare(out: Path) -> None:
    """Make the package, the tests and the wheels importable, here and in every process that is started from here."""
    found = [str(ROOT), str(TESTS), str(TESTS / "gpu")]
    wheels = os.environ.get("HOLMES_WHEELS")
    if wheels:
        target = out / "wheels"
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--target",
            str(target),
        ]
        subprocess.run([*command, *map(str, sorted(Path(wheels).glob("*.whl")))], check=True, timeout=120)
        found.append(str(target))
    os.environ["PYTHONPATH"] = os.pathsep.join([*found, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sys.path[:0] = found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
