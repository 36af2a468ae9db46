"""OpenVLA and OpenVLA-OFT checkpoints as an external policy: one file for an interpreter that has their pinned packages, not mmrl.

    envs/openvla/bin/python robotics/openvla_server.py --checkpoint openvla/openvla-7b-finetuned-libero-spatial
    envs/oft/bin/python robotics/openvla_server.py --oft --checkpoint moojink/openvla-7b-oft-finetuned-libero-spatial

`mmrl eval --policy-command "..."` starts it (mmrl.robotics.external). It answers observations on stdin with action chunks on
stdout, executed units and gripper: +1 closes, -1 opens. Needed there: torch 2.2, transformers 4.40.1 (--oft: the fork
moojink/transformers-openvla-oft, with attention in both directions, and the package of moojink/openvla-oft), tokenizers 0.19.1,
timm 0.9.10, 0.9.11, 0.9.12 or 0.9.16, PIL. Everything else is refused before weights are read: with other versions these
checkpoints load and act wrongly (openvla-oft issues 5, 12, 135: 52 % instead of 98 %).

Prompt, picture path (JPEG, Lanczos to 224, the middle 0.9 of the area), statistics key, gripper and --oft's order of pictures and
proprioception are those of openvla/openvla and moojink/openvla-oft, experiments/robot/{openvla_utils.py,libero/}. Decoding and
un-normalisation (q01, q99) are the checkpoint's own predict_action: loading runs the code that comes with it
(trust_remote_code). Predictions are greedy and one observation at a time, as in both projects.

Tested without weights: pins, wire format, pictures, prompt, keys, proprioception, gripper; loading and asking only with small
stand-in checkpoints, under transformers 4.40.1. **Not verified, since it needs the weights**: the real checkpoints, their code
and heads, and any success rate. The original attention was tried, the fork's was imitated. Pictures differ from TensorFlow's by
rounding.

Messages, both ways: 4 bytes MXP1, header length (uint32) and body length (uint64), little endian; the header, JSON in UTF-8; the
body, the arrays that header["arrays"] lists ({"name", "dtype": "uint8" or "float32", "shape"}) one after the other in C order.
The server says {"kind": "hello", "protocol": 1, "name", "versions", "policy": {"chunk", "action_dim", "bins" (0: continuous),
"cameras", "proprio_dim" (0: none), "greedy_only", "image" (null: pictures as mmrl prepares them)}}, or {"kind": "error",
"message"}; then it is sent {"kind": "act", "number", "greedy", "temperature", "keys", "instructions"} with arrays "i/camera" (H,
W, 3) and "i/proprio" (S,) for observation i, and answers {"kind": "actions", "number"} with "actions" (B, K, A) or an error.
{"kind": "close"} and the end of stdin end it.

Legend: B observations, K action steps of a chunk, A action dimensions, S proprioception values, H x W picture.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import json
import math
import os
import struct
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

__all__ = [
    "FRAME",
    "MAGIC",
    "OpenVLA",
    "attends_ahead",
    "attention_problem",
    "lengths",
    "main",
    "normalise_proprio",
    "pack",
    "picture",
    "pin_problems",
    "prompt_of",
    "read_message",
    "serve",
    "simulator_gripper",
    "statistics_key",
    "unpack",
]

MAGIC = b"MXP1"
FRAME = struct.Struct("<4sIQ")
_PROTOCOL = 1
_DTYPES = ("uint8", "float32")
_LARGEST = 1 << 30  # bytes of a message
_SIDE, _CROP = 224, 0.9
_FORK = 'pip install "transformers @ git+https://github.com/moojink/transformers-openvla-oft.git"'
_PINS = {
    "transformers": ("4.40.1",),
    "tokenizers": ("0.19.1",),
    "timm": ("0.9.10", "0.9.11", "0.9.12", "0.9.16"),
}


# messages


def pack(header: Mapping[str, Any], arrays: Mapping[str, Any] | None = None) -> bytes:
    """One message. Raises ValueError for an array that is neither uint8 nor float32."""
    import numpy as np

    listed, parts = [], []
    for name, array in (arrays or {}).items():
        if str(array.dtype) not in _DTYPES:
            raise ValueError(
                f"expected array {name} as {' or '.join(_DTYPES)}, found {array.dtype}"
            )
        listed.append({"name": name, "dtype": str(array.dtype), "shape": list(array.shape)})
        parts.append(np.ascontiguousarray(array).tobytes())
    text = json.dumps({**header, "arrays": listed}).encode()
    return b"".join([FRAME.pack(MAGIC, len(text), sum(map(len, parts))), text, *parts])


def lengths(frame: bytes) -> tuple[int, int]:
    """Header and body length. Raises ValueError when the bytes begin no message."""
    magic, header, body = FRAME.unpack(frame)
    if magic != MAGIC:
        raise ValueError(f"expected a message that begins with {MAGIC!r}, found {frame!r}")
    if header + body > _LARGEST:
        raise ValueError(
            f"expected a message of at most {_LARGEST} bytes, found one of {header + body}"
        )
    return header, body


def unpack(text: bytes, body: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """(header, arrays by name). Raises ValueError where header and body do not fit together."""
    import numpy as np

    header = json.loads(text)  # JSONDecodeError and UnicodeDecodeError are ValueErrors
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
        raise ValueError(f"expected a header with a kind, found {text[:80]!r}")
    arrays, at = {}, 0
    for entry in header.get("arrays") or ():
        try:
            name, dtype, shape = (
                str(entry["name"]),
                str(entry["dtype"]),
                [int(n) for n in entry["shape"]],
            )
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"expected arrays with name, dtype and shape, found {entry!r}"
            ) from error
        if dtype not in _DTYPES or min(shape, default=0) < 0:
            raise ValueError(
                f"expected an array of {' or '.join(_DTYPES)} with sizes >= 0, found {dtype} {shape}"
            )
        count = math.prod(shape)
        size = count * np.dtype(dtype).itemsize
        if at + size > len(body):
            raise ValueError(
                f"expected {size} bytes of array {name} {shape}, found {len(body) - at}"
            )
        arrays[name] = np.frombuffer(body, dtype, count, at).reshape(shape)
        at += size
    if at != len(body):
        raise ValueError(f"expected {at} bytes of arrays, found {len(body)}")
    return header, arrays


def _read(stream: BinaryIO, count: int) -> bytes:
    parts = []
    while count > 0:
        part = stream.read(count)
        if not part:
            raise EOFError("expected the rest of a message, found the end of stdin")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def read_message(stream: BinaryIO) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The next message, None at the end of the stream. Raises ValueError and EOFError."""
    first = stream.read(1)
    if not first:
        return None
    header, body = lengths(first + _read(stream, FRAME.size - 1))
    return unpack(_read(stream, header), _read(stream, body))


def serve(policy: Any, stdin: BinaryIO, stdout: BinaryIO) -> None:
    """Say hello and answer until the end. `policy` has hello() and act(observations) -> float32 (B, K, A)."""

    def send(header: Mapping[str, Any], **arrays: Any) -> None:
        stdout.write(pack(header, arrays))
        stdout.flush()

    send({"kind": "hello", "protocol": _PROTOCOL, **policy.hello()})
    while (message := read_message(stdin)) is not None and message[0]["kind"] != "close":
        header, arrays = message
        number = header.get("number")
        try:
            seen: list[dict[str, Any]] = [
                {"instruction": text, "images": {}} for text in header["instructions"]
            ]
            for name, array in arrays.items():
                i, what = name.split("/", 1)
                (seen[int(i)] if what == "proprio" else seen[int(i)]["images"])[what] = array
            send({"kind": "actions", "number": number}, actions=policy.act(seen))
        except Exception as error:  # the other side decides what becomes of the episode
            send({"kind": "error", "number": number, "message": f"{type(error).__name__}: {error}"})


# conventions of OpenVLA


def prompt_of(instruction: str) -> str:
    """The prompt of both projects."""
    return f"In: What action should the robot take to {instruction.lower()}?\nOut:"


def picture(picture_HWC: Any, side: int = _SIDE) -> Any:
    """A uint8 picture as the policies see it: JPEG there and back, Lanczos to `side`, the middle 0.9 of its area back to it."""
    import numpy as np
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(picture_HWC).save(buffer, "JPEG", quality=95, subsampling="4:2:0")
    small = (
        Image.open(buffer, formats=["JPEG"])
        .convert("RGB")
        .resize((side, side), Image.Resampling.LANCZOS)
    )
    pixels = np.asarray(small).astype(np.float64)
    # corners are pixel centres
    at = (side - 1) * np.linspace((1 - _CROP**0.5) / 2, (1 + _CROP**0.5) / 2, side)
    first = np.floor(at).astype(int)
    second, share = np.minimum(first + 1, side - 1), at - first
    rows = pixels[first] * (1 - share)[:, None, None] + pixels[second] * share[:, None, None]
    out = rows[:, first] * (1 - share)[None, :, None] + rows[:, second] * share[None, :, None]
    return np.clip(np.round(out), 0, 255).astype(np.uint8)


def statistics_key(known: Sequence[str], asked: str | None, checkpoint: str) -> str:
    """Which data set's statistics: `asked`, the only one, or the one the checkpoint's name ends in; with "_no_noops" where only
    that exists. Raises ValueError."""
    named = checkpoint.lower().replace("-", "_").rstrip("/")
    fitting = [k for k in known if named.endswith(k.removesuffix("_no_noops"))]
    wanted = asked or (known[0] if len(known) == 1 else fitting[0] if len(fitting) == 1 else None)
    for key in (wanted, f"{wanted}_no_noops"):
        if key in known:
            return str(key)
    raise ValueError(
        f"expected --unnorm-key as one of {', '.join(sorted(known)) or 'none'}, found {asked or 'none'}; it is the "
        "data set whose actions the suite takes, such as libero_spatial"
    )


def normalise_proprio(proprio_S: Any, statistics: Mapping[str, Any]) -> Any:
    """Proprioception in [-1, 1] by q01 and q99 (openvla-oft, normalize_proprio)."""
    import numpy as np

    low, high = np.asarray(statistics["q01"], np.float64), np.asarray(statistics["q99"], np.float64)
    value = np.asarray(proprio_S, np.float64)
    if value.shape != low.shape:
        raise ValueError(f"expected {len(low)} proprioception values, found {value.shape}")
    mask = np.asarray(statistics.get("mask", np.ones(len(low), bool)))
    return np.clip(np.where(mask, 2 * (value - low) / (high - low + 1e-8) - 1, value), -1, 1)


def simulator_gripper(actions_KA: Any) -> Any:
    """The policy's gripper (last dimension, 0 closed to 1 open) as LIBERO takes it: -1 opens, +1 closes."""
    import numpy as np

    out = np.array(actions_KA, np.float64)
    out[..., -1] = -np.sign(2 * out[..., -1] - 1)
    return out


# versions


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def pin_problems(oft: bool, found: Mapping[str, str] | None = None) -> list[str]:
    """What is not as these checkpoints need it, each with expected, found and fix; `found`: versions by package."""
    problems = []
    for package, wanted in _PINS.items():
        have = _version(package) if found is None else found.get(package, "none")
        if have not in wanted:
            fix = (
                _FORK
                if oft and package == "transformers"
                else f"pip install {package}=={wanted[-1]}"
            )
            problems.append(f"expected {package} {' or '.join(wanted)}, found {have}: {fix}")
    if oft and importlib.util.find_spec("prismatic") is None:
        problems.append(
            "expected the package prismatic, which the code of OFT checkpoints imports, found none: pip install "
            '"openvla-oft @ git+https://github.com/moojink/openvla-oft.git"'
        )
    return problems


def attends_ahead(model: Any) -> bool:
    """Whether a later token changes what a (small) language model computes for an earlier one."""
    import torch

    tokens = torch.tensor([[3, 5, 7, 11], [3, 5, 7, 13]])
    with torch.no_grad():
        out = model.eval()(
            input_ids=tokens, attention_mask=torch.ones_like(tokens)
        ).last_hidden_state[:, 0]
    return not torch.allclose(out[0], out[1], atol=1e-6)


def attention_problem(oft: bool) -> str | None:
    """Fork and original call themselves 4.40.1: ask a tiny Llama which of them this is."""
    import torch
    from transformers import LlamaConfig, LlamaModel

    with torch.random.fork_rng():
        torch.manual_seed(0)
        ahead = attends_ahead(
            LlamaModel(
                LlamaConfig(
                    vocab_size=32,
                    hidden_size=16,
                    intermediate_size=32,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                )
            )
        )
    if ahead == oft:
        return None
    if oft:
        return f"expected transformers 4.40.1 of the fork (attention in both directions), found the original (causal): {_FORK}"
    return (
        "expected transformers 4.40.1 (causal attention), found the fork for OpenVLA-OFT (both directions): pip install "
        "--force-reinstall transformers==4.40.1, or --oft for an OFT checkpoint"
    )


# the policy


class OpenVLA:
    """A loaded checkpoint. `checkpoint`: folder or hub name; `images`: pictures it takes (--oft: 2 are base and wrist). With --oft,
    an L1 action head and a proprioception projector are used where the checkpoint has their files (the LIBERO checkpoints of
    moojink; those of SimpleVLA-RL have none and answer in action tokens)."""

    def __init__(
        self,
        checkpoint: str,
        *,
        oft: bool,
        unnorm_key: str | None = None,
        images: int = 1,
        device: str | None = None,
        attention: str | None = None,
    ) -> None:
        import torch
        from transformers import AutoModelForVision2Seq, AutoProcessor

        self.torch, self.checkpoint, self.oft = torch, checkpoint, oft
        self.device = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
        folder = Path(checkpoint)
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(checkpoint))
        self.processor = AutoProcessor.from_pretrained(str(folder), trust_remote_code=True)
        options = {} if attention is None else {"attn_implementation": attention}
        self.model = AutoModelForVision2Seq.from_pretrained(
            str(folder),
            torch_dtype=torch.bfloat16,
            low_cpu_mem_usage=True,
            trust_remote_code=True,
            **options,
        )
        self.model = self.model.to(self.device).eval()
        if (folder / "dataset_statistics.json").is_file():
            self.model.norm_stats = json.loads(
                (folder / "dataset_statistics.json").read_text(encoding="utf-8")
            )
        self.key = statistics_key(list(self.model.norm_stats), unnorm_key, checkpoint)
        self.cameras = ["base", "wrist"][:images]
        self.head: Any = None
        self.projector: Any = None
        self.proprio_dim, self.chunk, self.dim = (
            0,
            1,
            len(self.model.norm_stats[self.key]["action"]["q01"]),
        )
        if oft:
            self._load_oft(folder)

    def _load_oft(self, folder: Path) -> None:
        heads, projectors, sizes = (
            importlib.import_module(f"prismatic.{name}")
            for name in ("models.action_heads", "models.projectors", "vla.constants")
        )
        self.chunk, self.dim = sizes.NUM_ACTIONS_CHUNK, sizes.ACTION_DIM
        self.model.vision_backbone.set_num_images_in_input(len(self.cameras))
        width = self.model.llm_dim
        if (state := self._weights(folder, "action_head")) is not None:
            self.head = self._module(
                heads.L1RegressionActionHead(
                    input_dim=width, hidden_dim=width, action_dim=self.dim
                ),
                state,
            )
        if (state := self._weights(folder, "proprio_projector")) is not None:
            self.proprio_dim = len(self.model.norm_stats[self.key]["proprio"]["q01"])
            self.projector = self._module(
                projectors.ProprioProjector(llm_dim=width, proprio_dim=self.proprio_dim), state
            )

    def _weights(self, folder: Path, part: str) -> dict[str, Any] | None:
        """Tensors of PART--STEP_checkpoint.pt, None where there is none."""
        files = sorted(folder.glob(f"{part}*checkpoint.pt"))
        if len(files) > 1:
            raise ValueError(
                f"expected one file {part}*checkpoint.pt in {folder}, found {len(files)}"
            )
        if not files:
            return None
        state = self.torch.load(files[0], map_location="cpu", weights_only=True)
        return {key.removeprefix("module."): value for key, value in state.items()}

    def _module(self, module: Any, state: Mapping[str, Any]) -> Any:
        module.load_state_dict(state)
        return module.to(self.torch.bfloat16).to(self.device).eval()

    def hello(self) -> dict[str, Any]:
        """Versions, and what mmrl.robotics.external must know."""
        packages = ("torch", "transformers", "tokenizers", "timm", "numpy", "pillow")
        image = {"jpeg": True, "resize": "lanczos", "side": _SIDE, "center_crop_area": _CROP}
        policy = {
            "chunk": self.chunk,
            "action_dim": self.dim,
            "bins": 0 if self.head is not None else 256,
            "cameras": self.cameras,
            "proprio_dim": self.proprio_dim,
            "greedy_only": True,
            "image": image,
        }
        return {
            "name": self.checkpoint,
            "policy": policy,
            "versions": {
                "python": sys.version.split()[0],
                **{name: _version(name) for name in packages},
            },
            "details": {"unnorm_key": self.key, "fork": self.oft, "device": self.device},
        }

    def act(self, observations: Sequence[Mapping[str, Any]]) -> Any:
        """float32 (B, K, A) in the simulator's units."""
        import numpy as np

        return np.stack([self._one(o) for o in observations]).astype(np.float32)

    def _one(self, observation: Mapping[str, Any]) -> Any:
        import numpy as np
        from PIL import Image

        torch, prompt = self.torch, prompt_of(observation["instruction"])
        with torch.inference_mode():
            shown = [
                Image.fromarray(picture(observation["images"][camera])) for camera in self.cameras
            ]
            seen = [
                self.processor(prompt, image).to(self.device, dtype=torch.bfloat16)
                for image in shown
            ]
            inputs = seen[0]
            if len(seen) > 1:
                inputs["pixel_values"] = torch.cat([s["pixel_values"] for s in seen], dim=1)
            more: dict[str, Any] = {}
            if self.projector is not None:
                proprio = normalise_proprio(
                    observation["proprio"], self.model.norm_stats[self.key]["proprio"]
                )
                more = {"proprio": proprio, "proprio_projector": self.projector}
            if self.head is not None:
                more["action_head"] = self.head
            found = self.model.predict_action(
                **inputs, unnorm_key=self.key, do_sample=False, **more
            )
        actions = found[0] if isinstance(found, tuple) else found  # OFT also returns hidden states
        return simulator_gripper(np.asarray(actions, np.float64).reshape(self.chunk, self.dim))


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the versions, load, serve; 2 when something is not as it must be."""
    parser = argparse.ArgumentParser(
        description="OpenVLA checkpoints as an external policy of mmrl eval --policy-command"
    )
    parser.add_argument("--checkpoint", required=True, help="folder or hub name")
    parser.add_argument(
        "--oft",
        action="store_true",
        help="an OpenVLA-OFT checkpoint: chunk of actions in one forward pass",
    )
    parser.add_argument(
        "--unnorm-key",
        help="data set of dataset_statistics.json; default: the one the checkpoint's name ends in",
    )
    parser.add_argument(
        "--images",
        type=int,
        choices=(1, 2),
        help="1: base camera, 2: and wrist; default 2 with --oft, else 1",
    )
    parser.add_argument("--device", help="default: cuda:0 if there is one")
    parser.add_argument(
        "--attention",
        help="attn_implementation, such as flash_attention_2; default: that of transformers",
    )
    asked = parser.parse_args(arguments)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print goes to stderr
    try:
        problems = pin_problems(asked.oft) or [p for p in [attention_problem(asked.oft)] if p]
        if problems:
            raise ValueError(
                "this interpreter cannot run the checkpoint:\n  " + "\n  ".join(problems)
            )
        if not asked.oft and asked.images == 2:
            raise ValueError(
                "expected --images 1 without --oft, found 2: OpenVLA takes one picture"
            )
        policy = OpenVLA(
            asked.checkpoint,
            oft=asked.oft,
            unnorm_key=asked.unnorm_key,
            device=asked.device,
            images=asked.images or (2 if asked.oft else 1),
            attention=asked.attention,
        )
    except Exception as error:
        if not isinstance(error, ValueError):
            import traceback

            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        if not out.isatty():
            out.write(pack({"kind": "error", "message": f"{sys.executable}: {error}"}))
            out.flush()
        return 2
    serve(policy, sys.stdin.buffer, out)
    return 0


if __name__ == "__main__":
    _here = Path(__file__).resolve().parent
    # its modules are named like others (libero, datasets)
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != _here]
    raise SystemExit(main())
