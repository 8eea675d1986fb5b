"""Optimizers that are none, and sizes and choices that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

import resilient as rs
from tests.resilient.mistaken_jobs import adamw, linear, scheduler, train, trainer

DESCRIPTION = "optimizer must be a description such as resilient.AdamW(lr=3e-4), got"
SCHEDULE = "lr_schedule must be a function from step (1, 2, ...) to factor, got"
TO_SCHEDULE = "write resilient.WarmupCosine(100, 2000) or lambda step: 0.99**step"

OPTIMIZERS: dict[str, tuple[Callable[[], object], str]] = {
    "torch's class": (
        lambda: train(optimizer=torch.optim.AdamW),
        f"{DESCRIPTION} the class torch.optim.AdamW; each worker builds torch's own for the layers it holds",
    ),
    "torch's": (
        lambda: train(optimizer=torch.optim.AdamW(linear().parameters())),
        f"{DESCRIPTION} torch's AdamW; each worker builds torch's own for the layers it holds",
    ),
    "class": (lambda: train(optimizer=rs.AdamW), f"{DESCRIPTION} the class AdamW; write AdamW(lr=3e-4)"),
    "text": (lambda: train(optimizer="adamw"), f"{DESCRIPTION} 'adamw'; resilient has AdamW and SGD"),
    "function": (
        lambda: train(optimizer=partial(torch.optim.SGD, lr=0.1)),
        f"{DESCRIPTION} a partial; resilient has AdamW and SGD",
    ),
    "rate by place": (
        lambda: rs.AdamW(3e-4),  # pyright: ignore[reportCallIssue]
        "arguments of AdamW must be named, got 0.0003; write AdamW(lr=0.0003); the trainer tells it of the parameters",
    ),
    "parameters": (
        lambda: rs.SGD(linear().parameters(), lr=0.1),  # pyright: ignore[reportCallIssue]
        "arguments of SGD must be named, got a generator; write SGD(lr=3e-4); the trainer tells it of the parameters",
    ),
    "rate as text": (adamw(lr="3e-4"), "lr must be a number > 0, got '3e-4'; write 3e-4"),
    "rate as tensor": (
        adamw(lr=torch.tensor(3e-4)),
        "lr must be a number > 0, got a Tensor; pass a positive learning rate",
    ),
    "torch's scheduler class": (
        adamw(lr_schedule=CosineAnnealingLR),
        f"{SCHEDULE} the class CosineAnnealingLR; {TO_SCHEDULE}",
    ),
    "torch's scheduler": (
        lambda: rs.AdamW(lr=1e-3, lr_schedule=scheduler()),  # pyright: ignore[reportArgumentType]
        f"{SCHEDULE} a StepLR; {TO_SCHEDULE}",
    ),
    "schedule's name": (adamw(lr_schedule="cosine"), f"{SCHEDULE} 'cosine'; {TO_SCHEDULE}"),
    "schedule that forgets to return": (
        adamw(lr_schedule=lambda step: None),
        "lr_schedule(1) must be a number >= 0, got None; return the factor on the learning rate",
    ),
    "share of steps": (
        lambda: rs.WarmupCosine(0.1, 100),  # pyright: ignore[reportArgumentType]
        "warmup_steps must be a whole number >= 0, got 0.1; 0 for none",
    ),
    "betas": (adamw(betas=0.9), "betas must be two numbers, got 0.9; write (0.9, 0.999)"),
    "decay as text": (adamw(weight_decay="0.1"), "weight_decay must be a number >= 0, got '0.1'; write 0.1"),
}
PIPELINES = "gpipe, 1f1b, eager-1f1b, interleaved-1f1b, split-1f1b, zb-h1, zb-h2, interleaved-zb, zb-v, auto"

ARGUMENTS: dict[str, tuple[Callable[[], object], str]] = {
    "batch as float": (lambda: train(global_batch=4.0), "global_batch must be a whole number >= 1, got 4.0; write 4"),
    "batch as text": (lambda: train(microbatch="2"), "microbatch must be a whole number >= 1, got '2'; write 2"),
    "microbatch beyond the batch": (
        lambda: train(microbatch=8),
        "global_batch must be a multiple of microbatch 8, at least 8 (one microbatch for each of 1 pipelines), got 4; "
        "use 8",
    ),
    "seed below 0": (lambda: train(seed=-1), "seed must be >= 0, got -1; choose any such number, 0 for example"),
    "no seed": (
        lambda: train(seed=None),
        "seed must be a whole number >= 0, got None; choose any such number, 0 for example",
    ),
    "precision": (
        lambda: train(precision="float16"),
        "precision must be one of ['bf16', 'fp32', 'fp64'], got 'float16'; choose one of them",
    ),
    "torch's precision": (
        lambda: train(precision=torch.bfloat16),
        "precision must be one of ['bf16', 'fp32', 'fp64'], got torch.bfloat16; choose one of them",
    ),
    "checkpoints": (
        lambda: train(checkpoint_every=-1),
        'checkpoint_every must be >= 0, got -1; 0 means at the end only, "auto" by what one costs',
    ),
    "no checkpoints": (
        lambda: train(checkpoint_every=None),
        'checkpoint_every must be a whole number >= 0, got None; 0 means at the end only, "auto" by what one costs',
    ),
    "clipping as text": (lambda: train(clip_grad_norm="1"), "clip_grad_norm must be a number > 0, got '1'; write 1"),
    "clipping yes": (
        lambda: train(clip_grad_norm=True),
        "clip_grad_norm must be a number > 0, got True; pass None not to clip",
    ),
    "schedule": (
        lambda: train(schedule=lambda step: 1.0),
        f"schedule must be one of {PIPELINES}, got a function; choose one of them; learning rates are the optimizer's "
        "lr_schedule",
    ),
    "device": (
        lambda: train(device="gpu"),
        "device must be one that can train here (cpu), got 'gpu'; leave it out to train on the CPU",
    ),
    "steps as float": (lambda: train(num_steps=10.0), "num_steps must be a whole number >= 1, got 10.0; write 10"),
    "steps as text": (lambda: train(num_steps="10"), "num_steps must be a whole number >= 1, got '10'; write 10"),
    "resume yes": (
        lambda: trainer().fit(1, resume=True),  # pyright: ignore[reportArgumentType]
        "resume must be a checkpoint folder or None, got True; give its path",
    ),
    "model before it is trained": (
        lambda: trainer().whole_model(),
        "whole_model must be called after fit, got an untrained Trainer; call fit first",
    ),
}
