"""Scene graphs: the objects of a picture with their boxes, and the relations between them.

A row's answer is {"objects": [{"id": "1", "label": "red circle", "bbox": [x1, y1, x2, y2]}, ...],
"relations": [["1", "left of", "2"], ...]}; a model answers the same with bbox_2d in the prompt's frame, or as R1-SGG asks for
it, {"objects": [{"id": "person.1", "bbox": [...]}], "relationships": [{"subject": "person.1", ...}]}. Ids only tie relations
to objects; where an object has no label, its id is one, without the number. The default reward is the mean of a soft node F1
and the edges' F1 (mmrl.rewards.scene_graph); what is invented costs, and so does what is left out.

    mmrl tasks check scene_graph --data my.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, did_you_mean
from mmrl.registry import register
from mmrl.rewards.objects import (
    MAX_OBJECT_CHARS,
    MAX_OBJECTS,
    ObjectError,
    label_of,
    normalise_label,
    number_box,
)
from mmrl.rewards.parsing import load_json, strip_fence
from mmrl.rewards.r1_sgg import make_r1_sgg
from mmrl.rewards.reading.blocks import json_block
from mmrl.rewards.router import Part, PartFactory
from mmrl.rewards.scene_graph import Edge, Graph, graph_metrics, make_scene_graph_reward
from mmrl.rewards.text import check_names
from mmrl.tasks.base import AnswerError, AnswerTask, Prediction, picture_size
from mmrl.tasks.boxes import beside, box_to_orig, format_box, from_picture, grid_step
from mmrl.tasks.detection import check_objects, hull
from mmrl.tasks.texts import foreign_text
from mmrl.types import ImageSize, RewardContext, Sample

__all__ = ["MAX_RELATIONS", "SceneGraph", "parse_graph"]

MAX_RELATIONS = 400
"""More relations than this are a flood, not an answer."""
_BOX_KEYS = ("bbox_2d", "bbox")


_R1_SGG: Mapping[str, Any] = {
    "answer_format": "think",
    "spelling": "r1_sgg",
    "format_rule": "r1_sgg",
    "frame": "abs_resized",
    "normalise": False,
}
_SPELLINGS = {
    "ids": '{"objects": [{"id": "1", "label": "...", "bbox_2d": [x1, y1, x2, y2]}, ...], "relations": [["1", "...", "2"], ...]}',
    "r1_sgg": '{"objects": [{"id": "name.1", "bbox": [x1, y1, x2, y2]}, ...], '
    '"relationships": [{"subject": "name.1", "predicate": "...", "object": "name.2"}, ...]}',
}


def _size(sample: Sample, ctx: RewardContext) -> ImageSize:
    return picture_size(sample, ctx, sample.params.get("image_index", 0))


def _truth(sample: Sample) -> Graph:
    objects = sample.answer["objects"]
    place = {str(item["id"]): i for i, item in enumerate(objects)}
    return Graph(
        tuple((normalise_label(item["label"]), tuple(item["bbox"])) for item in objects),
        tuple(
            (place[str(s)], normalise_label(p), place[str(o)])
            for s, p, o in sample.answer["relations"]
        ),
    )


def _id(value: Any) -> str:
    if (
        isinstance(value, bool)
        or not isinstance(value, (str, int))
        or not 0 < len(str(value)[:101]) <= 100
    ):
        raise ObjectError("no_id")
    return str(value)


def _name_in(identity: str) -> str:
    """'traffic_light.2' -> 'traffic light': R1-SGG's ids hold the label before the first dot."""
    return identity.partition(".")[0].replace("-", " ") if "." in identity else ""


def _nodes(items: Any) -> tuple[dict[str, int], list[tuple[str, Sequence[float]]]]:
    if not isinstance(items, list):
        raise ObjectError("no_objects")
    if len(items) > MAX_OBJECTS:
        raise ObjectError("too_many_objects")
    place: dict[str, int] = {}
    nodes: list[tuple[str, Sequence[float]]] = []
    for item in items:
        keys = [key for key in _BOX_KEYS if isinstance(item, dict) and key in item]
        if len(keys) != 1:
            raise ObjectError("ambiguous_keys" if keys else "no_box_key")
        name = _id(item.get("id"))
        if name in place:
            raise ObjectError("repeated_id")
        place[name] = len(nodes)
        nodes.append(
            (
                label_of(item["label"] if "label" in item else _name_in(name)),
                number_box(item[keys[0]]),
            )
        )
    return place, nodes


def _edges(items: Any, place: Mapping[str, int]) -> list[Edge]:
    if not isinstance(items, list):
        raise ObjectError("no_relations")
    if len(items) > MAX_RELATIONS:
        raise ObjectError("too_many_relations")
    edges: list[Edge] = []
    for item in items:
        if isinstance(item, dict):
            item = [item.get("subject"), item.get("predicate"), item.get("object")]
        if not isinstance(item, list) or len(item) != 3:
            raise ObjectError("not_a_relation")
        subject, predicate, target = item
        edges.append((place.get(_id(subject), -1), label_of(predicate), place.get(_id(target), -1)))
    return edges


def parse_graph(answer: str) -> Graph:
    """A graph, boxes in the text's own frame; relations are [subject, predicate, object] or objects with these keys.

    A relation that names an unknown id is kept as a wrong one. Raises AnswerError: answer_too_long, not_a_graph,
    no_objects, no_relations, too_many_objects, too_many_relations, no_id, repeated_id, not_a_relation and the reasons of
    mmrl.rewards.objects. Nothing in the text is run.
    """
    if len(answer) > MAX_OBJECT_CHARS:
        raise AnswerError("answer_too_long")
    try:
        value = load_json(strip_fence(answer))
        if not isinstance(value, dict):
            raise ObjectError("not_a_graph")
        place, nodes = _nodes(value.get("objects"))
        if "relations" in value and "relationships" in value:
            raise ObjectError("ambiguous_keys")
        relations = (
            value["relationships"] if "relationships" in value else value.get("relations", [])
        )
        return Graph(tuple(nodes), tuple(_edges(relations, place)))
    except ObjectError as err:
        raise AnswerError(err.reason) from None
    except (ValueError, RecursionError):
        raise AnswerError("not_a_graph") from None


def _accuracy_part(mode: str, **params: Any) -> Part:
    """A rule of mmrl.rewards.scene_graph or mmrl.rewards.r1_sgg in pixels of the original picture."""
    if mode == "r1_sgg":
        check_names("mode 'r1_sgg'", make_r1_sgg, params)
        published = make_r1_sgg(**params)
        return lambda predicted, sample, ctx: published(
            predicted.value, _truth(sample), _size(sample, ctx).orig_wh
        )
    reward = make_scene_graph_reward(mode, **params)

    def accuracy(predicted: Prediction, sample: Sample, ctx: RewardContext) -> float:
        return reward(predicted.value, _truth(sample))

    return accuracy


@register("scene_graph")
class SceneGraph(AnswerTask):
    """Describe a picture as a graph. Beside the parameters of AnswerTask:

    mode      f1 (default), r1_sgg_hard or r1_sgg_soft, see mmrl.rewards.scene_graph; r1_sgg, see mmrl.rewards.r1_sgg; their
              parameters in `accuracy`
    spelling  how the prompt asks for the graph: ids (default) or r1_sgg; both are read
    """

    headline: ClassVar[str] = "graph_f1"
    ask: ClassVar[str] = "{question} Coordinates {frame}."
    shape: ClassVar[str] = _SPELLINGS["ids"]
    default_mode: ClassVar[str] = "f1"
    own_params: ClassVar[Mapping[str, Any]] = {"spelling": "ids"}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        # edge_hard_reward and format_reward; node_acc + node_box (2 each) + edge (5) and format_reward
        "r1_sgg_hard": {
            "mode": "r1_sgg",
            "accuracy": {"edges": "hard"},
            "weights": {"accuracy": 5.0, "format": 1.0},
            **_R1_SGG,
        },
        "r1_sgg_soft": {
            "mode": "r1_sgg",
            "accuracy": {"edges": "soft"},
            "weights": {"accuracy": 9.0, "format": 1.0},
            **_R1_SGG,
        },
    }
    metric_names: ClassVar[tuple[str, ...]] = (
        "node_f1",
        "edge_f1",
        "edge_recall",
        "graph_f1",
        "correct",
    )

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        spelling = self.settings["spelling"]
        if spelling not in _SPELLINGS:
            raise ConfigError(
                f"unknown spelling {spelling!r} of scene_graph; expected {', '.join(_SPELLINGS)}."
                f"{did_you_mean(str(spelling), _SPELLINGS)}"
            )
        if self.settings["prompt"] is None:
            self.prompt = self.prompt.replace(self.shape, _SPELLINGS[spelling])

    def factories(self) -> Mapping[str, PartFactory]:
        """accuracy and format."""
        return {"accuracy": _accuracy_part, "format": self.format_factory()}

    def check_answer(
        self,
        value: Any,
        frame: CoordFrame,
        sizes: Sequence[tuple[int, int]],
        params: Mapping[str, Any],
    ) -> dict[str, Any]:
        """A graph of the picture params.image_index whose relations join objects that exist."""
        from mmrl.tasks.readers.common import RowError

        if (
            not isinstance(value, dict)
            or set(value) - {"objects", "relations"}
            or "objects" not in value
        ):
            raise RowError(
                'a graph {"objects": [...], "relations": [...]}',
                repr(value)[:80],
                "write exactly these keys",
            )
        index = params.get("image_index", 0)
        if not isinstance(index, int) or not 0 <= index < len(sizes):
            raise RowError(
                f"image_index from 0 to {len(sizes) - 1}", repr(index)[:40], "count pictures from 0"
            )
        objects = check_objects(value["objects"], frame, sizes[index])
        ids = [item.get("id") for item in value["objects"]]
        if any(isinstance(i, bool) or not isinstance(i, (str, int)) or i == "" for i in ids):
            raise RowError(
                "an 'id' per object, text or a number", repr(ids)[:80], "number the objects"
            )
        names = [str(i) for i in ids]
        if len(set(names)) < len(names):
            raise RowError("different ids", repr(names)[:80], "renumber the objects")
        relations = value.get("relations", [])
        _check_relations(relations, set(names))
        return {
            "objects": [{"id": name, **item} for name, item in zip(names, objects, strict=True)],
            "relations": [[str(s), p.strip(), str(o)] for s, p, o in relations],
        }

    def parse(self, answer: str, sample: Sample, ctx: RewardContext) -> Graph:
        """The graph with boxes in pixels of the original picture. Reasons: those of `parse_graph`."""
        graph, size = parse_graph(answer), _size(sample, ctx)
        return Graph(
            tuple((label, box_to_orig(box, ctx.frame, size)) for label, box in graph.nodes),
            graph.edges,
        )

    def native(self, answer: str, sample: Sample, ctx: RewardContext) -> str | None:
        """The one JSON object of a text with prose around it."""
        return json_block(answer)

    def measure(self, value: Graph, sample: Sample, ctx: RewardContext) -> Mapping[str, float]:
        """node_f1, edge_f1, edge_recall, graph_f1 (their mean) and correct, nodes matched at IoU 0.5."""
        return graph_metrics(value, _truth(sample))

    def describe(
        self, value: Graph | None, sample: Sample, ctx: RewardContext
    ) -> Mapping[str, Any]:
        """Boxes and labels in pixels of the original picture, relations as text."""
        truth = _truth(sample)
        shown = {
            "gold_boxes": [list(box) for _, box in truth.nodes],
            "gold_labels": [label for label, _ in truth.nodes],
            "gold_text": _relations_text(truth),
            "frame": CoordFrame.ABS_ORIG.value,
            "pred_boxes": [],
            "pred_labels": [],
        }
        if value is not None:
            shown |= {
                "pred_boxes": [list(box) for _, box in value.nodes],
                "pred_labels": [label for label, _ in value.nodes],
                "pred_text": _relations_text(value),
            }
        return shown

    def gold_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """The true graph with boxes in ctx.frame."""
        size = _size(sample, ctx)
        objects = [
            (item["id"], item["label"], from_picture(item["bbox"], ctx.frame, size))
            for item in sample.answer["objects"]
        ]
        return self._text(objects, sample.answer["relations"], ctx.frame)

    def _text(
        self,
        objects: Sequence[tuple[str, str, Sequence[float]]],
        relations: Sequence[Sequence[str]],
        frame: CoordFrame,
    ) -> str:
        """The graph as the prompt asks for it; boxes in `frame`."""
        if self.settings["spelling"] == "ids":
            return _spell(objects, relations, frame)
        ids = {
            i: f"{label.replace('.', ' ').replace(' ', '_')}.{n}"
            for n, (i, label, _) in enumerate(objects, 1)
        }
        nodes = ", ".join(
            f'{{"id": {json.dumps(ids[i], ensure_ascii=False)}, "bbox": {format_box(box, frame)}}}'
            for i, _, box in objects
        )
        edges = [{"subject": ids[s], "predicate": p, "object": ids[o]} for s, p, o in relations]
        return f'{{"objects": [{nodes}], "relationships": {json.dumps(edges, ensure_ascii=False)}}}'

    def wrong_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """A graph of one object that misses every true one."""
        size, objects = _size(sample, ctx), sample.answer["objects"]
        extent = ctx.frame.extent(size.resized_wh, size.orig_wh)
        if not objects:
            return self._text(
                [("1", "object", (0.0, 0.0, extent[0] / 2, extent[1] / 2))], [], ctx.frame
            )
        around = from_picture(hull([item["bbox"] for item in objects]), ctx.frame, size)
        name, miss = objects[0]["label"], beside(around, extent, grid_step(ctx.frame))
        # which also pays the label alone, and for boxes that are near
        if self.settings["mode"] == "r1_sgg":
            name = foreign_text([item["label"] for item in objects])
            miss = (900 * extent[0], 900 * extent[1], 901 * extent[0], 901 * extent[1])
        return self._text([("1", name, miss)], [], ctx.frame)

    def example_data(self, folder: str) -> str:
        """16 generated scenes with the relations left of and above; returns their file."""
        from mmrl.tasks.scenes import make_scenes

        scenes = Path(
            make_scenes(folder, count=16, seed=17, difficulty={0: 0.5, 1: 1.0, 2: 1.0, 3: 1.0})
        )
        path = scenes.with_name("scene_graph.jsonl")
        rows = [json.loads(line) for line in scenes.read_text(encoding="utf-8").splitlines()]
        path.write_text("".join(json.dumps(_example(row)) + "\n" for row in rows), encoding="utf-8")
        return str(path)


def _check_relations(relations: Any, names: set[str]) -> None:
    from mmrl.tasks.readers.common import RowError

    if not isinstance(relations, list) or not all(
        isinstance(r, list) and len(r) == 3 for r in relations
    ):
        raise RowError(
            "relations as [[subject id, predicate, object id], ...]",
            repr(relations)[:80],
            "write three values each",
        )
    if len(relations) > MAX_RELATIONS:
        raise RowError(
            f"at most {MAX_RELATIONS} relations",
            str(len(relations)),
            "leave the row out: no answer may be that long",
        )
    for subject, predicate, target in relations:
        if not isinstance(predicate, str) or not predicate.strip():
            raise RowError(
                "a predicate as text", repr(predicate)[:80], "write, for example, 'left of'"
            )
        for end in (subject, target):
            if str(end) not in names:
                raise RowError(
                    "relations between objects that exist",
                    f"id {end!r}"[:80],
                    f"the ids are {', '.join(sorted(names))[:200]}",
                )
    known = {(str(s), normalise_label(p), str(o)) for s, p, o in relations}
    if len(known) < len(relations):
        raise RowError("different relations", "one of them twice", "remove the repeated one")


def _relations_text(graph: Graph) -> str:
    def name(index: int) -> str:
        return graph.nodes[index][0] if index >= 0 else "?"

    return "; ".join(f"{name(s)} {p} {name(o)}" for s, p, o in graph.edges)


def _spell(
    objects: Sequence[tuple[str, str, Sequence[float]]],
    relations: Sequence[Sequence[str]],
    frame: CoordFrame,
) -> str:
    def words(text: str) -> str:
        return json.dumps(text, ensure_ascii=False)

    nodes = ", ".join(
        f'{{"id": {words(i)}, "label": {words(label)}, "bbox_2d": {format_box(box, frame)}}}'
        for i, label, box in objects
    )
    edges = ", ".join(f"[{words(s)}, {words(p)}, {words(o)}]" for s, p, o in relations)
    return f'{{"objects": [{nodes}], "relations": [{edges}]}}'


def _example(row: dict[str, Any]) -> dict[str, Any]:
    """A grounding scene as a scene-graph row: who is wholly left of, else above, whom."""
    objects = [
        {"id": str(i + 1), "label": f"{o['color']} {o['shape']}", "bbox": o["box"]}
        for i, o in enumerate(row["params"]["objects"])
    ]
    relations = []
    for a in objects:
        for b in objects:
            if a["bbox"][2] <= b["bbox"][0]:
                relations.append([a["id"], "left of", b["id"]])
            elif a["bbox"][3] <= b["bbox"][1] and b["bbox"][2] > a["bbox"][0]:
                relations.append([a["id"], "above", b["id"]])
    return {
        "id": row["id"],
        "image": row["image"],
        "question": "Describe the shapes: which is left of or above which?",
        "answer": {"objects": objects, "relations": relations},
        "frame": "abs_orig",
        "source": "scenes-graph",
    }
