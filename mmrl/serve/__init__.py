"""An OpenAI-compatible endpoint for a checkpoint, so that lmms-eval, VLMEvalKit or any OpenAI client can ask it.

    mmrl serve runs/NAME/checkpoints/best --port 8000

protocol.py reads requests and writes answers, media.py brings pictures and clips into files, engine.py decodes many requests
together, app.py speaks HTTP, vllm.py hands the checkpoint to vLLM instead. The package `starlette` is imported by app.py only.
"""
