"""Environments written with the library verifiers, one of each kind: load_environment(kind="tools"), as a package has it."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import random
import time
from typing import Any

import verifiers as vf
from datasets import Dataset
from PIL import Image

FEW = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "<answer>2</answer>"},
]


def sums(count: int = 4) -> Dataset:
    rows = [(n, n + 2) for n in range(count)]
    return Dataset.from_list(
        [{"question": f"{a} + {b}?", "answer": str(a + b), "info": {"a": a}} for a, b in rows]
    )


def single(**options: Any) -> vf.Environment:
    """A question, with a system prompt and an example, judged by two functions and a metric."""
    parser = vf.XMLParser(["answer"], answer_field="answer")

    def right(parser: Any, completion: Any, answer: str) -> float:
        return 1.0 if parser.parse_answer(completion) == answer else 0.0

    async def short(completion: Any) -> float:
        return 1.0 if len(completion[-1]["content"]) < 20 else 0.0

    rubric = vf.Rubric([right, short], [1.0, 0.25], parser=parser)
    rubric.add_metric(length)
    return vf.SingleTurnEnv(
        dataset=sums(),
        eval_dataset=sums(2),
        system_prompt="Add.",
        few_shot=FEW,
        parser=parser,
        rubric=rubric,
        **options,
    )


def length(completion: Any) -> float:
    return float(sum(len(str(m["content"])) for m in completion))


class Guess(vf.MultiTurnEnv):
    """Find the row's number; the last answer of the environment ends the rollout."""

    async def setup_state(self, state: Any) -> Any:
        state["secret"], state["guesses"] = int(state["answer"]), []
        state["drawn"] = random.random()
        return state

    async def env_response(self, messages: Any, state: Any, **options: Any) -> Any:
        said = str(messages[-1]["content"] or "").strip()
        if not said.isdigit():
            return [{"role": "user", "content": "Say a number."}]
        state["guesses"].append(int(said))
        if int(said) == state["secret"]:
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
            return state["final_env_response"]
        more = "More" if int(said) < state["secret"] else "Less"
        return [{"role": "user", "content": f"{more}. You have said {state['guesses']}."}]


def multi(most: int = 3) -> vf.Environment:
    def found(state: Any) -> float:
        return float(state["secret"] in state["guesses"])

    def quick(state: Any) -> float:
        return 1 / max(1, len(state["guesses"]))

    def wasted(state: Any) -> float:
        return float(len(state["trajectory"]) - len(state["guesses"]))

    return Guess(
        dataset=sums(),
        max_turns=most,
        rubric=vf.Rubric([found, quick, wasted], [0.5, 0.5, -0.125]),
    )


def divide(a: int, b: int) -> float:
    """Divide two numbers.

    Args:
        a: what is divided
        b: what it is divided by
    """
    return a / b


async def note(text: str) -> str:
    """Keep a note."""
    await asyncio.sleep(0.01)
    return f"kept {text!r}"


def tools() -> vf.Environment:
    def right(completion: Any, answer: str) -> float:
        return float(answer in str(completion[-1]["content"]))

    return vf.ToolEnv(tools=[divide, note], dataset=sums(), max_turns=4, rubric=vf.Rubric([right]))


class Account(vf.StatefulToolEnv):
    """Tools with an argument that the environment fills in, of a state for each rollout."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_tool(self.pay, args_to_skip=["purse"])

    async def setup_state(self, state: Any, **options: Any) -> Any:
        state["purse"] = {"left": int(state["info"]["a"]) + 5}
        return await super().setup_state(state, **options)

    def update_tool_args(
        self, tool_name: str, tool_args: Any, messages: Any, state: Any, **options: Any
    ) -> Any:
        return {**tool_args, "purse": state["purse"]}

    async def pay(self, amount: int, purse: dict) -> str:
        """Pay an amount."""
        if amount > purse["left"]:
            raise ValueError(f"only {purse['left']} left")
        purse["left"] -= amount
        return f"{purse['left']} left"


def stateful() -> vf.Environment:
    def saved(state: Any) -> float:
        return state["purse"]["left"] / 10

    return Account(dataset=sums(), max_turns=4, rubric=vf.Rubric([saved]))


def picture(colour: tuple[int, int, int], size: tuple[int, int] = (40, 30)) -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


class Look(vf.MultiTurnEnv):
    """Pictures in the question and in the answers to the policy."""

    async def env_response(self, messages: Any, state: Any, **options: Any) -> Any:
        shade = 40 * len(state["trajectory"])
        parts = [{"type": "text", "text": "And now?"}, picture((0, shade, 0), (20, 20))]
        return [{"role": "user", "content": parts}]


def pictures(most: int = 2) -> vf.Environment:
    def named(completion: Any, answer: str) -> float:
        return float(completion[0]["content"] == answer)

    prompt = [
        {"role": "system", "content": [{"type": "text", "text": "Look."}]},
        {
            "role": "user",
            "content": [picture((200, 0, 0)), {"type": "text", "text": "Which colour?"}],
        },
    ]
    return Look(
        dataset=Dataset.from_list([{"prompt": prompt, "answer": "red"}]),
        max_turns=most,
        rubric=vf.Rubric([named]),
    )


class Faulty(vf.MultiTurnEnv):
    """Does what it is told, however bad."""

    async def env_response(self, messages: Any, state: Any, **options: Any) -> Any:
        deed = messages[-1]["content"]
        if deed == "hang":
            await asyncio.sleep(600)
        if deed == "block":
            time.sleep(600)
        if deed == "raise":
            raise KeyError("the world is broken")
        if deed == "infra":
            raise vf.InfraError("no sandbox is left")
        if deed == "die":
            os._exit(7)
        if deed == "ask":
            await self.get_model_response(state, [vf.UserMessage(content="Summarize.")])
        if deed == "web":
            url = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}
            return [{"role": "user", "content": [url]}]
        return [{"role": "user", "content": f"done {deed}"}]

    async def get_prompt_messages(self, state: Any) -> Any:
        messages = await super().get_prompt_messages(state)
        if (
            state["trajectory"]
            and state["trajectory"][-1]["completion"][-1]["content"] == "rewrite"
        ):
            return [vf.UserMessage(content="All over again."), *messages[1:]]
        return messages

    @vf.stop
    async def over(self, state: Any) -> bool:
        last = state["trajectory"][-1]["completion"][-1] if state["trajectory"] else None
        return last is not None and last["content"] in ("end", "bad reward", "nan")

    @vf.cleanup
    async def leave(self, state: Any) -> None:
        if folder := state["info"].get("folder"):
            with open(os.path.join(folder, "cleaned"), "a") as file:
                file.write("x")


def faulty(folder: str = "") -> vf.Environment:
    def judged(completion: Any) -> float:
        last = completion[-1]["content"]
        if last == "nan":
            return float("nan")
        return 1.0 if last != "bad reward" else 1 / 0

    rows = [{"question": "Do.", "answer": "", "info": {"folder": folder}}]
    return Faulty(dataset=Dataset.from_list(rows), rubric=vf.Rubric([judged]))


def best(completions: Any) -> list[float]:
    lengths = [len(c[-1]["content"]) for c in completions]
    return [float(n == max(lengths)) for n in lengths]


def group() -> vf.Environment:
    return vf.SingleTurnEnv(dataset=sums(), rubric=vf.Rubric([best]))


def several() -> vf.Environment:
    return vf.EnvGroup([single(), multi()], env_names=["add", "guess"])


def judged(url: str = "", key: str = "JUDGE_KEY") -> vf.Environment:
    """A rubric that asks a model at `url`."""
    from openai import AsyncOpenAI

    rubric = vf.JudgeRubric(
        judge_client=AsyncOpenAI(base_url=url, api_key=os.environ[key], max_retries=0),
        judge_model="judge",
    )

    async def agrees(judge: Any, prompt: Any, completion: Any, answer: str, state: Any) -> float:
        return float("yes" in await judge(prompt, completion, answer, state))

    rubric.add_reward_func(agrees)
    return vf.SingleTurnEnv(dataset=sums(), rubric=rubric)


def load_environment(kind: str = "single", **options: Any) -> vf.Environment:
    made: vf.Environment = globals()[kind](**options)
    return made
