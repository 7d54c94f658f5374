"""The demo's trainer process: trains, publishes, and keeps its own bytes so that others can be compared with them.

Line protocol: each `next` on standard input is one optimiser step and one published version; each line on standard
output is one JSON object that describes a ready version. The end of standard input ends the process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mailboat.client import Api
from mailboat.errors import MailboatError
from mailboat.trainer.publisher import Publisher

if TYPE_CHECKING:
    from scripts.demonstration.encoder import Encoder


def main() -> int:
    """Run until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--server", required=True)
    parser.add_argument("--project", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        _serve(arguments)
    except MailboatError as error:
        print(f"trainer: {error}", file=sys.stderr)
        return 1
    return 0


def _serve(arguments: argparse.Namespace) -> None:
    from scripts.demonstration.encoder import Encoder

    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    saved = folder / "state.pt"
    encoder = Encoder()
    if saved.exists():
        encoder.load(saved)
    token = os.environ["MAILBOAT_TOKEN"]
    ready = Api(arguments.server, arguments.project, token).run(arguments.run).latest_ready
    with Publisher(
        arguments.server, arguments.project, arguments.run, token, state_dir=folder / "published"
    ) as publisher:
        if ready is None:
            _publish(publisher, encoder, folder)
        else:
            print(json.dumps({"continues": ready.number}), flush=True)
        for line in sys.stdin:
            if line.strip() == "next":
                encoder.step()
                encoder.save(saved)
                _publish(publisher, encoder, folder)


def _publish(publisher: Publisher, encoder: Encoder, folder: Path) -> None:
    from safetensors.torch import save_file

    served, side_files = encoder.served(), encoder.side_files()
    version = publisher.publish(served, step=encoder.step_count, side_files=side_files)
    # The trainer's own bytes, written by the safetensors package and by nothing of ours.
    own = folder / "own" / f"v{version.number:06d}"
    own.mkdir(parents=True, exist_ok=True)
    save_file(served, own / "model.safetensors")
    for name, content in side_files.items():
        (own / name).write_bytes(content)
    print(
        json.dumps(
            {
                "number": version.number,
                "digest": version.digest,
                "patch_bytes": version.patch_bytes,
                "full_bytes": version.full_bytes,
                "changed": version.changed,
                "elements": version.elements,
                "step": encoder.step_count,
                "loss": encoder.loss,
                "ready_at": time.time(),
                "own": str(own),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
