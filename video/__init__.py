"""Clips to tensors: decoding and sampling (decode, sampling, decoders, probing, containers, folders), pixel budgets (budget),
and the cache of visual tensors (store, visuals, encode).

    from mmrl.video.decode import probe, read_clip
    from mmrl.video.sampling import FrameSampling

Knows only mmrl's types, coordinates, errors and pictures. Nothing heavy is imported until it is needed.
"""

if __name__ != "mmrl.video":  # the repository's root is on sys.path
    raise ImportError(
        f"expected `import mmrl.video`, found an import as `{__name__}`: it would make a second copy of every module in it. "
        "Write mmrl.video; for a package `video` of your own, take mmrl's repository off PYTHONPATH or put yours before it"
    )
