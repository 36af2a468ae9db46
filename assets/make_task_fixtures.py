"""Tiny hand-made data sets in the public formats of questions, texts and screens, for tests and for looking at.

    python -m assets.make_task_fixtures assets/fixtures          # or a folder of yours; nothing is downloaded

Each is in the exact layout of its benchmark or training set, a few rows over pictures of a red disc, a blue square, a page
or a screen with buttons; every truth is true of its picture. assets.make_grounding_fixtures has the grounding formats.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.tasks.readers.tfrecord import encode_example, write_records

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "BUTTONS",
    "DISC",
    "MAKERS",
    "SCREEN",
    "SIZE",
    "SQUARE",
    "episode",
    "make_all",
    "screen_bytes",
    "tree_of",
]

SIZE, DISC, SQUARE = (96, 64), (8, 12, 40, 44), (56, 20, 80, 44)
"""The scene: its size, the box of the red disc and of the blue square, in pixels."""
SCREEN = (90, 160)
BUTTONS: Mapping[str, tuple[int, int, int, int]] = {
    "Search": (10, 8, 80, 28),
    "Maps": (10, 60, 40, 90),
    "Mail": (50, 60, 80, 90),
}
"""The screen: its size and the boxes of its buttons, in pixels."""


def _png(picture: Image) -> bytes:
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    return out.getvalue()


def _scene_bytes() -> bytes:
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", SIZE, (240, 240, 230))
    draw = ImageDraw.Draw(picture)
    draw.ellipse(DISC, fill=(220, 40, 40))
    draw.rectangle(SQUARE, fill=(40, 60, 200))
    return _png(picture)


def screen_bytes() -> bytes:
    """A phone's screen with three labelled buttons, as PNG."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", SCREEN, (250, 250, 250))
    draw = ImageDraw.Draw(picture)
    for label, box in BUTTONS.items():
        draw.rectangle(box, fill=(200, 215, 250), outline=(30, 30, 30))
        draw.text((box[0] + 3, (box[1] + box[3]) // 2 - 6), label, fill=(0, 0, 0))
    return _png(picture)


def _page_bytes(lines: list[str]) -> bytes:
    """A page with text in Pillow's own font; the Chinese digits for 1, 2, 3 and 10 are drawn as the strokes they are."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (180, 20 + 16 * len(lines)), "white")
    draw = ImageDraw.Draw(picture)
    strokes = {"一": (0.5,), "二": (0.2, 0.8), "三": (0.1, 0.5, 0.9), "十": (0.5,)}
    for row, line in enumerate(lines):
        for place, char in enumerate(line):
            x, y = 10 + 16 * place, 10 + 16 * row
            for level in strokes.get(char, ()):
                draw.line((x, y + 12 * level, x + 12, y + 12 * level), fill="black", width=2)
            if char == "十":
                draw.line((x + 6, y, x + 6, y + 12), fill="black", width=2)
        if line.isascii():
            draw.text((10, 10 + 16 * row), line, fill="black")
    return _png(picture)


def _put(path: Path, content: bytes | str | list[Any] | dict[str, Any]) -> Path:
    """Write bytes, text, or JSON (one line per row for .jsonl)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, (list, dict)):
        lines = (
            [json.dumps(row, ensure_ascii=False) for row in content]
            if path.suffix == ".jsonl"
            else [json.dumps(content, ensure_ascii=False, indent=1)]
        )
        content = "\n".join(lines) + "\n"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def _parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def _embedded(data: bytes, name: str | None = None) -> dict[str, Any]:
    return {"bytes": data, "path": name}


def make_video_r1(folder: Path) -> Path:
    """Video-R1-260k: one image row of each problem type and one video row, which needs images_only."""
    _put(folder / "images/scene.png", _scene_bytes())
    _put(folder / "images/page.png", _page_bytes(["OPEN 24 HOURS"]))

    def row(number: int, kind: str, problem: str, truth: str, **more: Any) -> dict[str, Any]:
        return {
            "problem_id": number,
            "problem": problem,
            "data_type": "image",
            "problem_type": kind,
            "options": [],
            "process": "",
            "solution": f"<answer>{truth}</answer>",
            "path": "./images/scene.png",
            "data_source": "hand-made",
            **more,
        }

    return _put(
        folder / "Video-R1-260k.json",
        [
            row(
                1,
                "multiple choice",
                "Which colour has the disc?",
                "B",
                options=["A. blue", "B. red", "C. green"],
            ),
            row(2, "numerical", "How many shapes are there?", "2"),
            row(3, "OCR", "What does the sign say?", "OPEN 24 HOURS", path="./images/page.png"),
            row(4, "free-form", "Describe the picture.", "A red disc beside a blue square."),
            row(5, "regression", "How wide is the square, in pixels?", "24"),
            row(
                6,
                "multiple choice",
                "Which shape is blue?\nOptions:\nA. the disc\nB. the square",
                "B",
            ),
            row(
                7,
                "multiple choice",
                "What happens next?",
                "A",
                data_type="video",
                path="./videos/1.mp4",
                options=["A. a", "B. b"],
            ),
        ],
    )


def make_easy_video_r1(folder: Path) -> Path:
    """EasyVideoR1's unified JSON: boolean, math and spatial grounding rows."""
    _put(folder / "scene.png", _scene_bytes())
    shared = {"data_type": "image", "options": [], "path": "scene.png", "data_source": "hand-made"}
    return _put(
        folder / "unified.json",
        [
            {
                "problem_id": "b1",
                "problem": "<image>Is the disc red?",
                "problem_type": "boolean",
                "solution": "<answer>yes</answer>",
                **shared,
            },
            {
                "problem_id": "m1",
                "problem": "<image>Half of the number of shapes, plus one half?",
                "problem_type": "math",
                "solution": "<answer>\\frac{3}{2}</answer>",
                **shared,
            },
            {
                "problem_id": "g1",
                "problem": "<image>the blue square",
                "problem_type": "spatial grounding",
                "solution": f'<answer>{{"boxes": {list(SQUARE)}}}</answer>',
                **shared,
            },
        ],
    )


def make_easyr1_types(folder: Path) -> Path:
    """EasyR1 parquet with problem_type: grounding, choice, counting and a math question without a picture."""
    scene = [_embedded(_scene_bytes())]
    return _parquet(
        folder / "train.parquet",
        [
            {
                "problem": "<image>the red disc",
                "answer": json.dumps(list(DISC)),
                "images": scene,
                "problem_type": "grounding",
                "options": None,
            },
            {
                "problem": "<image>What is blue?",
                "answer": "A",
                "images": scene,
                "problem_type": "multiple choice",
                "options": ["square", "disc"],
            },
            {
                "problem": "<image>discs",
                "answer": "<answer>1</answer>",
                "images": scene,
                "problem_type": "counting",
                "options": None,
            },
            {
                "problem": "What is 2^5?",
                "answer": "32",
                "images": [],
                "problem_type": "math",
                "options": None,
            },
        ],
    )


def make_vlm_r1_types(folder: Path) -> Path:
    """VLM-R1 training JSON Lines with accu_reward_method."""
    _put(folder / "images/scene.png", _scene_bytes())

    def row(number: int, method: str, question: str, answer: str) -> dict[str, Any]:
        return {
            "id": number,
            "image": "images/scene.png",
            "accu_reward_method": method,
            "conversations": [
                {"from": "human", "value": f"<image>{question}"},
                {"from": "gpt", "value": answer},
            ],
        }

    found = [{"bbox_2d": list(DISC), "label": "disc"}, {"bbox_2d": list(SQUARE), "label": "square"}]
    return _put(
        folder / "train.jsonl",
        [
            row(1, "mcq", "Which shape is red?\nA. disc\nB. square", "<answer>A</answer>"),
            row(2, "yes_no", "Is there a triangle?", "No"),
            row(3, "odLength", "Find discs and squares.", f"<answer>{found}</answer>"),
            row(4, "rec", "the blue square", f"{list(SQUARE)}"),
        ],
    )


def make_llama_factory(folder: Path) -> Path:
    """A data folder of two sharegpt sets: default tags, and OpenAI's messages with a system turn."""
    _put(folder / "images/scene.png", _scene_bytes())
    _put(
        folder / "sharegpt.json",
        [
            {
                "conversations": [
                    {"from": "human", "value": "<image>What is left of the square?"},
                    {"from": "gpt", "value": "a red disc"},
                ],
                "images": ["images/scene.png"],
            },
            {
                "conversations": [
                    {
                        "from": "human",
                        "value": "<image>In this picture and in <image>this one, what differs?",
                    },
                    {"from": "gpt", "value": "<answer>nothing</answer>"},
                ],
                "images": ["images/scene.png"] * 2,
            },
        ],
    )
    _put(
        folder / "openai.jsonl",
        [
            {
                "messages": [
                    {"role": "system", "content": "Be short."},
                    {"role": "user", "content": "<image>Which colour is the square?"},
                    {"role": "assistant", "content": "blue"},
                ],
                "pictures": ["images/scene.png"],
            }
        ],
    )
    columns = {"messages": "messages", "images": "pictures"}
    tags = {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
        "system_tag": "system",
    }
    _put(
        folder / "dataset_info.json",
        {
            "hand_made": {
                "file_name": "sharegpt.json",
                "formatting": "sharegpt",
                "columns": {"messages": "conversations", "images": "images"},
            },
            "hand_made_openai": {
                "file_name": "openai.jsonl",
                "formatting": "sharegpt",
                "columns": columns,
                "tags": tags,
            },
        },
    )
    return folder


def make_pageocr(folder: Path) -> Path:
    """The Fox benchmark's page files, English and Chinese."""
    pages = {"en": ["A SMALL PAGE", "of two lines"], "cn": ["一二三", "十"]}
    for language, lines in pages.items():
        _put(folder / f"{language}_pdf_png/{language}_1.png", _page_bytes(lines))
        text = "\n".join(lines)
        _put(
            folder / f"{language}_page_ocr.json",
            [
                {
                    "image": f"{language}_1.png",
                    "len": len(text),
                    "conversations": [
                        {"from": "human", "value": "<image>\nOCR this image: "},
                        {"from": "gpt", "value": text},
                    ],
                }
            ],
        )
    return folder


def make_ocrbench(folder: Path) -> Path:
    """OCRBench as parquet; the same rows under the names of the original file in OCRBench.json."""
    rows = [
        ("IIIT5K", "Regular Text Recognition", ["OPEN"], "OPEN"),
        ("HME100k", "Handwritten Mathematical Expression Recognition", ["x = 2 y"], "x = 2 y"),
    ]
    table: list[dict[str, Any]] = []
    for number, (dataset, kind, answers, text) in enumerate(rows):
        data = _page_bytes([text])
        _put(folder / f"images/{number}.png", data)
        table.append(
            {
                "dataset": dataset,
                "question": "what is written in the image?",
                "question_type": kind,
                "answer": answers,
                "image": _embedded(data),
            }
        )
    _put(
        folder / "OCRBench.json",
        [
            {
                "dataset_name": row["dataset"],
                "id": number,
                "question": row["question"],
                "type": row["question_type"],
                "answers": row["answer"] if number else row["answer"][0],
                "image_path": f"images/{number}.png",
            }
            for number, row in enumerate(table)
        ],
    )
    return _parquet(folder / "test-00000-of-00001.parquet", table)


def make_mathvista(folder: Path) -> Path:
    """MathVista's testmini as the official {pid: row}, one row of each kind."""
    _put(folder / "images/1.png", _scene_bytes())
    base = {
        "image": "images/1.png",
        "choices": None,
        "unit": None,
        "precision": None,
        "question_type": "free_form",
        "metadata": {"source": "hand-made"},
    }
    rows: list[dict[str, Any]] = [
        {
            "question": "Which letter stands for the square?",
            "choices": ["B", "A"],
            "answer": "A",
            "answer_type": "text",
            "question_type": "multi_choice",
        },
        {"question": "How many shapes are there?", "answer": "2", "answer_type": "integer"},
        {
            "question": "What share of the width is the square?",
            "answer": "0.25",
            "answer_type": "float",
            "precision": 2.0,
            "unit": "%",
        },
        {
            "question": "Left and right edge of the square?",
            "answer": "[56, 80]",
            "answer_type": "list",
        },
    ]
    return _put(
        folder / "testmini.json",
        {str(pid): {"pid": str(pid), **base, **row} for pid, row in enumerate(rows, 1)},
    )


def make_mmmu(folder: Path) -> Path:
    """MMMU validation of one subject: options as text, several pictures, a picture as option, an open question."""
    scene, screen = _embedded(_scene_bytes(), "1.png"), _embedded(screen_bytes(), "2.png")
    empty = {f"image_{k}": None for k in range(3, 8)}
    base = {
        "explanation": "",
        "img_type": "['Other']",
        "topic_difficulty": "Easy",
        "subfield": "Shapes",
        "image_1": scene,
        "image_2": screen,
        **empty,
    }
    return _parquet(
        folder / "Accounting/validation-00000-of-00001.parquet",
        [
            {
                "id": "validation_Accounting_1",
                "question": "<image 1> What is red?",
                "options": "['a disc', \"the square's edge\"]",
                "answer": "A",
                "question_type": "multiple-choice",
                **base,
            },
            {
                "id": "validation_Accounting_2",
                "question": "Which picture of <image 1> and another shows buttons?",
                "options": "['<image 1>', '<image 2>', 'none, \\\\alpha']",
                "answer": "B",
                "question_type": "multiple-choice",
                **base,
            },
            {
                "id": "validation_Accounting_3",
                "question": "<image 1> What colour has the square?",
                "options": "[]",
                "answer": "['blue', 'dark blue']",
                "question_type": "open",
                **base,
            },
        ],
    )


def _screenspot_rows(
    names: Mapping[str, str], form: Callable[[tuple[int, int, int, int]], list[float]]
) -> list[dict[str, Any]]:
    return [
        {
            names["image"]: "screen.png",
            "bbox": form(box),
            "instruction": f"open {label.lower()}",
            "data_type": "text" if label == "Search" else "icon",
            "data_source": "android",
        }
        for label, box in BUTTONS.items()
    ]


def make_screenspot(folder: Path) -> Path:
    """ScreenSpot v1: three files of pixels [x, y, width, height]; in the mobile file one box has width > x, height > y."""
    _put(folder / "screenspot_imgs/screen.png", screen_bytes())
    for platform in ("mobile", "desktop", "web"):
        _put(
            folder / f"screenspot_{platform}.json",
            _screenspot_rows(
                {"image": "img_filename"}, lambda b: [b[0], b[1], b[2] - b[0], b[3] - b[1]]
            ),
        )
    return folder


def make_screenspot_v2(folder: Path) -> Path:
    """ScreenSpot v2: the same form, its own names."""
    _put(folder / "screenspotv2_image/screen.png", screen_bytes())
    return _put(
        folder / "screenspot_mobile_v2.json",
        _screenspot_rows(
            {"image": "img_filename"}, lambda b: [b[0], b[1], b[2] - b[0], b[3] - b[1]]
        ),
    )


def make_screenspot_hf(folder: Path) -> Path:
    """The hub's copy: shares 0..1 [x1, y1, x2, y2], pictures inside."""
    rows = _screenspot_rows(
        {"image": "file_name"}, lambda b: [v / SCREEN[i % 2] for i, v in enumerate(b)]
    )
    return _parquet(
        folder / "test-00000-of-00001.parquet",
        [{**row, "image": _embedded(screen_bytes())} for row in rows],
    )


def make_screenspot_pro(folder: Path) -> Path:
    """ScreenSpot-Pro: annotations/*.json and images/, pixels [x1, y1, x2, y2], img_size."""
    _put(folder / "images/android_studio/screen.png", screen_bytes())
    _put(
        folder / "annotations/android_studio_macos.json",
        [
            {
                "id": f"android_studio_macos_{n}",
                "img_filename": "android_studio/screen.png",
                "img_size": list(SCREEN),
                "bbox": list(box),
                "instruction": f"open {label.lower()}",
                "instruction_cn": "",
                "application": "android_studio",
                "platform": "macos",
                "group": "Dev",
                "ui_type": "text",
            }
            for n, (label, box) in enumerate(BUTTONS.items())
        ],
    )
    return folder


def tree_of(boxes: list[tuple[int, int, int, int]]) -> bytes:
    """A serialized AndroidAccessibilityForest with one window of visible nodes with these bounds."""

    def number(field: int, value: int) -> bytes:
        return (
            bytes([field << 3]) + bytes([value & 0x7F | 0x80, value >> 7])
            if value > 127
            else bytes([field << 3, value])
        )

    def block(field: int, data: bytes) -> bytes:
        return bytes([field << 3 | 2, len(data) & 0x7F | 0x80, len(data) >> 7]) + data

    nodes = b"".join(
        block(1, block(2, b"".join(number(i, v) for i, v in enumerate(box, 1))) + b"\xb8\x01\x01")
        for box in boxes
    )
    return block(1, block(11, nodes))


def episode(number: int, goal: str, steps: list[tuple[dict[str, Any], str]]) -> dict[str, Any]:
    """The features of one AndroidControl episode; one screenshot more than steps."""
    count = len(steps) + 1
    return {
        "episode_id": [number],
        "goal": [goal.encode()],
        "screenshots": [screen_bytes()] * count,
        "accessibility_trees": [tree_of([(0, 0, *SCREEN), *BUTTONS.values()])] * count,
        "screenshot_widths": [SCREEN[0]] * count,
        "screenshot_heights": [SCREEN[1]] * count,
        "actions": [json.dumps(action).encode() for action, _ in steps],
        "step_instructions": [words.encode() for _, words in steps],
    }


def make_android_control(folder: Path) -> Path:
    """Two episodes with every action in a GZIP TFRecord, splits.json and test_subsplits.json."""
    folder.mkdir(parents=True, exist_ok=True)
    first: list[tuple[dict[str, Any], str]] = [
        ({"action_type": "open_app", "app_name": "Maps"}, "Open Maps"),
        ({"action_type": "click", "x": 45, "y": 18}, "Tap the search bar"),
        ({"action_type": "input_text", "text": "café"}, "Type café"),
        ({"action_type": "wait"}, "Wait for the results"),
        ({"action_type": "scroll", "direction": "down"}, "Scroll down"),
    ]
    second: list[tuple[dict[str, Any], str]] = [
        ({"action_type": "long_press", "x": 65, "y": 75}, "Hold Mail"),
        ({"action_type": "navigate_back"}, "Go back"),
        ({"action_type": "navigate_home"}, "Go home"),
    ]
    write_records(
        folder / "android_control-00000-of-00001",
        [
            encode_example(episode(140, "Find a café in Maps", first)),
            encode_example(episode(7, "Look at Mail", second)),
        ],
    )
    _put(folder / "splits.json", {"train": [7], "validation": [], "test": [140]})
    _put(
        folder / "test_subsplits.json",
        {"IDD": [140], "app_unseen": [], "task_unseen": [], "category_unseen": []},
    )
    return folder


def make_gui_odyssey(folder: Path) -> Path:
    """One episode with points, a key, a scroll, text and its end; the four splits."""
    steps: list[tuple[str, Any]] = [
        ("CLICK", [[250, 469]]),
        ("CLICK", "KEY_HOME"),
        ("SCROLL", [[500, 800], [520, 200]]),
        ("TEXT", "hello"),
        ("LONG_PRESS", [[722, 469]]),
        ("CLICK", "KEY_APPSELECT"),
        ("COMPLETE", ""),
    ]
    for number in range(len(steps)):
        _put(folder / f"screenshots/0042_{number}.png", screen_bytes())
    _put(
        folder / "annotations/0042.json",
        {
            "episode_id": "0042",
            "device_info": {
                "product": "cheetah",
                "w": SCREEN[0],
                "h": SCREEN[1],
                "device_name": "Pixel 7 Pro",
            },
            "task_info": {
                "category": "General_Tool",
                "app": ["Maps"],
                "meta_task": "Open {}",
                "task": "Open Maps",
                "instruction": "Open Maps and say hello.",
            },
            "step_length": len(steps),
            "steps": [
                {
                    "step": number,
                    "screenshot": f"0042_{number}.png",
                    "action": action,
                    "info": info,
                    "ps": "",
                    **({"sam2_bbox": [112, 375, 445, 563]} if number == 0 else {}),
                }
                for number, (action, info) in enumerate(steps)
            ],
        },
    )
    for name in ("random", "task", "device", "app"):
        _put(folder / f"splits/{name}_split.json", {"train": [], "test": ["0042.json"]})
    return folder


def make_gui_r1(folder: Path) -> Path:
    """GUI-R1 parquet: a click on a box, one on a point, text, a scroll and a key."""

    def row(
        action: str, place: list[float], words: str = "no input text", history: str = "None"
    ) -> dict[str, Any]:
        return {
            "image": _embedded(screen_bytes()),
            "instruction": f"do {action}",
            "history": history,
            "task_type": "high",
            "gt_action": action,
            "gt_bbox": place,
            "gt_input_text": words,
            "group": "android_control",
            "ui_type": "text",
        }

    shares = [v / SCREEN[i % 2] for i, v in enumerate(BUTTONS["Maps"])]
    return _parquet(
        folder / "train.parquet",
        [
            row("click", shares),
            row("click", [0.5, 0.1]),
            row("type", [-100.0, -100.0], "hello", "click Search"),
            row("scroll", [-100.0, -100.0], "DOWN"),
            row("press_back", [-100.0, -100.0]),
        ],
    )


def make_ui_r1(folder: Path) -> Path:
    """UI-R1 rows: img_filename, bbox in pixels [x1, y1, x2, y2], instruction."""
    _put(folder / "images/image1.png", screen_bytes())
    return _put(
        folder / "test.json",
        [
            {
                "img_filename": "image1.png",
                "bbox": list(BUTTONS["Search"]),
                "instruction": "search bar",
            },
            {
                "img_filename": "image1.png",
                "bbox": list(BUTTONS["Mail"]),
                "instruction": "check mail",
            },
        ],
    )


MAKERS: Mapping[str, Callable[[Path], Path]] = {
    "video_r1": make_video_r1,
    "easy_video_r1": make_easy_video_r1,
    "easyr1_types": make_easyr1_types,
    "vlm_r1_types": make_vlm_r1_types,
    "llama_factory": make_llama_factory,
    "pageocr": make_pageocr,
    "ocrbench": make_ocrbench,
    "mathvista": make_mathvista,
    "mmmu": make_mmmu,
    "screenspot": make_screenspot,
    "screenspot_v2": make_screenspot_v2,
    "screenspot_hf": make_screenspot_hf,
    "screenspot_pro": make_screenspot_pro,
    "android_control": make_android_control,
    "gui_odyssey": make_gui_odyssey,
    "gui_r1": make_gui_r1,
    "ui_r1": make_ui_r1,
}
"""Name of the fixture -> its maker; a maker returns what a reader reads."""


def make_all(folder: Path) -> dict[str, str]:
    """Every fixture in a folder of its own below `folder`: name -> path to read."""
    return {name: str(make(folder / name)) for name, make in MAKERS.items()}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    for kind, where in make_all(Path(sys.argv[1])).items():
        print(f"{kind:16} {where}")
