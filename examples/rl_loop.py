"""GRPO on one page: the whole algorithm, with mmrl's parts and without its trainer.

    python -m mmrl.tasks.scenes runs/scenes --count 200 --seed 0 --background graded
    python examples/rl_loop.py runs/scenes/data.jsonl --steps 20          # a tiny model on a CPU: minutes

One step, top to bottom: draw prompts, encode them (pictures are decoded once and stay in the visual cache), sample G completions of
each, score them, compare them within their group, and move the weights towards the better ones. What mmrl.Trainer adds is
everything around this: other estimators, dynamic sampling, several GPUs, workers, checkpoints, alarms, evaluation, the report.
Without these the numbers are the trainer's own, bit for bit (tests/library/test_rl_loop.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import fmean

import torch

from mmrl.algorithms import ObjectiveSettings, group_advantages, policy_loss
from mmrl.config import RunConfig, load_config
from mmrl.data.sources import load_sources, prompt_stream
from mmrl.policy.encode import Prompt
from mmrl.policy.loading import load_policy
from mmrl.policy.pack import PackItem, micro_batches, pack
from mmrl.policy.policy import Policy
from mmrl.rollout import PrefillOnceEngine, Request, SamplingSettings
from mmrl.training.optim import build_optimizer, take_step
from mmrl.types import RewardContext, Turn


def train(config: RunConfig) -> Iterator[dict[str, float]]:
    """Train the model of `config` on its data, and yield one row of numbers per step."""
    torch.manual_seed(config.seed)
    policy = load_policy(config.model, config.data)
    # an endless, seeded order of (sample, its task)
    stream = prompt_stream(config, load_sources(config.data.train))
    # one prefill per prompt; its KV cache is shared by the G completions
    engine = PrefillOnceEngine(policy)
    optimizer = build_optimizer(policy.trainable(), config.optim)
    for step in range(1, config.train.steps + 1):
        drawn = [stream.draw() for _ in range(config.train.prompts_per_step)]
        prompts = [policy.encoder(sample, task) for sample, task in drawn]

        # Rollout. Each completion carries its tokens and the log-prob of each under the policy that wrote it.
        r = config.rollout
        requests = [
            Request(prompt, r.group_size, key=(config.seed, 3, step, place, 0))
            for place, prompt in enumerate(prompts)
        ]
        sampling = SamplingSettings(
            r.temperature, r.top_p, r.top_k, r.max_new_tokens, r.batch_tokens
        )
        groups = engine.generate(requests, sampling)

        # Rewards, one per completion: `score` never raises on what a model wrote.
        rewards = [
            [
                task.score(sample, c.text, context(config, policy, step, prompt, c)).value
                for c in group
            ]
            for (sample, task), prompt, group in zip(drawn, prompts, groups, strict=True)
        ]

        # Advantages: (reward - mean of the group) / standard deviation of the group.
        advantages = [group_advantages(row, "std") for row in rewards]

        # Update: all completions of a prompt in one sequence behind one copy of the prompt; losses are summed over micro-batches
        # and the gradient is divided once by the number of tokens, so that no micro-batch weighs more than its tokens.
        items = [
            PackItem(prompt, tuple(c.token_ids for c in group))
            for prompt, group in zip(prompts, groups, strict=True)
        ]
        old_logprobs = [[x for c in group for x in c.logprobs] for group in groups]
        optimizer.zero_grad(set_to_none=True)
        loss_sum = tokens = 0.0
        for part in micro_batches(items, config.train.token_budget):
            loss, count = micro_batch_loss(
                policy,
                config,
                [items[i] for i in part],
                [old_logprobs[i] for i in part],
                [advantages[i] for i in part],
            )
            loss.backward()
            loss_sum, tokens = loss_sum + float(loss.detach()), tokens + count
        norm, rate = take_step(
            optimizer,
            policy.trainable(),
            config.optim,
            tokens,
            step - 1,
            config.train.steps,
            lambda norm: f"the gradient norm is {norm} in step {step}",  # noqa: B023
        )
        policy.publish()
        yield {
            "step": step,
            "reward": fmean(x for row in rewards for x in row),
            "loss": loss_sum / max(tokens, 1.0),
            "grad_norm": norm,
            "lr": rate,
            "signal": sum(max(row) > min(row) for row in rewards) / len(rewards),
        }


def context(
    config: RunConfig, policy: Policy, step: int, prompt: Prompt, completion: Turn
) -> RewardContext:
    """What a reward may know beside the text and the truth: progress, frame and sizes of the pictures, how the text ended."""
    return RewardContext(
        step,
        config.train.steps,
        policy.template.frame,
        prompt.images,
        completion.stop,
        len(completion.token_ids),
        config.rollout.max_new_tokens,
        prompt.videos,
    )


def micro_batch_loss(
    policy: Policy,
    config: RunConfig,
    items: list[PackItem],
    old_logprobs: list[list[float]],
    advantages: list[list[float]],
) -> tuple[torch.Tensor, float]:
    """The clipped policy-gradient loss, summed over all tokens of the micro-batch, and how many these are.

    Legend: N tokens of all completions, B completions.
    """
    batch = pack(items)
    sequence_N = batch.sequence_N.to(policy.device)  # which completion each token belongs to
    advantage_B = torch.tensor([a for group in advantages for a in group], device=policy.device)
    old_N = torch.tensor([x for group in old_logprobs for x in group], device=policy.device)
    logp_N = policy.logp(batch, config.rollout.temperature).logp_N
    a = config.algorithm
    settings = ObjectiveSettings(clip_low=a.clip_low, clip_high=a.clip_high, dual_clip=a.dual_clip)
    found = policy_loss(
        settings,
        logp_N,
        old_N,
        advantage_B[sequence_N],
        sequence_N,
        torch.ones_like(sequence_N, dtype=torch.bool),
    )
    return found.loss, found.denominator


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="rows of a task")
    parser.add_argument("--task", default="grounding")
    parser.add_argument("--model", default="assets/tiny_vlm")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    # what the tiny model was shown
    prompt = '{prompt: "{question}", mode: iou}' if options.model == "assets/tiny_vlm" else "{}"
    config = load_config(
        None,
        [
            f"model.path={options.model}",
            'model.system=""' if options.model == "assets/tiny_vlm" else "model.system=null",
            f"data.train=[{{task: {options.task}, path: {options.data}, params: {prompt}}}]",
            f"train.steps={options.steps}",
            "train.prompts_per_step=8",
            "rollout.max_new_tokens=24",
            "optim.lr=1e-4",
        ],
    )
    for row in train(config):
        print("  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
