"""`pip install` in one quiet line with a progress bar: `python install.py WHAT -- PIP-ARGUMENTS`.

pip itself either tells everything or shows no bar. This shows what is being fetched and how far it is, keeps pip's own
words for the case of a failure, and prints one line when it is done. Without a terminal (CI) there is no bar.
"""

import re
import subprocess
import sys
import time

DOWNLOADING = re.compile(r"\s*Downloading (\S+)")
PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
INSTALLING = re.compile(r"Installing collected packages: (.*)")
INSTALLED = re.compile(r"Successfully installed (.*)")
WIDTH = 28


def main(what: str, arguments: list[str]) -> int:
    began = time.monotonic()
    command = [sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *arguments]
    process = subprocess.Popen(
        [*command, "--progress-bar=raw"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    said, name, packages = [], "", 0
    assert process.stdout
    for line in process.stdout:
        if progress := PROGRESS.match(line):
            done, total = int(progress[1]), int(progress[2])
            show(f"{bar(done, total)} {name}")
            continue
        said.append(line)
        if fetching := DOWNLOADING.match(line):
            name = fetching[1].rsplit("/", 1)[-1].split("-")[0]
        elif listed := INSTALLING.match(line):
            packages = len(listed[1].split(","))
            show(f"unpacking {packages} packages")
        elif done_line := INSTALLED.match(line):
            packages = len(done_line[1].split())
    show("")
    if process.wait() != 0:
        sys.stdout.write("".join(said[-40:]))
        print(f"{what} could not be installed; pip's own words are above.", flush=True)
        return 1
    print(f"    {what}: {packages or 'no'} new packages, {time.monotonic() - began:.0f} s", flush=True)
    return 0


def bar(done: int, total: int) -> str:
    filled = WIDTH * done // max(total, 1)
    return f"[{'#' * filled}{'.' * (WIDTH - filled)}] {done / 1e6:6.1f} of {total / 1e6:.1f} MB"


def show(text: str) -> None:
    """Replaces the line on a terminal; says nothing elsewhere."""
    if sys.stdout.isatty():
        print(f"\r\033[K{'    ' + text if text else ''}"[:120], end="", flush=True)


if __name__ == "__main__":
    divide = sys.argv.index("--")
    sys.exit(main(" ".join(sys.argv[1:divide]), sys.argv[divide + 1 :]))
