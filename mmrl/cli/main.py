"""The `mmrl` command: train, resume, try, sft, eval, serve, rollout-server, score, report, push, new, tasks, env, cache,
families, config, memory and doctor.

    mmrl train configs/grounding.yaml train.steps=50 model.path=Qwen/Qwen2.5-VL-3B-Instruct

Errors a user can fix are printed without a traceback (exit status 2; MMRL_TRACEBACK=1 shows it). A training run that a signal
ended exits with 128 + its number: 143 for SIGTERM, 130 for Ctrl-C.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from mmrl.cli.families import families_app
from mmrl.cli.serve_options import TrustCode, serve
from mmrl.config.shipped import recipe_file
from mmrl.errors import ConfigError, DataError, MMRLError
from mmrl.files import storage_error
from mmrl.operations.startup import loaded, loading
from mmrl.operations.terminal import show_controls

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Reinforcement fine-tuning of vision-language models and vision-language-action policies.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from mmrl.operations.versions import versions

        typer.echo(
            f"mmrl {versions()['mmrl']} ({Path(__file__).resolve().parents[2]}), Python {versions()['python']}"
        )
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="print the version and stop"
        ),
    ] = False,
) -> None:
    """Reinforcement fine-tuning of vision-language models and vision-language-action policies."""


new_app = typer.Typer(no_args_is_help=True, help="Start something of your own.")
app.add_typer(new_app, name="new")
tasks_app = typer.Typer(
    no_args_is_help=True, help="List tasks and check that they keep the contract."
)
app.add_typer(tasks_app, name="tasks")
env_app = typer.Typer(no_args_is_help=True, help="Play environments of several turns.")
app.add_typer(env_app, name="env")
cache_app = typer.Typer(
    no_args_is_help=True, help="Fill and look after a folder of cached visual tensors."
)
app.add_typer(cache_app, name="cache")
app.add_typer(families_app, name="families")

# no defect of ours: told as an error
_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)
Overrides = Annotated[
    list[str] | None, typer.Argument(help="overrides such as train.steps=50 optim.lr=1e-6")
]
ConfigFile = Annotated[
    Path,
    typer.Argument(
        callback=lambda given: recipe_file(given),
        help="name of a recipe (mmrl recipes) or configuration file",
    ),
]
PresetName = Annotated[
    str | None,
    typer.Option(
        "--preset",
        help="settings that fit a GPU, laid over the file: gpu_24g, gpu_40g, gpu_40g_x8, gpu_48g, "
        "gpu_80g, gpu_80g_x8, gpu_80g_x8_zero3, or a file of yours",
    ),
]


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option(help="continue from the last checkpoint of the run")
    ] = False,
    auto_resume: Annotated[
        bool,
        typer.Option(
            "--auto-resume",
            help="continue the run if it was begun before, else start it: "
            "for jobs that are requeued or restarted",
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            help="replace an existing run of the same name; what else lies in its folder stays"
        ),
    ] = False,
    preset: PresetName = None,
    quiet: Annotated[bool, typer.Option(help="no progress display")] = False,
) -> None:
    """Fine-tune with GRPO, evaluate before and after, write metrics, checkpoints and the report."""
    from mmrl.cli.run import train_command

    if auto_resume and overwrite:
        raise ConfigError(
            "expected --auto-resume or --overwrite, found both: a restarted job would remove what it had done; start "
            "once with --overwrite, or remove the run's folder"
        )
    train_command(
        config,
        overrides or [],
        resume=resume or ("auto" if auto_resume else False),
        overwrite=overwrite,
        quiet=quiet,
        preset=preset,
    )


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="folder of a run")],
    overrides: Overrides = None,
    trust_code: TrustCode = False,
    quiet: Annotated[bool, typer.Option(help="no progress display")] = False,
) -> None:
    """Continue a run by its own configuration; train.steps=+200 (or a larger number) makes it longer."""
    from mmrl.cli.resuming import resume_command

    resume_command(run, overrides or [], quiet=quiet, trust_code=trust_code)


@app.command()
def sft(
    config: ConfigFile,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(help="folder for the trained model; default: DIR/NAME_sft/model of the run"),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="continue from the last checkpoint; begin where there is none"
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="replace the model, or the unfinished run, that is there"),
    ] = False,
    quiet: Annotated[bool, typer.Option(help="no progress display")] = False,
) -> None:
    """Supervised warm start on the gold answers of the training data."""
    from mmrl.cli.run import sft_command

    sft_command(config, overrides or [], out, resume=resume, overwrite=overwrite, quiet=quiet)


@app.command(name="try")
def try_(
    config: ConfigFile,
    overrides: Overrides = None,
    prompts: Annotated[int, typer.Option(help="prompts, or initial states of a robot", min=1)] = 8,
    samples: Annotated[
        int | None,
        typer.Option(
            help="answers or episodes of each; default rollout.group_size, at most 8", min=2
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder for try.html; default runs/try/NAME")
    ] = None,
    preset: PresetName = None,
) -> None:
    """Ask the model a few prompts before a run: would it learn, how long would it take? Status 1: it would learn nothing."""
    from mmrl.cli.trying import try_command

    try_command(config, overrides or [], prompts, samples, out, preset)


@app.command(name="eval")
def evaluate(
    checkpoint: Annotated[str | None, typer.Argument(help="model folder or hub name")] = None,
    overrides: Overrides = None,
    task: Annotated[
        str | None, typer.Option(help="task name, package/name or file.py:Name")
    ] = None,
    data: Annotated[
        list[Path] | None, typer.Option(help="data file or folder; may be given several times")
    ] = None,
    suite: Annotated[
        str | None, typer.Option(help="named suites instead of --task and --data: NAME,NAME,...")
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            help="rules of simulated suites: openvla_oft, openpi, lerobot, "
            "simplevla_rl or rlinf; default: the suite's own"
        ),
    ] = None,
    policy_command: Annotated[
        str | None,
        typer.Option(
            help="program that acts in simulated suites instead of a checkpoint: "
            "'PYTHON robotics/openvla_server.py --checkpoint NAME'"
        ),
    ] = None,
    policy_server: Annotated[
        str | None,
        typer.Option(
            help="server that acts in simulated suites instead of a checkpoint: ws://HOST:PORT of openpi's protocol, "
            "'lerobot://HOST:PORT?type=TYPE&path=NAME' of lerobot's"
        ),
    ] = None,
    policy_key: Annotated[
        str | None,
        typer.Option(envvar="MMRL_API_KEY", help="the key of --policy-server; lerobot's take none"),
    ] = None,
    policy_timeout: Annotated[
        float | None,
        typer.Option(
            help="seconds that --policy-server or --policy-command has for an answer (default 600), and the server to let "
            "us in (default 60)",
            min=0.1,
            max=1e6,
        ),
    ] = None,
    suites: Annotated[
        Path | None,
        typer.Option(help="file of suites; default configs/suites.yaml, robot_suites.yaml"),
    ] = None,
    data_root: Annotated[
        Path, typer.Option(envvar="MMRL_DATA", help="folder that suites' paths are relative to")
    ] = Path("data"),
    list_suites: Annotated[
        bool, typer.Option("--list-suites", help="print the suites and stop")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="output folder; default RUN/eval/NAME@STEP of the checkpoint's run, else runs/eval/MODEL/NAME"
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="take model, rollout and task settings from here")
    ] = None,
    samples: Annotated[
        int,
        typer.Option(
            help="sampled completions or episodes of each for avg@k; 0: greedy only", min=0
        ),
    ] = 0,
    limit: Annotated[
        int | None, typer.Option(help="first n samples, or states of each simulated task", min=1)
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="go on with the same evaluation where it was cut off"),
    ] = False,
    answers: Annotated[
        str | None,
        typer.Option(
            help="how freely answers are read: strict, native (dialects of released "
            "models) or official (the benchmark's extractor); default: as the task "
            "was trained, or as the suite says"
        ),
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Evaluate a checkpoint on held-out data or on named suites; writes results, predictions and submission files."""
    from mmrl.cli.evaluation import choose, eval_command, suites_command
    from mmrl.cli.suites import list_suites as print_suites

    if list_suites:
        print_suites(suites)
    elif policy_command is not None or policy_server is not None:
        from mmrl.cli.embodied import remote_suites, told_policy

        option, made = told_policy(policy_command, policy_server, policy_key, policy_timeout)
        if task or data or not suite:
            raise ConfigError(
                f"expected --suite with {option}, found --task or --data, or no suite: a policy that acts plays "
                "suites of simulated tasks"
            )
        remote_suites(
            option,
            made,
            checkpoint,
            suite,
            suites,
            out,
            config,
            overrides or [],
            samples=samples,
            limit=limit,
            protocol=protocol,
            resume=resume,
        )
    elif policy_timeout is not None:
        raise ConfigError(
            "expected --policy-server or --policy-command with --policy-timeout, found neither; name one, or drop it"
        )
    elif choose(checkpoint, task, data, suite) == "data":
        eval_command(
            checkpoint or "",
            task or "",
            data or [],
            out,
            config,
            overrides or [],
            samples,
            limit,
            trust_code,
            answers,
            resume,
        )
    else:
        suites_command(
            checkpoint or "",
            suite or "",
            suites,
            data_root,
            out,
            config,
            overrides or [],
            samples,
            limit,
            protocol,
            trust_code,
            answers,
            resume,
        )


app.command()(serve)


@app.command()
def rollout_server(
    config: ConfigFile,
    overrides: Overrides = None,
    host: Annotated[
        str, typer.Option(help="address to listen at; beyond this machine's own a key is needed")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port; 0 takes a free one", min=0, max=65535)] = 8100,
    media_gib: Annotated[
        float, typer.Option(help="pictures and clips kept, so that each is sent once")
    ] = 4.0,
    max_body_gib: Annotated[
        float,
        typer.Option(help="largest piece of weights or question; twice as much at once", min=0.1),
    ] = 8.0,
    memory: Annotated[
        float, typer.Option(help="share of the GPU that vLLM may hold", min=0.05, max=0.99)
    ] = 0.9,
    api_key: Annotated[
        str | None, typer.Option(envvar="MMRL_API_KEY", help="what runs must send as their key")
    ] = None,
) -> None:
    """Sample with vLLM for runs that set engine.vllm.mode=server and engine.vllm.url to this address."""
    from mmrl.cli.rollout_server import rollout_server_command

    rollout_server_command(
        config, overrides or [], host, port, api_key, media_gib, memory, max_body_gib
    )


@app.command()
def policy_server(
    checkpoint: Annotated[str, typer.Argument(help="VLA checkpoint: a folder with vla.json")],
    overrides: Overrides = None,
    protocol: Annotated[str, typer.Option(help="what clients speak: openpi or lerobot")] = "openpi",
    host: Annotated[
        str, typer.Option(help="address to listen at; beyond this machine's own a key is needed")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port; 0 takes a free one", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="MMRL_API_KEY", help="what clients must send as their key")
    ] = None,
    no_key: Annotated[
        bool, typer.Option("--no-key", help="let everyone in who reaches --host")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option("--served-model-name", help="what clients are told; default: CHECKPOINT"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="take model and device settings from here")
    ] = None,
    seed: Annotated[
        int,
        typer.Option(help="of the noise: the n-th answer on a connection has key (seed, n)", min=0),
    ] = 0,
    temperature: Annotated[
        float, typer.Option(help="of sampled actions; 0 acts greedily", min=0.0, max=100.0)
    ] = 0.0,
    default_prompt: Annotated[
        str, typer.Option(help="instruction of observations that bring none")
    ] = "",
    camera: Annotated[
        list[str] | None,
        typer.Option(
            help="OURS=THEIRS: what lerobot's robot calls a camera of the policy; may be given several times"
        ),
    ] = None,
    fps: Annotated[
        float,
        typer.Option(help="actions per second of lerobot's robot", min=0.1, max=10_000.0),
    ] = 30.0,
    max_message_mib: Annotated[int, typer.Option(help="largest observation", min=1)] = 16,
    max_clients: Annotated[int, typer.Option(help="connections at once", min=1)] = 16,
    idle_timeout: Annotated[
        float, typer.Option(help="seconds without an observation until a client is let go", min=1.0)
    ] = 3600.0,
    trust_code: TrustCode = False,
) -> None:
    """Serve a VLA checkpoint to robots and simulators that speak openpi's websocket protocol or lerobot's async inference."""
    from mmrl.cli.policy_server import policy_server_command

    policy_server_command(
        checkpoint,
        config,
        overrides or [],
        protocol=protocol,
        host=host,
        port=port,
        api_key=api_key,
        no_key=no_key,
        name=name,
        seed=seed,
        temperature=temperature,
        prompt=default_prompt,
        cameras=camera or [],
        fps=fps,
        max_message_mib=max_message_mib,
        max_clients=max_clients,
        idle_s=idle_timeout,
        trust_code=trust_code,
    )


@app.command()
def score(
    file: Annotated[Path, typer.Argument(help="rollouts/*.jsonl or predictions.jsonl of a run")],
    task: Annotated[
        str | None, typer.Option(help="score with this task instead of the logged one")
    ] = None,
    param: Annotated[
        list[str] | None, typer.Option(help="task parameter, for example mode=dynamic")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="where to write the new scores (jsonl)")] = None,
    trust_code: TrustCode = False,
) -> None:
    """Score logged completions again, offline: what would this reward have said?"""
    from mmrl.cli.offline import score_command

    score_command(file, task, param or [], out, trust_code)


@app.command()
def recipes() -> None:
    """The recipes that come with mmrl: the command that runs each, and what it trains."""
    from mmrl.cli.configuration import recipe_lines

    for line in recipe_lines():
        typer.echo(line)


@app.command()
def demo(
    overrides: Overrides = None,
    scenes: Annotated[
        int, typer.Option(help="training pictures to draw; a tenth as many are held out", min=20)
    ] = 2000,
    quiet: Annotated[bool, typer.Option(help="no progress display")] = False,
) -> None:
    """Train a tiny model on drawn scenes on the CPU, in minutes: everything it needs is installed."""
    from mmrl.cli.demo import demo_command

    demo_command(overrides or [], scenes, quiet)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="folder of a run")]) -> None:
    """Write RUN/report.html: one self-contained page with curves, pictures and timing."""
    from mmrl.report import build_report

    if run.is_dir() and not any((run / name).exists() for name in ("run.json", "metrics.jsonl")):
        raise DataError(
            f"expected the folder of a run, with run.json or metrics.jsonl, found neither in {run}; give DIR/NAME of the run"
        )
    typer.echo(f"report: {build_report(run)}")


@app.command()
def push(
    checkpoint: Annotated[Path, typer.Argument(help="checkpoint of a run")],
    repo: Annotated[str, typer.Argument(help="repository on the Hub, OWNER/NAME")],
    private: Annotated[bool, typer.Option("--private", help="make a private repository")] = False,
    out: Annotated[
        Path | None, typer.Option(help="write the files to this new folder; upload nothing")
    ] = None,
) -> None:
    """Upload a checkpoint to the Hugging Face Hub with a model card made from its run."""
    from mmrl.cli.publishing import push_command

    push_command(checkpoint, repo, private=private, out=out, say=typer.echo)


@app.command()
def view(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="folders of runs, or that hold runs; default: runs"),
    ] = None,
    host: Annotated[
        str, typer.Option(help="address to listen at; beyond this machine's own a key is needed")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port; 0 takes a free one", min=0, max=65535)] = 8600,
    api_key: Annotated[
        str | None, typer.Option(envvar="MMRL_API_KEY", help="what browsers must send as their key")
    ] = None,
    no_key: Annotated[
        bool, typer.Option("--no-key", help="let everyone in who reaches --host")
    ] = False,
    media_root: Annotated[
        list[Path] | None,
        typer.Option(
            help="show pictures and clips only from below this folder and from runs; repeatable"
        ),
    ] = None,
    browse: Annotated[bool, typer.Option("--open", help="open the page in a browser")] = False,
) -> None:
    """Look at runs in a browser while they train: curves, samples, comparisons. Reads the folders, writes nothing."""
    from mmrl.cli.viewing import view_command

    view_command(runs or [Path("runs")], host, port, api_key, no_key, media_root or [], browse)


@app.command()
def memory(
    config: ConfigFile,
    overrides: Overrides = None,
    processes: Annotated[
        int | None, typer.Option(help="with a device each; default: the preset's, or 1", min=1)
    ] = None,
    gpu_gib: Annotated[
        float | None,
        typer.Option(
            help="of a GPU that is not here; default: the preset's, or this machine's device"
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(help="length of a prompt; default: from data.max_pixels, data.video", min=1),
    ] = None,
    preset: PresetName = None,
) -> None:
    """Estimate what a run needs of each device's memory, without loading weights."""
    from mmrl.cli.memory import memory_command

    memory_command(
        config,
        overrides or [],
        processes=processes,
        gpu_gib=gpu_gib,
        prompt_tokens=prompt_tokens,
        preset=preset,
    )


@app.command(name="config")
def show_config(
    config: Annotated[
        Path | None,
        typer.Argument(
            callback=lambda given: given and recipe_file(given),
            help="name of a recipe or configuration file",
        ),
    ] = None,
    overrides: Overrides = None,
    preset: PresetName = None,
    explain: Annotated[
        list[str] | None,
        typer.Option(
            help="say what this key or section means: type, default, bounds "
            "(no FILE needed; may be repeated)"
        ),
    ] = None,
    schema: Annotated[
        bool,
        typer.Option(
            "--schema",
            help="print the JSON schema, for editors; with a file of a robot "
            "run that of robot runs",
        ),
    ] = False,
) -> None:
    """Print the resolved configuration of FILE, every key with its value; or say what a key means."""
    from mmrl.cli.configuration import config_command

    config_command(config, overrides or [], preset, explain or [], schema=schema)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
) -> None:
    """Say what this machine can do, and how to fix what is missing."""
    from mmrl.diagnostics.doctor import main as run

    raise typer.Exit(run(["--json"] if as_json else []))


@new_app.command("task")
def new_task(
    name: Annotated[str, typer.Argument(help="of the package, such as blue-cars")],
    folder: Annotated[Path, typer.Option(help="where its folder is made")] = Path(),
) -> None:
    """Write a package with a task, its test and a recipe, which passes its checks as it is."""
    from mmrl.cli.scaffold import new_task_command

    new_task_command(name, folder, typer.echo)


@tasks_app.command("list")
def tasks_list() -> None:
    """Every task: what it is, the shape of its answer, its presets, and where it comes from."""
    from mmrl.cli.offline import list_command

    list_command()


@tasks_app.command("check")
def tasks_check(
    name: Annotated[str, typer.Argument(help="task name, package/name or file.py:Name")],
    data: Annotated[
        Path | None,
        typer.Option(help="your data; default: that of --config, else the task's own examples"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="check as this run would see it: model, pixel budget, longest "
            "prompt, frame, system text, task parameters"
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="model whose template and processor to use")
    ] = None,
    param: Annotated[
        list[str] | None, typer.Option(help="task parameter, for example mode=dynamic")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="named parameters of a paper, see mmrl tasks list")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for pictures of gold and wrong answers")] = Path(
        "runs/check"
    ),
    limit: Annotated[int, typer.Option(help="samples to check")] = 200,
    every: Annotated[
        bool, typer.Option("--all", help="list every error of every row and pixel instead")
    ] = False,
) -> None:
    """Gold answers score 1, wrong ones 0, garbage 0 with a reason; prompts fit; answers drawn to look at."""
    from mmrl.cli.offline import check_all_command, check_command

    params = [*(param or []), *([f"preset={preset}"] if preset else [])]
    if every:
        check_all_command(name, data, model, params, out, config)
    else:
        check_command(name, data, model, params, out, limit, config)


@env_app.command("check")
def env_check(
    name: Annotated[
        str, typer.Argument(help="task name, package/name or file.py:Name of a Task or Environment")
    ],
    data: Annotated[
        Path | None,
        typer.Option(help="rows to play; default: that of --config, else the task's own examples"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="play as this run would: model, pixel budget, parameters")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="model whose template and processor to use")
    ] = None,
    param: Annotated[
        list[str] | None, typer.Option(help="parameter, for example max_turns=5")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for the filmstrips")] = Path("runs/env-check"),
    episodes: Annotated[int, typer.Option(help="samples that each player plays", min=1)] = 4,
    timeout: Annotated[float, typer.Option(help="seconds that one call may take", min=0.1)] = 30.0,
    seed: Annotated[int, typer.Option(help="of the players and the resets", min=0)] = 0,
) -> None:
    """Play episodes with scripted, random and junk turns: equal for equal seeds, rewards in range; drawn to look at."""
    from mmrl.cli.environments import check_environment_command

    check_environment_command(name, data, model, param or [], out, episodes, timeout, seed, config)


CacheFolder = Annotated[Path, typer.Argument(help="folder of the cache")]
AsJson = Annotated[bool, typer.Option("--json", help="machine-readable")]


@cache_app.command("build")
def cache_build(
    config: ConfigFile,
    overrides: Overrides = None,
    workers: Annotated[
        int | None, typer.Option(help="processes that decode; default data.workers", min=0)
    ] = None,
    features: Annotated[
        bool,
        typer.Option(
            "--features",
            help="also what the model's towers make of them; the default for a tower that is not trained "
            "(model.freeze, model.lora)",
        ),
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="status 1 when something failed")
    ] = False,
    quiet: Annotated[bool, typer.Option(help="no progress display")] = False,
) -> None:
    """Prepare all media of data.train and data.eval; what is there already is only counted, failures are listed."""
    from mmrl.cli.cache_build import build_command

    build_command(config, overrides or [], workers, features, strict, quiet)


@cache_app.command("stats")
def cache_stats(folder: CacheFolder, as_json: AsJson = False) -> None:
    """Entries and bytes by kind; hits, misses, builds and repairs of all runs that used it."""
    from mmrl.cli.cache import stats_command

    stats_command(folder, as_json)


@cache_app.command("verify")
def cache_verify(
    folder: CacheFolder,
    delete: Annotated[bool, typer.Option("--delete", help="remove damaged entries")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare the checksum of every entry; status 1 when damaged ones are left."""
    from mmrl.cli.cache import verify_command

    verify_command(folder, delete, as_json)


@cache_app.command("prune")
def cache_prune(
    folder: CacheFolder,
    max_gib: Annotated[
        float | None, typer.Option(help="remove the least recently used beyond this size", min=0)
    ] = None,
    unused_days: Annotated[
        float | None, typer.Option(help="remove what was not used for so long", min=0)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make room: remove entries by age or size, never one in use; status 1 when more than asked for is left."""
    from mmrl.cli.cache import prune_command

    prune_command(folder, max_gib, unused_days, as_json)


def main() -> None:
    """Entry point of the console command; one process of a launched run ends here (mmrl/operations/leaving.py)."""
    from mmrl.operations.leaving import launched, run_and_leave

    if launched():
        run_and_leave(_main)
    _main()


def _from_home(word: str) -> str:
    """Shells expand a ~ at the beginning of a word only, not that of --out=~/x."""
    option, sign, path = word.partition("=")
    return f"{option}={os.path.expanduser(path)}" if sign and option[:2] == "--" else word


def _main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # what UTF-8 (or this terminal) cannot show ends no command
        sys.stdout.reconfigure(errors="backslashreplace")
    show_controls()
    loading()
    try:
        sys.argv[1:] = map(_from_home, sys.argv[1:])
        app()
    except (MMRLError, OSError) as error:
        if os.environ.get("MMRL_TRACEBACK") or not (
            isinstance(error, MMRLError) or error.errno in _STORAGE
        ):
            raise
        told = (
            error
            if isinstance(error, MMRLError)
            else storage_error(error.filename or "a file", error)
        )
        print(f"error: {told}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted; continue with --resume", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        loaded()


if __name__ == "__main__":
    main()
