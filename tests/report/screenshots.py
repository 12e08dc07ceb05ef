"""Screenshots of the page of `autoplan report`, compared with the accepted ones; `--accept` takes the new ones.

Fonts may differ between machines, and then so does every line of text: the accepted pictures are of a machine with
DejaVu Sans. On another, accept your own before a change, and compare after it. What is compared has half the size, and
the accepted pictures few colours: small files, and little of anti-aliasing is left. .cache/screenshots has them whole.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

from autoplan import load_plan
from autoplan.report.html import render_page
from tests.recorded import make_plain_plan

ROOT = Path(__file__).resolve().parents[2]
ACCEPTED = Path(__file__).resolve().parent / "screenshots"
NEW = ROOT / ".cache/screenshots"
GAIN = ROOT / "benchmarks/results/gpt2_cpu_anytime/plan.json"
WIDTHS = (1100, 390)
SCHEMES = {"light": 1, "dark": 0}  # Chromium's names
HEIGHT = 16_000  # of the window; Chromium draws little more. The empty end is cut off
COLOURS = 24  # of an accepted picture: no colour of the page is then further than 30 of 255 from what it was
TOLERANCE = 32  # of 255 in red, green or blue: a little over that, so that a fainter change of colour is not seen
SHARE = 0.00002
"""The share of pixels that may differ. The same Chromium draws the same pixels twice, so that anything above zero is
a change. This is some 30 pixels of a long page: smaller dots in the drawings alone were 0.007 % at 390 pixels."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares screenshots of the report page with the accepted ones.")
    parser.add_argument("--accept", action="store_true", help="Take the new screenshots as the accepted ones.")
    accept = parser.parse_args().accept
    chromium = shutil.which("chromium")
    if chromium is None:
        print("chromium is not installed. On Debian: apt-get install chromium", file=sys.stderr)
        return 2
    NEW.mkdir(parents=True, exist_ok=True)
    ACCEPTED.mkdir(exist_ok=True)
    plan = load_plan(GAIN)
    # One in twelve of its many rows of what is ruled out: they are alike, and they would be most of the picture.
    plan = plan.model_copy(update={"left_out": plan.left_out[::12]})
    failed = False
    for name, page in (("gain", render_page(plan)), ("no_gain", render_page(make_plain_plan()))):
        (NEW / f"{name}.html").write_text(page)
        for width in WIDTHS:
            for scheme in SCHEMES:
                picture = f"{name}_{width}_{scheme}.png"
                small = shrink(take(chromium, NEW / f"{name}.html", width, scheme, NEW / picture))
                accepted = ACCEPTED / picture
                if accept:
                    kept = small.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
                    kept.save(accepted, optimize=True)
                share = difference(small, Image.open(accepted)) if accepted.exists() else 1.0
                failed |= share > SHARE
                print(f"{picture}: {share:.4%} differ" + (f", look at {NEW / picture}" if share > SHARE else ""))
    return int(failed)


def take(chromium: str, page: Path, width: int, scheme: str, picture: Path) -> Image.Image:
    """The whole page at a width, without the empty end of the window; it is written to `picture` too."""
    root = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox does not work for root
    fixed = ["--headless", "--disable-gpu", "--hide-scrollbars", "--disable-lcd-text", "--force-device-scale-factor=1"]
    with tempfile.TemporaryDirectory() as profile:
        given = [f"--user-data-dir={profile}", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"]
        given += [f"--window-size={width},{HEIGHT}", f"--screenshot={picture}", page.as_uri()]
        subprocess.run([chromium, *root, *fixed, *given], check=True, capture_output=True, timeout=120)
    full = Image.open(picture).convert("RGB")
    empty = Image.new("RGB", full.size, full.getpixel((0, HEIGHT - 1)))
    box = ImageChops.difference(full, empty).getbbox()
    # The page ends with a margin of 64 pixels: what is drawn there shows that the page goes on.
    assert box is not None and box[3] <= HEIGHT - 60, f"{picture.name}: the page is empty, or longer than {HEIGHT} px"
    full = full.crop((0, 0, width, box[3] + 20))
    full.save(picture)
    return full


def shrink(full: Image.Image) -> Image.Image:
    """What is compared: half the size."""
    return full.resize((full.width // 2, full.height // 2), Image.Resampling.BOX)


def difference(one: Image.Image, other: Image.Image) -> float:
    """The share of pixels that differ by more than TOLERANCE; what one picture is longer counts as different."""
    width, height = min(one.width, other.width), min(one.height, other.height)
    most = max(one.width, other.width) * max(one.height, other.height)
    parts = [picture.convert("RGB").crop((0, 0, width, height)) for picture in (one, other)]
    bands = [band.point(lambda value: 255 * (value > TOLERANCE)) for band in ImageChops.difference(*parts).split()]
    same = ImageChops.lighter(ImageChops.lighter(bands[0], bands[1]), bands[2]).histogram()[0]
    return 1 - same / most


if __name__ == "__main__":
    sys.exit(main())
