from __future__ import annotations
from dataclasses import dataclass
import numpy as np
@dataclass(frozen=True)
class Estimate:
    mean: float
    low: float
    high: float
    n: int
def bootstrap_mean(values, level=0.95, seed=0, clusters=None):
    v=np.asarray(values,float); _,i=np.unique(np.asarray(clusters),return_inverse=True)
    s=np.bincount(i,v); n=np.bincount(i); r=np.random.default_rng(seed).integers(0,len(s),(1000,len(s)))
    m=s[r].sum(1)/n[r].sum(1); return Estimate(float(v.mean()),float(np.quantile(m,.025)),float(np.quantile(m,.975)),len(v))
