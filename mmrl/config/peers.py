"""Keys of TRL, EasyR1, verl and LeRobot, and the key of mmrl that means the same.

Errors about an unknown key name the key here (`mmrl train grounding num_generations=4` says rollout.group_size), and
docs/coming-from.md shows the whole tables (`python -m scripts.update_readme` writes them from here). Names are those of TRL 1.16's
GRPOConfig and GRPOTrainer, of EasyR1 b44b311 (examples/config.yaml), of verl 1dda039 (_generated_ppo_trainer.yaml) and of LeRobot
7427f31 (configs/train.py); tests compare them with these programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["PEERS", "Meaning", "is_peer_section", "peer_hint"]


class Meaning(NamedTuple):
    """What a peer's key is here: the key, and how its values translate ('' where they are the same)."""

    key: str
    values: str = ""


_TRL: dict[str, Meaning] = {
    "model": Meaning("model.path"),
    "peft_config": Meaning("model.lora", "`{r: 16, alpha: 32}`"),
    "train_dataset": Meaning("data.train", "a list of sources, each with a task"),
    "eval_dataset": Meaning("data.eval", "a list of sources, each with a task"),
    "num_generations": Meaning("rollout.group_size"),
    "num_generations_eval": Meaning("eval.samples"),
    "max_completion_length": Meaning("rollout.max_new_tokens"),
    "temperature": Meaning("rollout.temperature"),
    "top_p": Meaning("rollout.top_p"),
    "top_k": Meaning("rollout.top_k"),
    "beta": Meaning("algorithm.kl.coef"),
    "epsilon": Meaning("algorithm.clip_low"),
    "epsilon_high": Meaning("algorithm.clip_high"),
    "delta": Meaning("algorithm.dual_clip"),
    "loss_type": Meaning(
        "algorithm.loss_aggregation",
        "grpo: `sequence_mean`, dapo: `token_mean`, dr_grpo: `dr_grpo`",
    ),
    "scale_rewards": Meaning(
        "algorithm.advantage_scale", "group: `std`, batch: `batch_rewards`, none: `none`"
    ),
    "importance_sampling_level": Meaning("algorithm.importance_sampling_level"),
    "multi_objective_aggregation": Meaning(
        "algorithm.reward_aggregation", "sum_then_normalize: `plain`, normalize_then_sum: `gdpo`"
    ),
    "mask_truncated_completions": Meaning("algorithm.overlong", "true: `mask`"),
    "num_iterations": Meaning("algorithm.epochs"),
    "steps_per_generation": Meaning("algorithm.minibatches", "optimizer steps of one rollout"),
    "entropy_coef": Meaning("algorithm.entropy.coef"),
    "use_adaptive_entropy": Meaning("algorithm.entropy.target", "a target switches it on"),
    "entropy_target": Meaning("algorithm.entropy.target"),
    "entropy_coef_delta": Meaning("algorithm.entropy.delta"),
    "entropy_coef_min": Meaning("algorithm.entropy.coef_min"),
    "entropy_coef_max": Meaning("algorithm.entropy.coef_max"),
    "learning_rate": Meaning("optim.lr"),
    "lr_scheduler_type": Meaning("optim.schedule", "constant, linear or cosine"),
    "warmup_steps": Meaning("optim.warmup_steps"),
    "weight_decay": Meaning("optim.weight_decay"),
    "max_grad_norm": Meaning("optim.max_grad_norm"),
    "adam_beta1": Meaning("optim.betas", "the first of two"),
    "adam_beta2": Meaning("optim.betas", "the second of two"),
    "adam_epsilon": Meaning("optim.eps"),
    "max_steps": Meaning("train.steps", "a step has rollouts of train.prompts_per_step prompts"),
    "generation_batch_size": Meaning(
        "train.prompts_per_step", "prompts, not completions; over all processes"
    ),
    "per_device_train_batch_size": Meaning(
        "train.token_budget", "tokens of a micro-batch; batches in prompts are prompts_per_step"
    ),
    "gradient_accumulation_steps": Meaning(
        "train.token_budget", "as many micro-batches as the step's tokens need"
    ),
    "gradient_checkpointing": Meaning("model.gradient_checkpointing"),
    "bf16": Meaning("model.dtype", "true: `bf16`"),
    "reward_weights": Meaning("data.train.0.params", "`{weights: {accuracy: 0.9, format: 0.1}}`"),
    "use_vllm": Meaning("engine.rollout", "true: `vllm`"),
    "vllm_mode": Meaning("engine.vllm.mode", "colocate: `colocated`"),
    "vllm_server_base_url": Meaning("engine.vllm.url"),
    "vllm_gpu_memory_utilization": Meaning("engine.vllm.memory"),
    "vllm_max_model_length": Meaning("engine.vllm.max_model_len"),
    "vllm_tensor_parallel_size": Meaning("engine.vllm.tensor_parallel"),
    "vllm_enable_sleep_mode": Meaning("engine.vllm.sleep"),
    "vllm_importance_sampling_correction": Meaning("engine.vllm.correction", "false: `none`"),
    "vllm_importance_sampling_mode": Meaning("engine.vllm.correction", "per token"),
    "vllm_importance_sampling_cap": Meaning("engine.vllm.threshold"),
    "deepspeed": Meaning("engine.train", "`deepspeed_zero2` or `deepspeed_zero3`"),
    "fsdp": Meaning("engine.train", "`fsdp2`"),
    "dataloader_num_workers": Meaning("data.workers", "processes that decode pictures and clips"),
    "eval_steps": Meaning("eval.every"),
    "metric_for_best_model": Meaning("eval.best_metric"),
    "save_steps": Meaning("train.save_every"),
    "save_total_limit": Meaning("train.keep_last"),
    "log_completions": Meaning("train.log_rollouts", "how many groups of a step"),
    "num_completions_to_print": Meaning("train.log_rollouts"),
    "report_to": Meaning("train.wandb", "`true`; also train.tensorboard, train.trackio"),
    "output_dir": Meaning("dir", "the run is written to dir/name"),
    "run_name": Meaning("name"),
}

_EASYR1: dict[str, Meaning] = {
    "data.train_files": Meaning("data.train.0.path"),
    "data.val_files": Meaning("data.eval.0.path"),
    "data.prompt_key": Meaning("data.train.0.params", "`{reader: {columns: {question: problem}}}`"),
    "data.answer_key": Meaning("data.train.0.params", "`{reader: {columns: {answer: answer}}}`"),
    "data.image_key": Meaning("data.train.0.params", "`{reader: {columns: {image: images}}}`"),
    "data.image_dir": Meaning("data.train.0.params", "`{reader: {image_root: FOLDER}}`"),
    "data.video_fps": Meaning("data.video.fps"),
    "data.max_prompt_length": Meaning(
        "model.max_prompt_tokens", "a longer prompt is an error, never cut"
    ),
    "data.max_response_length": Meaning("rollout.max_new_tokens"),
    "data.rollout_batch_size": Meaning("train.prompts_per_step"),
    "data.mini_rollout_batch_size": Meaning("schedule.wave"),
    "data.min_pixels": Meaning("data.min_pixels"),
    "data.max_pixels": Meaning("data.max_pixels"),
    "data.format_prompt": Meaning("data.train.0.params", "`{answer_format: think}`, or `prompt`"),
    "data.override_chat_template": Meaning("model.template"),
    "algorithm.adv_estimator": Meaning("algorithm.advantage"),
    "algorithm.kl_coef": Meaning("algorithm.kl.coef"),
    "algorithm.kl_penalty": Meaning("algorithm.kl.estimator", "low_var_kl: `k3`, mse: `k2`"),
    "algorithm.use_kl_loss": Meaning(
        "algorithm.kl.coef", "above 0 is a KL loss; none in the reward"
    ),
    "algorithm.disable_kl": Meaning("algorithm.kl.coef", "true: `0`"),
    "algorithm.gamma": Meaning("algorithm.critic.gamma"),
    "algorithm.lam": Meaning("algorithm.critic.gae_lambda"),
    "algorithm.online_filtering": Meaning("algorithm.dynamic_sampling"),
    "algorithm.filter_key": Meaning("algorithm.filter.key", "overall: `reward`"),
    "algorithm.filter_low": Meaning("algorithm.filter.low"),
    "algorithm.filter_high": Meaning("algorithm.filter.high"),
    "worker.actor.global_batch_size": Meaning(
        "algorithm.minibatches", "rollout_batch_size / global_batch_size"
    ),
    "worker.actor.micro_batch_size_per_device_for_update": Meaning("train.token_budget", "tokens"),
    "worker.actor.micro_batch_size_per_device_for_experience": Meaning(
        "train.token_budget", "tokens"
    ),
    "worker.actor.max_grad_norm": Meaning("optim.max_grad_norm"),
    "worker.actor.clip_ratio_low": Meaning("algorithm.clip_low"),
    "worker.actor.clip_ratio_high": Meaning("algorithm.clip_high"),
    "worker.actor.clip_ratio_dual": Meaning("algorithm.dual_clip"),
    "worker.actor.loss_avg_mode": Meaning(
        "algorithm.loss_aggregation", "token: `token_mean`, seq: `sequence_mean`"
    ),
    "worker.actor.loss_type": Meaning("algorithm.importance_sampling_level", "gspo: `sequence`"),
    "worker.actor.ppo_epochs": Meaning("algorithm.epochs"),
    "worker.actor.padding_free": Meaning("train.forward", "true: `shared`, which has no padding"),
    "worker.actor.model.model_path": Meaning("model.path"),
    "worker.actor.model.enable_gradient_checkpointing": Meaning("model.gradient_checkpointing"),
    "worker.actor.model.freeze_vision_tower": Meaning("model.freeze", "`[vision]`"),
    "worker.actor.model.lora.rank": Meaning("model.lora.r"),
    "worker.actor.model.lora.alpha": Meaning("model.lora.alpha"),
    "worker.actor.model.lora.target_modules": Meaning("model.lora.target_modules"),
    "worker.actor.optim.lr": Meaning("optim.lr"),
    "worker.actor.optim.weight_decay": Meaning("optim.weight_decay"),
    "worker.actor.optim.lr_warmup_ratio": Meaning("optim.warmup_steps", "in optimizer steps"),
    "worker.actor.fsdp.enable_full_shard": Meaning("engine.train", "`fsdp2`"),
    "worker.rollout.n": Meaning("rollout.group_size"),
    "worker.rollout.temperature": Meaning("rollout.temperature"),
    "worker.rollout.top_p": Meaning("rollout.top_p"),
    "worker.rollout.gpu_memory_utilization": Meaning("engine.vllm.memory"),
    "worker.reward.reward_function": Meaning(
        "data.train.0.task", "`file.py:Name`, or a function with mmrl.Trainer(reward=...)"
    ),
    "trainer.max_steps": Meaning("train.steps"),
    "trainer.experiment_name": Meaning("name"),
    "trainer.logger": Meaning("train.wandb", "`true`; also train.tensorboard, train.trackio"),
    "trainer.max_try_make_batch": Meaning("algorithm.max_rounds"),
    "trainer.critic_warmup": Meaning("algorithm.critic.warmup"),
    "trainer.val_freq": Meaning("eval.every"),
    "trainer.val_generations_to_log": Meaning("eval.gallery"),
    "trainer.save_freq": Meaning("train.save_every"),
    "trainer.save_limit": Meaning("train.keep_last"),
    "trainer.save_checkpoint_path": Meaning("dir", "the run is written to dir/name"),
}

_VERL: dict[str, Meaning] = {
    "actor_rollout_ref.actor.router_replay.mode": Meaning("algorithm.router_replay.mode"),
    "data.train_files": Meaning("data.train.0.path"),
    "data.val_files": Meaning("data.eval.0.path"),
    "data.train_batch_size": Meaning("train.prompts_per_step"),
    "data.train_max_samples": Meaning("data.train.0.limit"),
    "data.val_max_samples": Meaning("data.eval.0.limit"),
    "data.max_prompt_length": Meaning(
        "model.max_prompt_tokens", "a longer prompt is an error, never cut"
    ),
    "data.max_response_length": Meaning("rollout.max_new_tokens"),
    "data.image_key": Meaning("data.train.0.params", "`{reader: {columns: {image: images}}}`"),
    "data.video_key": Meaning("data.train.0.params", "`{reader: {columns: {video: videos}}}`"),
    "data.dataloader_num_workers": Meaning("data.workers", "processes that decode"),
    "actor_rollout_ref.model.path": Meaning("model.path"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": Meaning(
        "model.gradient_checkpointing"
    ),
    "actor_rollout_ref.model.lora_rank": Meaning("model.lora.r"),
    "actor_rollout_ref.model.lora_alpha": Meaning("model.lora.alpha"),
    "actor_rollout_ref.model.target_modules": Meaning("model.lora.target_modules"),
    "actor_rollout_ref.actor.strategy": Meaning("engine.train", "fsdp2: `fsdp2`"),
    "actor_rollout_ref.actor.freeze_vision_tower": Meaning("model.freeze", "`[vision]`"),
    "actor_rollout_ref.actor.optim.lr": Meaning("optim.lr"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": Meaning("optim.warmup_steps"),
    "actor_rollout_ref.actor.optim.lr_scheduler_type": Meaning(
        "optim.schedule", "constant, linear or cosine"
    ),
    "actor_rollout_ref.actor.optim.weight_decay": Meaning("optim.weight_decay"),
    "actor_rollout_ref.actor.optim.clip_grad": Meaning("optim.max_grad_norm"),
    "actor_rollout_ref.actor.grad_clip": Meaning("optim.max_grad_norm"),
    "actor_rollout_ref.actor.ppo_mini_batch_size": Meaning(
        "algorithm.minibatches", "train_batch_size / ppo_mini_batch_size"
    ),
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": Meaning("train.token_budget", "tokens"),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": Meaning("train.token_budget"),
    "trainer.balance_batch": Meaning("train.balance_batch"),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": Meaning(
        "engine.sequence_parallel", "token budgets count the whole row, not its slices"
    ),
    "actor_rollout_ref.actor.ppo_epochs": Meaning("algorithm.epochs"),
    "actor_rollout_ref.actor.clip_ratio_low": Meaning("algorithm.clip_low"),
    "actor_rollout_ref.actor.clip_ratio_high": Meaning("algorithm.clip_high"),
    "actor_rollout_ref.actor.clip_ratio_c": Meaning("algorithm.dual_clip"),
    "actor_rollout_ref.actor.policy_loss.loss_mode": Meaning(
        "algorithm.importance_sampling_level", "gspo: `sequence`"
    ),
    "actor_rollout_ref.actor.loss_agg_mode": Meaning(
        "algorithm.loss_aggregation",
        "token-mean: `token_mean`, seq-mean-token-mean: `sequence_mean`, seq-mean-token-sum-norm: "
        "`dr_grpo`",
    ),
    "actor_rollout_ref.actor.entropy_coeff": Meaning("algorithm.entropy.coef"),
    "actor_rollout_ref.actor.use_kl_loss": Meaning("algorithm.kl.coef", "above 0"),
    "actor_rollout_ref.actor.kl_loss_coef": Meaning("algorithm.kl.coef"),
    "actor_rollout_ref.actor.kl_loss_type": Meaning(
        "algorithm.kl.estimator", "low_var_kl: `k3`, mse: `k2`"
    ),
    "actor_rollout_ref.rollout.name": Meaning("engine.rollout", "vllm: `vllm`"),
    "actor_rollout_ref.rollout.n": Meaning("rollout.group_size"),
    "actor_rollout_ref.rollout.temperature": Meaning("rollout.temperature"),
    "actor_rollout_ref.rollout.top_p": Meaning("rollout.top_p"),
    "actor_rollout_ref.rollout.top_k": Meaning("rollout.top_k", "-1: `0`"),
    "actor_rollout_ref.rollout.gpu_memory_utilization": Meaning("engine.vllm.memory"),
    "actor_rollout_ref.rollout.max_model_len": Meaning("engine.vllm.max_model_len"),
    "actor_rollout_ref.rollout.free_cache_engine": Meaning("engine.vllm.sleep"),
    "actor_rollout_ref.rollout.val_kwargs.n": Meaning("eval.samples"),
    "algorithm.adv_estimator": Meaning(
        "algorithm.advantage",
        "gae, grpo, rloo, opo; grpo_passk: `pass_k`; gdpo: reward_aggregation",
    ),
    "algorithm.norm_adv_by_std_in_grpo": Meaning(
        "algorithm.advantage_scale", "true: `std`, false: `none`"
    ),
    "algorithm.gamma": Meaning("algorithm.critic.gamma"),
    "algorithm.lam": Meaning("algorithm.critic.gae_lambda"),
    "algorithm.kl_ctrl.kl_coef": Meaning("algorithm.kl.coef", "in the loss, not in the reward"),
    "algorithm.rollout_correction.rollout_is_threshold": Meaning("engine.vllm.threshold"),
    "critic.optim.lr": Meaning("algorithm.critic.lr"),
    "critic.cliprange_value": Meaning("algorithm.critic.value_clip"),
    "custom_reward_function.path": Meaning(
        "data.train.0.task", "`file.py:Name`, or a function with mmrl.Trainer(reward=...)"
    ),
    "trainer.total_training_steps": Meaning("train.steps"),
    "trainer.experiment_name": Meaning("name"),
    "trainer.default_local_dir": Meaning("dir", "the run is written to dir/name"),
    "trainer.logger": Meaning("train.wandb", "`true`; also train.tensorboard, train.trackio"),
    "trainer.log_val_generations": Meaning("eval.gallery"),
    "trainer.test_freq": Meaning("eval.every"),
    "trainer.save_freq": Meaning("train.save_every"),
    "trainer.max_actor_ckpt_to_keep": Meaning("train.keep_last"),
    "trainer.critic_warmup": Meaning("algorithm.critic.warmup"),
}

_LEROBOT: dict[str, Meaning] = {
    "dataset.root": Meaning("demos.path", "a LeRobot folder, v2.1 or v3, read as it is"),
    "policy.path": Meaning("model.path", "a Qwen-VL, or a checkpoint of mmrl"),
    "env.type": Meaning(
        "env.suite", "tiny, maniskill, libero, robosuite, metaworld, or module:Class"
    ),
    "env.task": Meaning("env.tasks", "a list"),
    "steps": Meaning("demos.steps", "of cloning; reinforcement learning has train.steps"),
    "batch_size": Meaning("demos.batch", "of cloning; reinforcement learning: prompts_per_step"),
    "optimizer.lr": Meaning("demos.optim.lr", "of cloning; reinforcement learning: optim.lr"),
    "eval.n_episodes": Meaning("eval_states", "held-out initial states of each task"),
    "eval.batch_size": Meaning("env.slots"),
    "env_eval_freq": Meaning("eval.every"),
    "save_freq": Meaning("train.save_every"),
    "seed": Meaning("seed"),
    "job_name": Meaning("name"),
    "output_dir": Meaning("dir", "the run is written to dir/name"),
    "wandb.enable": Meaning("train.wandb"),
    "peft.r": Meaning("model.lora.r"),
    "peft.lora_alpha": Meaning("model.lora.alpha"),
    "peft.target_modules": Meaning("model.lora.target_modules"),
}

PEERS: Mapping[str, Mapping[str, Meaning]] = {
    "TRL": _TRL,
    "EasyR1": _EASYR1,
    "verl": _VERL,
    "LeRobot": _LEROBOT,
}
"""Peer's name -> its key -> what it is here, in the order of the pages' tables."""


def is_peer_section(where: str) -> bool:
    """Whether a peer has a section at this path: trainer, worker.actor."""
    return any(theirs.startswith(f"{where}.") for keys in PEERS.values() for theirs in keys)


def peer_hint(word: str) -> str:
    """ " TRL's learning_rate is optim.lr here." for a peer's key, or for the end of one; '' for any other word.

    `word` may stand in a section of mmrl (optim.learning_rate). The first peer that has the name is named.
    """
    for exact in (True, False):
        for peer, keys in PEERS.items():
            for theirs, ours in keys.items():
                same = (
                    theirs == word
                    if exact
                    else theirs.rpartition(".")[2] == word.rpartition(".")[2]
                )
                if same and ours.key != word:
                    how = f" ({ours.values.replace('`', '')})" if ours.values else ""
                    return f" {peer}'s {theirs} is {ours.key} here{how}."
    return ""
