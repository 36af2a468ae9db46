"""What the viewer refuses, leaves out and survives: foreign requests, hostile and broken run folders.

pytest tests/viewer/test_viewer_attacks.py
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from mmrl.report.filmstrip import Figures
from mmrl.viewer.media import MediaPolicy
from tests.viewer.conftest import Viewer

pytestmark = pytest.mark.slow
View = Callable[..., Viewer]
SECRET = "the-secret-words"


def test_only_this_machines_names_are_answered(view: View, runs: Path) -> None:
    viewer = view(runs)
    for host in (f"localhost:{viewer.port}", "127.0.0.1", f"[::1]:{viewer.port}", "LOCALHOST"):
        assert viewer.raw("/api/runs", host=host).status == 200, host
    for host in (
        "evil.example",
        f"evil.example:{viewer.port}",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "",
        "169.254.169.254",
        "0.0.0.0",
    ):
        found = viewer.raw("/api/runs", host=host)
        assert found.status in (400, 403) and b"first" not in found.body, host


def test_pages_of_other_sites_and_other_methods_are_refused(view: View, runs: Path) -> None:
    viewer = view(runs)
    for site in ("cross-site", "same-site"):
        assert viewer.raw("/download/report.html?run=first", sec_fetch_site=site).status == 403
    assert viewer.raw("/", sec_fetch_site="cross-site").status == 200  # a link to the page
    assert viewer.raw("/api/runs", sec_fetch_site="same-origin").status == 200
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert viewer.raw("/api/runs", method=method).status == 405, method
    for target in (
        "/",
        "/api/runs",
        "/static/app.js",
        "/api/picture?run=first&table=predictions&row=0",
    ):
        headers = viewer.raw(target).headers
        assert "access-control-allow-origin" not in headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy


@pytest.mark.parametrize(
    "target",
    [
        "/../../../../etc/passwd",
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/static/..%2f..%2f..%2fetc%2fpasswd",
        "/static//etc/passwd",
        "/static/vendor/%00uplot.min.js",
        "/api/run?run=../../etc",
        "/api/run?run=/etc",
        "/api/run?run=first/../live",
        "/api/run?run=first%00",
        "/api/samples?run=first&table=../../etc",
        "/api/episode?run=first&table=predictions&row=0",
        "/api/picture?run=first&table=predictions&row=0&i=99",
        "/download/samples.jsonl?run=..&table=rollouts",
    ],
)
def test_no_address_names_a_file(standing: tuple[Viewer, Path], target: str) -> None:
    found = standing[0].raw(target)
    assert found.status in (400, 404), target
    assert b"root:" not in found.body and b"uvicorn" not in found.body


@pytest.mark.parametrize(
    "query",
    [
        "row=-1",
        "row=1e9",
        "row=" + "9" * 15,
        "row=" + "9" * 5000,
        "sort=__class__",
        "step_min=abc",
        "reward_min=nan",
        "offset=-5",
        "limit=%F0%9F%98%80",
        "parsed=maybe",
        "unit=inf",
        "q=" + "a" * 501,
        "table=predictions&table=nothing",
        "t=nan&table=predictions",
    ],
)
def test_odd_parameters_are_refused_in_words(standing: tuple[Viewer, Path], query: str) -> None:
    viewer, seen = standing[0], []
    for path in ("/api/samples", "/api/sample", "/api/frame"):
        found = viewer.raw(f"{path}?run=first&{query}")
        seen.append(found.status)
        assert found.status in (200, 400, 404), (path, found.body)
        assert found.status == 200 or len(found.json["error"]) > 10
    assert 400 in seen or 404 in seen


def test_a_huge_query_and_a_huge_head_are_refused_and_the_server_goes_on(
    view: View, runs: Path
) -> None:
    viewer = view(runs)
    assert viewer.raw("/api/runs?x=" + "a" * 20_000).status == 414
    # answered, or the connection is closed on it
    with contextlib.suppress(http.client.HTTPException, ConnectionError):
        assert viewer.raw("/api/runs", x_long="b" * 200_000).status in (400, 431)
    names = "&".join(f"names=n{i}" for i in range(2000))
    assert viewer.raw(f"/api/metrics?run=first&{names}"[:16_000]).status == 200
    assert viewer.get("/api/runs").status == 200


def test_links_that_lead_out_of_a_run_show_nothing_of_other_files(
    view: View, runs: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    row = {
        "step": 1,
        "source": SECRET,
        "id": SECRET,
        "question": SECRET,
        "text": SECRET,
        "mode": "greedy",
        SECRET: 1,
    }
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "predictions.jsonl",
        "run.json",
        "alarms.jsonl",
        "clip.mp4",
    ):
        (secret / name).write_text(json.dumps(row) + "\n")
    evil = runs / "evil"
    (evil / "rollouts").mkdir(parents=True)
    (evil / "eval" / "step_000000" / "videos").mkdir(parents=True)
    (evil / "metrics.jsonl").write_text('{"step": 1}\n')
    for name in ("config.yaml", "run.json", "alarms.jsonl"):
        (evil / name).symlink_to(secret / name)
    (evil / "rollouts/step_000001.jsonl").symlink_to(secret / "metrics.jsonl")
    shutil.copy(
        runs / "first/eval/step_000000/results.json", evil / "eval/step_000000/results.json"
    )
    video = {"id": "v", "source": "s", "mode": "greedy", "video": "clip.mp4", "score": {"value": 1}}
    (evil / "eval/step_000000/predictions.jsonl").write_text(json.dumps(video) + "\n")
    (evil / "eval/step_000000/videos/clip.mp4").symlink_to(secret / "clip.mp4")
    (evil / "eval/step_000020").symlink_to(secret)
    (runs / "linked").symlink_to(secret)
    viewer = view(runs)
    assert "linked" not in [r["key"] for r in viewer.get("/api/runs").json["runs"]]
    for path, query in (
        ("/api/runs", {}),
        ("/api/run", {"run": "evil"}),
        ("/api/metrics", {"run": "evil", "names": SECRET}),
        ("/api/samples", {"run": "evil", "table": "rollouts"}),
        ("/api/samples", {"run": "evil", "table": "predictions"}),
        ("/api/diff", {"run": ["evil", "first"]}),
        ("/api/episode", {"run": "evil", "table": "predictions", "row": 0}),
        ("/download/metrics.csv", {"run": "evil"}),
        ("/download/samples.jsonl", {"run": "evil", "table": "rollouts"}),
        ("/download/report.html", {"run": "evil"}),
        ("/download/comparison.html", {"run": ["evil", "first"]}),
    ):
        found = viewer.get(path, **query)
        assert found.status in (200, 404), (path, found.body)
        # the names of two parameters of the request come back; contents of the linked files never do
        assert SECRET.encode() not in found.body, path
    assert b"link that leads out" in viewer.get("/api/run", run="evil").body


def test_rows_name_no_bytes_but_pictures(view: View, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text(SECRET)
    os.mkfifo(tmp_path / "pipe")
    names = [
        str(tmp_path / "plain.txt"),
        str(tmp_path / "pipe"),
        "/dev/zero",
        "/etc",
        "http://127.0.0.1/x.png",
        "a\0b",
        "x" * 9000,
        "file:///etc/passwd",
    ]
    with (runs / "first/rollouts/step_000003.jsonl").open("w") as file:
        for name in names:
            sample = {
                "id": "x",
                "source": "s",
                "task": "grounding",
                "question": "q",
                "images": [name],
                "videos": [],
            }
            file.write(json.dumps({"sample": sample, "text": "t", "score": {"value": 0}}) + "\n")
            file.write(
                json.dumps(
                    {
                        "sample": {**sample, "images": [], "videos": [name]},
                        "text": "t",
                        "score": {"value": 0},
                    }
                )
                + "\n"
            )
    viewer = view(runs)
    rows = viewer.get("/api/samples", run="first", table="rollouts", step_min=3).json["rows"]
    assert len(rows) == 2 * len(names)
    for row in rows:
        for path in ("/api/picture", "/api/frame", "/api/sample"):
            for size in ("full", "thumb"):
                found = viewer.get(
                    path, run="first", table="rollouts", row=row["row"], size=size, t=0
                )
                assert found.status == (200 if path == "/api/sample" else 404), (path, found.body)
                assert SECRET.encode() not in found.body and b"root:" not in found.body


def test_pictures_outside_need_a_root_beyond_this_machine(
    view: View, runs: Path, tmp_path: Path
) -> None:
    shutil.move(runs / "first/pictures", tmp_path / "album")
    for file in runs.glob("first/eval/*/predictions.jsonl"):
        file.write_text(file.read_text().replace("pictures/", f"{tmp_path}/album/"))
    ask = {"run": "first", "table": "predictions", "row": 0}
    assert view(runs).get("/api/picture", **ask).status == 200  # loopback: what this user may read
    other = view(runs, "--media-root", tmp_path / "runs")
    assert other.get("/api/picture", **ask).status == 404
    assert "cannot be shown" in other.get("/api/sample", **ask).json["figure"]
    opened = view(runs, "--host", "0.0.0.0", "--no-key")
    assert opened.get("/api/picture", **ask).status == 404
    named = view(runs, "--host", "0.0.0.0", "--no-key", "--media-root", tmp_path / "album")
    assert named.get("/api/picture", **ask).status == 200


def test_an_exported_report_holds_no_picture_that_may_not_be_shown(
    view: View, runs: Path, tmp_path: Path
) -> None:
    shutil.move(runs / "first/pictures", tmp_path / "album")
    for file in runs.glob("first/eval/*/predictions.jsonl"):
        file.write_text(file.read_text().replace("pictures/", f"{tmp_path}/album/"))
    key = {"authorization": "Bearer k"}
    target = "/download/report.html?run=first"
    opened = view(runs, "--host", "0.0.0.0", "--api-key", "k").raw(target, **key)
    assert opened.status == 200 and b"cannot be shown (missing)" in opened.body
    assert b"data:image/" not in opened.body
    named = view(runs, "--host", "0.0.0.0", "--api-key", "k", "--media-root", tmp_path / "album")
    assert b"data:image/" in named.raw(target, **key).body


def test_an_export_opens_no_clip_that_may_not_be_shown(runs: Path, tmp_path: Path) -> None:
    """The filmstrip of a clip is looked for where pictures are, and by the same rule."""
    clip = tmp_path / "frames"
    clip.mkdir()
    Image.new("RGB", (32, 32), "red").save(clip / "000.png")
    row = {"id": "c", "videos": [str(clip)]}
    for roots, shown in (((), False), ((tmp_path,), True), (None, True)):
        policy = MediaPolicy(roots)

        def find(path: str, policy: MediaPolicy = policy) -> str:
            return policy.place(path, runs / "first", "")

        drawn = Figures(runs / "first", find=find).drawing(row, [])
        assert ("data:image/" in drawn) is shown, (roots, drawn)
        assert ("cannot be shown (missing): frames" in drawn) is not shown


def test_beyond_this_machine_a_key_is_needed(view: View, runs: Path) -> None:
    import subprocess
    import sys

    command = [
        sys.executable,
        "-m",
        "mmrl.cli.main",
        "view",
        str(runs),
        "--host",
        "0.0.0.0",
        "--port",
        "0",
    ]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode == 2 and "--api-key" in refused.stderr
    viewer = view(runs, "--host", "0.0.0.0", "--api-key", "k&y")
    assert "?key=k%26y" in viewer.said
    for target in ("/", "/api/runs", "/static/app.js", "/?key=wrong", "/api/runs?key=k%26y"):
        assert viewer.raw(target).status == 401, target
    first = viewer.raw("/?key=k%26y")
    assert first.status == 303 and first.headers["location"] == "/"
    cookie = first.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert viewer.raw("/api/runs", cookie=cookie.partition(";")[0], host="any.name").status == 200
    assert viewer.raw("/api/runs", cookie="mmrl_view=wrong").status == 401
    assert viewer.raw("/api/runs", authorization="Bearer k&y").status == 200


def test_broken_lines_are_counted_and_the_rest_is_shown(view: View, runs: Path) -> None:
    path = runs / "first/rollouts/step_000002.jsonl"
    whole = path.read_bytes().splitlines(keepends=True)
    deep = b'{"sample": ' + b"[" * 200_000 + b"\n"
    odd = [
        b"\xff\xfe not text\n",
        b"[1, 2]\n",
        b'{"sample": 5, "score": "x", "text": 7, "turns": 3, "images": {"a": 1}}\n',
        b'{"sample": {"id": {"a": [1]}, "images": [3, null]}, "text": null, "score": {"value": "high", "metrics": []}}\n',
        b'{"text": "\\ud800 half", "id": "\\udfff", "score": {"value": NaN, "metrics": {"a": Infinity, "big": 1e999}}}\n',
        b'{"text": "x", "score": {"value": ' + b"9" * 5000 + b"}}\n",
        deep,
        b"\n",
    ]
    path.write_bytes(b"".join(odd) + b"".join(whole) + whole[0][: len(whole[0]) // 2])
    viewer = view(runs)
    found = viewer.get(
        "/api/samples", run="first", table="rollouts", sort="file", order="up", limit=200
    ).json
    # no text, no object, a number no int has, too deep
    assert found["done"] and found["broken"] == 4
    assert found["total"] == 40 + 3
    for row in found["rows"]:
        shown = viewer.get("/api/sample", run="first", table="rollouts", row=row["row"])
        assert shown.status == 200, shown.body
        assert isinstance(shown.json["raw"], str)
    assert viewer.get("/api/samples", run="first", table="rollouts", q="half").json["total"] == 1
    assert viewer.get("/api/samples", run="first", table="rollouts", q="\ud800").status in (
        200,
        400,
    )
    with path.open("ab") as file:  # the torn line is finished
        file.write(whole[0][len(whole[0]) // 2 :])
    assert viewer.get("/api/samples", run="first", table="rollouts").json["total"] == 44


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: &d [*c, *c, *c, *c]\ne: "
        + "[*d, *d, *d, *d, *d]",
        "[" * 50_000,
        "x: 2001-99-99\n",
        "? [a, b]\n: 1\n",
        "\x00\x01",
        "!!python/object/apply:os.system ['true']",
        "env: {}\n" * 3,
    ],
)
def test_hostile_configurations_cost_little(view: View, runs: Path, text: str) -> None:
    (runs / "first/config.yaml").write_text(text)
    viewer = view(runs)
    for path, query in (
        ("/api/runs", {}),
        ("/api/run", {"run": "first"}),
        ("/api/diff", {"run": ["first", "live"]}),
    ):
        assert viewer.get(path, **query).status == 200, path


def test_files_that_are_something_else_do_not_hold_the_viewer(view: View, runs: Path) -> None:
    odd = runs / "odd"
    odd.mkdir()
    for name in ("run.json", "metrics.jsonl"):
        os.mkfifo(odd / name)
    (odd / "sub").mkdir()
    (runs / "dirs").mkdir()
    (runs / "dirs" / "metrics.jsonl").mkdir()
    (runs / "empty").mkdir()
    (runs / "empty" / "run.json").write_text("")
    (runs / "weird").mkdir()
    (runs / "weird" / "run.json").write_text(
        '{"name": ["x"], "status": 5, "started": 1e400, "total_steps": NaN, "info": {}, "signal": {}}'
    )
    (runs / "weird" / "metrics.jsonl").write_text(
        '{"step": 1e308, "a": 1e308}\n{"step": -1, "a": true}\n{"step": 1.5, "'
        + "n" * 5000
        + '": 2}\n'
    )
    viewer = view(runs)
    keys = [r["key"] for r in viewer.get("/api/runs").json["runs"]]
    assert {"empty", "weird", "first"} <= set(keys)
    for key in keys:
        assert viewer.get("/api/run", run=key).status == 200, key
        assert viewer.get("/api/metrics", run=key, names=["a", "train/loss"]).status == 200
        assert viewer.get("/api/samples", run=key, table="rollouts").status == 200
        assert viewer.get("/download/metrics.csv", run=key).status == 200


def test_a_folder_that_is_deleted_meanwhile_is_said(view: View, runs: Path) -> None:
    viewer = view(runs)
    assert viewer.get("/api/samples", run="first", table="predictions").status == 200
    for name in ("rollouts", "eval", "metrics.jsonl", "config.yaml"):
        victim = runs / "first" / name
        shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
        for path in (
            "/api/run",
            "/api/metrics",
            "/api/samples",
            "/api/sample",
            "/api/picture",
            "/download/samples.jsonl",
        ):
            found = viewer.get(path, run="first", table="predictions", row=3)
            assert found.status in (200, 404), (name, path, found.body)
    shutil.rmtree(runs / "first")
    for path in ("/api/run", "/api/metrics", "/api/samples", "/download/report.html"):
        assert viewer.get(path, run="first", table="predictions").status in (400, 404)
    assert len(viewer.get("/api/runs").json["runs"]) == 2
    shutil.rmtree(runs)
    assert viewer.get("/api/runs").json["runs"] == []
