"""Video benchmarks against what the official programs gave for the same answers (assets.make_official_goldens tells how)."""

from __future__ import annotations

import pytest

from assets.make_official_goldens import load
from mmrl.rewards.choice import parse_choice
from mmrl.tasks.metrics import nextgqa, qvhighlights, temporal
from mmrl.tasks.metrics.tracking import got10k, rect_iou, success_curve
from mmrl.tasks.metrics.video_suites import suite_numbers
from mmrl.types import Sample, Score


def test_charades_recall_is_lmms_evals() -> None:
    """R1@0.3 / 0.5 / 0.7 and mIoU over all queries, also those without a readable answer; overshooting ones and truths as they are,
    the two times of an answer sorted, which no other program does."""
    given, golden = load("charades")
    rows = given["rows"]
    ious = [temporal.best_iou(row["span"], row["true"], "sorted") for row in rows]
    assert ious == pytest.approx(golden["ious"], abs=1e-12) and any(
        row["span"] is None for row in rows
    )
    assert sum(row["true"][1] > row["duration"] for row in rows) > 5
    assert sum(max(row["span"] or [0]) > row["duration"] for row in rows) > 3
    found = {row["video"]: row["span"] for row in rows if row["span"]}
    numbers = temporal.evaluate(
        found, {row["video"]: row["true"] for row in rows}, reversed_as="sorted"
    )
    ours = temporal.evaluate(found, {row["video"]: row["true"] for row in rows})
    back = [
        iou
        for iou, row in zip(golden["ious"], rows, strict=True)
        if row["span"] and row["span"][0] > row["span"][1]
    ]
    assert len(back) > 2 and len(rows) * (numbers["mIoU"] - ours["mIoU"]) == pytest.approx(
        sum(back)
    )
    official = golden["lmms_eval"]
    assert {name: 100 * value for name, value in numbers.items()} == pytest.approx(
        {
            "R1@0.3": official["IOU@3"],
            "R1@0.5": official["IOU@5"],
            "R1@0.7": official["IOU@7"],
            "mIoU": official["mIOU"],
        }
    )


def test_vtimellm_rounds_ious_before_it_compares_them() -> None:
    """Its answers are whole percents of the clip and its IoUs have two decimals; rounded likewise, ours are the same."""
    given, golden = load("charades")
    rows = [row for row in given["rows"] if row["percent"]]
    ious = [
        temporal.best_iou(
            *([second / row["duration"] for second in row[key]] for key in ("span", "true"))
        )
        for row in rows
    ]
    assert [round(iou, 2) for iou in ious] == pytest.approx(golden["vtimellm_ious"]) and len(
        rows
    ) > 15
    rounded = temporal.recall_at([round(iou, 2) for iou in ious])
    assert {name: 100 * value for name, value in rounded.items()} == pytest.approx(
        {name: value for name, value in golden["vtimellm"].items() if name != "mIoU"}
    )
    assert ious != golden["vtimellm_ious"]


def test_qvhighlights_is_moment_detrs_program() -> None:
    """All printed numbers; more than ten windows, equal scores, several true windows, saliency of other lengths than the clip,
    windows behind the end, reversed, twice and without length."""
    given, golden = load("qvhighlights")
    numbers = qvhighlights.evaluate(given["submission"], given["truth"], nan_hits=True)
    assert numbers == golden["printed"]["brief"] and len(numbers) == 14
    ours = qvhighlights.evaluate(given["submission"], given["truth"])
    assert ours["MR-full-mAP"] < numbers["MR-full-mAP"], (
        "a reversed window as long as a true one is no hit here"
    )
    assert {name for name in numbers if ours[name] != numbers[name]} <= {
        name for name in numbers if "mAP" in name and "MR" in name
    }
    assert any(len(row["pred_relevant_windows"]) > 10 for row in given["submission"])


def test_qvhighlights_unrounded() -> None:
    given, golden = load("qvhighlights")
    numbers = qvhighlights.evaluate(
        given["submission"], given["truth"], decimals=None, nan_hits=True
    )
    exact = golden["unrounded"]
    for name in ("short", "middle", "long", "full"):
        assert numbers[f"MR-{name}-mAP"] == pytest.approx(
            100 * sum(exact[name]["mAP"]) / 10, abs=1e-9
        )
    assert numbers["MR-full-mAP@0.75"] == pytest.approx(100 * exact["full"]["mAP"][5], abs=1e-9)
    for level in (0.5, 0.7):
        share = sum(iou >= level for iou in exact["full"]["iou"]) / exact["full"]["queries"]
        assert numbers[f"MR-full-R1@{level}"] == pytest.approx(100 * share, abs=1e-9)


def test_nextgqa_is_its_program() -> None:
    """With its two habits switched on: questions without a prediction are left out, a moment inside a true span has IoP 1."""
    given, golden = load("nextgqa")
    official = golden["all"]
    numbers = nextgqa.evaluate(
        given["spans"], given["truth"], given["answers"], drop_missing=True, point_hits=True
    )
    names = ("Acc@GQA", "mIoP", "IoP@0.3", "IoP@0.5", "mIoU", "IoU@0.3", "IoU@0.5")
    assert [round(numbers[name], 1) for name in names] == official["printed"]
    counted = {
        "Acc@GQA": "cqt",
        "IoP@0.3": "crtp3",
        "IoP@0.5": "crtp5",
        "IoU@0.3": "crt3",
        "IoU@0.5": "crt5",
    }
    expected = {name: 100 * official[key] / official["cnt"] for name, key in counted.items()}
    assert {name: numbers[name] for name in names} == pytest.approx(
        {**expected, "mIoP": official["mIoP"], "mIoU": official["mIoU"]}, abs=1e-9
    )


def test_nextgqa_question_by_question() -> None:
    given, golden = load("nextgqa")
    for key, (iou, iop) in golden["each"].items():
        video, qid = key.rsplit("_", 1)
        pairs = [
            nextgqa.iou_iop(true, given["spans"][key], point_hits=True)
            for true in given["truth"][video]["location"][qid]
        ]
        assert (
            max(0.0, *(p[0] for p in pairs)),
            max(0.0, *(p[1] for p in pairs)),
        ) == pytest.approx((iou, iop), abs=1e-9), key


def test_nextgqa_counts_questions_without_prediction_and_pays_nothing_for_moments() -> None:
    """Our headline on the same file: every question counts, so each number is at most the program's."""
    given, golden = load("nextgqa")
    ours = nextgqa.evaluate(given["spans"], given["truth"], given["answers"])
    official = golden["all"]
    questions = sum(len(facts["location"]) for facts in given["truth"].values())
    assert questions == official["cnt"] + len(given["missing"]) and given["missing"]
    assert ours["mIoU"] == pytest.approx(official["mIoU"] * official["cnt"] / questions, abs=1e-9)
    moments = sum(iop == 1 and iou == 0 for iou, iop in golden["each"].values())
    assert moments > 0 and ours["mIoP"] == pytest.approx(
        (official["mIoP"] * official["cnt"] - 100 * moments) / questions, abs=1e-9
    )


def test_got10k_is_the_toolkit() -> None:
    """AO, SR at 0.5 and 0.75 over all frames and per sequence; boxes across and beyond the edges, invisible frames."""
    given, golden = load("got10k")
    sequences = {row["name"]: row for row in given["sequences"]}

    def numbers(names: list[str]) -> dict[str, float]:
        return got10k(
            {n: sequences[n]["predictions"] for n in names},
            {n: sequences[n]["boxes"] for n in names},
            sizes={n: sequences[n]["size"] for n in names},
            covers={n: sequences[n]["cover"] for n in names},
        )

    assert numbers(list(sequences)) == pytest.approx(
        {"AO": golden["ao"], "SR0.50": golden["sr_0.5"], "SR0.75": golden["succ_curve"][75]},
        abs=1e-12,
    )
    for name, official in golden["sequences"].items():
        some = numbers([name])
        assert (some["AO"], some["SR0.50"]) == pytest.approx(
            (official["ao"], official["sr_0.5"]), abs=1e-12
        )
    assert 0.2 < golden["ao"] < 0.9 and any(0 in row["cover"] for row in sequences.values())


def test_got10k_frame_by_frame() -> None:
    given, golden = load("got10k")
    pooled = []
    for row, official in zip(given["sequences"], golden["ious"], strict=True):
        ious = rect_iou(row["predictions"], row["boxes"], row["size"])[1:]
        assert list(ious) == pytest.approx(official, abs=1e-12)
        pooled += [iou for iou, cover in zip(ious, row["cover"][1:], strict=True) if cover]
    assert list(success_curve(pooled)) == pytest.approx(golden["succ_curve"], abs=1e-12)


def suite(name: str, letters: str = "ABCDEF", options: int = 4) -> dict[str, float]:
    """Our numbers of a set's answers whose right letter is one of `letters`."""
    pairs = []
    for row in load("choices")[0][name]:
        if row["answer"] in letters:
            right = parse_choice(row["said"], [], options).option == "ABCDEF".index(row["answer"])
            params = {
                "suite": name.split("_")[0],
                "category": row["category"],
                "duration_group": row["category"],
            }
            score = Score(float(right), True, metrics={"correct": float(right)})
            pairs.append((Sample("1", "choice", "s", "q", "A", params=params), score))
    return suite_numbers(pairs)


def test_mlvus_m_avg_is_lmms_evals() -> None:
    official = load("choices")[1]
    dev = suite("mlvu_dev")
    assert (
        100 * dev["mlvu/M-Avg"] == pytest.approx(official["mlvu_dev"])
        and dev["mlvu/categories"] == 7
    )
    assert dev["mlvu/M-Avg"] != pytest.approx(dev["mlvu/accuracy"])
    # one of the nine tasks has no such question: the program divides by nine all the same
    test = suite("mlvu_test", "ABCD", 6)
    assert test["mlvu/categories"] == 8
    assert 100 * test["mlvu/M-Avg"] * 8 / 9 == pytest.approx(official["mlvu_test_a_to_d"])


def test_lmms_eval_cannot_read_the_fifth_and_sixth_option_of_mlvus_test_set() -> None:
    official, ours = load("choices")[1], suite("mlvu_test", options=6)
    assert official["mlvu_test"] < 100 * ours["mlvu/M-Avg"] - 5 and ours["mlvu/categories"] == 9
    rows = load("choices")[0]["mlvu_test"]
    assert not any(
        hit
        for row, hit in zip(rows, official["mlvu_test_each"], strict=True)
        if row["answer"] in "EF"
    )


def test_mvbenchs_tasks_are_lmms_evals_but_for_empty_answers() -> None:
    """It leaves empty answers out of the denominator; here they are wrong."""
    official, ours = load("choices")[1]["mvbench"], suite("mvbench")
    rows = [row for row in load("choices")[0]["mvbench"] if row["category"] == "object_shuffle"]
    empty = sum(not row["said"] for row in rows)
    assert {
        name: 100 * ours[f"mvbench/{name}"] for name in ("action_count", "moving_direction")
    } == pytest.approx({name: official[name] for name in ("action_count", "moving_direction")})
    assert empty > 0 and 100 * ours["mvbench/object_shuffle"] == pytest.approx(
        official["object_shuffle"] * (1 - empty / len(rows))
    )
    assert official["object_shuffle"] > 0


def test_videomme_is_lmms_evals() -> None:
    official, ours = load("choices")[1], suite("videomme")
    assert 100 * ours["videomme/accuracy"] == pytest.approx(official["videomme"])
    printed = {
        name: f"{100 * ours[f'videomme/duration {name}']:.1f}"
        for name in ("short", "medium", "long")
    }
    assert printed == official["videomme_printed"] and len(set(printed.values())) > 1
