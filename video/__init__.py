"""Clips to tensors: decoding and sampling (decode, sampling, decoders, probing, containers, folders), pixel budgets (budget),
and the cache of visual tensors (store, visuals, encode).

    from mmrl.video.decode import probe, read_clip
    from mmrl.video.sampling import FrameSampling

Knows only mmrl's types, coordinates, errors and pictures. Nothing heavy is imported until it is needed.
"""
